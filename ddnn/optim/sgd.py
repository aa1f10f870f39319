"""Plain stochastic gradient descent (Kaldi nnet1: nnet-train-frmshuff, nnet-affine-transform.h Update)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ddnn.model.network import Buffers, Network, gradient, layer_views
from ddnn.optim.ng_sgd import NaturalGradientDirection
from ddnn.recipe.schema import Optimizer as OptimizerRecipe

Direction = Callable[[Network, Buffers, float, Tensor], Tensor]
"""Network, buffers after the backward pass, rate of one worker, flat buffer to fill -> that buffer: what a step goes
along."""


class Sgd:
    """c <- momentum * c + g;  W <- W - rate * l2 * N * W - rate * c;  b <- b - rate * c.

    g is the gradient of the loss SUMMED over the N frames of the minibatch, so that a rate of 0.008 at minibatch 256
    is 2.048 on the mean gradient. Layers with a rate of their own have g scaled by it, biases have no l2.

    NG-SGD is the same step along another direction: `direction` fills g.

    Attributes:
        gradient: g, (num_parameters,), of the last minibatch.
        correction: c, (num_parameters,); the gradient itself where momentum is 0.
        shared_by: workers whose rates are multiplied by their number. NG-SGD limits its step as it is at the rate of
            one: each worker may go so many times as far, as one worker with so many times the minibatch may.
    """

    def __init__(
        self, network: Network, *, momentum: float = 0.0, l2: float = 0.0, direction: Direction | None = None
    ) -> None:
        self.direction = direction or plain_gradient
        self.momentum = momentum
        self.l2 = l2
        self.shared_by = 1
        self.gradient = network.parameters.new_zeros(network.parameters.shape)
        self.correction = self.gradient.clone() if momentum else self.gradient

    def clear_momentum(self) -> None:
        """Forgets the momentum. At each epoch too: nnet1 runs one process per epoch, and each starts from none."""
        if self.momentum:
            self.correction.zero_()

    def step(
        self, network: Network, buffers: Buffers, rate: float, average: Callable[[Tensor], None] | None = None
    ) -> None:
        """One update from the layer inputs and output derivatives of a minibatch.

        Args:
            average: what workers that average gradients do with theirs before it is applied, in place.
        """
        self.direction(network, buffers, rate / self.shared_by, self.gradient)
        if average is not None:
            average(self.gradient)
        self.apply(network, rate, frames=len(buffers.x))

    def apply(self, network: Network, rate: float, frames: int) -> Tensor:
        """The update from `self.gradient`, summed over `frames` frames; returns the parameters."""
        weights, biases = layer_views(network.layers, self.gradient)
        for layer, weight, bias in zip(network.layers, weights, biases, strict=True):
            if layer.weight_rate != 1.0:
                weight.mul_(layer.weight_rate)
            if layer.bias_rate != 1.0:
                bias.mul_(layer.bias_rate)
        if self.momentum:
            self.correction.mul_(self.momentum).add_(self.gradient)
        if self.l2:
            for layer, weight in zip(network.layers, network.weights, strict=True):
                weight.mul_(1.0 - rate * layer.weight_rate * self.l2 * frames)
        return network.parameters.add_(self.correction, alpha=-rate)


def plain_gradient(network: Network, buffers: Buffers, rate: float, flat: Tensor) -> Tensor:
    """The gradient itself, whatever the rate."""
    return gradient(network, buffers, flat)


def make_optimizer(recipe: OptimizerRecipe, network: Network) -> Sgd:
    """The optimizer that the recipe names."""
    direction = NaturalGradientDirection(network, recipe) if recipe.name == "ng-sgd" else plain_gradient
    return Sgd(network, momentum=recipe.momentum, l2=recipe.l2, direction=direction)
