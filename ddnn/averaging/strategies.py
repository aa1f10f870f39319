"""How workers average a flat vector: one class per strategy, in one table. See arXiv 1507.01239, section 3.

A new strategy is a class here and a line in `STRATEGIES`. `ddnn.averaging.averager` decides when it is called.

Every strategy averages a flat float32 vector in place. The mixing matrices M (theta_r <- sum_s M[r, s] theta_s) are
doubly stochastic: the mean over workers is preserved, and the disagreement between workers never grows. The gossip
strategies (butterfly, ring, hopping ring) keep the equal-weight mean: a worker's weight only says there whether the
worker is excluded (0), as one whose model is not finite; all-reduce weighs by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddnn.averaging.one_bit import cut_into_stripes
from ddnn.averaging.strategy import (
    AveragingOptions,
    AveragingStrategy,
    CommDtype,
    Traffic,
    gather_weights,
    mean_of_deltas,
    weighted_mean,
)
from ddnn.distributed.communicator import Communicator


class AllReduce(AveragingStrategy):
    """theta_r <- the mean over workers, weighted by frames: the same bits on every worker, always sent as float32."""


class CompressedAllReduce(AveragingStrategy):
    """All-reduce of parameters sent as bfloat16: only the change since the last averaging is sent. theta <- reference +
    mean(theta - reference), where the reference is the result of the averaging before, the same on every worker. The
    first averaging, and the first after an exact mean, is sent as float32 and sets the reference."""

    remembers = True
    reference: Tensor | None = None

    def start(self, parameters: Tensor) -> None:
        self.reference = None
        self._like = parameters

    def average(self, vector: Tensor, index: int, weight: float) -> None:
        if self.reference is None:
            weighted_mean(self.comm, vector, weight)
            self.reference = vector.clone()
            return
        vector.sub_(self.reference)
        mean_of_deltas(self.comm, vector, weight, self.comm_dtype)
        self.reference.add_(vector)
        vector.copy_(self.reference)

    def end_epoch(self, vector: Tensor, index: int, weight: float, remainder_frames: int) -> int:
        self.reference = None
        return super().end_epoch(vector, index, weight, remainder_frames)

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.reference is None else {"compression.reference": self.reference}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if "compression.reference" in state:
            self.reference = torch.empty_like(self._like).copy_(state["compression.reference"])


class OneBit(AveragingStrategy):
    """All-reduce of the change since the last averaging in one bit a value, with error feedback: Seide, Fu, Droppo, Li and Yu,
    Interspeech 2014; `ddnn.averaging.one_bit` has the quantization Q. With plain SGD and an averaging after each minibatch
    this is their 1-bit SGD.

    With R the last result, s_r worker r's share of the weights, e_r its residual:
        c_r = s_r (theta_r - R) + e_r       e_r <- c_r - Q(c_r)       Q(c_r) is sent by stripes, one to each worker
        t = sum of Q(c_r) + e               e <- t - Q(t)             the owner of a stripe, which sends Q(t) to all
        theta_r <- R <- R + Q(t)
    so that every change arrives in the end. The exact mean that ends an epoch includes all residuals, which are 0 after it. A
    worker of weight 0 is excluded: s_r is 0, and it sends what its residual has of earlier changes.

    Attributes:
        reference: R, (num_parameters,) float32, the same bits on every worker.
        residual: e_r, (num_parameters,).
        stripe_residual: e, of the stripe that this worker owns.
    """

    remembers = True

    @classmethod
    def traffic(cls, world_size: int) -> Traffic:
        """A message to each other worker, then an all-gather; without the two numbers of each unit. To encode a value PyTorch's
        operations read and write 47 bytes, to decode it 28; the change and its sum with R take 32 more."""
        messages, coding = world_size - 1 + (world_size - 1).bit_length(), 135 + 47 / world_size
        return super().traffic(world_size)._replace(messages=messages, coding_bytes=coding, value_bytes=1 / 8)

    @classmethod
    def copies(cls, comm_dtype: CommDtype, world_size: int) -> int:
        """R, the residual, and of a stripe its residual and up to three copies."""
        return 2 + math.ceil(4 / world_size)

    def start(self, parameters: Tensor) -> None:
        self.reference = parameters.detach().clone()
        self.residual = torch.zeros_like(self.reference)
        self.stripes = cut_into_stripes(self.shapes or [(1, len(parameters))], self.comm.world_size)
        self.stripe_residual = self.residual.new_zeros(self.stripes[self.comm.rank].size)

    def average(self, vector: Tensor, index: int, weight: float) -> None:
        comm, own = self.comm, self.stripes[self.comm.rank]
        self._add_change(vector, weight)
        size = max(stripe.num_bytes for stripe in self.stripes)
        messages = comm.workspace("one_bit", comm.world_size * size, torch.uint8, vector.device).view(-1, size)
        for stripe, part, message in zip(self.stripes, self._split(self.residual), messages, strict=True):
            stripe.encode(part, message)
        for message in comm.all_to_all(messages):
            own.add(message, self.stripe_residual)
        own.encode(self.stripe_residual, messages[comm.rank])
        gathered = comm.all_gather(messages[comm.rank])
        for stripe, part, message in zip(self.stripes, self._split(self.reference), gathered, strict=True):
            stripe.add(message, part)
        vector.copy_(self.reference)

    def _add_change(self, vector: Tensor, weight: float) -> None:
        """e_r <- c_r."""
        total = float(gather_weights(self.comm, weight).sum())
        if weight > 0.0:
            self.residual.add_(vector.sub_(self.reference), alpha=weight / total)

    def _split(self, vector: Tensor) -> Sequence[Tensor]:
        return torch.split(vector, [stripe.size for stripe in self.stripes])

    def end_epoch(self, vector: Tensor, index: int, weight: float, remainder_frames: int) -> int:
        self._add_change(vector, weight)
        self._split(self.residual)[self.comm.rank].add_(self.stripe_residual)
        self.comm.all_reduce(self.residual)
        self.start(vector.copy_(self.reference.add_(self.residual)))
        return 0

    def state_dict(self) -> dict[str, Tensor]:
        return {"one_bit.reference": self.reference}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.reference.copy_(state["one_bit.reference"])

    def worker_state_dict(self) -> dict[str, Tensor]:
        stripe = torch.zeros_like(self.residual)
        self._split(stripe)[self.comm.rank].copy_(self.stripe_residual)
        return {"one_bit.residual": self.residual, "one_bit.stripe_residual": stripe}

    def load_worker_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Where a replica has another number of columns than the one that was saved, this worker's stripe is another one: what it
        does not contain is sent with the residual."""
        stripe = state["one_bit.stripe_residual"].clone()
        own = self._split(stripe)[self.comm.rank]
        self.stripe_residual.copy_(own)
        own.zero_()
        self.residual.copy_(state["one_bit.residual"]).add_(stripe)


class GradientAllReduce(AveragingStrategy):
    """Synchronous SGD: the gradients are averaged at every minibatch, weighted by 1 (finite) or 0."""

    unit = "gradients"
    overlaps = False  # the step needs the averaged gradient

    def average(self, vector: Tensor, index: int, weight: float) -> None:
        mean_of_deltas(self.comm, vector, weight, self.comm_dtype)


class _Gossip(AveragingStrategy):
    """theta_r <- (theta_r + theta_source) / 2, one message an averaging; subclasses choose how far it goes.

    Between a worker that is excluded and one that is not, the latter's model counts alone.

    Sent as bfloat16: theta <- theta + (Q(theta_source) - Q(theta)) / 2, Q rounding to bfloat16. What one worker gains
    by rounding another loses, so the mean stays accurate to float32, and equal models stay as they are (Carli, Bullo
    and Zampieri 2010). Workers agree to bfloat16's 8 bits, no closer.
    """

    gossip = True

    @classmethod
    def traffic(cls, world_size: int) -> Traffic:
        """One message of one model."""
        return Traffic(1, 1.0) if world_size > 1 else Traffic(0, 0.0)

    @classmethod
    def copies(cls, comm_dtype: CommDtype, world_size: int) -> int:
        """With bfloat16: half of one sent, half of one received."""
        return 1 if comm_dtype == "bfloat16" else 0

    @staticmethod
    def hop(world_size: int, index: int) -> int:
        """How far around the circle of workers a model is sent; from 2 workers on."""
        raise NotImplementedError

    @classmethod
    def peers(cls, rank: int, world_size: int, index: int) -> tuple[int, int]:
        """The ranks to which `rank` sends its model and from which it receives one."""
        hop = cls.hop(world_size, index)
        return (rank + hop) % world_size, (rank - hop) % world_size

    def average(self, vector: Tensor, index: int, weight: float) -> None:
        comm = self.comm
        if comm.world_size == 1:
            return
        dest, source = self.peers(comm.rank, comm.world_size, index)
        with comm.time_as_wait():
            peer_is_finite = bool(comm.sendrecv(torch.tensor([weight > 0.0], dtype=torch.int64), dest, source))
        if self.comm_dtype == "float32":
            received = comm.sendrecv(vector, dest, source)
        else:
            sent = comm.workspace("bf16_send", vector.numel(), torch.bfloat16, vector.device).copy_(vector)
            received = comm.sendrecv(sent.view(torch.int16), dest, source).view(torch.bfloat16)
        if not peer_is_finite:
            return
        if weight == 0.0:
            vector.copy_(received)
        elif self.comm_dtype == "float32":
            vector.add_(received).mul_(0.5)
        else:
            vector.add_(received, alpha=0.5).sub_(sent, alpha=0.5)

    def distance_to_mean(self, moved: float) -> float:
        """Half the distance to one peer: on average a peer is as far from the mean as this worker."""
        return moved * math.sqrt(2.0 * (self.comm.world_size - 1) / self.comm.world_size)


class Butterfly(_Gossip):
    """n = 2^q workers: the peer is r XOR 2^(index mod q); q averagings give the exact mean.

    Any other n: with q = ceil(log2 n), r sends to r + 2^(index mod q) and receives from r - 2^(index mod q), around the
    circle (Hensgen, Finkel and Manber's dissemination). From a multiple of q on, q averagings give every worker
    sum_j theta_(r-j) / 2^q over j = 0 ... 2^q - 1: each of the n models counts floor or ceil of 2^q / n times, nearly
    the mean, and no worker is ever idle.
    """

    @staticmethod
    def hop(world_size: int, index: int) -> int:
        return 1 << index % (world_size - 1).bit_length()

    @classmethod
    def peers(cls, rank: int, world_size: int, index: int) -> tuple[int, int]:
        if world_size & (world_size - 1):
            return super().peers(rank, world_size, index)
        peer = rank ^ cls.hop(world_size, index)
        return peer, peer


class Ring(_Gossip):
    """theta_r <- (theta_r + theta_(r-1 mod n)) / 2, any n. Gossip, not the chunked ring all-reduce."""

    @staticmethod
    def hop(world_size: int, index: int) -> int:
        return 1


class HoppingRing(_Gossip):
    """theta_r <- (theta_r + theta_(r-s mod n)) / 2, s = 1, 2, ..., n-1, 1, ... averaging by averaging, any n."""

    @staticmethod
    def hop(world_size: int, index: int) -> int:
        return 1 + index % (world_size - 1)


class _Remembering(AveragingStrategy):
    """Strategies that keep a model of their own, the same bits on every worker: `model` is the one to evaluate and save."""

    overlaps = False  # the next interval needs the result of the last
    remembers = True

    def model(self) -> Tensor:
        """(num_parameters,)."""
        raise NotImplementedError

    def mean_change(self, vector: Tensor, start: Tensor, weight: float) -> Tensor:
        """vector <- the mean over workers of vector - `start`, weighted as in `weighted_mean`. Returns this worker's own
        difference from that mean, (num_parameters,), which the next call overwrites; `distance` becomes its norm."""
        vector.sub_(start)
        local_delta = self.comm.workspace("local_delta", vector.numel(), vector.dtype, vector.device).copy_(vector)
        mean_of_deltas(self.comm, vector, weight, self.comm_dtype)
        self.distance = float(torch.linalg.vector_norm(local_delta.sub_(vector)))
        return local_delta

    def end_epoch(self, vector: Tensor, index: int, weight: float, remainder_frames: int) -> int:
        """vector <- `model` after a last averaging, if any worker has trained since the one before."""
        with self.comm.time_as_wait():
            remainders = self.comm.all_gather(torch.tensor([remainder_frames]))
        used = int(bool(remainders.any()))
        if used:
            self.average(vector, index, weight)
        vector.copy_(self.model())
        return used

    def distance_to_mean(self, moved: float) -> float:
        return self.distance


class BlockMomentum(_Remembering):
    """Blockwise model-update filtering, BMUF: Chen and Huo, ICASSP 2016. Averaging with a momentum over blocks.

    After block t, in which every worker started from S(t-1):
        G(t) = mean over workers of theta - S(t-1)
        D(t) = eta * D(t-1) + zeta * G(t)
        W(t) = W(t-1) + D(t)
        S(t) = W(t), or with Nesterov W(t) + eta * D(t): what every worker's theta becomes.

    W is the model to evaluate and save: `model()`. eta = 1 - 1/n makes each block's change count n times in the end, as
    if the n workers' blocks had come one after the other. With one worker eta is 0, and nothing is done.

    A worker's own momentum points where its model no longer is, so `local_momentum` is reset.

    Attributes:
        block_initial: S, (num_parameters,) float32.
        momentum_buffer: D, (num_parameters,) float32.
        distance: NaN before the first averaging, and where theta was not finite.
    """

    @classmethod
    def copies(cls, comm_dtype: CommDtype, world_size: int) -> int:
        """S, D, and this worker's change of the block."""
        return 3 + super().copies(comm_dtype, world_size)

    def __init__(self, config: AveragingOptions, comm: Communicator, shapes: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(config, comm, shapes)
        self.momentum = 1.0 - 1.0 / comm.world_size if config.block_momentum is None else config.block_momentum
        self.learning_rate, self.nesterov = config.block_learning_rate, config.nesterov

    def start(self, parameters: Tensor) -> None:
        self.block_initial = parameters.detach().clone()
        self.momentum_buffer = torch.zeros_like(self.block_initial)

    def average(self, vector: Tensor, index: int, weight: float) -> None:
        """vector <- S(t), the same bits on every worker; a worker of weight 0 is excluded from G and joins again."""
        self.mean_change(vector, self.block_initial, weight)
        model = self.model()
        self.momentum_buffer.mul_(self.momentum).add_(vector, alpha=self.learning_rate)
        model.add_(self.momentum_buffer)
        self.block_initial.copy_(model)
        if self.nesterov:
            self.block_initial.add_(self.momentum_buffer, alpha=self.momentum)
        vector.copy_(self.block_initial)

    def model(self) -> Tensor:
        """W, a new tensor (num_parameters,)."""
        if not self.nesterov:
            return self.block_initial.clone()
        return self.block_initial.sub(self.momentum_buffer, alpha=self.momentum)

    def begin_epoch(self, parameters: Tensor) -> None:
        parameters.copy_(self.block_initial)

    def state_dict(self) -> dict[str, Tensor]:
        return {"bmuf.block_initial": self.block_initial, "bmuf.momentum_buffer": self.momentum_buffer}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.block_initial.copy_(state["bmuf.block_initial"])
        self.momentum_buffer.copy_(state["bmuf.momentum_buffer"])


class Elastic(_Remembering):
    """Elastic averaging, synchronous EASGD: Zhang, Choromanska and LeCun, NIPS 2015, equations 5 and 6.

    The workers keep models of their own, which a center C attracts and which attract it. With d_r = theta_r - C:
        theta_r <- theta_r - (beta / n) d_r
        C       <- C + beta * mean of d over workers

    C is the model to evaluate and save. Each epoch ends with theta_r <- C; the paper's workers keep their own models.

    Attributes:
        center: C, (num_parameters,) float32, the same bits on every worker.
        distance: NaN before the first averaging, and where theta was not finite.
    """

    @classmethod
    def copies(cls, comm_dtype: CommDtype, world_size: int) -> int:
        """C, and this worker's difference from it."""
        return 2 + super().copies(comm_dtype, world_size)

    def __init__(self, config: AveragingOptions, comm: Communicator, shapes: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(config, comm, shapes)
        self.elasticity = config.elasticity

    def start(self, parameters: Tensor) -> None:
        self.center = parameters.detach().clone()

    def average(self, vector: Tensor, index: int, weight: float) -> None:
        """A worker of weight 0 is excluded from the mean and continues from C. The others count alike, whatever their
        weight."""
        own = self.mean_change(vector, self.center, float(weight > 0))
        if weight > 0:
            own.add_(vector).mul_(1.0 - self.elasticity / self.comm.world_size).add_(self.center)
        self.center.add_(vector, alpha=self.elasticity)
        vector.copy_(own if weight > 0 else self.center)

    def model(self) -> Tensor:
        return self.center

    def state_dict(self) -> dict[str, Tensor]:
        return {"elastic.center": self.center}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.center.copy_(state["elastic.center"])


class ParameterServing(AveragingStrategy):
    """Asynchronous SGD with a parameter server, which `ddnn.averaging.parameter_server` is: here is what it costs."""

    unit = "changes"
    overlaps = False  # an exchange waits for no worker

    @classmethod
    def traffic(cls, world_size: int) -> Traffic:
        """What waits for each other in an exchange: a few numbers and the change, a few numbers and the parameters."""
        return Traffic(4, 2.0)

    @classmethod
    def copies(cls, comm_dtype: CommDtype, world_size: int) -> int:
        """On worker 0: the server's parameters, and a change that it receives. Nothing is copied for the MPI."""
        return 1


STRATEGIES: dict[str, type[AveragingStrategy]] = {
    "all-reduce": AllReduce,
    "butterfly": Butterfly,
    "ring": Ring,
    "hopping-ring": HoppingRing,
    "gradient-all-reduce": GradientAllReduce,
    "bmuf": BlockMomentum,
    "elastic": Elastic,
    "1-bit": OneBit,
    "async": ParameterServing,
}
"""`parallel.strategy` -> class."""


def make_strategy(
    config: AveragingOptions, comm: Communicator, shapes: Sequence[Sequence[int]] = ()
) -> AveragingStrategy:
    """The strategy of a training; the all-reduce of parameters sent as bfloat16 is a class of its own."""
    if config.strategy == "all-reduce" and config.comm_dtype == "bfloat16":
        return CompressedAllReduce(config, comm, shapes)
    return STRATEGIES[config.strategy](config, comm, shapes)
