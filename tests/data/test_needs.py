"""What a training is said to need of memory, what it takes, and what is refused before anything is loaded."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import assert_refused, make_job

from ddnn.data import needs as module
from ddnn.data import residency
from ddnn.data.needs import LIBRARIES, count_parameters, frames_needs, require_for_training, training_needs
from ddnn.data.residency import require_on_gpu
from ddnn.data.source import Source
from ddnn.errors import DataError
from ddnn.parallel.exchange import Exchange
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.train.command import run_training

GIB = 1 << 30
CLEAR_REFS = Path("/proc/self/clear_refs")


def recipe(**more: Any) -> Recipe:
    return Recipe.model_validate({"data": {"train": Path("d"), "alignments": Path("a")}, **more})


class Others(Exchange):
    """A worker alone, to whom others seem to answer as well."""

    def __init__(self, *answers: list[Any]) -> None:
        super().__init__(host="n1", size=1 + len(answers))
        self.answers = answers

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.answers]


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    def available(size: int | None) -> None:
        monkeypatch.setattr(module, "available_memory", lambda: size)

    return available


def test_sizes() -> None:
    assert count_parameters([3, 5, 2]) == 5 * 4 + 2 * 6
    assert frames_needs("float16", 100, 110, 40) == {"frames in float16": 110 * 84 + 2400}
    base = training_needs(recipe(precision="float32", model={"hidden_layers": 4, "hidden_units": 512}), 40, 3000, 1)
    parameters = count_parameters([440, *[512] * 4, 3000])
    assert base["parameters"] == 3 * 4 * parameters and "averaging" not in base
    one = 4 * parameters
    for more, part, size in (
        ({"optimizer": {"momentum": 0.5}}, "parameters", 4 * one),
        ({"precision": "bf16"}, "parameters", 4 * one),
        ({"parallel": {"overlap": True}}, "averaging", 4 * one),
        ({"parallel": {"reduce": "bmuf"}}, "averaging", 5 * one),
        ({"parallel": {"wire": "bfloat16"}}, "averaging", 5 * one),
    ):
        made = recipe(**{"precision": "float32", "model": {"hidden_layers": 4, "hidden_units": 512}, **more})
        assert training_needs(made, 40, 3000, 2)[part] == size, more
    assert training_needs(recipe(optimizer={"name": "ng-sgd"}), 40, 3000, 1)["natural gradient"] > 0
    assert "activations" not in training_needs(recipe(), 40, 3000, 1, "cuda"), "they lie on the GPU"


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="no /proc here")
@pytest.mark.parametrize("optimizer", ["sgd", "ng-sgd"])
def test_a_training_takes_no_more_than_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    job, said = make_job(tmp_path / "job"), []

    def status(name: str) -> int:
        return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]

    def measured(needs: Any, *rest: Any) -> None:
        require_for_training(needs, *rest)
        said.append((sum(needs.values()), status("VmRSS")))
        CLEAR_REFS.write_text("5")  # the highest so far is forgotten

    monkeypatch.setattr("ddnn.train.load.require_for_training", measured)
    settings = ("model={hidden_layers: 3, hidden_units: 1000}", "precision=float32", f"optimizer.name={optimizer}")
    run_training(load_recipe(job.recipe, (*settings, "schedule.initial=0.0001")), job.run, "cpu")
    taken = status("VmHWM") - said[0][1]
    assert taken < said[0][0]
    assert said[0][0] - LIBRARIES < 100e6, "8 MB of parameters"


def test_too_little(available: Callable[[int | None], None], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    needs = {"frames in float32": 6 * GIB, "parameters": 2 * GIB}
    available(8 * GIB - 1)
    with pytest.raises(DataError, match=r"8\.0 GiB of memory needed, 8\.0 GiB available") as caught:
        require_for_training(needs, "data/train", Exchange(host="n1"))
    assert "on n1 with about frames in float32 6.0 GiB, parameters 2.0 GiB" in caught.value.what
    assert caught.value.mend is not None and "float16" in caught.value.mend and caught.value.where == "data/train"
    available(8 * GIB)
    require_for_training(needs, "", Exchange())
    assert "memory is scarce" in caplog.text and caplog.records[-1].levelno == logging.WARNING
    available(11 * GIB)
    require_for_training(needs, "", Exchange())
    assert caplog.records[-1].levelno == logging.INFO
    available(None)
    require_for_training(needs, "", Exchange())


def test_workers_of_a_host_add_up(available: Callable[[int | None], None]) -> None:
    available(40 * GIB)
    needs = {"frames in float16": 10 * GIB}
    same, other = ["n1", needs, 35 * GIB], ["n2", needs, 15 * GIB]
    require_for_training(needs, "", Others(same, other))
    with pytest.raises(
        DataError, match=r"4 workers on n1, each with about .* 40\.0 GiB of memory needed, 35"
    ) as caught:
        require_for_training(needs, "", Others(same, same, same, other))
    assert caught.value.mend is not None
    assert "fewer workers on each" in caught.value.mend and "float16" not in caught.value.mend
    with pytest.raises(DataError, match="2 workers on n2"):  # said by all, those of other hosts too
        require_for_training(needs, "", Others(other, other))


def test_refused_before_anything_is_loaded(
    tmp_path: Path,
    run_cli: Callable[..., Any],
    available: Callable[[int | None], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = make_job(tmp_path / "job")
    available(50 << 20)
    monkeypatch.setattr(Source, "load", lambda *_: pytest.fail("loaded"))
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu")
    assert_refused(result, "of memory needed, 50 MiB available", str(job.data), "with more memory")
    assert "MiB" in result.stderr


def test_a_gpu_on_which_training_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    large, gpu = recipe(model={"hidden_layers": 6, "hidden_units": 8192}), torch.device("cuda", 0)
    monkeypatch.setattr(residency, "device_identity", lambda device: "GPU-1")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * GIB, 40 * GIB))
    with pytest.raises(DataError, match=r"at least 6\.\d GiB of GPU memory, 4\.0 GiB are free on GPU-1 of n1"):
        require_on_gpu(large, 40, 8806, gpu, Exchange(host="n1"))
    require_on_gpu(recipe(), 40, 8806, gpu, Exchange(host="n1"))
    require_on_gpu(large, 40, 8806, torch.device("cpu"), Exchange())
