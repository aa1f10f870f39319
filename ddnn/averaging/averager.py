"""When the workers average their models: the policy around `ddnn.averaging.strategies`.

Blocking, after each interval of `averaging_period` minibatches, with theta this worker's parameters:

    theta <- A(theta)                                       A: the strategy, which all workers call together

With `parallel.overlap`, interval k + 1 is trained while interval k is being averaged:

    s <- theta after interval k                             handed to the averaging
    theta <- s + c                                          c: this worker's own change over interval k + 1
    theta <- s + c + (A(s) - s)                             the correction: what the averaging would have changed

so that a change of 0 leaves theta at A(s), as blocking does, and a worker's model lacks only the others' last interval.

Every epoch ends with the exact mean over the workers, each weighted by the frames that it has trained on in the epoch
(BMUF: with its block momentum). That model is evaluated, saved and trained further, whatever the strategy in between.
With `async` there is no averaging: workers exchange with a parameter server (`ddnn.averaging.parameter_server`).
A worker whose model is not finite is excluded from an averaging (weight 0) and continues from what the others have. The
Fisher matrices of NG-SGD stay with their worker.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from ddnn.averaging.strategies import AllReduce, make_strategy
from ddnn.averaging.strategy import AveragingOptions, FrameInterval, Interval, gather_weights
from ddnn.distributed.communicator import CommStats, StagingBuffer
from ddnn.distributed.groups import Groups
from ddnn.distributed.mpi import require_thread_level
from ddnn.nn.network import Network
from ddnn.nn.rbm import Rbm
from ddnn.optim.sgd import Sgd

log = logging.getLogger(__name__)

REQUEST_SYNC_PERIOD, REQUEST_SYNC_SECONDS = 8, 30.0
"""Where intervals end without a message from all workers to all: at most so many intervals, and about so many seconds, between two
exchanges of requests."""

TIMED = ("data", "compute", "averaging")


class Request(IntEnum):
    """What a worker asks all workers to do after an averaging; the strongest request of all is met."""

    NONE = 0
    CHECKPOINT = 1
    STOP = 2


class Timer:
    """Seconds of the training thread by what they were spent on, one of `TIMED`. On CUDA `compute` includes what the
    host waits for at the end of an interval, and `data` only what the host itself does. `compute_cpu_seconds`: CPU time
    of the process during `compute`; where the cores are overloaded it is the shorter one."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.seconds, self.compute_cpu_seconds = dict.fromkeys(TIMED, 0.0), 0.0
        self.started, self._marked, self._cpu_marked = (*[time.perf_counter()] * 2, time.process_time())

    def mark(self, part: str) -> None:
        """The time since the last mark was spent on `part`."""
        now, cpu = time.perf_counter(), time.process_time()
        self.seconds[part] += now - self._marked
        self.compute_cpu_seconds += cpu - self._cpu_marked if part == "compute" else 0.0
        self._marked, self._cpu_marked = now, cpu


@dataclass
class EpochCounters:
    """What this worker did since the epoch began: the figures of its row in metrics.jsonl."""

    stats: CommStats  # the data group's counters as the epoch began, or this start within it
    column_stats: CommStats  # those of the column group
    stage_stats: CommStats  # those of the stage group
    frames: int = 0  # trained on, as the minibatches
    minibatches: int = 0
    averagings: int = 0
    excluded_averagings: int = 0  # of these, and of the epoch's last mean, without this worker's model: not finite
    consensus_distances: list[float] = field(default_factory=list)  # |theta - mean| / |theta| before each, where known
    interval_seconds: list[float] = field(default_factory=list)  # of the minibatches between two averagings
    staleness: list[float] = field(default_factory=list)  # of async: other workers' changes between fetch and push


class Averager:
    """What the training loop calls, and all that a single worker needs: here nothing is averaged.

    Args:
        groups: of these, the models of `data` are averaged.
        network: its flat parameters are averaged in place; the same on every worker.
        optimizer: its momentum is kept, averaged or reset.

    Attributes:
        lr_scale: what the schedule's learning rates are multiplied by.
        average_gradient: what the optimizer calls on the flat gradient of each minibatch; None where nothing is to do.
        excludes: whether a worker whose model is not finite is excluded, and training continues without its interval.
        overlapped: whether averaging takes place beside training.
        counters, timer: since the epoch began.
        local_request: this worker's request at the next averaging.
        requested: the strongest request of all workers, as of the last `sync_requests`.
    """

    average_gradient: Callable[[Tensor], None] | None = None
    excludes = False
    overlapped = False

    def __init__(self, groups: Groups, network: Network | Rbm, optimizer: Sgd | Rbm) -> None:
        self.groups, self.network, self.optimizer = groups, network, optimizer
        self.lr_scale = 1.0
        self.timer, self.counters = Timer(), _counters(groups, groups.data.stats.copy())
        self.local_request: Callable[[], Request] = lambda: Request.NONE
        self.requested = Request.NONE
        self._interval_started = 0.0
        self._remainder_frames, self._index = 0, 0
        self._averagings_per_epoch: int | None = None

    def begin_epoch(self, num_minibatches: int, num_frames: int) -> int:
        """Starts the counters; returns how many of this worker's `num_minibatches`, of `num_frames` in all, it is to train
        on. Collective."""
        groups, self._remainder_frames = self.groups, 0
        self.counters = _counters(groups, groups.data.stats.copy())
        self.timer.restart()
        self._interval_started = time.perf_counter()
        return num_minibatches

    def after_minibatch(self, frames: int) -> bool:
        """To be called after every update. Averages where an interval is complete; True if it did."""
        self._count_minibatch(frames)
        self.requested = self.local_request()
        return False

    def log_averagings(self) -> None:
        """Logs how often models are averaged in the epoch that has begun."""

    def end_epoch(self) -> None:
        """Leaves in the network the model to evaluate and save, the same bits on every worker. Collective.
        NoFiniteModelError: no worker's model is finite."""

    def averaging_seconds(self, count: int) -> float:
        """Seconds of an averaging, the mean of `count`, while all workers do nothing else; 0 where none is made. Collective."""
        return 0.0

    def average_every(self, frames: int) -> None:
        """From the next epoch on, an interval is so many frames of each worker."""

    def broadcast(self) -> None:
        """parameters <- those of rank 0, from which the training starts. Collective."""

    def reset(self) -> None:
        """After the parameters were set from outside, the same on every worker: a rejected epoch."""

    def sync_requests(self) -> None:
        """Sets `requested`, on all workers alike. Collective."""
        with self.groups.world.time_as_wait():
            requests = self.groups.world.all_gather(torch.tensor([int(self.local_request())]))
        self.requested = Request(int(requests.max()))

    def wait(self) -> None:
        """Applies an averaging that is pending."""

    def begin_interval(self) -> None:
        """The next interval begins now: what came since the last update was no training."""
        self.timer.mark("averaging")
        self._interval_started = time.perf_counter()

    def close(self) -> None:
        """Ends a background thread. After an error its averaging may wait for ever: it is not waited for."""

    def state_dict(self) -> dict[str, Tensor]:
        """This worker's own state within the epoch, for a checkpoint after an averaging or between epochs."""
        counters, traffic = self.counters, self.groups.data.stats - self.counters.stats
        numbers = [counters.frames, counters.minibatches, counters.averagings, counters.excluded_averagings]
        numbers += [self._remainder_frames, self._index, self._averagings_per_epoch or 0]
        seconds = [*self.timer.seconds.values(), time.perf_counter() - self.timer.started]
        floats = {
            "consensus_distances": counters.consensus_distances,
            "interval_seconds": counters.interval_seconds,
            "seconds": seconds,
            "traffic": list(vars(traffic).values()),
        }
        tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in floats.items()}
        return {"counters": torch.tensor(numbers, dtype=torch.int64), **tensors}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state_dict`, after the parameters were restored."""
        traffic = CommStats(*state["traffic"].tolist())
        traffic.bytes_sent = int(traffic.bytes_sent)
        self.counters = counters = _counters(self.groups, self.groups.data.stats - traffic)
        counters.frames, counters.minibatches, counters.averagings, counters.excluded_averagings, *rest = map(
            int, state["counters"].tolist()
        )
        self._remainder_frames, self._index, self._averagings_per_epoch = rest
        counters.consensus_distances = state["consensus_distances"].tolist()
        counters.interval_seconds = state["interval_seconds"].tolist()
        self.timer.restart()
        *seconds, passed = state["seconds"].tolist()
        self.timer.seconds = dict(zip(TIMED, seconds, strict=True))
        self.timer.started -= passed
        self.timer.compute_cpu_seconds = math.nan  # of the whole epoch it is not known
        self._interval_started = time.perf_counter()

    def shared_state_dict(self) -> dict[str, Tensor]:
        """The strategy's state, the same on every worker, of the whole network: `AveragingStrategy.state_dict`."""
        return {}

    def load_shared_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores `shared_state_dict`."""

    def _count_minibatch(self, frames: int) -> None:
        self.timer.mark("compute")
        self.groups.world.watchdog.heartbeat()
        self.counters.minibatches += 1
        self.counters.frames += frames
        self._remainder_frames += frames


class ReplicaAverager(Averager):
    """Of a single model that several workers share: nothing is averaged, but they exchange requests once in
    `averaging_period` minibatches."""

    def __init__(self, config: AveragingOptions, groups: Groups, network: Network | Rbm, optimizer: Sgd | Rbm) -> None:
        super().__init__(groups, network, optimizer)
        self._period = config.averaging_period

    def after_minibatch(self, frames: int) -> bool:
        self._count_minibatch(frames)
        self.requested = Request.NONE
        if self.counters.minibatches % self._period == 0:
            self.sync_requests()
        return False


class SeveralWorkersAverager(Averager):
    """What all averagers of several workers have: a strategy, and a buffer through which parameters are sent."""

    excludes = True

    def __init__(
        self,
        config: AveragingOptions,
        groups: Groups,
        network: Network | Rbm,
        optimizer: Sgd | Rbm,
    ) -> None:
        super().__init__(groups, network, optimizer)
        self.config, self.strategy = config, make_strategy(config, groups.data, network.shapes)
        self.lr_scale = float(groups.data.world_size) if config.scale_learning_rate else 1.0
        self.parameters = network.parameters
        self._staging = StagingBuffer(self.parameters, groups.data.transport, own_buffer=self.overlapped)
        self.reset()
        self.interval, self._request_sync_period = config.interval, 1
        self._prepare()

    def _prepare(self) -> None:
        """Sets what only this kind of averager needs; called once."""

    def begin_epoch(self, num_minibatches: int, num_frames: int) -> int:
        """Agrees with the others on the number of averagings of the epoch. All workers average as often as the one with
        the fewest intervals can, so that none waits for ever. A worker trains on its remaining minibatches all the
        same, and they count in the epoch's mean; only where gradients are averaged they are dropped."""
        longest = max(self.counters.interval_seconds, default=REQUEST_SYNC_SECONDS)  # unknown: at each averaging
        super().begin_epoch(num_minibatches, num_frames)
        self.strategy.begin_epoch(self.parameters)
        self.network.parameters_changed()
        world = self.groups.world
        self._averagings_per_epoch = world.all_reduce_min(self.interval.completed(num_minibatches, num_frames))
        rare = max(1, min(REQUEST_SYNC_PERIOD, int(REQUEST_SYNC_SECONDS / max(longest, 1e-9))))
        self._request_sync_period = world.all_reduce_min(rare if self._syncs_rarely() else 1)
        self.timer.mark("averaging")
        return num_minibatches

    def _syncs_rarely(self) -> bool:
        """Whether no other message goes from all to all after an interval, so that one at each would make every worker wait."""
        return self.strategy.gossip

    def log_averagings(self) -> None:
        if self.groups.world.rank:
            return
        end = "then the model of rank 0" if self.average_gradient else "and the mean at its end"
        log.info("model averaging: %d per epoch, %s", self._averagings_per_epoch, end)
        if self._averagings_per_epoch == 0:
            log.warning("the smallest shard has fewer than the %s of an averaging interval", self.interval)

    def averaging_seconds(self, count: int) -> float:
        strategy = make_strategy(self.config, self.groups.data, self.network.shapes)
        before, started = self.parameters.clone(), 0.0
        strategy.start(before)
        for index in range(1 + count):  # the first one does not count
            with self._staged_parameters() as vector:
                strategy.average(vector, index, 1.0)
            started = started or time.perf_counter()
        seconds = (time.perf_counter() - started) / count
        self.parameters.copy_(before)
        self.network.parameters_changed()
        return seconds

    def average_every(self, frames: int) -> None:
        self.interval = FrameInterval(frames)

    def broadcast(self) -> None:
        with self._staged_parameters() as vector:
            self.groups.data.broadcast(vector, 0)
        self.reset()

    def reset(self) -> None:
        self.strategy.start(self._staging.copy_in(self.parameters))

    def state_dict(self) -> dict[str, Tensor]:
        return super().state_dict() | self._whole(self.strategy.worker_state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        names = self.strategy.worker_state_dict()
        self.strategy.load_worker_state_dict(self._own({name: state[name] for name in names}))

    def shared_state_dict(self) -> dict[str, Tensor]:
        return self._whole(self.strategy.state_dict())

    def load_shared_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.strategy.load_state_dict(self._own(state))

    def _whole(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.network.partition.whole(vector) for name, vector in vectors.items()}

    def _own(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.network.partition.own(vector) for name, vector in vectors.items()}

    @contextmanager
    def _staged_parameters(self) -> Iterator[Tensor]:
        """The vector that is sent, which becomes the parameters at the end of the block."""
        with self._staging.staged(self.parameters) as vector:
            yield vector
        self.network.parameters_changed()

    def _reset_excluded(self) -> None:
        """This worker's model was not finite and now is what the others had, so its momentum is cleared. Logged once an
        epoch, since it may continue for days."""
        if self.counters.excluded_averagings == 0:
            text = "worker %d on %s: its model is not finite and was excluded from averaging %d of the epoch"
            log.warning(text, self.groups.world.rank, self.groups.world.host, self.counters.averagings)
        self.counters.excluded_averagings += 1
        self.optimizer.clear_momentum()

    def _replica_norm(self, norm: float) -> float:
        """The norm of the replica's whole vector, from that of the part that this worker has; not finite where that of any
        part is not. All of a replica take part in an averaging, or none."""
        replica = self.groups.replica
        with replica.time_as_wait():
            norms = replica.all_gather(torch.tensor([norm], dtype=torch.float64))
        return math.hypot(*norms.view(-1).tolist())

    def _is_finite(self, vector: Tensor) -> bool:
        return math.isfinite(self._replica_norm(_norm(vector)))

    def _end_interval(self) -> None:
        if self.parameters.device.type == "cuda":
            torch.cuda.synchronize(self.parameters.device)
        self.timer.mark("compute")
        self.counters.interval_seconds.append(time.perf_counter() - self._interval_started)


class BlockingAverager(SeveralWorkersAverager):
    """Averages the parameters after each interval, while no worker trains."""

    def _prepare(self) -> None:
        self._before = torch.empty_like(self.parameters)
        self._norm = 0.0
        averages_momentum = self.config.local_momentum == "average"
        momentum, transport = self.optimizer.momentum_buffer, self.groups.data.transport
        self._momentum_staging = StagingBuffer(momentum, transport) if averages_momentum else None

    def after_minibatch(self, frames: int) -> bool:
        before = self._completed_intervals()
        self._count_minibatch(frames)
        self.requested = Request.NONE
        intervals = self._completed_intervals()
        if intervals == before or intervals > (self._averagings_per_epoch or 0):
            return False
        self._end_interval()
        averaged = self._after_interval(intervals)
        self.begin_interval()
        return averaged

    def _completed_intervals(self) -> int:
        return self.interval.completed(self.counters.minibatches, self.counters.frames)

    def _after_interval(self, intervals: int) -> bool:
        """theta <- A(theta); whether this averages."""
        weight = self._begin_averaging()
        with self._staged_parameters() as vector:
            self.strategy.average(vector, self._index, weight)
        self._average_momentum(weight)
        self._index += 1
        self._count_averaging(self._before.sub_(self.parameters))
        self._sync_requests_after(intervals)
        return True

    def _begin_averaging(self) -> float:
        """Keeps the parameters as they are now; returns this worker's weight, the frames of the interval."""
        self._norm = self._replica_norm(_norm(self.parameters))
        self._before.copy_(self.parameters)
        frames, self._remainder_frames = self._remainder_frames, 0
        return float(frames) if math.isfinite(self._norm) else 0.0

    def _average_momentum(self, weight: float) -> None:
        if self._momentum_staging is None:
            return
        momentum = self.optimizer.momentum_buffer
        strategy = AllReduce(self.config, self.groups.data) if self.strategy.remembers else self.strategy
        with self._momentum_staging.staged(momentum) as vector:
            strategy.average(vector, self._index, weight if self._is_finite(momentum) else 0.0)

    def _count_averaging(self, moved: Tensor) -> None:
        """Counts the averaging that has moved the parameters by `moved`, a vector that may be overwritten."""
        self.counters.averagings += 1
        if not math.isfinite(self._norm):
            self._reset_excluded()
            return
        distance = self._replica_norm(self.strategy.distance_to_mean(_norm(moved)))
        self.counters.consensus_distances.append(relative := distance / max(self._norm, 1e-30))
        log.debug("averaging %d of the epoch: relative distance to the mean %.3g", self.counters.averagings, relative)
        if self.config.local_momentum == "reset":
            self.optimizer.clear_momentum()

    def _sync_requests_after(self, intervals: int) -> None:
        if intervals % self._request_sync_period == 0:
            self.sync_requests()

    def end_epoch(self) -> None:
        finite = self._is_finite(self.parameters)
        weight = float(max(1, self.counters.frames) if finite else 0)
        with self._staged_parameters() as vector:
            self._index += self.strategy.end_epoch(vector, self._index, weight, self._remainder_frames)
        if not finite:
            self._reset_excluded()
        self.timer.mark("averaging")


class EpochAverager(BlockingAverager):
    """Averages the parameters at the end of each epoch. Within it the workers only exchange requests, and whether their models
    are finite, so that a request does not wait for the end of the epoch, and training ends where no model is finite."""

    def _prepare(self) -> None:
        self._norm = 0.0

    def _syncs_rarely(self) -> bool:
        return True

    def log_averagings(self) -> None:
        log.info("model averaging: at the end of each epoch")

    def _after_interval(self, intervals: int) -> bool:
        if intervals % self._request_sync_period == 0:
            before, self._norm = self._norm, self._replica_norm(_norm(self.parameters))
            finite = math.isfinite(self._norm)
            if math.isfinite(before) and not finite:
                text = "worker %d on %s: its model is not finite and will be excluded from the mean at the end of the epoch"
                log.warning(text, self.groups.world.rank, self.groups.world.host)
            gather_weights(self.groups.data, float(finite))
            self.sync_requests()
        return False


class OverlappedAverager(BlockingAverager):
    """Averages on a thread of its own while the next interval is trained; see the module's docstring. While an
    averaging is pending nothing may be sent in any group, but for what `begin_epoch` sends."""

    overlapped = True

    def _prepare(self) -> None:
        require_thread_level(self.groups.world, "overlap", "overlap sends")
        super()._prepare()
        self._averaged = torch.empty_like(self.parameters)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="averaging")
        self._pending: Future[None] | None = None

    def _after_interval(self, intervals: int) -> bool:
        """s <- theta, handed to the averaging, once the last one has corrected theta."""
        self.wait()
        self._sync_requests_after(intervals)  # while nothing is pending
        weight, index = self._begin_averaging(), self._index
        self._sent = self._staging.copy_in(self.parameters)
        self._index += 1

        def average_beside_training() -> None:
            with self._staging.side_stream():
                self.strategy.average(self._sent, index, weight)

        self._pending = self._thread.submit(average_beside_training)
        return True

    def wait(self) -> None:
        """theta <- theta + (A(s) - s), where an averaging is pending; A(s) where s was not finite."""
        if self._pending is None:
            return
        self._pending.result()
        self._pending = None
        if math.isfinite(self._norm):
            self._staging.copy_out(self._averaged)
            moved = self._averaged.sub_(self._before)
            self.parameters.add_(moved)
        else:
            self._staging.copy_out(self.parameters)
            moved = self._before.sub_(self.parameters)
        self.network.parameters_changed()
        self._count_averaging(moved)

    def end_epoch(self) -> None:
        self.wait()
        super().end_epoch()

    def state_dict(self) -> dict[str, Tensor]:
        """Waits for the pending averaging, but does not apply it: that comes after the next interval."""
        if self._pending is None:
            return super().state_dict()
        self._pending.result()
        pending = {"pending.before": self._before, "pending.averaged": self._sent}
        pending["pending.norms"] = torch.tensor([self._norm, self.strategy.distance], dtype=torch.float64)
        return super().state_dict() | pending

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        if "pending.before" not in state:
            return
        self._norm, self.strategy.distance = state["pending.norms"].tolist()
        self._sent = self._staging.copy_in(self.parameters)
        self._sent.copy_(state["pending.averaged"])
        self._before.copy_(state["pending.before"])
        self._pending = Future()
        self._pending.set_result(None)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class GradientAverager(SeveralWorkersAverager):
    """Synchronous SGD: averages the gradient of every minibatch; parameters stay the same on every worker."""

    def _prepare(self) -> None:
        self.average_gradient, self.interval = self._average_gradient, Interval(1)
        self._gradient_staging = StagingBuffer(self.parameters, self.groups.data.transport)

    def begin_epoch(self, num_minibatches: int, num_frames: int) -> int:
        """As many minibatches as the worker with the fewest has."""
        super().begin_epoch(num_minibatches, num_frames)
        return self._averagings_per_epoch or 0

    def _average_gradient(self, gradient: Tensor) -> None:
        """gradient <- the mean over workers."""
        self._end_interval()
        finite = self._is_finite(gradient)
        with self._gradient_staging.staged(gradient) as vector:
            self.strategy.average(vector, self._index, float(finite))
        self.counters.averagings += 1
        self.counters.excluded_averagings += not finite
        self.begin_interval()

    def after_minibatch(self, frames: int) -> bool:
        self._count_minibatch(frames)
        self.requested = Request.NONE
        if self.counters.minibatches % self.config.averaging_period == 0:
            self.sync_requests()
        return True

    def end_epoch(self) -> None:
        with self._staged_parameters() as vector:  # machines of different kinds round differently
            self.groups.data.broadcast(vector, 0)
        self.timer.mark("averaging")


def _counters(groups: Groups, stats: CommStats) -> EpochCounters:
    return EpochCounters(stats, groups.column.stats.copy(), groups.stage.stats.copy())


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))
