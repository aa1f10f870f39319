"""`ddnn reproduce --slurm` with a made-up sbatch and squeue: one job a run, stacks first, and what became of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reproduce.small import TOY, write_corpus

from ddnn.recipe.load import load_recipe
from ddnn.reproduce.command import ReproduceResult, exclusive
from ddnn.reproduce.executor import LocalExecutor
from ddnn.reproduce.jobs import SlurmExecutor
from ddnn.reproduce.runs import RunRecord, plan_runs, read_records, write_record
from ddnn.reproduce.tables import load_config
from ddnn.runs.run_status import DBN
from ddnn.slurm.options import SlurmOptions
from ddnn.util.errors import UserError
from ddnn.util.system import cpu_name

SBATCH = """\
calls = open(FOLDER + "/sbatch.calls", "a+")
calls.seek(0)
number = 1 + len(calls.readlines())
calls.write(json.dumps(sys.argv[1:]) + "\\n")
states = json.load(open(FOLDER + "/states"))
if states.get("refuse") == number:
    sys.exit("sbatch: error: invalid partition")
states[str(number)] = "PENDING"
json.dump(states, open(FOLDER + "/states", "w"))
print(number)
"""
SQUEUE = """\
states = json.load(open(FOLDER + "/states"))
if states.get("down"):
    sys.exit("slurm_load_jobs error: Unable to contact slurm controller")
asked = [word for word in sys.argv if word.startswith("--jobs=")][0][7:].split(",")
for number in asked:
    if number in states:
        print(number + "|" + states[number])
"""


class Slurm:
    """Jobs of which the test says how they are; `finish` runs a job's script here."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.set_states({})
        for name, body in (("sbatch", SBATCH), ("squeue", SQUEUE), ("scontrol", "")):
            path = folder / name
            path.write_text(f"#!{sys.executable}\nimport json, sys\nFOLDER = {str(folder)!r}\n{body}")
            path.chmod(0o755)

    def set_states(self, states: dict[str, Any]) -> None:
        (self.folder / "states").write_text(json.dumps(states))

    @property
    def calls(self) -> list[list[str]]:
        """Arguments of each sbatch, in order: job N is the N-th."""
        path = self.folder / "sbatch.calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def finish(self, number: int) -> int:
        """Runs the job's script, as Slurm would; its exit code."""
        script = Path(self.calls[number - 1][-1])
        with (script.parent / "job.out").open("ab") as output:
            ended = subprocess.run(
                ["bash", script], stdout=output, stderr=output, env={**os.environ, "SLURM_JOB_ID": "1"}
            )
        return ended.returncode


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    return made


def submit(
    folder: Path, out: Path, *, sizes: tuple[int, ...] = (1, 2), retried: tuple[str, ...] = (), dry_run: bool = False,
    **settings: object,
) -> tuple[SimpleNamespace, list[str]]:  # fmt: skip
    """Executes the toy table's runs of seed 1 as jobs; those that have finished are not evaluated."""
    config = load_config(folder)
    records = {n: r for n, r in read_records(out / "records").items() if n not in retried}
    runs = [run for run in plan_runs(config, folder, [TOY], out) if run.workers in sizes and run.seed == 1]
    local = LocalExecutor(folder, folder / config.dbn_recipe, out / "records", "auto", 1, lambda line: None)
    local.execute = lambda runs: {}  # type: ignore[method-assign]
    executor = SlurmExecutor(local, "auto", SlurmOptions(None, None, dict(settings)), retried, dry_run)
    errors = executor.execute([run for run in runs if not run.is_recorded(records)])
    return SimpleNamespace(**executor.jobs), [f"{name}: {error}" for name, error in errors.items()]


def test_each_run_gets_one_job_after_that_of_its_stack(slurm: Slurm, tmp_path: Path) -> None:
    folder, out = write_corpus(tmp_path / "a b"), tmp_path / "out"
    dry, _ = submit(folder, out, dry_run=True)
    assert dry.to_submit == ["dbn-1", "sgd-1-1", "base-1-1", "sgd-2-1", "base-2-1"]
    assert not out.exists() and slurm.calls == []
    values = {"tables": ["toy"], "records": 0, "jobs": vars(dry)}
    lists = ("missing", "not_selected", "failed", "files", "outdated_recipe", "outdated_tests")
    told = ReproduceResult(values | {name: [] for name in lists}, {}).as_text()
    assert "\njobs: 5 would be submitted, 0 pending, 0 running, 0 finished, 0 diverged, 0 ended without" in told

    jobs, problems = submit(folder, out)
    assert problems == []
    assert jobs.submitted == {"dbn-1": "1", "sgd-1-1": "2", "base-1-1": "3", "sgd-2-1": "4", "base-2-1": "5"}
    dbn, *trainings = slurm.calls
    assert "--job-name=ddnn-dbn-1" in dbn and not any(word.startswith("--dependency") for word in dbn)
    for call, tasks in zip(trainings, (1, 1, 2, 2), strict=True):
        assert "--dependency=afterok:1" in call and "--kill-on-invalid-dep=yes" in call
        assert f"--ntasks-per-node={tasks}" in call and "--nodes=1" in call
        script = Path(call[-1])
        assert "--dependency" not in script.read_text(), "a script submitted by hand later waits for nothing"
        recipe = load_recipe(script.parent / "recipe.yaml")
        assert recipe.pretrain.dbn == next((out / "dbns").iterdir()) and recipe.parallel.workers == tasks

    slurm.set_states({"1": "RUNNING", **{str(n): "PENDING" for n in (2, 3, 4, 5)}})
    jobs, _ = submit(folder, out)
    assert (jobs.submitted, jobs.running, len(jobs.pending)) == ({}, {"dbn-1": "1"}, 4)
    # A run whose job was cancelled waits for the same DBN, which is being trained.
    slurm.set_states({"1": "RUNNING", **{str(n): "PENDING" for n in (2, 3, 4)}})
    jobs, _ = submit(folder, out)
    assert jobs.submitted == {"base-2-1": "6"} and "--dependency=afterok:1" in slurm.calls[5]
    assert [ended["job"] for ended in jobs.ended] == ["5"] and "cancelled" in jobs.ended[0]["error"]
    told = ReproduceResult({**values, **{name: [] for name in lists}, "jobs": vars(jobs)}, {}).as_text()
    assert "ended without a result: base-2-1, job 5: Slurm job 5 was cancelled before it began; see" in told


def test_from_the_first_call_to_the_records(
    slurm: Slurm, tmp_path: Path, run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the command line, the scripts run here. What ended without a result is submitted again, and goes on."""
    monkeypatch.setattr("ddnn.reproduce.report.Report.write", lambda *_: [])
    folder, out = write_corpus(tmp_path, graphs=False), tmp_path / "out"
    call = ("reproduce", "table6", "--corpus", folder, "--out", out, "--seeds", "1", "--workers", "1", "--slurm")
    with exclusive(out):
        refused = run_cli(*call)
    assert refused.exit_code == 2 and "another call" in refused.stderr and slurm.calls == []
    first = run_cli(*call)
    assert first.exit_code == 0 and "jobs: 3 submitted" in first.stdout and "same command again" in first.stdout
    assert slurm.finish(1) == 0 and (next((out / "dbns").iterdir()) / DBN).exists()
    assert slurm.finish(2) == 0
    run_dir = Path(slurm.calls[2][-1]).parent
    (run_dir / "job.out").write_text("slurmstepd: error: *** JOB 3 ON n1 CANCELLED ***\n")
    slurm.set_states({"1": "COMPLETING"})
    second = json.loads(run_cli(*call, "--json").stdout)
    assert second["jobs"]["finished"] == ["sgd-1-1"] and second["jobs"]["submitted"] == {"base-1-1": "4"}
    assert [(ended["job"], "CANCELLED" in ended["error"]) for ended in second["jobs"]["ended"]] == [("3", True)]
    assert not any(word.startswith("--dependency") for word in slurm.calls[3]), "the RBMs exist"
    assert slurm.finish(4) == 0
    slurm.set_states({})
    assert json.loads(run_cli(*call, "--json").stdout)["jobs"]["finished"] == ["base-1-1"]
    records = read_records(out / "records")
    assert {name: record.machine for name, record in records.items()} == dict.fromkeys(
        ("sgd-1-1", "base-1-1"), f"{cpu_name()}, Slurm, 1 node"
    )
    assert {record.precision for record in records.values()} == {"float32"}
    assert all(record.epochs == 2 and record.tests["test"].frame_accuracy > 0.3 for record in records.values())
    last = json.loads(run_cli(*call, "--json").stdout)
    assert "jobs" not in last and len(slurm.calls) == 4, "once all is there nothing is submitted"


def test_without_sbatch_no_run_is_written(
    tmp_path: Path, run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = write_corpus(tmp_path, graphs=False), tmp_path / "out"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    call = ("reproduce", "table6", "--corpus", folder, "--out", out, "--seeds", "1", "--workers", "1", "--slurm")
    result = run_cli(*call)
    assert result.exit_code == 2 and "sbatch is not found" in result.stderr and result.stderr.count("hint:") == 1
    assert not (out / "runs").exists() and not (out / "dbns").exists()
    dry = run_cli(*call, "--dry-run")
    assert dry.exit_code == 0 and "jobs: 3 would be submitted" in dry.stdout and "6 more missing" in dry.stdout


def test_a_dry_run_says_where_the_selection_leaves_nothing_to_submit(
    slurm: Slurm, tmp_path: Path, run_cli: Callable[..., Any]
) -> None:
    folder, out = write_corpus(tmp_path, graphs=False), tmp_path / "out"
    for run in plan_runs(load_config(folder), folder, [TOY], out)[:2]:
        made = RunRecord(condition=run.condition, workers=1, seed=1, recipe=run.digest, test_digest=run.test_digest)
        write_record(out / "records", made)
    call = ("reproduce", "table6", "--corpus", folder, "--out", out, "--seeds", "1", "--workers", "1", "--slurm")
    said = run_cli(*call, "--dry-run").stdout
    assert "to execute: no runs" in said and "6 more missing and not selected" in said and "missing:" not in said


def test_a_run_that_diverges_is_a_result(slurm: Slurm, tmp_path: Path) -> None:
    folder, out = write_corpus(tmp_path, init="random", rate=1e38), tmp_path / "out"
    submit(folder, out, sizes=(1,))
    assert slurm.finish(1) == 3
    slurm.set_states({"2": "RUNNING"})
    jobs, _ = submit(folder, out, sizes=(1,))
    assert list(jobs.diverged) == ["sgd-1-1"] and jobs.submitted == {} and list(jobs.running) == ["base-1-1"]
    record = read_records(out / "records")["sgd-1-1"]
    assert (
        record.failed is not None
        and record.failed.startswith("the training diverged")
        and record.command.startswith("ddnn train ")
    )
    jobs, _ = submit(folder, out, sizes=(1,))
    assert jobs.diverged == {} and list(jobs.running) == ["base-1-1"] and len(slurm.calls) == 2
    jobs, _ = submit(folder, out, sizes=(1,), retried=("sgd-1-1",))
    assert jobs.submitted == {"sgd-1-1": "3"} and read_records(out / "records") == {}


def test_nothing_is_submitted_where_something_is_wrong(slurm: Slurm, tmp_path: Path) -> None:
    folder, out = write_corpus(tmp_path), tmp_path / "out"
    with pytest.raises(UserError, match="1 workers cannot be spread evenly over 2 nodes"):
        submit(folder, out, nodes=2)
    assert slurm.calls == []
    submit(folder, out, sizes=(1,))
    slurm.set_states({"down": True})
    with pytest.raises(UserError, match="Slurm does not say what became of job"):
        submit(folder, out)
    (next((out / "runs").iterdir()) / "job.json").write_text("{}")
    with pytest.raises(UserError, match="damaged"):
        submit(folder, out)
    assert len(slurm.calls) == 3


def test_what_sbatch_refuses_is_said_and_tried_at_the_next_call(slurm: Slurm, tmp_path: Path) -> None:
    folder, out = write_corpus(tmp_path, init="random"), tmp_path / "out"
    slurm.set_states({"refuse": 2})
    jobs, problems = submit(folder, out)
    assert jobs.submitted == {"sgd-1-1": "1"} and len(slurm.calls) == 2
    assert len(problems) == 1 and problems[0].startswith("base-1-1: sbatch refused the job")
    slurm.set_states({"1": "PENDING"})
    jobs, problems = submit(folder, out)
    assert list(jobs.submitted) == ["base-1-1", "sgd-2-1", "base-2-1"] and problems == []
