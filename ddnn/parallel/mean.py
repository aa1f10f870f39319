"""The mean over workers, weighted: exact in float32, or of differences sent in 16 bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ddnn.errors import UserError
from ddnn.parallel.exchange import Exchange


class AllLeftOut(UserError):
    """Every worker has been left out of an averaging, as where no model is finite; raised on all of them alike."""


def shared_weights(exchange: Exchange, weight: float) -> Tensor:
    """Every worker's weight, (size,) float64, the same bits on each. Where a worker waits for the slowest.

    Raises:
        ValueError: this worker's weight is negative or not finite.
        AllLeftOut: no worker has a weight above 0.
    """
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"a weight is a number of frames, 0 to leave a worker out, not {weight}")
    with exchange.waiting():
        weights = exchange.all_gather(torch.tensor([weight], dtype=torch.float64)).view(-1)
    if not bool(weights.any()):
        raise AllLeftOut("no worker is left to average: every one has been left out")
    return weights


def mean(exchange: Exchange, buffer: Tensor, weight: float) -> None:
    """buffer <- sum_r w_r buffer_r / sum_r w_r, in float32, the same bits on every worker.

    A worker of weight 0 is left out, whatever stands in its buffer (NaN too), and gets the mean as the others do.
    The sum is divided, not the terms scaled by 1/n: fl(1/3) is off by 3e-8, always to the same side, which ten thousand
    averagings would turn into a drift.

    Args:
        buffer: (n,) float32.
        weight: frames behind this worker's buffer.
    """
    weights = shared_weights(exchange, weight)
    if exchange.size == 1:
        return
    if weight == 0.0:
        buffer.zero_()
    if bool((weights[weights > 0] == weights.max()).all()):
        exchange.sum_in_place(buffer)
        buffer.div_(int((weights > 0).sum()))
    else:
        # Relative to the mean weight, so that sums stay in the range of the parameters.
        scale = float(weights.sum()) / exchange.size
        if weight > 0.0:
            buffer.mul_(weight / scale)
        exchange.sum_in_place(buffer)
        buffer.div_(exchange.size)


def mean_of_differences(exchange: Exchange, difference: Tensor, weight: float) -> None:
    """As `mean`, by way of `exchange.wire`: for differences and gradients, never for parameters themselves.

    With wire bfloat16 each number crosses in 16 bits: worker r gets the r-th chunk of everyone (rounded to bfloat16),
    sums it in float32, and sends its chunk of the mean (rounded once more) to all. Both round by 2^-8 at most:
    harmless on a small difference that is added to float32 parameters, ruinous on the parameters themselves, whose
    updates are smaller than that.
    """
    if exchange.wire == "float32" or exchange.size == 1:
        mean(exchange, difference, weight)
        return
    weights = shared_weights(exchange, weight)
    if weight == 0.0:
        difference.zero_()
    size, length = exchange.size, difference.numel()
    chunk = -(-length // size)
    sent = exchange.keep("16-bit", size * chunk, torch.bfloat16, difference.device)
    sent[length:] = 0
    sent[:length] = difference
    received = exchange.all_to_all(sent.view(torch.int16).view(size, chunk)).view(torch.bfloat16)
    total = exchange.keep("16-bit sum", chunk, torch.float32, difference.device)
    total.zero_()
    for row, share in zip(received, (weights / weights.sum()).tolist(), strict=True):
        total.add_(row, alpha=share)
    difference.copy_(exchange.all_gather(total.bfloat16().view(torch.int16)).view(torch.bfloat16).view(-1)[:length])


class SixteenBitAllReduce:
    """All-reduce of parameters over a 16-bit wire: only what changed since the last averaging is sent.

    theta <- reference + mean(theta - reference), where the reference is the result of the averaging before, the same
    on every worker. The first averaging (after a start or a resume) goes in float32 and makes the reference.
    """

    def __init__(self) -> None:
        self.reference: Tensor | None = None

    def average(self, exchange: Exchange, parameters: Tensor, round: int, weight: float) -> None:
        """parameters <- the weighted mean over workers, within bfloat16's rounding of the change."""
        if self.reference is None:
            mean(exchange, parameters, weight)
            self.reference = parameters.clone()
            return
        parameters.sub_(self.reference)
        mean_of_differences(exchange, parameters, weight)
        self.reference.add_(parameters)
        parameters.copy_(self.reference)
