"""What an averaging makes of a model: the recipe's strategy with what it remembers, on the buffer that is exchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ddnn.optim.sgd import Sgd
from ddnn.parallel.bmuf import BlockMomentum
from ddnn.parallel.exchange import Exchange
from ddnn.parallel.mean import SixteenBitAllReduce, mean, mean_of_differences
from ddnn.parallel.strategies import STRATEGIES, Strategy
from ddnn.parallel.transport import Staging, choose_transport
from ddnn.recipe.schema import Parallel

GOSSIP = ("butterfly", "ring", "hopping-ring")


class Mixing:
    """The exchange of one model's parameters, momentum or gradients. All methods that average are collective; `weight`
    is the number of frames behind what this worker gives, 0 to be left out.

    Args:
        parameters: (num_parameters,) float32 on the worker's device, the same on every worker.
        optimizer: of which gradients or momentum may be averaged too.
    """

    def __init__(self, exchange: Exchange, options: Parallel, parameters: Tensor, optimizer: Sgd) -> None:
        self.exchange, self.options, self.parameters, self.optimizer = exchange, options, parameters, optimizer
        self.round = 0
        transport = choose_transport(options.transport, parameters.device, exchange)
        self._staging = Staging(parameters, transport, own_buffer=options.overlap)
        self._other = Staging(optimizer.correction, transport)  # gradients, or momentum: one buffer for either
        self._buffer = parameters
        self._blocks: BlockMomentum | None = None
        self._sixteen: SixteenBitAllReduce | None = None
        # Of what is not parameters: bmuf and the 16-bit all-reduce remember the model of the averaging before.
        self._stateless = STRATEGIES.get(options.reduce, STRATEGIES["all-reduce"])
        self._strategy: Strategy = self._stateless
        if options.reduce == "bmuf":
            self._blocks = BlockMomentum(
                self._staging.fetch(parameters),
                exchange.size,
                momentum=options.block_momentum,
                rate=options.block_rate,
                nesterov=options.nesterov,
            )
            self._strategy = self._blocks.average
        elif options.reduce == "all-reduce" and options.wire == "bfloat16":
            self._sixteen = SixteenBitAllReduce()
            self._strategy = self._sixteen.average

    def fetch(self) -> None:
        """Takes the parameters as they are now."""
        self._buffer = self._staging.fetch(self.parameters)

    def average(self, weight: float) -> None:
        """Averages what was fetched."""
        self._strategy(self.exchange, self._buffer, self.round, weight)
        self.round += 1

    def average_beside_training(self, weight: float) -> None:
        """The same, on a thread beside the one that trains."""
        with self._staging.beside_training():
            self.average(weight)

    def store(self, out: Tensor) -> None:
        """out <- what was made of it."""
        self._staging.store(out)

    def average_momentum(self, weight: float) -> None:
        """The momentum, after the parameters and as they."""
        momentum = self._other.fetch(self.optimizer.correction)
        self._stateless(self.exchange, momentum, self.round - 1, weight)
        self._other.store(self.optimizer.correction)

    def average_gradient(self, gradient: Tensor, weight: float) -> None:
        """gradient <- the mean over workers."""
        mean_of_differences(self.exchange, self._other.fetch(gradient), weight)
        self._other.store(gradient)

    def exact_mean(self, weight: float) -> None:
        """parameters <- their mean, in float32 whatever the wire."""
        mean(self.exchange, self._staging.fetch(self.parameters), weight)
        self._staging.store(self.parameters)
        if self._sixteen is not None:
            self._sixteen.reference = None  # the next one goes in float32 and makes it anew

    def start_epoch(self) -> None:
        """parameters <- where bmuf starts its next block; else as they are."""
        if self._blocks is not None:
            self.parameters.copy_(self._blocks.start)

    def finish_epoch(self, weight: float, tail: int) -> None:
        """parameters <- the exact mean; of bmuf its model after a last block, if a worker has a tail of frames."""
        if self._blocks is None:
            self.exact_mean(float(weight))
            return
        with self.exchange.waiting():
            anyone_trained = bool(self.exchange.all_gather(torch.tensor([tail])).any())
        if anyone_trained:
            self.fetch()
            self.average(float(weight))
        self.parameters.copy_(self._blocks.model())

    def restart(self) -> None:
        """After the parameters were set from outside, the same on every worker."""
        if self._blocks is not None:
            self._blocks.restart(self._staging.fetch(self.parameters))
        if self._sixteen is not None:
            self._sixteen.reference = None

    def shared_state(self) -> dict[str, Tensor]:
        """What bmuf and the 16-bit all-reduce remember, the same on every worker; (num_parameters,) float32 each."""
        found = {}
        if self._blocks is not None:
            found["blocks.start"], found["blocks.change"] = self._blocks.start, self._blocks.change
        if self._sixteen is not None and self._sixteen.reference is not None:
            found["sixteen.reference"] = self._sixteen.reference
        return found

    def load_shared_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes up `shared_state`."""
        if self._blocks is not None:
            self._blocks.start.copy_(state["blocks.start"])
            self._blocks.change.copy_(state["blocks.change"])
        if self._sixteen is not None and "sixteen.reference" in state:
            exchanged = self.parameters if self._staging.buffer is None else self._staging.buffer
            self._sixteen.reference = torch.empty_like(exchanged).copy_(state["sixteen.reference"])

    def result(self) -> tuple[Tensor, float]:
        """What the last averaging has made, (num_parameters,), and bmuf's deviation in it; NaN of others."""
        return self._buffer, math.nan if self._blocks is None else self._blocks.deviation

    def load_result(self, made: Tensor, deviation: float) -> None:
        """Takes up `result`."""
        self.fetch()
        self._buffer.copy_(made)
        if self._blocks is not None:
            self._blocks.deviation = deviation

    def share(self) -> None:
        """parameters <- those of the first worker."""
        self.exchange.broadcast(self._staging.fetch(self.parameters), 0)
        self._staging.store(self.parameters)

    def deviation(self, change: float) -> float:
        """|theta_r - mean| before the last averaging, by how far that has moved theta_r."""
        if self._blocks is not None:
            return self._blocks.deviation
        if self.options.reduce in GOSSIP:  # half the way to one other: as far from the mean as that is on average
            return change * math.sqrt(2.0 * (self.exchange.size - 1) / self.exchange.size)
        return change
