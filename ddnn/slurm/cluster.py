"""Settings of a cluster, configs/cluster/*.yaml or a file of one's own, and the placement of workers on its nodes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ddnn.recipe.section import Count, Section
from ddnn.recipe.source import configs_folder, exists, read_yaml, validate
from ddnn.util.errors import UserError
from ddnn.util.text import plural

TIME = re.compile(r"\d+(:\d\d?){0,2}|\d+-\d\d?(:\d\d?){0,2}|UNLIMITED|INFINITE")
_FILE = "{} in the cluster file"
INSTEAD = {
    **{f"--{name}": f"--{name}" for name in ("account", "constraint", "job-name", "mem", "nodes", "partition", "qos", "time")},
    **dict.fromkeys(("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket"), "--gpus-per-node"),
    **dict.fromkeys(("--ntasks", "--ntasks-per-node", "--ntasks-per-gpu"), "--workers and --workers-per-node"),
    **dict.fromkeys(("--requeue", "--no-requeue"), _FILE.format("requeue")),
    **dict.fromkeys(("--cpus-per-task", "--cpus-per-gpu"), _FILE.format("cpus_per_worker")),
    **dict.fromkeys(("--output", "--error", "--open-mode"), "--run-dir, where the output goes"),
    **dict.fromkeys(("--chdir", "--parsable", "--test-only", "--wait", "--wrap"), ""),
    "--array": "--seeds", "--signal": _FILE.format("signal_seconds"),
}  # fmt: skip
"""Options of sbatch that ddnn sets itself, and what sets them here; nothing where they cannot be set."""


def check_word(text: str) -> str:
    """`text` if it can be one word of an #SBATCH line; else ValueError."""
    if not text or not text.isprintable() or re.search(r"[\s\"'\\#]", text) or text.startswith("-"):
        raise ValueError("a space, a quote, a backslash, # or a control character, or a - at the beginning")
    return text


def check_time_limit(text: str) -> str:
    """`text` if Slurm reads it as a time; else ValueError."""
    if not TIME.fullmatch(text):
        raise ValueError("no time as Slurm writes it")
    return text


def parse_time_limit(text: str) -> float:
    """A time limit in seconds, inf where there is none: what `check_time_limit` accepts."""
    if not text[0].isdigit():
        return math.inf
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not dash and len(parts) < 3:  # minutes, minutes:seconds
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds


def check_single_line(text: str) -> str:
    """`text` if it is one line; else ValueError."""
    if "\n" in text or "\r" in text or "\0" in text:
        raise ValueError("a line break or a zero byte")
    return text


def check_sbatch_option(text: str) -> str:
    """`text` if it is a long option of sbatch that ddnn does not set itself; else ValueError."""
    if not re.fullmatch(r"--[a-z][a-z-]*(=[^\"'\\]+)?", text) or not text.isprintable():
        raise ValueError("expected --name or --name=value, on one line, without quotes and backslashes")
    name = text.partition("=")[0]
    ours = name if name in INSTEAD else next((ours for ours in INSTEAD if ours.startswith(name)), None)
    if ours is not None:  # sbatch takes a beginning for the whole
        raise ValueError("ddnn sets it itself" + (f": use {INSTEAD[ours]}" if INSTEAD[ours] else ""))
    return text


def check_memory(text: str) -> str:
    """`text` if Slurm reads it as an amount of memory; else ValueError."""
    if not re.fullmatch(r"[0-9]+([KMGT]B?)?", text, re.IGNORECASE):
        raise ValueError("expected a whole number with K, M, G or T, as 64G; without a letter it is megabytes")
    return text


def _number_as_text(value: Any) -> Any:
    """What YAML reads as a number where text is expected: 64000 of memory."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Text = BeforeValidator(_number_as_text)
Word = Annotated[str, Text, AfterValidator(check_word)]
Memory = Annotated[str, Text, AfterValidator(check_memory)]
TimeLimit = Annotated[str, Text, AfterValidator(check_time_limit)]
Line = Annotated[str, AfterValidator(check_single_line)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class ClusterConfig(Section):
    """Settings of a cluster. Options of the command line win; what neither gives has Slurm's own defaults."""

    partition: Word | None = None
    """Partition, or several separated by commas."""
    account: Word | None = None
    """Account to charge."""
    qos: Word | None = None
    """Quality of service."""
    constraint: Word | None = None
    """Features that the nodes must have, as `sinfo -o %f` lists them."""
    time: TimeLimit | None = None
    """Time limit: minutes, HOURS:MM:SS, or DAYS-HOURS."""
    nodes: Count | None = None
    """Number of nodes; ignored if `--workers` is given."""
    workers_per_node: Count | None = None
    """Workers on each node. Default: one for each GPU."""
    gpus_per_node: Annotated[int, Field(ge=0)] | None = None
    """GPUs on each node. Default: 0, and workers compute on CPU cores."""
    gpu_type: Word | None = None
    """Type of GPU: the TYPE of `gpu:TYPE:4` in the output of `sinfo -o %G`."""
    cpus_per_worker: Count = 1
    """CPU cores of each worker, at least `parallel.cpu_threads` of the recipe."""
    mem: Memory | None = None
    """Memory on each node, in K, M (also without a letter), G or T: 64G. 0: all of it."""
    launcher: Literal["mpirun", "srun"] = "mpirun"
    """What starts the workers: `mpirun`, which ddnn runs itself, or `srun` (with `--mpi=pmix`)."""
    requeue: bool = True
    """Whether the job is requeued, and then resumes, after Slurm's signal, a node failure or preemption."""
    signal_seconds: Annotated[int, Field(ge=0, le=65535)] = 120
    """Seconds before the time limit at which Slurm asks for a checkpoint. They must suffice for the minibatches up to the next
    averaging step and for writing it. Slurm may be a minute early. 0: it does not ask."""
    options: list[Annotated[str, AfterValidator(check_sbatch_option)]] = Field(default_factory=list)
    """Further options of sbatch, each as you would write it on the command line."""
    setup: list[Line] = Field(default_factory=list)
    """Lines of shell that run in the job before the training, exactly as written. The first that fails ends the job."""
    container: list[Annotated[Line, Text]] = Field(default_factory=list)
    """Words put before the command of each worker, so that it runs in a container: `[apptainer, exec, --nv, ddnn.sif]`. With
    Pyxis, options of srun: `[--container-image=ddnn.sqsh]`. The `python3` of the container runs ddnn. Needs `launcher: srun`.
    See docs/how-to/containers.md."""
    environment: dict[VariableName, Annotated[Line, Text]] = Field(default_factory=dict)
    """Environment variables of the job, set after `setup`."""


def load_cluster(name_or_file: str) -> ClusterConfig:
    """The settings of a file, or of configs/cluster/NAME.yaml: first of the working directory, then of ddnn. UserError:
    there is none such, or something is wrong with it: all problems, one a line."""
    path = find_cluster(name_or_file)
    tree = read_yaml(path)
    tree.values = {name: value for name, value in tree.values.items() if value is not None}
    return validate(ClusterConfig, tree, path, error=UserError, hint="docs/reference/cluster.md describes all keys")


def find_cluster(name_or_file: str) -> Path:
    """The file that `--cluster` means. UserError: there is none such."""
    as_file = Path(name_or_file)
    if exists(as_file) and not as_file.is_dir():
        return as_file
    folders = [Path("configs", "cluster"), configs_folder() / "cluster"]
    if re.fullmatch(r"[\w.-]+", name_or_file):
        for folder in folders:
            if exists(folder / f"{name_or_file}.yaml"):
                return folder / f"{name_or_file}.yaml"
    known = ", ".join(sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})) or "none"
    message = f"there is neither a file {name_or_file} nor settings of that name; there are {known}"
    hint = "name one of these, or a file of your own: docs/reference/cluster.md has all keys"
    raise UserError(message, location="--cluster", hint=hint)


@dataclass(frozen=True)
class Placement:
    """The same number of workers on each node. `gpus_per_node`: GPUs to ask for, 0 where workers compute on cores."""

    nodes: int
    workers_per_node: int
    gpus_per_node: int

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    def __str__(self) -> str:
        location = f"{plural(self.gpus_per_node, 'GPU')} each" if self.gpus_per_node else "CPU cores"
        return f"{plural(self.workers, 'worker')} on {plural(self.nodes, 'node')}, {location}"


def place(cluster: ClusterConfig, workers: int | None, recipe_workers: int, oversubscribe_gpus: bool) -> Placement:
    """Spreads the workers evenly over nodes: as many as --workers says, else what `cluster` (options of the command
    line merged in) says, else `recipe_workers`. UserError: they cannot be spread evenly, the numbers contradict each
    other, or there are too few GPUs and not `oversubscribe_gpus`."""
    if workers is not None and workers < 1:
        raise UserError(f"{workers} workers found, expected a whole number >= 1", location="--workers")
    nodes, gpus = cluster.nodes, cluster.gpus_per_node or 0
    most = cluster.workers_per_node or gpus or None
    if workers is None and (nodes is None or most is None) and recipe_workers > 1:
        workers = recipe_workers
    if workers is None:
        nodes, each = nodes or 1, most or 1
    elif nodes is not None:
        each = _divided(workers, nodes, f"{nodes} nodes", f"take a multiple of {nodes}, or other --nodes")
        if cluster.workers_per_node not in (None, each):
            message = (
                f"{workers} workers on {nodes} nodes are {each} on each, but {cluster.workers_per_node} are asked for"
            )
            hint = "leave one of --workers, --nodes, --workers-per-node out"
            raise UserError(message, location="--workers-per-node", hint=hint)
    else:
        each = min(workers, most or workers)
        nodes = _divided(workers, each, f"nodes of {each}", f"take a multiple of {each}, or say --nodes")
    if gpus and each > gpus and not oversubscribe_gpus:
        message = f"{each} workers on each node, but {plural(gpus, 'GPU')}"
        hint = "take more nodes or fewer workers, or set parallel.oversubscribe_gpus: true in the recipe"
        raise UserError(message, location="--gpus-per-node", hint=hint)
    return Placement(nodes, each, min(gpus, each))


def _divided(workers: int, by: int, over: str, hint: str) -> int:
    if workers % by:
        raise UserError(f"{workers} workers cannot be spread evenly over {over}", location="--workers", hint=hint)
    return workers // by
