"""A judge that is killed or stopped harms no other run, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from reproduce.small import TOY, write_corpus

from ddnn.reproduce.children import Children
from ddnn.reproduce.corpus import load_corpus_plan
from ddnn.reproduce.judge import FOLDER, TASK, Task, judge_run, main
from ddnn.reproduce.plan import Run, plan_runs
from ddnn.reproduce.records import Record, read_records
from ddnn.reproduce.run import Place, Workshop


def workshop(root: Path, cores: int) -> tuple[Workshop, list[Run]]:
    """With the two runs of one worker and seed 1."""
    folder, out = write_corpus(root, graphs=False, init="random"), root / "out"
    plan = load_corpus_plan(folder)
    runs = [run for run in plan_runs(plan, folder, [TOY]) if run.workers == run.seed == 1]
    return Workshop(plan, folder, "", Place(out, out / "records"), "cpu", cores, lambda line: None), runs


def stand_in(root: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Judges run this module; `folder` is the one to be judged in, `main` the judge."""
    (root / "stand_in.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\nfrom ddnn.reproduce.judge import main\n"
        f"folder = Path(sys.argv[1])\n{body}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setattr("ddnn.reproduce.judge.MODULE", "stand_in")


def test_a_judge_that_is_killed_is_the_problem_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop, runs = workshop(tmp_path, 2)
    kill = "if 'sgd' in str(folder):\n    (folder / 'loglikes.ark').write_bytes(b'x')\n    os.kill(os.getpid(), 9)\n"
    with monkeypatch.context() as patch:
        stand_in(tmp_path, patch, kill + "sys.exit(main(sys.argv[1:]))")
        problems = shop.make(runs)
    assert len(problems) == 1 and problems[0].startswith("sgd-1-1: ended by SIGKILL")
    assert list(read_records(shop.place.records)) == ["base-1-1"]
    assert not list(shop.place.out.glob(f"runs/*/{FOLDER}"))
    assert shop.make(runs[:1]) == [] and "sgd-1-1" in read_records(shop.place.records)


def test_a_stop_ends_the_judges_and_begins_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop, runs = workshop(tmp_path, 1)
    stand_in(tmp_path, monkeypatch, f"(Path({str(tmp_path)!r}) / f'judge-{{os.getpid()}}').touch()\ntime.sleep(600)")

    def interrupt() -> None:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("judge-*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        shop.make(runs)
    thread.join()
    (judge,) = tmp_path.glob("judge-*")
    with pytest.raises(ProcessLookupError):
        os.kill(int(judge.name.split("-")[1]), 0)
    assert read_records(shop.place.records) == {} and not list(shop.place.out.glob(f"runs/*/{FOLDER}"))


def test_what_a_killed_call_left_goes_and_damage_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / FOLDER
    (folder / "tmp1").mkdir(parents=True)
    (folder / "tmp1" / "loglikes.ark").write_bytes(b"x")
    task = Task(record=Record(setting="a", workers=1, seed=1, recipe=""), tests=(), device="cpu")
    with pytest.raises(Exception, match="exit code 2: ddnn: error: there is no such file"):
        judge_run(Children(), tmp_path, task, tmp_path / "log")  # no training's run dir
    assert not folder.exists()
    assert main([str(tmp_path)]) == 2 and "cannot read" in capfd.readouterr().err
    (tmp_path / TASK).write_text('{"tests": 1}')
    assert main([str(tmp_path)]) == 2 and "no task" in capfd.readouterr().err
