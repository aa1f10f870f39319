"""What a training is estimated to need of memory, what it takes, what is refused before anything is loaded, and where
the features are, on made-up GPUs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import load_all
from jobs import assert_refused, make_job

from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.loading import Corpus, DataConfig
from ddnn.data.source import DataSource, open_source
from ddnn.distributed.communicator import SingleProcess
from ddnn.nn.layers import num_parameters
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.training import memory
from ddnn.training.job import run_training
from ddnn.training.memory import (
    LIBRARY_BYTES,
    TrainingMemory,
    choose_feature_device,
    frames_memory,
    require_host_memory,
)
from ddnn.training.network_layers import network_layers
from ddnn.training.options import estimate_memory
from ddnn.util.errors import DataError

GIB = 1 << 30
CLEAR_REFS = Path("/proc/self/clear_refs")
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
SMALL = TrainingMemory({"activations": 3000}, {}, gpu=20_000, min_gpu=10_000)
SWBD = {"hidden_layers": 6, "hidden_units": 2048}


def recipe(**more: Any) -> Recipe:
    return Recipe.model_validate({"data": {"train": Path("d"), "alignments": Path("a")}, **more})


class Others(SingleProcess):
    """A worker alone, to whom others seem to answer as well."""

    def __init__(self, *answers: list[Any]) -> None:
        super().__init__(host="n1")
        self.world_size, self.answers = 1 + len(answers), answers

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, *self.answers]


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    def available(size: int | None) -> None:
        monkeypatch.setattr(memory, "available_memory", lambda: size)

    return available


def parameters_of(recipe: Recipe, input_dim: int, num_pdfs: int) -> int:
    return num_parameters(network_layers(recipe, input_dim, num_pdfs))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sizes_of_frames(tmp_path: Path, dtype: str) -> None:
    job = make_job(tmp_path / "job")
    config = DataConfig(FeatureConfig(splice=5, dtype=dtype))
    source = open_source([Corpus(job.data, job.ali)], config, SingleProcess())
    for utterances in ([0, 2], range(len(source.index.entries))):
        dataset = source.load(utterances, SingleProcess())
        stored = dataset.features.nbytes + dataset.labels.nbytes
        size = stored + 24 * int(dataset.num_frames.sum())
        assert frames_memory(source, utterances) == {f"frames in {dtype}": size}


def test_sizes() -> None:
    plain = {"precision": "float32", "model": {"hidden_layers": 4, "hidden_units": 512}}
    host = estimate_memory(recipe(**plain), 440, 3000, 1).on_host("cpu")
    one = 4 * (512 * 441 + 3 * 512 * 513 + 3000 * 513)
    assert host == {
        "parameters": 3 * one,
        "activations": 4 * (256 + 1024) * (440 + 2 * (4 * 512 + 3000)),
        "files": 3 * one,
        "libraries": LIBRARY_BYTES,
    }
    for more, part, size in (
        ({"optimizer": {"momentum": 0.5}}, "parameters", 3 * one),
        ({"optimizer": {"momentum": 0.5}}, "momentum", one),
        ({"precision": "bf16"}, "parameters", 4 * one),
        ({"parallel": {"overlap": True}}, "averaging", 4 * one),
        ({"parallel": {"strategy": "bmuf"}}, "averaging", 5 * one),
        ({"parallel": {"strategy": "elastic"}}, "averaging", 4 * one),
        ({"parallel": {"strategy": "1-bit"}}, "averaging", 6 * one),
        ({"parallel": {"strategy": "async"}}, "averaging", 3 * one),
        ({"parallel": {"comm_dtype": "bfloat16"}}, "averaging", 5 * one),
    ):
        assert estimate_memory(recipe(**{**plain, **more}), 440, 3000, 2).on_host("cpu")[part] == size, more
    assert estimate_memory(recipe(optimizer={"name": "ng-sgd"}), 440, 3000, 1).on_host("cpu")["optimizer"] > 0
    assert "activations" not in estimate_memory(recipe(), 440, 3000, 1).on_host("cuda"), "they are on the GPU"
    swbd = recipe(model=SWBD)
    on_gpu = estimate_memory(swbd, 440, 8806, 1).gpu
    assert 40 * parameters_of(swbd, 440, 8806) < on_gpu < 5 * GIB, "beside 300 hours in float16 on any GPU of 24 GB"
    assert estimate_memory(recipe(model={**SWBD, "hidden_units": 4096}), 440, 8806, 1).gpu > on_gpu


def test_columns_and_stages_divide_what_a_worker_needs() -> None:
    """Of Fisher matrices a worker has all of a layer's input and its own outputs of the derivative's, in float32 four times."""
    settings = {"optimizer": {"name": "ng-sgd", "rank_in": 20, "rank_out": 80}, "minibatch_size": 1}
    needed = {}
    for columns, stages in ((1, 1), (2, 1), (1, 2), (2, 2)):
        split = {**settings, "parallel": {"columns": columns, "stages": stages}}
        split["model"] = {"hidden_layers": 3, "hidden_units": 512}
        needed[columns, stages] = estimate_memory(recipe(**split), 440, 512, 1).cpu["optimizer"]
    inputs, frames = (441, 513, 513, 513), (440, 512, 512, 512)
    for (columns, stages), found in needed.items():
        first = 0 if stages == 1 else 2  # 2 | 2 layers, of which the upper two have more parameters
        matrices = sum(16 * (20 * inputs[i] + 80 * 512 // columns) for i in range(first, 4))
        rows = 4 * (sum(frames[first:]) + 512 // columns + (4 - first) * 2 * 100)
        assert found == matrices + rows, (columns, stages)


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="no /proc here")
@pytest.mark.parametrize("optimizer", ["sgd", "ng-sgd"])
def test_a_training_takes_no_more_than_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    job, said = make_job(tmp_path / "job"), []

    def status(name: str) -> int:
        return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]

    def measured(needs: Any, *rest: Any) -> None:
        require_host_memory(needs, *rest)
        said.append((sum(needs.values()), status("VmRSS")))
        CLEAR_REFS.write_text("5")  # the highest so far is forgotten

    monkeypatch.setattr(memory, "require_host_memory", measured)
    settings = ("model={hidden_layers: 3, hidden_units: 1000}", "precision=float32", f"optimizer.name={optimizer}")
    run_training(load_recipe(job.recipe, (*settings, "schedule.initial_learning_rate=0.0001")), job.run, "cpu")
    taken = status("VmHWM") - said[0][1]
    assert taken < said[0][0]
    assert said[0][0] - LIBRARY_BYTES < 100e6, "8 MB of parameters"


def test_too_little(available: Callable[[int | None], None], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    needs = {"frames in float32": 6 * GIB, "parameters": 2 * GIB}
    available(8 * GIB - 1)
    with pytest.raises(DataError, match=r"needs about 8\.0 GiB of memory .* and 8\.0 GiB are available") as caught:
        require_host_memory(needs, "data/train", SingleProcess(host="n1"))
    assert (
        "one process on n1 needs about 8.0 GiB of memory (frames in float32 6.0 GiB, parameters 2.0 GiB)"
        in caught.value.message
    )
    assert caught.value.hint is not None and "float16" in caught.value.hint and caught.value.location == "data/train"
    available(8 * GIB)
    require_host_memory(needs, "", SingleProcess())
    assert "memory is scarce" in caplog.text and caplog.records[-1].levelno == logging.WARNING
    available(11 * GIB)
    require_host_memory(needs, "", SingleProcess())
    assert caplog.records[-1].levelno == logging.INFO
    available(None)
    require_host_memory(needs, "", SingleProcess())


def test_frames_alone_are_worth_a_line_only_where_memory_is_scarce(
    tmp_path: Path, available: Callable[[int | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    """What `ddnn evaluate` and `ddnn decode-prep` load; a process takes much more than its frames."""
    caplog.set_level(logging.INFO)
    data = make_job(tmp_path / "job").data
    available(GIB)
    stored = load_all(data, None)
    needed = stored.features.nbytes + stored.labels.nbytes + 24 * 480
    assert "memory" not in caplog.text
    available(needed)
    load_all(data, None)
    assert "memory is scarce: one process on " in caplog.text
    available(needed - 1)
    with pytest.raises(DataError, match=r"one process on .* needs about") as caught:
        load_all(data, None)
    assert caught.value.location == str(data)


def hint_for(available_bytes: int, workers: int = 1, **sizes: int) -> tuple[str | None, str]:
    estimate = {name.replace("_", " "): size * GIB for name, size in sizes.items()}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DataError) as caught:
        patch.setattr(memory, "available_memory", lambda: available_bytes * GIB)
        comm = Others(*[["n1", estimate, available_bytes * GIB]] * (workers - 1))
        require_host_memory(estimate, "data/train", comm)
    assert caught.value.hint is not None
    return caught.value.location, caught.value.hint


def test_the_advice_fits_what_does_not_fit() -> None:
    """Frames are divided among the workers; each has all parameters and the state of the optimizer."""
    location, hint = hint_for(10, frames_in_float32=8, parameters=4)
    assert location == "data/train" and "more workers on more machines" in hint and "float16" in hint
    assert "model.hidden_units" not in hint
    location, hint = hint_for(10, frames_in_float32=8, parameters=12)
    assert location == "model" and "each worker holds 12.0 GiB for the model" in hint
    assert "more workers help only where they share it (parallel.columns, parallel.stages): lower model." in hint
    assert "lower model.hidden_units or model.hidden_layers (in " in hint
    assert "model.layers units, filters or repeat), or use machines" in hint
    assert not any(word in hint for word in ("float16", "utterances", "more machines", "optimizer", "minibatch_size"))
    _, hint = hint_for(10, frames_in_float16=1, parameters=5, momentum=4, optimizer=2)
    assert "optimizer.momentum: 0" in hint and "optimizer.name: sgd" in hint
    _, hint = hint_for(10, parameters=2, activations=9)
    assert "or minibatch_size" in hint
    _, hint = hint_for(10, workers=3, frames_in_float32=1, parameters=4)
    assert "each worker holds 4.0 GiB for the model" in hint and "use fewer workers on each machine" in hint
    location, hint = hint_for(10, workers=3, frames_in_float32=2, parameters=3)
    assert location == "data/train" and "more machines with fewer workers on each" in hint and "float16" in hint


def test_a_model_too_large_for_memory(
    tmp_path: Path, run_cli: Callable[..., Any], available: Callable[[int | None], None]
) -> None:
    job = make_job(tmp_path / "job")
    available(20 * GIB)
    settings = ("model={hidden_layers: 6, hidden_units: 30000}", "optimizer.momentum=0.9")
    options = [word for setting in settings for word in ("--set", setting)]
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu", *options)
    assert_refused(result, "location: model", "GiB for the model, so that more workers", "optimizer.momentum: 0")
    assert "momentum 16.8 GiB" in result.stderr and "more machines" not in result.stderr


def test_workers_of_a_host_add_up(available: Callable[[int | None], None]) -> None:
    available(40 * GIB)
    needs = {"frames in float16": 10 * GIB}
    same, other = ["n1", needs, 35 * GIB], ["n2", needs, 15 * GIB]
    require_host_memory(needs, "", Others(same, other))
    with pytest.raises(
        DataError, match=r"4 workers on n1 need about 40\.0 GiB of memory \(each: .*\), and 35"
    ) as caught:
        require_host_memory(needs, "", Others(same, same, same, other))
    assert caught.value.hint is not None
    assert "fewer workers on each" in caught.value.hint and "float16" not in caught.value.hint
    with pytest.raises(DataError, match="2 workers on n2"):  # said by all, those of other hosts too
        require_host_memory(needs, "", Others(other, other))


def test_refused_before_anything_is_loaded(
    tmp_path: Path,
    run_cli: Callable[..., Any],
    available: Callable[[int | None], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = make_job(tmp_path / "job")
    available(50 << 20)
    monkeypatch.setattr(DataSource, "load", lambda *_: pytest.fail("loaded"))
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu")
    assert_refused(result, "and 50 MiB are available", "location: model", "with more memory")
    assert "MiB" in result.stderr


def place(
    monkeypatch: pytest.MonkeyPatch, free: int, size: int, comm: SingleProcess | None = None, **options: Any
) -> Any:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10 * free))
    monkeypatch.setattr(memory, "device_identity", lambda device: "GPU-1")
    return choose_feature_device(SMALL, size, GPU, comm or SingleProcess(host="n1"), **options)


def test_on_the_gpu_to_the_last_byte_that_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = 10**6
    needed = size + SMALL.gpu
    with caplog.at_level(logging.INFO, "ddnn"):
        assert place(monkeypatch, needed, size) == GPU
        assert place(monkeypatch, needed - 1, size) == CPU
        assert place(monkeypatch, 10 * needed, size, on_host=True) == CPU
    texts = [record.getMessage() for record in caplog.records]
    assert "are on the GPU" in texts[0] and "read ahead" in texts[1] and "float16" in texts[1]
    assert "data.feature_device" in texts[2] and len(texts) == 3


def test_workers_on_one_gpu_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 10**6
    needed = size + SMALL.gpu
    same, elsewhere = ["n1", "GPU-1"], [["n1", "GPU-2", needed], ["other", "GPU-1", needed]]
    assert place(monkeypatch, 2 * needed, size, Others([*same, 2 * needed], *elsewhere)) == GPU
    assert place(monkeypatch, 2 * needed, size, Others([*same, 2 * needed - 2], *elsewhere)) == CPU
    assert place(monkeypatch, 2 * needed, size, Others([*same, 9 * needed], [*same, 9 * needed])) == CPU


def test_a_cpu_is_never_asked_for_its_memory() -> None:
    assert choose_feature_device(SMALL, 10**15, CPU, SingleProcess(), on_host=True) == CPU


def test_a_gpu_on_which_training_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    large = estimate_memory(recipe(model={"hidden_layers": 6, "hidden_units": 8192}), 440, 8806, 1)
    small, comm = estimate_memory(recipe(), 440, 8806, 1), SingleProcess(host="n1")
    monkeypatch.setattr(memory, "device_identity", lambda device: "GPU-1")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * GIB, 40 * GIB))
    with pytest.raises(DataError, match=r"at least 6\.\d GiB of GPU memory, 4\.0 GiB are free on GPU-1 of n1"):
        choose_feature_device(large, 0, GPU, comm)
    assert choose_feature_device(small, 0, GPU, comm) == GPU
    assert choose_feature_device(large, 0, CPU, comm) == CPU
