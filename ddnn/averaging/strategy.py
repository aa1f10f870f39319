"""What an averaging strategy is: the base of all, its options, and the means that they compute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ddnn.distributed.communicator import Communicator
from ddnn.util.errors import DivergedError

CommDtype = Literal["float32", "bfloat16"]
VALUE_BYTES = {"float32": 4.0, "bfloat16": 2.0}


@dataclass(frozen=True)
class Interval:
    """What each worker trains on between two averagings: `period` minibatches."""

    period: int

    def __str__(self) -> str:
        return f"{self.period} minibatches"

    def completed(self, minibatches: int, frames: int) -> int:
        """How many intervals are complete after so many minibatches of an epoch, of so many frames in all: of those that a
        worker has trained on, or can train on. One minibatch completes one interval at most."""
        return minibatches // self.period


class FrameInterval(Interval):
    """`period` frames, no fewer than any minibatch has, and what the minibatch that completes them has more; the next
    interval is shorter by as many."""

    def __str__(self) -> str:
        return f"{self.period} frames"

    def completed(self, minibatches: int, frames: int) -> int:
        return frames // self.period


@dataclass(frozen=True)
class AveragingOptions:
    """How the workers of a training average; the keys of the recipe's section `parallel`, resolved."""

    strategy: str = "all-reduce"  # a key of `STRATEGIES`
    averaging_period: int = 10  # between two averagings, of each worker; minibatches
    averaging_frames: int | Literal["epoch", "auto"] | None = (
        None  # or frames; "epoch": only at its end; "auto": not chosen yet
    )
    comm_dtype: CommDtype = "float32"  # the type in which vectors are sent
    overlap: bool = False  # train the next interval while the last averaging is under way
    local_momentum: Literal["keep", "average", "reset"] = "keep"  # what an averaging does to the optimizer's momentum
    scale_learning_rate: bool = True  # multiply the learning rate by the number of workers
    block_momentum: float | None = None  # of BMUF, as the next two; None: 1 - 1 / workers
    block_learning_rate: float = 1.0
    nesterov: bool = False
    elasticity: float = 0.9  # of elastic averaging: how much of the workers' mean change the center takes
    update_scale: float | None = None  # of async: what the server multiplies the changes by; None: 1 / workers

    @property
    def interval(self) -> Interval:
        frames = self.averaging_frames
        return FrameInterval(frames) if isinstance(frames, int) else Interval(self.averaging_period)


class NoFiniteModelError(DivergedError):
    """Every worker has been excluded from an averaging, since no model is finite. Raised on all of them alike."""


def gather_weights(comm: Communicator, weight: float) -> Tensor:
    """Every worker's weight, (world_size,) float64, the same bits on each, in memory of its own. Here a worker waits for the slowest.
    ValueError: this worker's weight is negative or not finite. NoFiniteModelError: no worker has a weight above 0."""
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"a weight is a number of frames, or 0 to exclude a worker, not {weight}")
    with comm.time_as_wait():
        weights = comm.all_gather(torch.tensor([weight], dtype=torch.float64)).view(-1).clone()
    if not bool(weights.any()):
        raise NoFiniteModelError("the training diverged: no worker has a finite model to average")
    return weights


def weighted_mean(comm: Communicator, vector: Tensor, weight: float) -> None:
    """vector <- sum_r w_r vector_r / sum_r w_r, in float32, the same bits on every worker.

    A worker of weight 0 is excluded, whatever its vector holds (NaN too), and receives the mean as the others do.
    The sum is divided, instead of the terms being scaled by 1/n: fl(1/3) is off by 3e-8, always to the same side, which
    ten thousand averagings would turn into a drift.

    `vector`: (n,) float32. `weight`: frames that this worker's vector was trained on.
    """
    weights = gather_weights(comm, weight)
    if comm.world_size == 1:
        return
    if weight == 0.0:
        vector.zero_()
    if bool((weights[weights > 0] == weights.max()).all()):
        comm.all_reduce(vector)
        vector.div_(int((weights > 0).sum()))
    else:
        # Relative to the mean weight, so that sums stay in the range of the parameters.
        scale = float(weights.sum()) / comm.world_size
        if weight > 0.0:
            vector.mul_(weight / scale)
        comm.all_reduce(vector)
        vector.div_(comm.world_size)


def mean_of_deltas(comm: Communicator, delta: Tensor, weight: float, comm_dtype: CommDtype) -> None:
    """As `weighted_mean`, sent as `comm_dtype`: for differences and gradients, never for parameters themselves.

    With bfloat16 each number is sent in 16 bits: worker r receives the r-th chunk of every worker (rounded to
    bfloat16), sums it in float32, and sends its chunk of the mean (rounded once more) to all. Both roundings are 2^-8
    at most: harmless on a small difference that is added to float32 parameters, ruinous on the parameters themselves,
    whose updates are smaller than that.
    """
    if comm_dtype == "float32" or comm.world_size == 1:
        weighted_mean(comm, delta, weight)
        return
    weights = gather_weights(comm, weight)
    if weight == 0.0:
        delta.zero_()
    size, length = comm.world_size, delta.numel()
    chunk = -(-length // size)
    sent = comm.workspace("bf16_send", size * chunk, torch.bfloat16, delta.device)
    sent[length:] = 0
    sent[:length] = delta
    received = comm.all_to_all(sent.view(torch.int16).view(size, chunk)).view(torch.bfloat16)
    total = comm.workspace("bf16_sum", chunk, torch.float32, delta.device)
    total.zero_()
    for row, fraction in zip(received, (weights / weights.sum()).tolist(), strict=True):
        total.add_(row, alpha=fraction)
    delta.copy_(comm.all_gather(total.bfloat16().view(torch.int16)).view(torch.bfloat16).view(-1)[:length])


class Traffic(NamedTuple):
    """What one worker sends in an averaging, and what that costs it."""

    messages: int  # one after the other
    models: float  # sizes of the vector
    value_bytes: float | None = None  # of a value of the vector; None: as `comm_dtype` says
    coding_bytes: float = 0.0  # that are read and written in memory to encode and decode, for each value of the vector

    def num_bytes(self, parameters: float, comm_dtype: str) -> float:
        """Of a vector of so many parameters."""
        return self.models * parameters * (self.value_bytes or VALUE_BYTES[comm_dtype])


class AveragingStrategy:
    """One way to average a flat vector over the workers; the base of all, which is the all-reduce in float32.

    All methods that take a vector are collective. `index` counts the averagings of the training from 0, the same on
    every worker. `weight` is the number of frames that this worker's vector was trained on, 0 to be excluded.

    Attributes:
        unit: what is averaged: the parameters after each interval, or the gradient of every minibatch; with a parameter
            server nothing is, and each worker sends it the changes of its intervals.
        gossip: whether workers exchange with one peer at a time, so that they hold different models afterwards.
        overlaps: whether training may continue during an averaging.
        remembers: whether something is kept from one averaging to the next, so that momentum, say, cannot be averaged
            by the same object.
        distance: |theta - mean of theta| before the last averaging, this worker's distance from the mean, where the
            strategy computes it; else NaN.
    """

    unit: Literal["parameters", "gradients", "changes"] = "parameters"
    gossip = False
    overlaps = True
    remembers = False
    distance = math.nan

    def __init__(self, config: AveragingOptions, comm: Communicator, shapes: Sequence[Sequence[int]] = ()) -> None:
        """`shapes`: of the tensors that the vector consists of, those of outputs first."""
        self.comm, self.comm_dtype, self.shapes = comm, config.comm_dtype, shapes

    @classmethod
    def traffic(cls, world_size: int) -> Traffic:
        """For forecasts; a class that sends something else in `average` overrides it. An all-reduce of n workers is
        recursive halving, then doubling: 2 ceil(log2 n) messages and 2 (n - 1) / n models."""
        return Traffic(2 * (world_size - 1).bit_length(), 2.0 * (world_size - 1) / world_size)

    @classmethod
    def copies(cls, comm_dtype: CommDtype, world_size: int) -> int:
        """Float32 copies of the vector that are kept, or needed while averaging, besides the vector and MPI's copy of it:
        for estimates of memory. With bfloat16: half of one sent, half of one received, a reference, and their sum."""
        return 3 if comm_dtype == "bfloat16" else 0

    def start(self, parameters: Tensor) -> None:
        """The training starts, or continues after a rejected epoch, from `parameters`, the same on every worker."""

    def average(self, vector: Tensor, index: int, weight: float) -> None:
        """vector <- what this strategy makes of the workers' vectors."""
        weighted_mean(self.comm, vector, weight)

    def begin_epoch(self, parameters: Tensor) -> None:
        """parameters <- where the next interval starts."""

    def end_epoch(self, vector: Tensor, index: int, weight: float, remainder_frames: int) -> int:
        """vector <- the epoch's model, the same bits on every worker: the exact mean, in float32 whatever the dtype.

        Args:
            remainder_frames: that this worker has trained on since the last averaging.

        Returns:
            how many averagings (values of `index`) this used.
        """
        weighted_mean(self.comm, vector, weight)
        return 0

    def distance_to_mean(self, moved: float) -> float:
        """|theta_r - mean| before the last averaging, from the distance by which it has moved theta_r."""
        return moved

    def state_dict(self) -> dict[str, Tensor]:
        """What the strategy remembers between averagings, the same on every worker; (num_parameters,) float32 each."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state_dict`, after `start`."""

    def worker_state_dict(self) -> dict[str, Tensor]:
        """What this worker alone remembers between averagings; (num_parameters,) float32 each."""
        return {}

    def load_worker_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores `worker_state_dict`, after `start`."""
