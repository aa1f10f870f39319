"""Every loader gives the minibatches that a plain gather makes, and ends its threads whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import islice

import pytest
import torch
from data.test_transform import make_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddnn.data import batches
from ddnn.data.batches import (
    NUM_BUFFERS,
    BatchLoader,
    PrefetchLoader,
    SequentialSampler,
    ShuffledSampler,
    UtteranceRows,
    make_batch_loader,
)
from ddnn.data.dataset import AcousticDataset, InputTransform, gather, labels_of, splice_only

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("kind", [BatchLoader, PrefetchLoader])


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("prefetch", "shuffle"))]


class Rows:
    """A sampler that gives these rows, in every epoch."""

    def __init__(self, rows: Iterator[Tensor] | tuple[Tensor, ...], batch_size: int) -> None:
        self.rows, self.batch_size = rows, batch_size

    def __len__(self) -> int:
        raise NotImplementedError

    def epoch(self, number: int = 0, skip: int = 0) -> Iterator[Tensor]:
        yield from self.rows

    def close(self) -> None:
        pass


def loader(kind: type[BatchLoader], dataset: AcousticDataset, sampler: object, **more: object) -> BatchLoader:
    transform = splice_only(dataset.dim, 0)
    out = torch.empty(sampler.batch_size, dataset.dim)
    return kind(dataset.subset(range(len(dataset.utterances))), transform, sampler, out, **more)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.integers(1, 7),
    st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([(-2, -1, 0, 1, 2), (-2, 0, 1), (0,)]),
    st.integers(0, 99),
    st.booleans(),
    st.integers(0, 2),
)
def test_both_loaders_give_what_is_gathered(
    sizes: list[int],
    minibatch: int,
    stored: torch.dtype,
    wanted: torch.dtype,
    offsets: tuple[int, ...],
    seed: int,
    shuffled: bool,
    skip: int,
) -> None:
    """In order and to the same bits, epoch after epoch in the same memory; a short last minibatch too."""
    dataset, _ = make_corpus(sizes, 3, 2, seed, stored)
    frames, width = dataset.subset(range(len(sizes))), 3 * len(offsets)
    transform = InputTransform(offsets, 3, torch.full((width,), 0.3), torch.full((width,), 1.7))
    sampler = ShuffledSampler(frames, minibatch, seed=seed) if shuffled else SequentialSampler(frames, minibatch)
    for kind in (BatchLoader, PrefetchLoader):
        with closing(kind(frames, transform, sampler, torch.empty(minibatch, width, dtype=wanted))) as batches:
            for epoch in (1, 2):
                order, seen = list(sampler.epoch(epoch, skip)), 0
                assert len(order) == max(0, len(batches) - skip)
                for rows, (x, labels, _) in zip(order, batches.epoch(epoch, skip), strict=True):
                    expected = gather(dataset, transform, rows, torch.empty(len(rows), width)).to(wanted)
                    assert torch.equal(x, expected) and x.data_ptr() == batches.out.data_ptr()
                    assert torch.equal(labels, labels_of(dataset, rows, CPU)) and labels.dtype == torch.int64
                    seen += len(rows)
                if not shuffled and not skip:
                    assert seen == len(frames)
    assert not threads()


def test_the_loader_is_chosen_by_where_the_features_are() -> None:
    dataset, _ = make_corpus([20], 2, 0, 1)
    frames = dataset.subset([0])
    sampler = SequentialSampler(frames, 4)
    assert type(make_batch_loader(frames, splice_only(2, 0), sampler, device=CPU)) is BatchLoader
    assert make_batch_loader(frames, splice_only(2, 0), sampler).out.shape == (4, 2)
    elsewhere = make_batch_loader(frames, splice_only(2, 0), sampler, device=torch.device("meta"))
    assert type(elsewhere) is PrefetchLoader and elsewhere.out.device.type == "meta"


def test_a_faster_gather_takes_the_place_of_the_plain_one() -> None:
    dataset, _ = make_corpus([20], 2, 0, 1)
    frames, calls = dataset.subset([0]), []

    def counted(features: Tensor, rows: Tensor, first: int, shift: object, scale: object, out: Tensor) -> None:
        calls.append(len(rows))
        out.copy_(features[rows] + 1)

    batches = loader(BatchLoader, dataset, SequentialSampler(frames, 8), gather_kernel=counted)
    for rows, batch in zip(frames.indices.split(8), batches.epoch(), strict=True):
        assert torch.equal(batch.x, dataset.features[rows] + 1)
    assert calls == [8, 8, 4]


@KINDS
def test_a_sample_is_of_full_minibatches_from_the_start(kind: type[BatchLoader]) -> None:
    dataset, _ = make_corpus([21], 2, 0, 1)
    rows = dataset.subset([0]).indices
    for count in (2, 7):
        sample = loader(kind, dataset, ShuffledSampler(dataset.subset([0]), 8, seed=1)).sample(count)
        assert len(sample) == count
        for n, (x, labels, _) in enumerate(sample):
            chosen = rows[8 * (n % 2) : 8 * (n % 2) + 8]
            assert torch.equal(x, dataset.features[chosen]) and torch.equal(labels, dataset.labels[chosen].long())
    assert not threads()


@KINDS
def test_a_minibatch_holds_until_the_next_is_requested(kind: type[BatchLoader]) -> None:
    """However far the thread is ahead."""
    dataset, _ = make_corpus([60], 2, 0, 1)
    order, ahead = dataset.subset([0]).indices.split(2), threading.Event()

    def rows() -> Iterator[Tensor]:
        for number, rows in enumerate(order):
            if number == NUM_BUFFERS - 1:
                ahead.set()
            yield rows

    with closing(loader(kind, dataset, Rows(rows(), 2))) as batches:
        x = next(batches.epoch()).x
        first = x.clone()
        assert kind is BatchLoader or ahead.wait(5.0), "the thread reads ahead"
        assert torch.equal(x, first) and torch.equal(x, dataset.features[order[0]])
    assert not threads()


def test_an_error_of_the_thread_reaches_the_trainer() -> None:
    dataset, _ = make_corpus([20], 2, 0, 1)
    prefetching = partial(loader, PrefetchLoader, dataset)

    def broken() -> Iterator[Tensor]:
        yield from dataset.subset([0]).indices.split(4)[:3]
        raise ZeroDivisionError("made up")

    seen = 0
    with pytest.raises(ZeroDivisionError, match="made up"), closing(prefetching(Rows(broken(), 4))) as batches:
        for _ in batches.epoch():
            seen += 1
    assert seen == 3, "what was read before is trained on"
    assert not threads()
    message = "5 rows in a minibatch, at most 4 expected"
    with pytest.raises(ValueError, match=message), closing(prefetching(Rows((torch.arange(5),), 4))) as batches:
        next(batches.epoch())
    rows = (torch.full((4,), 10**6),)
    with pytest.raises(IndexError), closing(prefetching(Rows(rows, 4))) as batches:
        next(batches.epoch())
    assert not threads()


def test_an_epoch_that_the_garbage_collector_ends_joins_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may do so while a thread starts, with the lock held that the other thread needs to end: that would hang."""
    dataset, _ = make_corpus([200], 2, 0, 1)
    batches = loader(PrefetchLoader, dataset, SequentialSampler(dataset.subset([0]), 4))
    epoch = batches.epoch()
    next(epoch)

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        raise AssertionError("a thread was waited for")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", join)
        epoch.close()  # what the garbage collector calls
    batches.close()
    assert not threads()


@KINDS
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closing_leaves_no_thread(kind: type[BatchLoader], taken: int) -> None:
    dataset, _ = make_corpus([200], 2, 0, 1)
    sampler = ShuffledSampler(dataset.subset([0]), 2, seed=1, prefetch=True)
    with closing(loader(kind, dataset, sampler)) as batches:
        assert len(list(islice(batches.epoch(1), taken))) == taken
        assert threads() or kind is BatchLoader
    assert not threads()


@KINDS
def test_an_error_of_the_trainer_leaves_no_thread(kind: type[BatchLoader]) -> None:
    """Also while the traceback, and with it the iterator of the epoch, is still held."""
    dataset, _ = make_corpus([200], 2, 0, 1)
    sampler = ShuffledSampler(dataset.subset([0]), 2, seed=1, prefetch=True)

    def train() -> None:
        with closing(loader(kind, dataset, sampler)) as batches:
            for number in (1, 2):
                for n, _ in enumerate(batches.epoch(number)):
                    if (number, n) == (2, 3):
                        assert threads()
                        raise KeyError("of the trainer")

    with pytest.raises(KeyError) as caught:
        train()
    assert caught.tb is not None and not threads()


@KINDS
def test_a_new_epoch_ends_the_one_before(kind: type[BatchLoader]) -> None:
    dataset, _ = make_corpus([40], 2, 0, 1)
    with closing(loader(kind, dataset, SequentialSampler(dataset.subset([0]), 4))) as batches:
        first = batches.epoch()
        next(first)
        second = batches.epoch()
        assert next(first, None) is None
        assert torch.equal(next(second).x, dataset.features[:4])
        assert len(threads()) <= 1
    assert not threads()


def test_an_order_drawn_ahead_is_the_one_drawn_when_it_is_needed() -> None:
    dataset, _ = make_corpus([90], 2, 0, 1)
    frames = dataset.subset([0])
    ahead, plain = (ShuffledSampler(frames, 8, seed=3, rank=2, prefetch=prefetch) for prefetch in (True, False))
    for epoch in (1, 2, 5, 6):
        assert all(map(torch.equal, ahead.epoch(epoch), plain.epoch(epoch)))
    ahead.close()
    assert torch.equal(next(ahead.epoch(7, skip=4)), list(plain.epoch(7))[4])
    ahead.close()
    assert not threads()


def test_waiting_for_data_is_told_from_waiting_for_the_device() -> None:
    dataset, _ = make_corpus([8], 2, 0, 1)
    marks: list[str] = []
    for kind, expected in (
        (BatchLoader, ["data", "step", "data", "step"]),
        (PrefetchLoader, ["compute", "data", "step", "compute", "data", "step", "compute"]),
    ):
        marks.clear()
        for _ in loader(kind, dataset, SequentialSampler(dataset.subset([0]), 4), mark=marks.append).epoch():
            marks.append("step")
        assert marks == expected


def test_the_thread_that_reads_ahead_works_on_the_gpu_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(batches, "use_device", lambda device: used.append((threading.current_thread().name, device)))
    dataset, _ = make_corpus([8], 2, 0, 1)
    list(loader(PrefetchLoader, dataset, SequentialSampler(dataset.subset([0]), 4)).epoch())
    assert used == [("prefetch_0", torch.device("cpu"))]


class WholeUtterances:
    """A sampler that gives whole utterances, as many as fit into a minibatch, in an order of its own in each epoch."""

    def __init__(self, dataset: AcousticDataset, batch_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size

    def __len__(self) -> int:
        raise NotImplementedError

    def epoch(self, number: int = 0, skip: int = 0) -> Iterator[UtteranceRows]:
        generator = torch.Generator().manual_seed(number)
        minibatches: list[tuple[int, ...]] = [()]
        for u in torch.randperm(len(self.dataset.utterances), generator=generator).tolist():
            if self.dataset.num_frames[[*minibatches[-1], u]].sum() > self.batch_size:
                minibatches.append(())
            minibatches[-1] += (u,)
        for utterances in minibatches[skip:]:
            yield UtteranceRows(self.dataset.rows_of(utterances), utterances)

    def close(self) -> None:
        pass


@KINDS
def test_a_sampler_of_whole_utterances_is_all_that_a_criterion_over_utterances_needs(kind: type[BatchLoader]) -> None:
    """Minibatches of unequal sizes, each with the indices of its utterances."""
    dataset, _ = make_corpus([5, 9, 1, 4], 2, 1, 1)
    with closing(loader(kind, dataset, WholeUtterances(dataset, 10))) as batches:
        for epoch in (1, 2, 3):
            seen: list[int] = []
            for batch in batches.epoch(epoch):
                rows = dataset.rows_of(batch.utterances)
                assert batch.num_frames == len(rows) == len(batch.x) == dataset.num_frames[[*batch.utterances]].sum()
                assert torch.equal(batch.x, dataset.features[rows])
                assert torch.equal(batch.labels, dataset.labels[rows].long())
                seen += batch.utterances
            assert sorted(seen) == [0, 1, 2, 3]
        skipped = [batch.utterances for batch in batches.epoch(3, skip=1)]
        assert skipped == [batch.utterances for batch in batches.epoch(3)][1:]
    frames = SequentialSampler(dataset.subset([0, 1]), 10)
    assert [(b.num_frames, b.utterances) for b in loader(kind, dataset, frames).epoch()] == [(10, ()), (4, ())]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prefetching_to_a_gpu_equals_features_on_the_gpu(dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    dataset, _ = make_corpus([4000, 3000], 40, 5, 1, dtype)
    width = 440
    transform = InputTransform(splice_only(40, 5).offsets, 40, torch.full((width,), 0.3), torch.full((width,), 1.7))
    transform, busy = transform.to(device), torch.randn(2000, 2000, device=device)
    loaders = []
    for where in (dataset, dataset.to(device)):
        frames = where.subset([0, 1])
        loaders.append(make_batch_loader(frames, transform, ShuffledSampler(frames, 256, seed=1), device=device))
    assert [type(one) for one in loaders] == [PrefetchLoader, BatchLoader]
    for epoch in (1, 2):
        results = []
        for (x, labels, _), (expected, expected_labels, _) in zip(*(one.epoch(epoch) for one in loaders), strict=True):
            busy = torch.nn.functional.normalize(busy @ busy)  # the device lags behind the host
            results.append((x == expected).all() & (labels == expected_labels).all())
        assert len(results) == 27 and bool(torch.stack(results).all())
    for one in loaders:
        one.close()
    assert not threads()
