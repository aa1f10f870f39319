"""`parallel.averaging_frames: auto`: what is chosen, that choosing changes nothing else, and that a resume keeps the choice."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corpora import labelled_utterances, write_data_dir, write_pdfs, write_recipe
from distributed.threads import run_workers
from training.toy import MINIBATCH, toy_trainer
from variants import make_optimizer_config, make_parallel_config

from ddnn.distributed.communicator import Communicator
from ddnn.nn.acoustic_model import load_model
from ddnn.recipe.load import dump_recipe, load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.training import auto_averaging
from ddnn.training.auto_averaging import choose_frames, with_averaging_frames
from ddnn.training.job import run_training
from ddnn.training.resume import with_recorded_averaging
from ddnn.training.resume_rules import check_same_recipe
from ddnn.training.state import collect_state
from ddnn.util.errors import DataError

AUTO = "parallel.averaging_frames=auto"


@pytest.mark.parametrize(
    ("longest", "frame", "averaging", "expected"),
    [
        (256, 1e-4, 1e-3, 256),  # no shorter than a minibatch
        (2048, 1e-4, 1e-3, 2048),
        (256, 1e-4, 0.1, 9_000),  # 0.1 s in 0.9 s of training are a tenth of the time
        (256, 1e-4, 0.2, 18_000),
    ],
)
def test_what_is_chosen(longest: int, frame: float, averaging: float, expected: int) -> None:
    assert choose_frames(longest, frame, averaging) == expected
    more = choose_frames(longest, frame, 2 * averaging + 1)
    assert (2 * averaging + 1) / (2 * averaging + 1 + more * frame) == pytest.approx(0.1, rel=1e-3)


def recipe_of(tmp_path: Path, *settings: str) -> Recipe:
    features, labels = labelled_utterances(count=16)
    if not (tmp_path / "recipe.yaml").exists():
        data = write_data_dir(tmp_path / "data", features)
        write_recipe(tmp_path / "recipe.yaml", data, write_pdfs(tmp_path / "pdfs.txt", labels))
    return load_recipe(tmp_path / "recipe.yaml", ["parallel.workers=2", "schedule.min_epochs=2", *settings])


def train(recipe: Recipe, run: Path, workers: int = 2, **more: Any) -> tuple[torch.Tensor, list[int]]:
    """The final parameters, and the averagings of each worker and epoch."""
    run_workers(workers, lambda comm: run_training(recipe, run, "cpu", comm, **more))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    averagings = [row["averagings"] for row in rows if row["type"] == "worker"]
    return load_model(run / "final.safetensors").network.parameters, averagings


@pytest.mark.parametrize(
    "settings",
    [
        ("optimizer={name: ng-sgd, rank_in: 3, rank_out: 4, momentum: 0.5}", "parallel.overlap=false"),
        ("parallel.strategy=bmuf", "parallel.nesterov=true"),
        ("parallel.comm_dtype=bfloat16", "parallel.warmup=all-reduce", "parallel.warmup_minibatches=3"),
    ],
)
def test_a_run_with_the_number_that_was_chosen_is_the_same(
    settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same bits: what is timed leaves no trace. It is a tenth of the shard with these networks."""
    monkeypatch.setattr(auto_averaging, "MAX_SHARE", 0.9999)  # threads wait for each other
    found, averagings = train(recipe_of(tmp_path, AUTO, *settings), tmp_path / "auto")
    number = load_recipe(tmp_path / "auto/recipe.yaml").parallel.averaging_frames
    assert isinstance(number, int) and sum(averagings) >= 5 * len(averagings)
    again, expected = train(recipe_of(tmp_path, f"parallel.averaging_frames={number}", *settings), tmp_path / "again")
    assert torch.equal(found, again) and averagings == expected


def test_a_resume_takes_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the original recipe, or that of the run dir; on other workers too, and one that has had nothing to choose."""
    monkeypatch.setattr(auto_averaging, "choose_frames", lambda *of: 48)
    short, longer = ("schedule.max_epochs=2",), ("schedule.max_epochs=4",)
    train(recipe_of(tmp_path, AUTO, *short), tmp_path / "run")
    whole, averagings = train(recipe_of(tmp_path, "parallel.averaging_frames=48", *longer), tmp_path / "whole")
    monkeypatch.setattr(auto_averaging, "choose_frames", lambda *of: 16)
    resumed, of_all = train(recipe_of(tmp_path, AUTO, *longer), tmp_path / "run", resume=True)
    assert torch.equal(resumed, whole) and of_all == averagings
    recipe = load_recipe(tmp_path / "run/recipe.yaml")
    assert recipe.parallel.averaging_frames == 48
    check_same_recipe(dump_recipe(recipe), recipe_of(tmp_path, AUTO, *longer, "precision=float32"), tmp_path)


def test_one_worker_chooses_nothing_and_several_that_resume_it_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_averaging, "choose_frames", lambda *of: 32)
    run, alone = tmp_path / "run", recipe_of(tmp_path, AUTO, "parallel.workers=1", "schedule.max_epochs=2")
    run_training(alone, run, "cpu")
    assert load_recipe(run / "recipe.yaml").parallel.averaging_frames == "auto"
    train(recipe_of(tmp_path, AUTO, "schedule.max_epochs=3"), run, resume=True)
    assert load_recipe(run / "recipe.yaml").parallel.averaging_frames == 32


def test_a_checkpoint_without_a_number_is_refused(tmp_path: Path) -> None:
    text = "parallel: {averaging_frames: -3}\n"
    loaded: Any = SimpleNamespace(metadata=SimpleNamespace(recipe=text), location=tmp_path)
    with pytest.raises(
        DataError, match=r"recipe in the checkpoint is not valid: parallel.averaging_frames.*greater than or equal to 1"
    ):
        with_recorded_averaging(recipe_of(tmp_path, AUTO), loaded)


def test_the_slowest_worker_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All choose by the same figures, whatever they have timed themselves, and leave their state as it was."""
    asked = []
    caplog.set_level("INFO", logger="ddnn")
    monkeypatch.setattr(auto_averaging, "choose_frames", lambda *figures: asked.append(figures) or 77)
    recipe = recipe_of(tmp_path, AUTO)

    def work(comm: Communicator) -> tuple[bool, int | str | None, int]:
        sgd = make_optimizer_config("ng-sgd", rank_in=2, rank_out=2, momentum=0.5)
        frames = MINIBATCH * (2 + comm.rank)
        trainer = toy_trainer(comm, make_parallel_config(averaging_frames="auto"), frames=frames, optimizer=sgd)
        step, average = trainer.step, trainer.averager.averaging_seconds

        def slow(batch: Any, lr: float) -> Any:
            time.sleep(0.05 * (comm.rank == 1))
            return step(batch, lr)

        trainer.step = slow
        trainer.averager.averaging_seconds = lambda count: average(count) + (comm.rank == 2)  # type: ignore[method-assign]
        before = {name: tensor.clone() for name, tensor in collect_state(trainer.parts).items()}
        chosen = with_averaging_frames(recipe, trainer)
        after = collect_state(trainer.parts)
        times = ("averager.seconds", "averager.traffic", "progress.seconds")
        same = all(torch.equal(tensor, after[name]) for name, tensor in before.items() if name not in times)
        assert load_recipe_text(trainer.recipe) == chosen.parallel.averaging_frames
        return same, chosen.parallel.averaging_frames, trainer.averager.interval.period  # type: ignore[attr-defined]

    assert run_workers(3, work) == [(True, 77, 77)] * 3
    assert len(set(asked)) == 1
    ((longest, frame, averaging),) = set(asked)
    assert longest == MINIBATCH
    assert 0.05 / MINIBATCH < frame < 1.0 and averaging > 1.0
    said = caplog.messages[-1]
    assert said.startswith("averaging_frames: auto chose 77: an averaging takes 1 s, 77 frames ")
    assert said.endswith(" of the time; a run that is to repeat this one needs parallel.averaging_frames=77")


def load_recipe_text(text: str) -> Any:
    found = re.search(r"averaging_frames: (\w+)", text)
    return found and int(found[1])
