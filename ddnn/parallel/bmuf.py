"""Block momentum: BMUF, Chen and Huo, ICASSP 2016."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ddnn.parallel.exchange import Exchange
from ddnn.parallel.mean import mean_of_differences


class BlockMomentum:
    """Averaging with a momentum over blocks of minibatches.

    After block t, in which every worker started from S(t-1):
        G(t) = mean over workers of theta - S(t-1)
        D(t) = eta * D(t-1) + zeta * G(t)
        W(t) = W(t-1) + D(t)
        S(t) = W(t), or with Nesterov W(t) + eta * D(t): what every worker's theta becomes.

    W is the model to evaluate and save: `model()`. eta = 1 - 1/n makes each block's change count n times in the end, as
    if the n workers' blocks had come one after the other. With one worker eta is 0, and nothing is done.

    A worker's own momentum points where its model no longer is: the caller clears it after each averaging
    (`clears_local_momentum`).

    Attributes:
        start: S, (num_parameters,) float32.
        change: D, (num_parameters,) float32.
        deviation: |theta - mean of theta| before the last averaging, this worker's distance from the mean; NaN before
            the first, and where theta was not finite.
        clears_local_momentum: True.
    """

    clears_local_momentum = True

    def __init__(
        self,
        parameters: Tensor,
        workers: int,
        *,
        momentum: float | None = None,
        rate: float = 1.0,
        nesterov: bool = False,
    ) -> None:
        """Starts from `parameters`, which are the same on every worker. `momentum` is eta, `rate` is zeta."""
        eta = 1.0 - 1.0 / workers if momentum is None else momentum
        if not (0.0 <= eta < 1.0 and math.isfinite(rate) and rate > 0.0):
            raise ValueError(f"block momentum must lie in [0, 1) and its rate above 0, not {eta} and {rate}")
        self.momentum, self.rate, self.nesterov = eta, rate, nesterov
        self.start = parameters.detach().clone()
        self.change = torch.zeros_like(self.start)
        self.deviation = math.nan

    def average(self, exchange: Exchange, parameters: Tensor, round: int, weight: float) -> None:
        """parameters <- S(t), the same bits on every worker; a worker of weight 0 is left out of G and joins again."""
        parameters.sub_(self.start)
        own = exchange.keep("own change", parameters.numel(), parameters.dtype, parameters.device).copy_(parameters)
        mean_of_differences(exchange, parameters, weight)
        self.deviation = float(torch.linalg.vector_norm(own.sub_(parameters)))
        model = self.model()
        self.change.mul_(self.momentum).add_(parameters, alpha=self.rate)
        model.add_(self.change)
        self.start.copy_(model)
        if self.nesterov:
            self.start.add_(self.change, alpha=self.momentum)
        parameters.copy_(self.start)

    def model(self) -> Tensor:
        """W, a new tensor (num_parameters,): the model to evaluate and save."""
        if not self.nesterov:
            return self.start.clone()
        return self.start.sub(self.change, alpha=self.momentum)

    def restart(self, parameters: Tensor) -> None:
        """Starts again from `parameters`, the same on every worker, without momentum: after a rejected epoch."""
        self.start.copy_(parameters)
        self.change.zero_()
