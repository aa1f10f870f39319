"""CMVN and deltas, as Kaldi computes them, on one utterance's features."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Kaldi's floor of a variance.
_VARIANCE_FLOOR = 1e-20

FRAMES_PER_HOUR = 360_000
"""At Kaldi's usual 10 ms a frame."""


def accumulate_cmvn_stats(features: NDArray[Any]) -> NDArray[np.float64]:
    """CMVN statistics of `features` (frames, dim); add them up over utterances (kaldi `transform/cmvn.cc`).

    Returns:
        float64 (2, dim + 1). Row 0: the sums, then the number of frames; row 1: the sums of squares, then 0.
    """
    frames, dim = features.shape
    stats = np.zeros((2, dim + 1))
    stats[0, :dim] = features.sum(axis=0, dtype=np.float64)
    stats[0, dim] = frames
    stats[1, :dim] = np.square(features, dtype=np.float64).sum(axis=0)
    return stats


def apply_cmvn(features: NDArray[Any], stats: NDArray[np.float64], *, variance: bool) -> NDArray[np.float32]:
    """Takes the mean away; with `variance` divides by the standard deviation (kaldi `transform/cmvn.cc`).

    Args:
        features: (frames, dim).
        stats: float64 (2, dim + 1) as `accumulate_cmvn_stats` gives; one row is enough without `variance`.
        variance: whether to scale to variance 1; a variance below 1e-20 counts as 1e-20.

    Returns:
        float32 (frames, dim), a new array.

    Raises:
        ValueError: the statistics do not fit the features, or hold fewer than 1 frame.
    """
    dim = features.shape[1]
    if stats.ndim != 2 or stats.shape[1] != dim + 1 or not (2 if variance else 1) <= len(stats) <= 2:
        raise ValueError(f"expected CMVN statistics of 2 rows and {dim + 1} columns, found {stats.shape}")
    count = stats[0, dim]
    if not count >= 1.0:
        raise ValueError(f"expected CMVN statistics of at least 1 frame, found {count}")
    mean = stats[0, :dim] / count
    if not variance:
        centred: NDArray[np.float32] = np.asarray(features, np.float32) - mean.astype(np.float32)
        return centred
    spread = np.maximum(stats[1, :dim] / count - mean * mean, _VARIANCE_FLOOR)
    scale = 1.0 / np.sqrt(spread)
    normalised: NDArray[np.float32] = np.asarray(features, np.float32) * scale.astype(np.float32)
    normalised += (-mean * scale).astype(np.float32)
    return normalised


def _delta_windows(order: int, window: int) -> list[NDArray[np.float32]]:
    """The taps of each order, 0 to `order`: each convolves those of the order before with the slope over `window`."""
    slope = np.arange(-window, window + 1, dtype=np.float32)
    windows = [np.ones(1, np.float32)]
    for _ in range(order):
        windows.append(np.convolve(windows[-1], slope).astype(np.float32) / np.float32(np.square(slope).sum()))
    return windows


def add_deltas(features: NDArray[Any], order: int, window: int = 2) -> NDArray[np.float32]:
    """Appends the time derivatives up to `order` (kaldi `feat/feature-functions.cc`, DeltaFeatures).

    A frame before the first or behind the last repeats it, for each order on the features themselves.

    Args:
        features: (frames, dim).
        order: 1 for deltas, 2 for deltas and delta-deltas, ...; 0 changes nothing.
        window: frames on each side that one order looks at.

    Returns:
        float32 (frames, dim * (order + 1)): the features, their deltas, the deltas' deltas, ...
    """
    frames, dim = features.shape
    result = np.zeros((frames, dim * (order + 1)), np.float32)
    if frames == 0:
        return result
    edge = order * window
    padded = np.pad(np.asarray(features, np.float32), ((edge, edge), (0, 0)), mode="edge")
    for number, taps in enumerate(_delta_windows(order, window)):
        target = result[:, number * dim : (number + 1) * dim]
        first = edge - (len(taps) - 1) // 2
        for tap, weight in enumerate(taps):
            if weight != 0.0:
                target += weight * padded[first + tap : first + tap + frames]
    return result
