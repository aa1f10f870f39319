"""Runs are made once, go on after a break, and end in records; a diverged one is a result."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from reproduce.small import TOY, write_corpus

from ddnn.recipe.load import load_recipe
from ddnn.reproduce import measure
from ddnn.reproduce.corpus import load_corpus_plan
from ddnn.reproduce.lock import alone
from ddnn.reproduce.plan import Run, digest, missing, plan_runs
from ddnn.reproduce.records import Record, read_records, write_record
from ddnn.reproduce.run import Place, Workshop
from ddnn.reproduce.slots import Slots


def workshop(folder: Path, out: Path) -> tuple[Workshop, list[Run]]:
    """With all runs of the toy table."""
    plan = load_corpus_plan(folder)
    stack = digest(load_recipe(folder / plan.stack))
    place = Place(out, out / "records")
    return Workshop(plan, folder, stack, place, "cpu", 2, lambda line: None), plan_runs(plan, folder, [TOY])


def make(folder: Path, out: Path, sizes: tuple[int, ...] = (1, 2), seeds: tuple[int, ...] = (1,)) -> list[str]:
    """Makes what is missing; the names of the runs that were made, and the problems."""
    plan = load_corpus_plan(folder)
    place = Place(out, out / "records")
    runs = [run for run in plan_runs(plan, folder, [TOY]) if run.workers in sizes and run.seed in seeds]
    todo = missing(runs, read_records(place.records))
    shop = Workshop(plan, folder, digest(load_recipe(folder / plan.stack)), place, "cpu", 2, lambda line: None)
    return [*(run.name for run in todo), *shop.make(todo)]


def test_runs_are_made_judged_and_recorded_once(tmp_path: Path) -> None:
    pytest.importorskip("kaldi_decoder")
    folder, out = write_corpus(tmp_path / "a b"), tmp_path / "out"
    assert make(folder, out) == ["sgd-1-1", "base-1-1", "sgd-2-1", "base-2-1"]
    assert make(folder, out) == []
    records = read_records(out / "records")
    assert len(list((out / "stacks").iterdir())) == 1
    stack = next((out / "stacks").glob("*/stack.safetensors"))
    for name, record in records.items():
        assert record.stack == hashlib.sha256(stack.read_bytes()).hexdigest()[:12]
        assert record.failed is None and record.epochs == 2 and len(record.cv_by_epoch) == 2
        assert record.cv is not None and record.cv == record.cv_by_epoch[-1]
        assert record.tests["test"].frame_accuracy > 0.3
        words = record.wers["test loop"]
        assert sum(words.words) == 24 and words.wer == pytest.approx(100 * sum(words.errors) / 24)
        assert record.time is not None and (record.time.bytes_sent or 0) > 0 if "-2-" in name else record.time
        assert record.measured is not None and record.measured.strategy == "all-reduce"
        assert record.command.startswith("ddnn train ") and str(folder) in record.command
    assert not list(out.glob("runs/*/judging"))


def test_what_was_trained_before_a_break_is_only_judged(tmp_path: Path) -> None:
    folder, out = write_corpus(tmp_path, graphs=False, init="random"), tmp_path / "out"
    assert make(folder, out, sizes=(1,)) == ["sgd-1-1", "base-1-1"]
    (out / "records" / "base-1-1.json").unlink()
    run_dir = next((out / "runs").glob("base-1-1-*"))
    before = (run_dir / "final.safetensors").stat()
    first = read_records(out / "records")["sgd-1-1"]
    assert first.time is not None and first.time.cores == measure.cores() and first.machine and not first.stack
    first = first.model_copy(update={"stack": "of its own"})
    write_record(out / "records", first.model_copy(update={"judged": "on other tests"}))
    assert make(folder, out, sizes=(1,)) == ["sgd-1-1", "base-1-1"]
    assert (run_dir / "final.safetensors").stat().st_ino == before.st_ino
    again = read_records(out / "records")
    assert again["sgd-1-1"] == first, "its record said where it was trained, and from what"
    assert again["base-1-1"].time is not None and again["base-1-1"].time.cores == 0 and not again["base-1-1"].machine


def test_a_run_that_lost_workers_is_no_run_of_so_many(tmp_path: Path) -> None:
    folder, out = write_corpus(tmp_path, graphs=False, init="random"), tmp_path / "out"
    assert make(folder, out, sizes=(1,)) == ["sgd-1-1", "base-1-1"]
    (out / "records" / "base-1-1.json").unlink()
    metrics = next((out / "runs").glob("base-1-1-*")) / "metrics.jsonl"
    with metrics.open("a") as rows:
        rows.write('{"epoch": 1, "minibatch": 0, "split": "lost", "rank": 1, "host": "n1", "workers": 1}\n')
    _, problem = make(folder, out, sizes=(1,))
    assert problem.startswith("base-1-1: worker 1 on n1 was lost after epoch 1") and str(metrics.parent) in problem
    assert list(read_records(out / "records")) == ["sgd-1-1"]


def test_a_stack_that_fails_fails_once_for_all_its_runs(tmp_path: Path) -> None:
    folder, out = write_corpus(tmp_path), tmp_path / "out"
    shop, runs = workshop(folder, out)
    (tmp_path / "data" / "feats.ark").write_bytes(b"")
    problems = shop.make(runs)
    assert len(runs) == 8 and len(problems) == 8, "all runs of two seeds"
    assert all(f"stack-{run.seed}.txt" in problem for run, problem in zip(runs, problems, strict=True))
    for seed in (1, 2):
        assert (out / "logs" / f"stack-{seed}.txt").read_text().count("ddnn: error:") == 1
    assert not (out / "runs").exists()


def test_one_call_at_a_time_makes_runs(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    folder, out = write_corpus(tmp_path, graphs=False, init="random"), tmp_path / "out"
    with alone(out):
        said = run_cli("reproduce", "table6", "--corpus", folder, "--out", out)
    assert said.exit_code == 2 and "another call" in said.stderr and not (out / "runs").exists()
    with alone(out):
        pass  # it was given back


def test_ctrl_c_while_runs_are_lined_up_begins_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Future[Any]] = []

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **more: Any) -> Future[Any]:
            if submitted:
                raise KeyboardInterrupt
            submitted.append(super().submit(*arguments, **more))
            return submitted[0]

    monkeypatch.setattr("ddnn.reproduce.run.ThreadPoolExecutor", Interrupted)
    shop, runs = workshop(write_corpus(tmp_path, init="random"), tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        shop.make(runs)
    assert shop.children.run(["--version"], tmp_path / "log") == (143, "not begun")
    assert read_records(tmp_path / "out" / "records") == {}


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_diverges_is_a_result(tmp_path: Path, size: int) -> None:
    folder, out = write_corpus(tmp_path, init="random", rate=1e38), tmp_path / "out"
    assert make(folder, out, sizes=(size,)) == [f"sgd-{size}-1", f"base-{size}-1"]
    record = read_records(out / "records")[f"sgd-{size}-1"]
    assert record.failed is not None and "diverged" in record.failed and record.cv is None
    assert make(folder, out, sizes=(size,)) == []


def test_a_failure_that_is_none_of_the_training_leaves_no_record(tmp_path: Path) -> None:
    folder, out = write_corpus(tmp_path, init="random"), tmp_path / "out"
    shop, runs = workshop(folder, out)
    (tmp_path / "data" / "feats.ark").write_bytes(b"")
    problems = shop.make([run for run in runs if run.name == "sgd-1-1"])
    assert len(problems) == 1 and "sgd-1-1.txt" in problems[0]
    assert "exit code 2: ddnn: error: " in problems[0] and "the file is empty" in problems[0]
    assert read_records(out / "records") == {}


def test_cores_are_shared_out_in_order() -> None:
    slots, began, at_once, most = Slots(2), [], 0, 0
    lock = threading.Lock()

    def work(name: str, cores: int) -> None:
        nonlocal at_once, most
        with slots.taken(cores):
            with lock:
                began.append(name)
                at_once += min(cores, 2)
                most = max(most, at_once)
            time.sleep(0.02)
            with lock:
                at_once -= min(cores, 2)

    threads = []
    for name, cores in (("a", 1), ("b", 16), ("c", 1), ("d", 1)):
        threads.append(threading.Thread(target=work, args=(name, cores)))
        threads[-1].start()
        time.sleep(0.005)
    for thread in threads:
        thread.join()
    assert most <= 2 and began[:2] == ["a", "b"] and sorted(began) == ["a", "b", "c", "d"]


def test_a_record_says_what_came_out() -> None:
    from ddnn.reproduce.run import summary

    assert summary(Record(setting="a", workers=1, seed=1, recipe="", failed="the training diverged")).endswith(
        "diverged"
    )
