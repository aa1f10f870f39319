"""An evaluation that is killed or stopped harms no other run, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from reproduce.small import Toy

from ddnn.reproduce.measure import EVALUATION
from ddnn.reproduce.runs import read_records


def forget(records: Path) -> None:
    for path in records.glob("*.json"):
        path.unlink()


def stand_in(root: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Evaluations run this module; `folder` is theirs, `main` evaluates."""
    (root / "stand_in.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\nfrom ddnn.reproduce.measure import main\n"
        f"folder = Path(sys.argv[1]).parent\n{body}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setattr("ddnn.reproduce.measure.MODULE", "stand_in")


def test_an_evaluation_that_is_killed_is_the_error_of_its_run(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, runs = toy.executor, toy.runs
    forget(executor.records)
    kill = "if 'sgd' in str(folder):\n    (folder / 'loglikes.ark').write_bytes(b'x')\n    os.kill(os.getpid(), 9)\n"
    with monkeypatch.context() as patch:
        stand_in(tmp_path, patch, kill + "sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))")
        errors = executor.execute(runs)
    assert list(errors) == ["sgd-1-1"] and errors["sgd-1-1"].message.startswith("ended by SIGKILL")
    assert list(read_records(executor.records)) == ["base-1-1"]
    assert not list(runs[0].output_dir.glob(f"runs/*/{EVALUATION}"))
    assert executor.execute(runs[:1]) == {} and "sgd-1-1" in read_records(executor.records)


def test_a_stop_ends_the_evaluations_and_starts_no_more(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, runs = toy.executor, toy.runs
    executor.cores = 1
    forget(executor.records)
    stand_in(
        tmp_path, monkeypatch, f"(Path({str(tmp_path)!r}) / f'evaluation-{{os.getpid()}}').touch()\ntime.sleep(600)"
    )

    def interrupt() -> None:
        deadline = time.monotonic() + 600
        while not list(tmp_path.glob("evaluation-*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        executor.execute(runs)
    thread.join()
    (process,) = tmp_path.glob("evaluation-*")
    with pytest.raises(ProcessLookupError):
        os.kill(int(process.name.split("-")[1]), 0)
    assert read_records(executor.records) == {} and not list(runs[0].output_dir.glob(f"runs/*/{EVALUATION}"))


def test_what_a_killed_call_left_is_removed(toy: Toy) -> None:
    executor, run = toy.executor, toy.runs[0]
    run_dir = run.run_dir
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / EVALUATION / "tmp1").mkdir(parents=True)
    error = executor.execute([run])["sgd-1-1"]
    assert error.message.startswith("exit code 2: ddnn: error: there is no metrics.jsonl here")
    assert not (run_dir / EVALUATION).exists()
