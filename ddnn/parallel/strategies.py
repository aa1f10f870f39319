"""How workers average their parameters: plain functions in one table. See arXiv 1507.01239, section 3.

Each averages the flat float32 parameter buffer in place. `round` counts averagings from 0 and is the same on every
worker. Their mixing matrices M (theta_r <- sum_s M[r, s] theta_s) are doubly stochastic: the mean over workers stays,
disagreement never grows. The gossip strategies (butterfly, ring, hopping ring) keep the equal-weight mean: `weight`
says there only whether a worker is left out (0), as one whose model is not finite; all-reduce weighs by it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.parallel.exchange import Exchange
from ddnn.parallel.mean import mean

Strategy = Callable[[Exchange, Tensor, int, float], None]
"""Exchange, flat parameters (num_parameters,) float32, number of this averaging, frames behind the parameters."""


def all_reduce(exchange: Exchange, parameters: Tensor, round: int, weight: float) -> None:
    """theta_r <- the mean over workers, weighted by frames: the same bits on every worker. Always float32 on the wire;
    `ddnn.parallel.mean.SixteenBitAllReduce` is its 16-bit form."""
    mean(exchange, parameters, weight)


def butterfly(exchange: Exchange, parameters: Tensor, round: int, weight: float) -> None:
    """theta_r <- (theta_r + theta_partner) / 2, one message a round.

    n = 2^q: the partner is r XOR 2^(round mod q); q rounds give the exact mean.

    Any other n: with q = ceil(log2 n), r sends to r + 2^(round mod q) and receives from r - 2^(round mod q), around the
    circle (Hensgen, Finkel and Manber's dissemination). From a multiple of q on, q rounds give every worker
    sum_j theta_(r-j) / 2^q over j = 0 ... 2^q - 1: each of the n models counts floor or ceil of 2^q / n times, nearly
    the mean, and no worker is ever idle.
    """
    _mix(exchange, parameters, _butterfly_partners(exchange.rank, exchange.size, round), weight)


def ring(exchange: Exchange, parameters: Tensor, round: int, weight: float) -> None:
    """theta_r <- (theta_r + theta_(r-1 mod n)) / 2, any n. Gossip, not the chunked ring all-reduce."""
    _mix(exchange, parameters, _around(exchange.rank, exchange.size, 1), weight)


def hopping_ring(exchange: Exchange, parameters: Tensor, round: int, weight: float) -> None:
    """theta_r <- (theta_r + theta_(r-s mod n)) / 2, s = 1, 2, ..., n-1, 1, ... averaging by averaging, any n."""
    _mix(exchange, parameters, _hopping_partners(exchange.rank, exchange.size, round), weight)


STRATEGIES: dict[str, Strategy] = {
    "all-reduce": all_reduce,
    "butterfly": butterfly,
    "ring": ring,
    "hopping-ring": hopping_ring,
}
"""Those that keep no state. With one: `bmuf.BlockMomentum`, `mean.SixteenBitAllReduce` (their `average`)."""


def mixing_matrix(name: str, n: int, round: int, weights: list[float] | None = None) -> NDArray[np.float64]:
    """M, (n, n) float64: averaging number `round` of strategy `name` makes theta_r <- sum_s M[r, s] theta_s.

    Args:
        weights: frames behind each worker's parameters, for all-reduce; equal where not given.
    """
    if name == "all-reduce":
        given = np.ones(n) if weights is None else np.asarray(weights, dtype=np.float64)
        return np.tile(given / given.sum(), (n, 1))
    partners: dict[str, Callable[[int], tuple[int, int]]] = {
        "butterfly": lambda rank: _butterfly_partners(rank, n, round),
        "ring": lambda rank: _around(rank, n, 1),
        "hopping-ring": lambda rank: _hopping_partners(rank, n, round),
    }
    matrix: NDArray[np.float64] = np.eye(n) / 2
    for rank in range(n):
        _, source = partners[name](rank)
        matrix[rank, source] += 0.5
    return matrix


def _butterfly_partners(rank: int, n: int, round: int) -> tuple[int, int]:
    rounds = (n - 1).bit_length()
    step = 2 ** (round % rounds) if rounds else 0
    if n & (n - 1) == 0:
        return rank ^ step, rank ^ step
    return _around(rank, n, step)


def _hopping_partners(rank: int, n: int, round: int) -> tuple[int, int]:
    return _around(rank, n, 1 + round % (n - 1) if n > 1 else 0)


def _around(rank: int, n: int, step: int) -> tuple[int, int]:
    """Whom `rank` sends to and receives from, `step` places around the circle."""
    return (rank + step) % n, (rank - step) % n


def _mix(exchange: Exchange, parameters: Tensor, partners: tuple[int, int], weight: float) -> None:
    """theta <- (theta + theta_source) / 2; between a worker that is left out and one that is not, the latter's counts.

    With wire bfloat16: theta <- theta + (Q(theta_source) - Q(theta)) / 2, Q rounding to bfloat16. What one worker gains
    by rounding another loses, so the mean stays to float32's accuracy, and equal models stay as they are (Carli,
    Bullo and Zampieri 2010). Workers agree to bfloat16's 8 bits, no closer.
    """
    to, source = partners
    if exchange.size == 1:
        return
    with exchange.waiting():
        theirs_counts = bool(exchange.send_receive(torch.tensor([weight > 0.0], dtype=torch.int64), to, source))
    if exchange.wire == "float32":
        received = exchange.send_receive(parameters, to, source)
    else:
        sent = exchange.keep("16-bit", parameters.numel(), torch.bfloat16, parameters.device).copy_(parameters)
        received = exchange.send_receive(sent.view(torch.int16), to, source).view(torch.bfloat16)
    if not theirs_counts:
        return
    if weight == 0.0:
        parameters.copy_(received)
    elif exchange.wire == "float32":
        parameters.add_(received).mul_(0.5)
    else:
        parameters.add_(received, alpha=0.5).sub_(sent, alpha=0.5)
