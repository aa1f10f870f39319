"""Where the corpus lies, with made-up GPUs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from data.test_transform import make_corpus

from ddnn.data import residency
from ddnn.data.residency import corpus_bytes, place_of_corpus, training_bytes
from ddnn.parallel.exchange import Exchange
from ddnn.recipe.schema import Data, Model, Recipe

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
CORPUS, _ = make_corpus([50, 30], 4, 5, 1)


def make_recipe(place: str = "auto", **model: int) -> Recipe:
    return Recipe.model_validate(
        {"data": Data(train=Path("d"), alignments=Path("a"), place=place), "model": Model(**model)}
    )


class Others(Exchange):
    """A worker alone, to whom others seem to answer as well."""

    def __init__(self, *answers: list[Any]) -> None:
        super().__init__()
        self.answers = answers

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.answers]


def place(monkeypatch: pytest.MonkeyPatch, free: int, recipe: Recipe, exchange: Exchange | None = None) -> torch.device:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10 * free))
    monkeypatch.setattr(residency, "device_identity", lambda device: "GPU-1")
    return place_of_corpus(recipe, CORPUS, 7, GPU, exchange)


def test_on_the_gpu_to_the_last_byte_that_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = make_recipe()
    needed = corpus_bytes(CORPUS) + training_bytes(recipe, CORPUS.dim, 7)
    with caplog.at_level(logging.INFO, "ddnn"):
        assert place(monkeypatch, needed, recipe) == GPU
        assert place(monkeypatch, needed - 1, recipe) == CPU
        assert place(monkeypatch, 10 * needed, make_recipe("host")) == CPU
    texts = [record.getMessage() for record in caplog.records]
    assert "lies on the GPU" in texts[0] and "read ahead" in texts[1] and "float16" in texts[1]
    assert "data.place" in texts[2] and len(texts) == 3


def test_workers_on_one_gpu_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, exchange = make_recipe(), Exchange()
    needed = corpus_bytes(CORPUS) + training_bytes(recipe, CORPUS.dim, 7)
    same, elsewhere = [exchange.host, "GPU-1"], [[exchange.host, "GPU-2", 0], ["other", "GPU-1", 0]]
    assert place(monkeypatch, 2 * needed, recipe, Others([*same, 2 * needed], *elsewhere)) == GPU
    assert place(monkeypatch, 2 * needed, recipe, Others([*same, 2 * needed - 2], *elsewhere)) == CPU
    assert place(monkeypatch, 2 * needed, recipe, Others([*same, 9 * needed], [*same, 9 * needed])) == CPU


def test_a_cpu_is_never_asked_for_its_memory() -> None:
    assert place_of_corpus(make_recipe("host"), CORPUS, 7, CPU) == CPU


def test_sizes() -> None:
    rows, frames = 80 + 4 * 5, 80
    assert corpus_bytes(CORPUS) == rows * (4 * 4 + 4) + 24 * frames
    half, _ = make_corpus([50, 30], 4, 5, 1, torch.float16)
    assert corpus_bytes(half) == rows * (4 * 2 + 4) + 24 * frames
    swbd = training_bytes(make_recipe(hidden_layers=6, hidden_units=2048), 40, 8806)
    parameters = 440 * 2048 + 5 * 2048 * 2048 + 2048 * 8806 + 6 * 2048 + 8806
    assert parameters * 40 < swbd < 5 * 2**30, "beside 300 hours of 40 dims in float16 on any GPU of 24 GB"
    assert training_bytes(make_recipe(hidden_layers=6, hidden_units=4096), 40, 8806) > swbd
