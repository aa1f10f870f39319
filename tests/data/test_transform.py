"""Splice and normalization against naive float64 twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddnn.data.batches import SequentialSampler, ShuffledSampler, shuffled
from ddnn.data.dataset import AcousticDataset, InputTransform, gather, splice_only
from ddnn.kaldi.data_dir import add_deltas
from ddnn.training.normalization import estimate_normalization


def make_corpus(
    lengths: list[int], dim: int, context: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[AcousticDataset, list[np.ndarray]]:
    """A corpus of random utterances, and the utterances."""
    rng = np.random.default_rng(seed)
    features = [rng.normal(2.0, 3.0, (n, dim)).astype(np.float32) for n in lengths]
    pieces, first, row = [], [], context
    for matrix in features:
        pieces += [np.repeat(matrix[:1], context, 0), matrix, np.repeat(matrix[-1:], context, 0)]
        first.append(row)
        row += len(matrix) + 2 * context
    store = torch.from_numpy(np.concatenate(pieces)).to(dtype)
    names = tuple(f"u{i}" for i in range(len(lengths)))
    labels = torch.arange(len(store), dtype=torch.int32)
    return AcousticDataset(store, labels, names, names, np.array(first), np.array(lengths), context), features


def twin_splice(matrix: np.ndarray, offsets: tuple[int, ...]) -> np.ndarray:
    """Frame by frame, clamped at the utterance's ends."""
    last = len(matrix) - 1
    return np.array([np.concatenate([matrix[min(max(t + o, 0), last)] for o in offsets]) for t in range(len(matrix))])


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(lengths, st.integers(1, 4), st.integers(0, 4), st.integers(0, 99))
def test_gather_splices_and_clamps(sizes: list[int], dim: int, context: int, seed: int) -> None:
    corpus, features = make_corpus(sizes, dim, context, seed)
    transform = splice_only(dim, context)
    expected = np.concatenate([twin_splice(m, transform.offsets) for m in features])
    rows = corpus.rows_of(range(len(sizes)))
    out = torch.full((len(rows), transform.output_dim), float("nan"))
    np.testing.assert_array_equal(gather(corpus, transform, rows, out).numpy(), expected)


def test_gather_takes_any_offsets_and_half_precision() -> None:
    corpus, features = make_corpus([7, 3], 4, 3, 1, torch.float16)
    transform = InputTransform((-3, 0, 2), 4, torch.full((12,), 1.0), torch.full((12,), 2.0))
    halves = [m.astype(np.float16).astype(np.float32) for m in features]
    expected = (np.concatenate([twin_splice(m, transform.offsets) for m in halves]) + 1.0) * 2.0
    rows = corpus.rows_of([0, 1])
    np.testing.assert_allclose(gather(corpus, transform, rows, torch.empty(10, 12)).numpy(), expected, rtol=1e-6)


@settings(max_examples=20, deadline=None)
@given(lengths, st.integers(1, 4), st.integers(0, 4), st.integers(0, 99))
def test_normalization_is_over_the_chosen_utterances(sizes: list[int], dim: int, context: int, seed: int) -> None:
    corpus, features = make_corpus(sizes, dim, context, seed)
    chosen = list(range(0, len(sizes), 2))
    transform = estimate_normalization(splice_only(dim, context), corpus, chosen)
    spliced = np.concatenate([twin_splice(features[u].astype(np.float64), transform.offsets) for u in chosen])
    np.testing.assert_allclose(transform.shift.numpy(), -spliced.mean(0), rtol=1e-5, atol=1e-5)
    expected = 1.0 / np.sqrt(np.maximum(spliced.var(0), 1e-10))
    np.testing.assert_allclose(transform.scale.numpy(), expected, rtol=1e-3)


@settings(max_examples=30, deadline=None)
@given(lengths, st.integers(1, 12), st.integers(0, 2**62), st.integers(1, 30))
def test_an_epoch_sees_every_frame_once_but_for_the_tail(
    sizes: list[int], minibatch: int, seed: int, epoch: int
) -> None:
    corpus, _ = make_corpus(sizes, 2, 1, 0)
    frames = corpus.subset(list(range(len(sizes))))
    batches = list(ShuffledSampler(frames, minibatch, seed=seed).epoch(epoch))
    assert [len(b) for b in batches] == [minibatch] * (sum(sizes) // minibatch)
    assert len(ShuffledSampler(frames, minibatch, seed=1)) == len(batches)
    seen = torch.cat(batches).tolist() if batches else []
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(frames.indices.tolist())
    again = list(ShuffledSampler(frames, minibatch, seed=seed).epoch(epoch))
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 12), st.integers(0, 2**62), st.integers(1, 60), st.integers(0, 3))
def test_a_randomizer_shuffles_blocks_of_utterances(
    sizes: list[int], minibatch: int, seed: int, randomizer_size: int, rank: int
) -> None:
    """Kaldi's: blocks of whole utterances, of more than `randomizer_size` frames but the last, the same ones in the same
    order in every epoch; within a block the order is another in each epoch."""
    corpus, _ = make_corpus(sizes, 2, 1, 0)
    frames = corpus.subset(range(len(sizes)))
    sampler = ShuffledSampler(frames, minibatch, seed=seed, rank=rank, randomizer_size=randomizer_size)
    orders = [frames.indices[sampler._draw(epoch)].tolist() for epoch in (1, 2, 3)]
    block: list[int] = []
    utterances = shuffled(range(len(sizes)), seed, rank)
    for u in utterances:
        block += corpus.rows_of([u]).tolist()
        if len(block) > randomizer_size or u == utterances[-1]:
            for order in orders:
                assert sorted(order[: len(block)]) == sorted(block)
                del order[: len(block)]
            block = []
    assert orders == [[], [], []]


def test_a_block_that_only_reaches_the_size_of_the_randomizer_takes_another_utterance() -> None:
    corpus, _ = make_corpus([20, 20, 20], 2, 1, 0)
    order = ShuffledSampler(corpus.subset(range(3)), 4, seed=1, randomizer_size=20)._draw(1)
    assert len({int(frame) // 20 for frame in order[:20]}) == 2


def test_a_randomizer_of_the_whole_corpus_shuffles_all_frames() -> None:
    corpus, _ = make_corpus([50] * 40, 2, 1, 0)
    frames = corpus.subset(range(40))
    epochs = [ShuffledSampler(frames, 8, seed=1, randomizer_size=size)._draw(e) for size in (500, 5000) for e in (1, 2)]
    assert len({tuple(order.tolist()) for order in epochs}) == 4
    moved = [float((order - torch.arange(2000)).abs().float().mean()) for order in epochs]
    assert min(moved) > 300, "utterances are in a random order"
    inside = [len({row // 50 for row in order[:100].tolist()}) for order in epochs]
    assert max(inside[:2]) <= 11 and min(inside[2:]) > 25


def test_the_order_changes_with_epoch_and_seed() -> None:
    corpus, _ = make_corpus([500], 2, 1, 0)
    frames = corpus.subset([0])
    orders = {tuple(next(iter(ShuffledSampler(frames, 400, seed=s).epoch(e))).tolist()) for s in (1, 2) for e in (1, 2)}
    assert len(orders) == 4


def test_blocks_in_order_drop_nothing() -> None:
    corpus, _ = make_corpus([5, 4], 2, 1, 0)
    frames = corpus.subset([1, 0])
    assert torch.equal(torch.cat(list(SequentialSampler(frames, 4).epoch())), frames.indices)


def test_workers_draw_different_orders_and_the_first_that_of_one_worker() -> None:
    corpus, _ = make_corpus([500], 2, 1, 0)
    frames = corpus.subset([0])
    orders = [next(iter(ShuffledSampler(frames, 400, seed=2**62, rank=rank).epoch(3))).tolist() for rank in range(40)]
    assert orders[0] == next(iter(ShuffledSampler(frames, 400, seed=2**62).epoch(3))).tolist()
    assert len({tuple(order) for order in orders}) == 40
    before = torch.randperm(500, generator=torch.Generator().manual_seed((7 * 1_000_003 + 3) % 2**63))
    now = next(iter(ShuffledSampler(frames, 500, seed=7).epoch(3)))
    assert torch.equal(now, frames.indices[before])


@pytest.mark.parametrize("sizes", [[], [3]], ids=["empty corpus", "nothing chosen"])
def test_an_empty_set_has_no_minibatch(sizes: list[int]) -> None:
    if sizes:
        corpus, _ = make_corpus(sizes, 2, 1, 0)
    else:
        empty = np.zeros(0, dtype=np.int64)
        corpus = AcousticDataset(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int32), (), None, empty, empty, 1)
    frames = corpus.subset([])
    assert len(frames) == len(ShuffledSampler(frames, 4, seed=1)) == 0
    assert list(ShuffledSampler(frames, 4, seed=1).epoch(1)) == list(SequentialSampler(frames, 4).epoch()) == []
    assert gather(corpus, splice_only(2, 1), frames.indices, torch.empty(0, 6)).shape == (0, 6)
    with pytest.raises(ValueError, match="no frame"):
        estimate_normalization(splice_only(2, 1), corpus, [])


@pytest.mark.parametrize("ahead", [False, True])
def test_orders_drawn_ahead_are_those_of_their_epochs(ahead: bool) -> None:
    """Whichever epoch is asked for next."""
    frames = make_corpus([90], 2, 0, 1)[0].subset([0])
    orders = ShuffledSampler(frames, 8, seed=5, rank=2, prefetch=ahead)
    for epoch in (1, 2, 3, 7, 7, 8):
        expected = list(ShuffledSampler(frames, 8, seed=5, rank=2).epoch(epoch))
        assert all(torch.equal(a, b) for a, b in zip(orders.epoch(epoch), expected, strict=True))
    orders.close()


def test_a_spliced_frame_is_ordered_by_offset_delta_order_and_dim() -> None:
    """Viewed as (channels, time, frequency), as a convolution reads features with deltas."""
    features = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
    with_deltas = torch.from_numpy(add_deltas(features, 2))
    labels, first = torch.zeros(6, dtype=torch.int32), np.array([1])
    dataset = AcousticDataset(with_deltas, labels, ("u",), None, first, np.array([4]), 1)
    transform = splice_only(9, 1)
    x = gather(dataset, transform, dataset.rows_of([0]), torch.empty(4, 27))
    image = x.view(4, 3, 3, 3).transpose(1, 2)
    for frame in range(4):
        np.testing.assert_array_equal(image[frame, 0], features[frame : frame + 3])
        for order in range(3):
            for offset in range(3):
                expected = with_deltas[frame + offset, 3 * order : 3 * order + 3]
                assert torch.equal(image[frame, order, offset], expected)
