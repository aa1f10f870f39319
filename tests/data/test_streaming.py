"""Minibatches read ahead are those that a plain gather makes; the thread ends whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import islice

import pytest
import torch
from data.test_transform import make_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddnn.data.minibatches import frame_set, shuffled_minibatches
from ddnn.data.streaming import SLOTS, Stream
from ddnn.data.transform import InputTransform, gather, labels_of, normalise, plain_splice

CPU = torch.device("cpu")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("frames")]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.integers(1, 7),
    st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from([(-2, -1, 0, 1, 2), (-2, 0, 1), (0,)]),
    st.integers(0, 99),
)
def test_what_is_streamed_is_what_is_gathered(
    sizes: list[int], minibatch: int, dtype: torch.dtype, offsets: tuple[int, ...], seed: int
) -> None:
    """In order and to the same bits, epoch after epoch in the same memory."""
    corpus, _ = make_corpus(sizes, 3, 2, seed, dtype)
    frames, width = frame_set(corpus, list(range(len(sizes)))), 3 * len(offsets)
    transform = InputTransform(offsets, 3, torch.full((width,), 0.3), torch.full((width,), 1.7))
    stream = Stream(corpus, transform, minibatch, CPU)
    for epoch in (1, 2):
        order = list(shuffled_minibatches(frames, minibatch, seed=seed, epoch=epoch))
        seen = 0
        for rows, (x, labels) in zip(order, stream.over(iter(order)), strict=True):
            expected = gather(corpus, transform, rows, torch.empty(minibatch, width))
            assert torch.equal(normalise(torch.empty(minibatch, width).copy_(x), transform), expected)
            assert torch.equal(labels.long(), labels_of(corpus, rows, CPU))
            seen += 1
        assert seen == len(frames) // minibatch
    assert not threads()


def test_a_minibatch_holds_until_the_next_is_asked_for() -> None:
    """However far the thread is ahead."""
    corpus, _ = make_corpus([60], 2, 0, 1)
    order = list(frame_set(corpus, [0]).rows.split(2))
    ran = threading.Event()

    def told() -> Iterator[Tensor]:
        for at, rows in enumerate(order):
            if at == SLOTS:
                ran.set()
            yield rows

    with closing(Stream(corpus, plain_splice(2, 0), 2, CPU).over(told())) as batches:
        x, _ = next(batches)
        first = x.clone()
        assert ran.wait(5.0), "the thread reads ahead"
        assert torch.equal(x, first) and torch.equal(x, corpus.store[order[0]])
    assert not threads()


def test_an_error_of_the_thread_reaches_the_trainer() -> None:
    corpus, _ = make_corpus([20], 2, 0, 1)

    def broken() -> Iterator[Tensor]:
        yield from frame_set(corpus, [0]).rows.split(4)[:3]
        raise ZeroDivisionError("made up")

    stream, seen = Stream(corpus, plain_splice(2, 0), 4, CPU), 0
    with pytest.raises(ZeroDivisionError, match="made up"):
        for _ in stream.over(broken()):
            seen += 1
    assert seen == 3, "what was read before is trained on"
    assert not threads()
    with pytest.raises(ValueError, match="3 rows in a minibatch, 4 expected"):
        next(stream.over(iter([torch.arange(3)])))
    with pytest.raises(IndexError):
        next(stream.over(iter([torch.full((4,), 10**6)])))
    assert not threads()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closing_leaves_no_thread(taken: int) -> None:
    corpus, _ = make_corpus([200], 2, 0, 1)
    rows = frame_set(corpus, [0]).rows
    with closing(Stream(corpus, plain_splice(2, 0), 2, CPU).over(rows.split(2))) as batches:
        assert len(list(islice(batches, taken))) == taken
    assert not threads()
    with pytest.raises(KeyError), closing(Stream(corpus, plain_splice(2, 0), 2, CPU).over(rows.split(2))) as batches:
        for _ in batches:
            raise KeyError("of the trainer")
    assert not threads()


def test_waiting_for_data_is_told_from_waiting_for_the_device() -> None:
    corpus, _ = make_corpus([8], 2, 0, 1)
    laps: list[str] = []
    for _ in Stream(corpus, plain_splice(2, 0), 4, CPU).over(frame_set(corpus, [0]).rows.split(4), laps.append):
        laps.append("step")
    assert laps == ["compute", "data", "step", "compute", "data", "step", "compute"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_streaming_to_a_gpu_equals_a_resident_corpus(dtype: torch.dtype) -> None:
    """Not yet seen on a GPU."""
    device = torch.device("cuda", 0)
    corpus, _ = make_corpus([4000, 3000], 40, 5, 1, dtype)
    transform = plain_splice(40, 5)
    host, resident = frame_set(corpus, [0, 1]), frame_set(corpus.to(device), [0, 1])
    stream = Stream(corpus, transform, 256, device)
    busy = torch.randn(2000, 2000, device=device)
    for epoch in (1, 2):
        order = shuffled_minibatches(host, 256, seed=1, epoch=epoch)
        there = shuffled_minibatches(resident, 256, seed=1, epoch=epoch)
        results = []
        for rows, (x, labels) in zip(there, stream.over(order), strict=True):
            busy = torch.nn.functional.normalize(busy @ busy)  # the device lags behind the host
            expected = gather(resident.corpus, transform, rows, torch.empty(256, 440, device=device))
            results.append((x.float() == expected).all() & (labels == resident.corpus.labels[rows]).all())
        assert len(results) == 27 and bool(torch.stack(results).all())
    assert not threads()
