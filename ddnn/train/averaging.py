"""When this worker's model meets the others', and what is done with it: the policy around `ddnn.parallel`'s strategies.

Blocking, after each block of `every` minibatches, with theta this worker's parameters:

    theta <- A(theta)                                       A: the strategy, which all workers call together

With `parallel.overlap`, block k + 1 is trained while the exchange of block k is under way:

    s <- theta after block k                                handed to the exchange
    theta <- s + c                                          c: this worker's own change over block k + 1
    theta <- s + c + (A(s) - s)                             the correction: what the averaging would have changed

so that a change of 0 leaves theta at A(s), as blocking does, and a worker's model lacks only the others' last block.

Every epoch ends with the exact mean over the workers, each weighed by the frames it has trained on in the epoch (bmuf:
with its block momentum). That model is judged, saved and trained on, whatever the strategy between. A worker whose
model is not finite is left out of an averaging (weight 0) and goes on from what the others have. Fisher matrices stay
with their worker.
"""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ddnn.optim.sgd import Sgd
from ddnn.parallel.bmuf import BlockMomentum
from ddnn.parallel.exchange import Exchange, require_threads
from ddnn.parallel.mean import SixteenBitAllReduce, mean, mean_of_differences
from ddnn.parallel.strategies import STRATEGIES, Strategy
from ddnn.parallel.transport import Staging, choose_transport
from ddnn.recipe.schema import Parallel
from ddnn.train.telemetry import Clock, counts_from_now

log = logging.getLogger(__name__)

GOSSIP = ("butterfly", "ring", "hopping-ring")


class Averaging:
    """This worker's part in the averagings of a training. With one worker it only counts.

    Args:
        parameters: (num_parameters,) float32 on the worker's device, the same on every worker; trained in place.
        optimizer: its momentum is kept, averaged or reset.
        minibatch: frames in a minibatch.

    Attributes:
        rate_scale: what the schedule's rates are multiplied by.
        counts, clock: since the epoch began.
    """

    def __init__(
        self, exchange: Exchange, options: Parallel, parameters: Tensor, optimizer: Sgd, minibatch: int
    ) -> None:
        self.exchange, self.options, self.parameters, self.optimizer = exchange, options, parameters, optimizer
        exchange.wire = options.wire
        self.alone = exchange.size == 1
        self.of_gradients = options.reduce == "gradient" and not self.alone
        self.rate_scale = exchange.size if scales_rate(options) else 1
        self.momentum_rule = options.momentum_rule or ("reset" if options.reduce == "bmuf" else "keep")
        self.clock, self.counts = Clock(), counts_from_now(exchange)
        self.round = self._agreed = self._tail = 0
        self._block_frames = float(options.every * minibatch)
        self._block_started = 0.0
        self._blocks: BlockMomentum | None = None
        self._sixteen: SixteenBitAllReduce | None = None
        self._background: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None
        if self.alone:
            return
        transport = choose_transport(options.transport, parameters.device, exchange)
        self._staging = Staging(parameters, transport, own_buffer=options.overlap)
        self._other = Staging(optimizer.correction, transport)  # gradients, or momentum: one buffer for either
        self._before = torch.empty_like(parameters)
        self._strategy = self._make_strategy()
        if options.overlap:
            require_threads(exchange)
            self._averaged = torch.empty_like(parameters)
            self._background = ThreadPoolExecutor(1, thread_name_prefix="exchange")

    def _make_strategy(self) -> Strategy:
        options = self.options
        if options.reduce == "bmuf":
            self._blocks = BlockMomentum(
                self._staging.fetch(self.parameters),
                self.exchange.size,
                momentum=options.block_momentum,
                rate=options.block_rate,
                nesterov=options.nesterov,
            )
            return self._blocks.average
        if options.reduce == "all-reduce" and options.wire == "bfloat16":
            self._sixteen = SixteenBitAllReduce()
            return self._sixteen.average
        return STRATEGIES.get(options.reduce, STRATEGIES["all-reduce"])

    def start_epoch(self, minibatches: int) -> int:
        """Agrees with the others on the epoch's averagings; returns how many of `minibatches` this worker trains on.

        All workers make as many averagings as the one with the fewest minibatches can, so that none waits for ever.
        What a worker has beyond that it trains on all the same, and it counts in the epoch's mean; only where gradients
        are averaged it is left.
        """
        self.counts, self._tail = counts_from_now(self.exchange), 0
        self.clock.restart()
        self._block_started = time.perf_counter()
        if self.alone:
            return minibatches
        if self._blocks is not None:
            self.parameters.copy_(self._blocks.start)
        self._agreed = self.exchange.agree_min(minibatches // (1 if self.of_gradients else self.options.every))
        self.clock.lap("averaging")
        return self._agreed if self.of_gradients else minibatches

    def average_gradient(self, gradient: Tensor) -> None:
        """gradient <- the mean over workers, where gradients are averaged; else nothing."""
        if not self.of_gradients:
            return
        self._end_block()
        finite = math.isfinite(_norm(gradient))
        mean_of_differences(self.exchange, self._other.fetch(gradient), 1.0 if finite else 0.0)
        self._other.store(gradient)
        self.counts.averagings += 1
        self.counts.left_out += not finite
        self._start_block()

    def after_minibatch(self, frames: int) -> bool:
        """To be called after every step; averages where a block is full. True if it did."""
        self.clock.lap("compute")
        self.counts.minibatches += 1
        self.counts.frames += frames
        self._tail += frames
        if self.alone or self.of_gradients:
            return self.of_gradients
        blocks, incomplete = divmod(self.counts.minibatches, self.options.every)
        if incomplete or blocks > self._agreed:
            return False
        self._end_block()
        if self._background is None:
            self._depart()
            self._take_up()
        else:
            self.arrive()
            self._depart()
        self._start_block()
        return True

    def arrive(self) -> None:
        """Waits for the exchange in the background, where one is under way, and takes up its result. Before this
        returns nothing else may be sent over the exchange."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None
            self._take_up()

    def finish_epoch(self) -> None:
        """Leaves in `parameters` the model to judge and save, the same bits on every worker: the mean, or bmuf's.

        Raises:
            AllLeftOut: no worker's model is finite.
        """
        if self.alone:
            return
        if self.of_gradients:
            self.share()  # machines of different kinds round differently
            self.clock.lap("averaging")
            return
        self.arrive()
        finite = math.isfinite(_norm(self.parameters))
        if self._blocks is None:
            self._exact_mean(self.counts.frames if finite else 0)
        else:
            with self.exchange.waiting():
                anyone_trained = bool(self.exchange.all_gather(torch.tensor([self._tail])).any())
            if anyone_trained:
                self._blocks.average(
                    self.exchange, self._staging.fetch(self.parameters), self.round, float(finite) * self.counts.frames
                )
            self.parameters.copy_(self._blocks.model())
        if not finite:
            self._join_again()
        self.clock.lap("averaging")

    def restart(self) -> None:
        """After `parameters` were set from outside, the same on every worker: a rejected epoch, a warm start."""
        if self._blocks is not None:
            self._blocks.restart(self._staging.fetch(self.parameters))
        if self._sixteen is not None:
            self._sixteen.reference = None

    def mean_now(self) -> None:
        """parameters <- their exact mean, at once: each step of a warm start by all-reduce."""
        self._exact_mean(1 if math.isfinite(_norm(self.parameters)) else 0)

    def share(self, root: int = 0) -> None:
        """parameters <- those of worker `root`."""
        if not self.alone:
            self.exchange.broadcast(self._staging.fetch(self.parameters), root)
            self._staging.store(self.parameters)

    def close(self) -> None:
        """Ends the background thread. After an error its exchange may wait for ever: it is not waited for."""
        if self._background is not None:
            self._background.shutdown(wait=False, cancel_futures=True)

    def _depart(self) -> None:
        """Calls the strategy, with overlap in the background."""
        self._norm = _norm(self.parameters)
        weight = self._block_frames if math.isfinite(self._norm) else 0.0
        self._before.copy_(self.parameters)
        buffer = self._staging.fetch(self.parameters)
        if self._background is None:
            self._strategy(self.exchange, buffer, self.round, weight)
            if self.momentum_rule == "average" and self.optimizer.momentum:
                self._average_momentum(weight)
        else:
            self._under_way = self._background.submit(self._beside_training, buffer, self.round, weight)
        self.round += 1
        self._tail = 0

    def _average_momentum(self, weight: float) -> None:
        """Not by bmuf or `SixteenBitAllReduce`, which remember the model of the last averaging: by all-reduce."""
        momentum = self._other.fetch(self.optimizer.correction)
        strategy = STRATEGIES.get(self.options.reduce, STRATEGIES["all-reduce"])
        strategy(self.exchange, momentum, self.round, weight if math.isfinite(_norm(momentum)) else 0.0)
        self._other.store(self.optimizer.correction)

    def _beside_training(self, buffer: Tensor, round: int, weight: float) -> None:
        with self._staging.beside_training():
            self._strategy(self.exchange, buffer, round, weight)

    def _take_up(self) -> None:
        """Takes up what the strategy has made of the model."""
        finite = math.isfinite(self._norm)
        if self._background is None or not finite:
            self._staging.store(self.parameters)
            change = self._before.sub_(self.parameters)
        else:
            self._staging.store(self._averaged)
            change = self._averaged.sub_(self._before)
            self.parameters.add_(change)
        self.counts.averagings += 1
        if not finite:
            self._join_again()
            return
        self.counts.divergences.append(self._divergence(change))
        if self.momentum_rule == "reset":
            self.optimizer.clear_momentum()

    def _exact_mean(self, weight: float) -> None:
        mean(self.exchange, self._staging.fetch(self.parameters), float(weight))
        self._staging.store(self.parameters)
        if self._sixteen is not None:
            self._sixteen.reference = None  # the next one goes in float32 and makes it anew

    def _join_again(self) -> None:
        """This worker's model was not finite, and now is what the others had: its momentum has to go. Said once an
        epoch, since it may go on for days."""
        if self.counts.left_out == 0:
            log.warning(
                "worker %d on %s: its model is not finite and was left out of averaging %d",
                *(self.exchange.rank, self.exchange.host, self.round),
            )
        self.counts.left_out += 1
        self.optimizer.clear_momentum()

    def _divergence(self, change: Tensor) -> float:
        """This worker's relative distance from the mean, by what the averaging changed."""
        if self._blocks is not None:
            deviation = self._blocks.deviation
        else:
            deviation = _norm(change)
            if self.options.reduce in GOSSIP:  # half the way to one other: as far from the mean as that is on average
                deviation *= math.sqrt(2.0 * (self.exchange.size - 1) / self.exchange.size)
        return deviation / max(self._norm, 1e-30)

    def _end_block(self) -> None:
        if self.parameters.device.type == "cuda":
            torch.cuda.synchronize(self.parameters.device)
        self.clock.lap("compute")
        self.counts.blocks.append(time.perf_counter() - self._block_started)

    def _start_block(self) -> None:
        self.clock.lap("averaging")
        self._block_started = time.perf_counter()


def no_averaging(parameters: Tensor, optimizer: Sgd, minibatch: int) -> Averaging:
    """That of a single worker."""
    return Averaging(Exchange(), Parallel(), parameters, optimizer, minibatch)


def scales_rate(options: Parallel) -> bool:
    """Whether the schedule's rates are multiplied by the number of workers."""
    return options.reduce != "bmuf" if options.scale_learning_rate is None else options.scale_learning_rate


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))
