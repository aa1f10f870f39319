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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from ddnn.optim.sgd import Sgd
from ddnn.parallel.connect import require_threads
from ddnn.parallel.exchange import Exchange
from ddnn.parallel.survive import WorkerLost
from ddnn.parallel.traffic import Traffic
from ddnn.recipe.schema import Parallel
from ddnn.train.mixing import GOSSIP, Mixing
from ddnn.train.telemetry import Clock, counts_from_now

log = logging.getLogger(__name__)

NOTHING, CHECKPOINT, STOP = 0, 1, 2
"""What a worker may wish for; the strongest wish is done by all."""
GOSSIP_MEETS_EVERY, GOSSIP_MEETS_SECONDS = 8, 30.0
"""Where averaging is gossip: at most so many averagings, and about so long, between two questions to all workers what
they wish."""


class Averaging:
    """This worker's part in the averagings of a training. With one worker it only counts.

    Args:
        parameters: (num_parameters,) float32 on the worker's device, the same on every worker; trained in place.
        optimizer: its momentum is kept, averaged or reset.
        minibatch: frames in a minibatch.

    Attributes:
        rate_scale: what the schedule's rates are multiplied by.
        counts, clock: since the epoch began.
        wish: what this worker would have done at the next averaging, where all can do it: `NOTHING`, a `CHECKPOINT`,
            or that and to `STOP`.
        asked: the strongest wish of all workers, as of the last `meet`.
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
        self.wish: Callable[[], int] = lambda: NOTHING
        self.asked = NOTHING
        self._agreed: int | None = None
        self._tail, self._meets_every = 0, 1
        self._block_frames = float(options.every * minibatch)
        self._block_started = 0.0
        self._background: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None
        if self.alone:
            return
        self.mixing = Mixing(exchange, options, parameters, optimizer)
        self._before = torch.empty_like(parameters)
        if options.overlap:
            require_threads(exchange)
            self._averaged = torch.empty_like(parameters)
            self._background = ThreadPoolExecutor(1, thread_name_prefix="exchange")

    def start_epoch(self, minibatches: int) -> int:
        """Agrees with the others on the epoch's averagings; returns how many of `minibatches` this worker trains on.

        All workers make as many averagings as the one with the fewest minibatches can, so that none waits for ever.
        What a worker has beyond that it trains on all the same, and it counts in the epoch's mean; only where gradients
        are averaged it is left.
        """
        longest = max(self.counts.blocks, default=GOSSIP_MEETS_SECONDS)  # not known: a question at each averaging
        self.counts, self._tail = counts_from_now(self.exchange), 0
        self.clock.restart()
        self._block_started = time.perf_counter()
        if self.alone:
            return minibatches
        self.mixing.start_epoch()
        every, known = 1 if self.of_gradients else self.options.every, self._agreed is not None
        self._agreed = self.exchange.agree_min(minibatches // every)
        self._meets_every = self.exchange.agree_min(
            max(1, min(GOSSIP_MEETS_EVERY, int(GOSSIP_MEETS_SECONDS / max(longest, 1e-9))))
        )
        if not known and self.exchange.rank == 0:
            end = "then the first worker's model" if self.of_gradients else "and the mean at its end"
            log.info("averagings in an epoch: %d, %s", self._agreed, end)
            if self._agreed == 0:
                log.warning("the smallest shard has fewer than parallel.every = %d minibatches", every)
        self.clock.lap("averaging")
        return self._agreed if self.of_gradients else minibatches

    def average_gradient(self, gradient: Tensor) -> None:
        """gradient <- the mean over workers, where gradients are averaged; else nothing."""
        if not self.of_gradients:
            return
        self._end_block()
        finite = math.isfinite(_norm(gradient))
        self.mixing.average_gradient(gradient, float(finite))
        self.counts.averagings += 1
        self.counts.left_out += not finite
        self.start_block()

    def after_minibatch(self, frames: int) -> bool:
        """To be called after every step; averages where a block is full. True if it did."""
        self.clock.lap("compute")
        self.exchange.tick()
        self.counts.minibatches += 1
        self.counts.frames += frames
        self._tail += frames
        self.asked = self.wish() if self.alone else NOTHING
        blocks, incomplete = divmod(self.counts.minibatches, self.options.every)
        if self.of_gradients and not incomplete:
            self.meet()
        if self.alone or self.of_gradients:
            return self.of_gradients
        if incomplete or blocks > (self._agreed or 0):
            return False
        self._end_block()
        if self._background is None:
            self._depart()
            self._take_up()
            self._meet_after(blocks)
        else:
            self.arrive()
            self._meet_after(blocks)  # while nothing is under way
            self._depart()
        self.start_block()
        return True

    def meet(self) -> None:
        """Fills `asked`, on all workers alike. Collective."""
        self.asked = self.wish()
        if not self.alone:
            with self.exchange.waiting():
                self.asked = int(self.exchange.all_gather(torch.tensor([self.asked])).max())

    def _meet_after(self, blocks: int) -> None:
        """Gossip has no other message from all to all: there one at each averaging would make everyone wait."""
        if self.options.reduce not in GOSSIP or blocks % self._meets_every == 0:
            self.meet()

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
            self.mixing.share()  # machines of different kinds round differently
        else:
            self.arrive()
            finite = math.isfinite(_norm(self.parameters))
            with self._kept():
                # An epoch that went on after a loss may have no minibatch left for this worker.
                self.mixing.finish_epoch(max(1, self.counts.frames) if finite else 0, self._tail)
            if not finite:
                self._join_again()
        self.clock.lap("averaging")

    def mean_now(self) -> None:
        """parameters <- their exact mean, at once: each step of a warm start by all-reduce."""
        finite = math.isfinite(_norm(self.parameters))
        with self._kept():
            self.mixing.exact_mean(float(finite))
        if not finite:
            self._join_again()

    def share(self) -> None:
        """parameters <- those of the first worker, from which a training starts; before the first epoch."""
        if not self.alone:
            self.mixing.share()
            self.mixing.restart()

    def restart(self) -> None:
        """After `parameters` were set from outside, the same on every worker: a rejected epoch."""
        if not self.alone:
            self.mixing.restart()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keeps a copy of the parameters, which are put back where a worker is lost in the middle of an averaging."""
        self._before.copy_(self.parameters)
        try:
            yield
        except WorkerLost:
            self.parameters.copy_(self._before)
            raise

    def state(self) -> dict[str, Tensor]:
        """What this worker alone knows of the epoch's averagings, for a checkpoint after an averaging or between
        epochs: tensors on any device, some of them the ones in use."""
        if self._under_way is not None:
            self._under_way.result()  # it is waited for, not taken up: that comes after the next block
        counts, traffic = self.counts, self.exchange.traffic - self.counts.traffic
        round_ = 0 if self.alone else self.mixing.round
        numbers = [counts.frames, counts.minibatches, counts.averagings, counts.left_out, self._tail, round_]
        seconds = [self.clock.seconds[what] for what in ("data", "compute", "averaging")]
        found = {
            "counts": torch.tensor([*numbers, self._agreed or 0], dtype=torch.int64),
            "divergences": torch.tensor(counts.divergences, dtype=torch.float64),
            "blocks": torch.tensor(counts.blocks, dtype=torch.float64),
            "seconds": torch.tensor([*seconds, time.perf_counter() - self.clock.started], dtype=torch.float64),
            "traffic": torch.tensor(list(vars(traffic).values()), dtype=torch.float64),
        }
        if self._under_way is not None:
            made, deviation = self.mixing.result()
            found |= {"under_way.before": self._before, "under_way.made": made}
            found["under_way.norms"] = torch.tensor([self._norm, deviation], dtype=torch.float64)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes up `state`, after the parameters were put back."""
        counts = counts_from_now(self.exchange)
        numbers = [int(number) for number in state["counts"].tolist()]
        counts.frames, counts.minibatches, counts.averagings, counts.left_out, self._tail, round_, agreed = numbers
        counts.divergences, counts.blocks = state["divergences"].tolist(), state["blocks"].tolist()
        sent, transfer, waiting = state["traffic"].tolist()
        counts.traffic = self.exchange.traffic - Traffic(int(sent), transfer, waiting)
        self.counts, self._agreed = counts, agreed
        self.clock.restart()
        *seconds, passed = state["seconds"].tolist()
        self.clock.seconds.update(zip(("data", "compute", "averaging"), seconds, strict=True))
        self.clock.started -= passed
        self._block_started = time.perf_counter()
        if not self.alone:
            self.mixing.round = round_
        if "under_way.before" in state:
            self._norm, deviation = state["under_way.norms"].tolist()
            self.mixing.load_result(state["under_way.made"], deviation)
            self._before.copy_(state["under_way.before"])
            self._under_way = Future()
            self._under_way.set_result(None)

    def abandon(self) -> None:
        """After WorkerLost, once the others have been called: waits for the exchange in the background, which fails."""
        if self._background is not None:
            self._background.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """Ends the background thread. After an error its exchange may wait for ever: it is not waited for."""
        if self._background is not None:
            self._background.shutdown(wait=False, cancel_futures=True)

    def _depart(self) -> None:
        """Averages, with overlap in the background."""
        self._norm = _norm(self.parameters)
        weight = self._block_frames if math.isfinite(self._norm) else 0.0
        if self._background is None:
            with self._kept():
                self.mixing.fetch()
                self.mixing.average(weight)
                if self.momentum_rule == "average" and self.optimizer.momentum:
                    self.mixing.average_momentum(weight if math.isfinite(_norm(self.optimizer.correction)) else 0.0)
        else:
            self._before.copy_(self.parameters)
            self.mixing.fetch()
            self._under_way = self._background.submit(self.mixing.average_beside_training, weight)
        self._tail = 0

    def _take_up(self) -> None:
        """Takes up what the averaging has made of the model."""
        finite = math.isfinite(self._norm)
        if self._background is None or not finite:
            self.mixing.store(self.parameters)
            change = self._before.sub_(self.parameters)
        else:
            self.mixing.store(self._averaged)
            change = self._averaged.sub_(self._before)
            self.parameters.add_(change)
        self.counts.averagings += 1
        if not finite:
            self._join_again()
            return
        self.counts.divergences.append(self.mixing.deviation(_norm(change)) / max(self._norm, 1e-30))
        if self.momentum_rule == "reset":
            self.optimizer.clear_momentum()

    def _join_again(self) -> None:
        """This worker's model was not finite, and now is what the others had: its momentum has to go. Said once an
        epoch, since it may go on for days."""
        if self.counts.left_out == 0:
            log.warning(
                "worker %d on %s: its model is not finite and was left out of averaging %d of the epoch",
                *(self.exchange.rank, self.exchange.host, self.counts.averagings),
            )
        self.counts.left_out += 1
        self.optimizer.clear_momentum()

    def _end_block(self) -> None:
        if self.parameters.device.type == "cuda":
            torch.cuda.synchronize(self.parameters.device)
        self.clock.lap("compute")
        self.counts.blocks.append(time.perf_counter() - self._block_started)

    def start_block(self) -> None:
        """The next block begins now: what went before is no training."""
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
