"""CMVN and deltas against naive float64 twins, written from Kaldi's sources value by value."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddnn.kaldi.data_dir import accumulate_cmvn_stats, add_deltas, apply_cmvn

SHAPES = hnp.array_shapes(min_dims=2, max_dims=2, max_side=12)
FEATURES = hnp.arrays(np.float32, SHAPES, elements=st.floats(-100, 100, width=32))


def naive_cmvn(features: np.ndarray, stats: np.ndarray, variance: bool) -> np.ndarray:
    result = features.astype(np.float64)
    dim = features.shape[1]
    count = float(stats[0, dim])
    for d in range(dim):
        mean = stats[0, d] / count
        scale = 1.0
        if variance:
            scale = 1.0 / math.sqrt(max(stats[1, d] / count - mean * mean, 1e-20))
        for t in range(len(features)):
            result[t, d] = (float(features[t, d]) - mean) * scale
    return result


def naive_deltas(features: np.ndarray, order: int, window: int) -> np.ndarray:
    frames, dim = features.shape
    scales = [[1.0]]
    for _ in range(order):
        previous = scales[-1]
        half = (len(previous) - 1) // 2
        current = [0.0] * (len(previous) + 2 * window)
        normalizer = 0.0
        for j in range(-window, window + 1):
            normalizer += j * j
            for k in range(-half, half + 1):
                current[j + k + half + window] += j * previous[k + half]
        scales.append([value / normalizer for value in current])
    result = np.zeros((frames, dim * (order + 1)))
    for t in range(frames):
        for i, taps in enumerate(scales):
            half = (len(taps) - 1) // 2
            for j in range(-half, half + 1):
                source = min(max(t + j, 0), frames - 1)
                for d in range(dim):
                    result[t, i * dim + d] += taps[j + half] * float(features[source, d])
    return result


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(hnp.arrays(np.float32, (7, 3), elements=st.floats(-100, 100, width=32)), min_size=1, max_size=4))
def test_statistics_add_up(parts: list[np.ndarray]) -> None:
    stats = sum(accumulate_cmvn_stats(part) for part in parts)
    whole = np.concatenate(parts).astype(np.float64)
    assert stats.shape == (2, 4) and stats.dtype == np.float64
    np.testing.assert_allclose(stats[0], [*whole.sum(axis=0), len(whole)], rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(stats[1], [*(whole**2).sum(axis=0), 0], rtol=1e-12, atol=1e-9)


def test_statistics_are_summed_in_double_precision() -> None:
    features = np.full((200_000, 1), 16777217.0, np.float64).astype(np.float32) / 3
    assert accumulate_cmvn_stats(features)[0, 0] == pytest.approx(200_000 * float(features[0, 0]), rel=1e-12)


@pytest.mark.parametrize("variance", [False, True])
@settings(max_examples=60, deadline=None)
@given(features=FEATURES)
def test_cmvn_agrees_with_the_twin(features: np.ndarray, variance: bool) -> None:
    """The statistics are of other data as well, as a speaker's are: so no variance is near the floor."""
    rng = np.random.default_rng(0)
    other = rng.normal(3.0, 20.0, (50, features.shape[1])).astype(np.float32)
    stats = accumulate_cmvn_stats(features) + accumulate_cmvn_stats(other)
    before = features.copy()
    found = apply_cmvn(features, stats, variance=variance)
    assert found.dtype == np.float32 and found.shape == features.shape
    np.testing.assert_allclose(found, naive_cmvn(features, stats, variance), rtol=1e-5, atol=5e-5)
    np.testing.assert_array_equal(features, before)


def test_cmvn_of_the_same_data_is_standard() -> None:
    features = np.random.default_rng(1).normal(5, 3, (1000, 4)).astype(np.float32)
    found = apply_cmvn(features, accumulate_cmvn_stats(features), variance=True)
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(found.std(axis=0), 1, atol=1e-5)


def test_a_constant_dim_is_floored_not_divided_by_zero() -> None:
    features = np.full((4, 2), 2.0, np.float32)
    found = apply_cmvn(features, accumulate_cmvn_stats(features), variance=True)
    np.testing.assert_array_equal(found, np.zeros((4, 2)))


def test_the_floor_of_a_variance_is_kaldis() -> None:
    """Variances 0 and 1e-16 beside mean 0: the floor 1e-20 gives a scale of 1e10, above it nothing is floored."""
    stats = np.array([[0.0, 0.0, 4.0], [0.0, 4e-16, 0.0]])
    found = apply_cmvn(np.ones((1, 2), np.float32), stats, variance=True)
    np.testing.assert_allclose(found, [[1e10, 1e8]], rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(features=FEATURES, order=st.integers(0, 4), window=st.integers(1, 3))
def test_deltas_agree_with_the_twin(features: np.ndarray, order: int, window: int) -> None:
    found = add_deltas(features, order, window)
    assert found.dtype == np.float32 and found.flags.c_contiguous
    np.testing.assert_allclose(found, naive_deltas(features, order, window), rtol=1e-5, atol=1e-4)


def test_deltas_of_a_slope() -> None:
    """In the middle of a straight line the delta is its slope, the second one 0; at the edge frames repeat."""
    found = add_deltas(np.arange(20, dtype=np.float32)[:, None] * 3, 2)
    np.testing.assert_allclose(
        found[4:-4], np.stack([np.arange(4, 16) * 3, np.full(12, 3), np.zeros(12)], 1), atol=1e-5
    )
    assert found[0, 1] == pytest.approx((1 * 3 + 2 * 6) / 10)


def test_deltas_of_nothing() -> None:
    assert add_deltas(np.zeros((0, 5), np.float32), 2).shape == (0, 15)
