"""Recipes, settings, metrics and other text of ddnn's own as fuzz targets."""

from __future__ import annotations

import json
from pathlib import Path

from corpora import write_data_dir, write_pdfs, write_recipe

from ddnn.errors import UserError
from ddnn.info.path import describe_path
from ddnn.info.status import read_status
from ddnn.recipe.load import dump_recipe, load_recipe
from ddnn.report.measured import read_measured
from ddnn.report.table import report
from ddnn.slurm.cluster import load_cluster
from ddnn.slurm.job import read_job
from ddnn.train.read_metrics import read_metrics, read_pretraining
from fuzz import seeds
from fuzz.harness import Target

RECIPE = b"""include: base.yaml
data: {train: data, alignments: pdfs, splice: 2, cmvn: mean, cv: {fraction: 0.2}}
model:
  hidden_layers: 2
  hidden_units: 16   # small
minibatch: 64
seed: 3
schedule: {name: newbob, initial: 0.05, epochs: 3}
parallel: {workers: 2, reduce: bmuf, every: 10, block_momentum: 0.5}
"""
BASE = b"optimizer: {name: ng-sgd, momentum: 0.5}\nmodel: {activation: 'tanh'}\n"
SETTING = b"model.hidden_units=32"
CLUSTER = b"""partition: gpu
account: "a1"
time: 1-12
nodes: 2
gpus_per_node: 4
mem: 64G
options: [--exclusive, "--mail-type=END"]
setup:
  - module load openmpi
  - source env/bin/activate
environment: {OMP_NUM_THREADS: 1, NAME: text}
"""
MEASURED = b"""network: 440-6x2048-8806
minibatch: 256
every: 10
reduce: butterfly
frames: 1.1e+8
unit: minutes
workers: [1, 2, 4]
total: [100.0, 60, 40.5]
communication: [0, 5, 8]
"""
ROWS = (
    {"epoch": 0, "split": "cv", "loss": 1.1, "frame_accuracy": 0.3, "frames": 10, "seconds": 0.1, "frames_per_second": 100.0, "learning_rate": 0.1, "accepted": True},
    {"epoch": 1, "split": "train", "loss": 1.0, "frame_accuracy": 0.4, "frames": 90, "seconds": 1.5, "frames_per_second": 60.0, "learning_rate": 0.1},
    {"epoch": 1, "split": "worker", "rank": 0, "host": "n1", "device": "cpu", "frames": 90, "minibatches": 9, "seconds": 1.5, "frames_per_second": 60.0,
     "compute_share": 0.9, "data_share": 0.01, "communication_share": 0.02, "waiting_share": 0.03, "averagings": 2, "left_out": 0, "divergence": 0.01,
     "bytes_sent": 123, "exchange_seconds": 0.06, "parameters": 131, "block_seconds": 0.2, "block_seconds_std": 0.01},
    {"epoch": 1, "split": "cv", "loss": 0.9, "frame_accuracy": 0.5, "frames": 10, "seconds": 0.1, "frames_per_second": 100.0, "learning_rate": 0.1, "accepted": True},
)  # fmt: skip
METRICS = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
PRETRAINING = b"".join(
    b'{"layer": %d, "pass": %d, "reconstruction_error": 1.5, "reconstruction_error_all_passes": 1.25, "frames": 90}\n' % (n // 2 + 1, n % 2 + 1)
    for n in range(4)
)  # fmt: skip
JOB = json.dumps(
    {"number": "17", "slurm_cluster": None, "submitted": 1.7e9, "workers": 4, "nodes": 2, "launcher": "mpirun"}
).encode()
LOG = b"""2026-01-01 00:00:00,000 INFO ddnn 0.1.0
2026-01-01 00:00:01,000 ERROR no space left
  where: /x
2026-01-01 00:00:02,000 INFO the end
"""
YAML = (b"include: ", b"base.yaml", b"../../../etc/passwd", b"/dev/stdin", b"recipe.yaml", b"data:", b"{", b"}", b"[", b"]", b": ", b"- ", b"&a ", b"*a",
        b"!!python/object/apply:os.system ", b"<<: ", b"? ", b"|\n", b">-\n", b"'", b'"', b"# ", b"%YAML 1.1\n", b"---\n", b"...\n", b"\t", b"null", b"~",
        b"yes", b"\\uD800", b'"\\uD800"', b'"\\0"', b"environment: x\n", b"schedule.initial: 1\n", b".nan", b"-.inf", b"1e400", b"0o17", b"2026-01-01")  # fmt: skip
LAUGHS = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [*%c, *%c, *%c, *%c]\n" % (n + 1, n + 1, n, n, n, n) for n in range(97, 110)
)
YAML_CRAFTED = (
    LAUGHS,
    b"a: " + b"[" * 50_000,
    b"a: " + b"{b: " * 20_000,
    b"- " * 40_000,
    b"? " * 40_000,
    b"seed: " + b"1" * 60_000,
    b"seed: " + b"1" * 60_000 + b"x",
    b"seed: " + b"1" * 30_000 + b"." + b"1" * 30_000 + b"x",
    b"seed: 1e" + b"9" * 60_000,
    b"".join(b"key%d: 1\n" % n for n in range(5000)),
    b"".join(b"a%d: {b%d: 1}\n" % (n, n) for n in range(3000)),
    b"seed: [" + b"1, " * 20_000 + b"]",
    b"x" * 90_000 + b": 1",
    b"seed: !!python/object/apply:os.system [id]\n",
    b"include: [" + b"base.yaml, " * 5000 + b"]",
    b"include: /dev/zero\n",
    b"include: recipe.yaml\n",
    b"seed: '" + b"\\" * 50_000,
    b"a: |" + b"\n " * 40_000,
    b"\xff\xfes\0e\0e\0d\0",
    b"environment: x\nenvironment: {A: b}\n",
)  # fmt: skip
JSON = (b'"epoch": ', b'"split": "cv"', b'"worker"', b'"rank": 0', b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"{", b"}", b"[", b"]", b", ",
        b"\\ud800", b'"\\u0000"', b'"parameters": ', b'"seconds": ', b"-1", b"0", b"1e-320", b"9007199254740992", b"\n")  # fmt: skip
JSON_CRAFTED = (
    *(b'{"epoch": ' + b"[" * n + b"]" * n + b', "split": "cv"}\n' for n in (100, 900, 940, 960, 970, 975, 980, 985, 990, 995, 1000, 5000, 30_000)),
    *(b'{"epoch": ' + b'{"a":' * n + b"1" + b"}" * n + b', "split": "cv"}\n' for n in (500, 900, 950, 970, 980, 990)),
    b'{"epoch": ' + b"9" * 4000 + b', "split": "cv", "loss": ' + b"9" * 4000 + b', "frame_accuracy": 1}\n',
    b'{"epoch": 1, "split": "cv", "loss": ' + b"9" * 30_000 + b"}\n",
    b'{"epoch": 1, "split": "cv", "loss": 1e308, "frame_accuracy": 1e308}\n',
    b'{"epoch": 1, "split": "train", "loss": 1e308, "frame_accuracy": -1e308, "seconds": 1e-300, "frames": 9007199254740992, "frames_per_second": 1e-300}\n',
    b"{}\n" * 10_000,
    b'{"split": "x"}\n' * 3000,
    b"\0" * 60_000,
)  # fmt: skip


def _recipe(folder: Path) -> None:
    recipe = load_recipe(folder / "recipe.yaml")
    (folder / "again.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(folder / "again.yaml", must_exist=False) == recipe


def _recipe_beside(folder: Path) -> None:
    features, labels = seeds.MATRICES, seeds.PDFS
    write_data_dir(folder / "data", features)
    write_pdfs(folder / "pdfs", labels)
    (folder / "recipe.yaml").write_bytes(RECIPE)
    (folder / "base.yaml").write_bytes(BASE)


def _setting(folder: Path) -> None:
    try:
        setting = (folder / "setting").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UserError(str(error)) from error
    load_recipe(folder / "recipe.yaml", [setting])


def _report(folder: Path) -> None:
    report([folder / "run"], None)


def _run_beside(folder: Path) -> None:
    run = folder / "run"
    run.mkdir()
    write_recipe(run / "recipe.yaml", folder / "data", folder / "pdfs")
    (run / "metrics.jsonl").write_bytes(METRICS)
    (run / "job.json").write_bytes(JOB)
    (run / "train.log").write_bytes(LOG)
    (run / "ali_train_pdf.counts").write_bytes(seeds.counts(binary=False))


def _status(folder: Path) -> None:
    status = read_status(folder / "run", lambda job: "RUNNING")
    status.as_text()
    json.dumps(status.as_dict())


def _describe(name: str, folder: Path) -> None:
    info = describe_path(folder / name)
    info.as_text()
    json.dumps(info.as_dict())


def _info(name: str, *valid: bytes, inputs: int = 200) -> Target:
    tokens = (b"\0B", b"<Nnet> ", b"<TransitionModel> ", b"[ ", b"\xd6\xfd\xb2\x7e", b"utt 1 2\n", b"a x |\n")
    return Target(f"info, {name}", name, lambda folder: _describe(name, folder), valid, tokens=tokens, beside=_info_beside, inputs=inputs, per_byte=1100)  # fmt: skip


def _info_beside(folder: Path) -> None:
    (folder / "feats.ark").write_bytes(seeds.archive())


def text_targets() -> list[Target]:
    """Recipes, clusters, published times; metrics, jobs, logs; `ddnn info` of anything."""
    info = (seeds.archive(), seeds.integers(), seeds.text_archive(), seeds.final_mdl(), seeds.network(binary=True), seeds.network(binary=False),
            seeds.graph("const"), seeds.counts(binary=False), seeds.zipped(seeds.integers()))  # fmt: skip
    return [
        Target("recipe", "recipe.yaml", _recipe, (RECIPE,), YAML_CRAFTED, beside=_recipe_beside, tokens=YAML, per_byte=400, inputs=200),
        Target("recipe, included", "base.yaml", _recipe, (BASE,), YAML_CRAFTED, beside=_recipe_beside, tokens=YAML, per_byte=400, inputs=100),
        Target("recipe, --set", "setting", _setting, (SETTING, b"data.cv={fraction: 0.5}", b"seed=4"), tuple(b"seed=" + text for text in YAML_CRAFTED),
               beside=_recipe_beside, tokens=YAML, per_byte=400, inputs=100),
        Target("cluster", "cluster.yaml", lambda folder: load_cluster(str(folder / "cluster.yaml")), (CLUSTER,), YAML_CRAFTED, tokens=YAML,
               per_byte=400, inputs=200),
        Target("published times", "times.yaml", lambda folder: read_measured(folder / "times.yaml"), (MEASURED,),
               (*YAML_CRAFTED, MEASURED.replace(b"440-6x2048-8806", b"100x1-" * 9000 + b"1")), tokens=YAML, per_byte=400, inputs=200),
        Target("metrics", "metrics.jsonl", lambda folder: read_metrics(folder / "metrics.jsonl"), (METRICS,), JSON_CRAFTED, tokens=JSON, per_byte=300),
        Target("metrics of a pretraining", "metrics.jsonl", lambda folder: read_pretraining(folder / "metrics.jsonl"), (PRETRAINING,), JSON_CRAFTED,
               tokens=JSON, per_byte=300),
        Target("metrics, reported", "run/metrics.jsonl", _report, (METRICS,), JSON_CRAFTED, beside=_run_beside, tokens=JSON, per_byte=300, inputs=100),
        Target("metrics, measured", "run/metrics.jsonl", lambda folder: read_measured(folder / "run"), (METRICS,), JSON_CRAFTED, beside=_run_beside,
               tokens=JSON, per_byte=300, inputs=100),
        Target("status, metrics", "run/metrics.jsonl", _status, (METRICS,), JSON_CRAFTED, beside=_run_beside, tokens=JSON, per_byte=300, inputs=100),
        Target("status, train.log", "run/train.log", _status, (LOG,), (b"2026-01-01 00:00:00,0 ERROR " * 2000, b"9" * 60_000), beside=_run_beside, inputs=100),
        Target("job.json", "job.json", read_job, (JOB,), (b"[" * 9000, b'{"number": ' + b"9" * 5000 + b"}"), tokens=JSON),
        _info("x.ark", *info, inputs=400),
        _info("x.scp", b"a feats.ark:10\nb feats.ark:10[0:1]\nc x |\n"),
        _info("x.yaml", RECIPE.replace(b"include: base.yaml\n", b"")),
        _info("x.jsonl", METRICS),
    ]  # fmt: skip
