"""Names of what a run dir holds, apart from run_dir.py: whoever reads them needs no torch."""

COUNTS = "ali_train_pdf.counts"
FINAL = "final.safetensors"
RECIPE = "recipe.yaml"
LOG = "train.log"
METRICS = "metrics.jsonl"
PRETRAIN = "pretrain"
STACK = "stack.safetensors"
BEST = "best.safetensors"
CHECKPOINTS = "checkpoints"

JOB_SCRIPT = "job.sh"
JOB_RECORD = "job.json"
JOB_OUTPUT = "job.out"
JOB_FILES = frozenset({JOB_SCRIPT, JOB_RECORD, JOB_OUTPUT})


def is_job_file(name: str) -> bool:
    """Whether a file of a run dir belongs to its Slurm job: also the record while it is being written, as it may be at
    the moment in which the job begins."""
    return name in JOB_FILES or name.startswith(f".{JOB_RECORD}.tmp")
