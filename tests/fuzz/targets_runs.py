"""What a run dir holds beside models, and `ddnn info` of anything, as fuzz targets."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from corpora import write_recipe
from fuzz import seeds
from fuzz.child import Target

from ddnn.inspection.path import describe_path
from ddnn.inspection.status import read_status
from ddnn.report.measured import read_measured
from ddnn.report.table import report
from ddnn.runs.metrics import read_metrics
from ddnn.runs.run_status import RunError, RunStatus
from ddnn.slurm.job import SlurmState, read_job

RECIPE = b"data: {train: /x, alignments: /x}\nmodel: {hidden_layers: 2}\nschedule: {initial_learning_rate: 0.1, max_epochs: 3}\n"
ROWS = (
    {
        "type": "epoch",
        "epoch": 0,
        "split": "cv",
        "loss": 1.1,
        "frame_accuracy": 0.3,
        "frames": 10,
        "seconds": 0.1,
        "frames_per_second": 100.0,
        "learning_rate": 0.1,
        "accepted": True,
    },
    {
        "type": "epoch",
        "epoch": 1,
        "split": "train",
        "loss": 1.0,
        "frame_accuracy": 0.4,
        "frames": 90,
        "seconds": 1.5,
        "frames_per_second": 60.0,
        "learning_rate": 0.1,
    },
    {
        "type": "worker",
        "epoch": 1,
        "rank": 0,
        "host": "n1",
        "device": "cpu",
        "frames": 90,
        "minibatches": 9,
        "seconds": 1.5,
        "frames_per_second": 60.0,
        "compute_fraction": 0.9,
        "data_fraction": 0.01,
        "comm_fraction": 0.02,
        "wait_fraction": 0.03,
        "averagings": 2,
        "excluded_averagings": 0,
        "consensus_distance": 0.01,
        "bytes_sent": 123,
        "comm_seconds": 0.06,
        "num_parameters": 131,
        "interval_seconds": 0.2,
        "interval_seconds_std": 0.01,
    },
    {
        "type": "epoch",
        "epoch": 1,
        "split": "cv",
        "loss": 0.9,
        "frame_accuracy": 0.5,
        "frames": 10,
        "seconds": 0.1,
        "frames_per_second": 100.0,
        "learning_rate": 0.1,
        "accepted": True,
    },
)


METRICS = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


PRETRAINING = b"".join(
    b'{"type": "pretrain", "rbm": %d, "epoch": %d, "reconstruction_error": 1.5, "mean_reconstruction_error": 1.25, "frames": 90}\n'
    % (n // 2 + 1, n % 2 + 1)
    for n in range(4)
)


JOB = json.dumps(
    {"number": "17", "slurm_cluster": None, "submitted": 1.7e9, "workers": 4, "nodes": 2, "launcher": "mpirun"}
).encode()


STATUS = (
    RunStatus(
        kind="training",
        state="failed",
        pid=77,
        host="n1",
        max_epochs=3,
        started=1.7e9,
        updated=1.7e9,
        error=RunError(type="UserError", message="no space left", hint="free some"),
    )
    .model_dump_json()
    .encode()
)


OUTPUT = b"ddnn: error: no space left\n  location: /x\nsrun: error: n1: task 0: Exited with exit code 2\n"


JSON = (
    b'"epoch": ',
    b'"split": "cv"',
    b'"type": "worker"',
    b'"type": "event"',
    b'"rank": 0',
    b"null",
    b"true",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"{",
    b"}",
    b"[",
    b"]",
    b", ",
    b"\\ud800",
    b'"\\u0000"',
    b'"num_parameters": ',
    b'"seconds": ',
    b"-1",
    b"0",
    b"1e-320",
    b"9007199254740992",
    b"\n",
)


JSON_CRAFTED = (
    *(
        b'{"type": "epoch", "epoch": ' + b"[" * n + b"]" * n + b', "split": "cv"}\n'
        for n in (100, 900, 940, 960, 970, 975, 980, 985, 990, 995, 1000, 5000, 30_000)
    ),
    *(
        b'{"type": "epoch", "epoch": ' + b'{"a":' * n + b"1" + b"}" * n + b', "split": "cv"}\n'
        for n in (500, 900, 950, 970, 980, 990)
    ),
    b'{"type": "epoch", "epoch": '
    + b"9" * 4000
    + b', "split": "cv", "loss": '
    + b"9" * 4000
    + b', "frame_accuracy": 1}\n',
    b'{"type": "epoch", "epoch": 1, "split": "cv", "loss": ' + b"9" * 30_000 + b"}\n",
    b'{"type": "epoch", "epoch": 1, "split": "cv", "loss": 1e308, "frame_accuracy": 1e308}\n',
    b'{"type": "epoch", "epoch": 1, "split": "train", "loss": 1e308, "frame_accuracy": -1e308, "seconds": 1e-300, '
    b'"frames": 9007199254740992, "frames_per_second": 1e-300}\n',
    b"{}\n" * 10_000,
    b'{"type": "x"}\n' * 3000,
    b"\0" * 60_000,
)


def _report(folder: Path) -> None:
    report([folder / "run"], None)


def _run_beside(folder: Path) -> None:
    run = folder / "run"
    run.mkdir()
    write_recipe(run / "recipe.yaml", folder / "data", folder / "pdfs")
    (run / "metrics.jsonl").write_bytes(METRICS)
    (run / "job.json").write_bytes(JOB)
    (run / "status.json").write_bytes(STATUS)
    (run / "job.out").write_bytes(OUTPUT)
    (run / "ali_train_pdf.counts").write_bytes(seeds.counts(binary=False))


def _status(folder: Path) -> None:
    status = read_status(folder / "run", lambda job: SlurmState("GONE"))
    status.as_text()
    json.dumps(status.as_dict())


def _describe(name: str, folder: Path) -> None:
    info = describe_path(folder / name)
    info.as_text()
    json.dumps(info.as_dict())


def _info(name: str, *valid: bytes, inputs: int = 200) -> Target:
    tokens = (b"\0B", b"<Nnet> ", b"<TransitionModel> ", b"[ ", b"\xd6\xfd\xb2\x7e", b"utt 1 2\n", b"a x |\n")
    return Target(
        f"info, {name}",
        name,
        lambda folder: _describe(name, folder),
        valid,
        tokens=tokens,
        beside=_info_beside,
        inputs=inputs,
        per_byte=1100,
    )


def _info_beside(folder: Path) -> None:
    (folder / "feats.ark").write_bytes(seeds.archive())


_json = partial(Target, crafted=JSON_CRAFTED, tokens=JSON, per_byte=300)


def run_targets() -> list[Target]:
    """Metrics, job.json, logs, and whatever `ddnn info` is asked about."""
    info = (
        seeds.archive(),
        seeds.integers(),
        seeds.text_archive(),
        seeds.final_mdl(),
        seeds.network(binary=True),
        seeds.network(binary=False),
        seeds.graph("const"),
        seeds.counts(binary=False),
        seeds.zipped(seeds.integers()),
    )
    return [
        _json(
            "metrics",
            "metrics.jsonl",
            lambda folder: read_metrics(folder / "metrics.jsonl"),
            (METRICS,),
        ),
        _json(
            "metrics of a pretraining",
            "metrics.jsonl",
            lambda folder: read_metrics(folder / "metrics.jsonl"),
            (PRETRAINING,),
        ),
        _json(
            "metrics, reported",
            "run/metrics.jsonl",
            _report,
            (METRICS,),
            beside=_run_beside,
            inputs=100,
        ),
        _json(
            "metrics, measured",
            "run/metrics.jsonl",
            lambda folder: read_measured(folder / "run"),
            (METRICS,),
            beside=_run_beside,
            inputs=100,
        ),
        _json(
            "status, metrics",
            "run/metrics.jsonl",
            _status,
            (METRICS,),
            beside=_run_beside,
            inputs=100,
        ),
        _json(
            "status, status.json",
            "run/status.json",
            _status,
            (STATUS,),
            beside=_run_beside,
            inputs=100,
        ),
        Target(
            "status, job.out",
            "run/job.out",
            _status,
            (OUTPUT,),
            (b"ddnn: error " * 2000, b"9" * 60_000),
            beside=_run_beside,
            inputs=100,
        ),
        Target(
            "job.json", "job.json", read_job, (JOB,), (b"[" * 9000, b'{"number": ' + b"9" * 5000 + b"}"), tokens=JSON
        ),
        _info("x.ark", *info, inputs=400),
        _info("x.scp", b"a feats.ark:10\nb feats.ark:10[0:1]\nc x |\n"),
        _info("x.yaml", RECIPE),
        _info("x.jsonl", METRICS),
    ]
