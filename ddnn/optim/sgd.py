"""Plain stochastic gradient descent (Kaldi nnet1: nnet-train-frmshuff, nnet-affine-transform.h Update)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from ddnn.model.network import Buffers, Network, gradient_by_layer, layer_views
from ddnn.optim.ng_sgd import NaturalGradientDirection
from ddnn.recipe.schema import Optimizer as OptimizerRecipe

Places = Iterable[tuple[Tensor, Tensor]]
"""Per layer where the direction's weight and bias go, as of `gradient_by_layer`."""
Direction = Callable[[Network, Buffers, float, Places], Iterator[float]]
"""Network, buffers after the backward pass, rate of one worker, places -> fills one layer's after another's: what a
step goes along, but for the factor that it gives, which is 1 where the buffers have no kernels."""


class Sgd:
    """c <- momentum * c + g;  W <- W - rate * l2 * N * W - rate * c;  b <- b - rate * c.

    g is the gradient of the loss SUMMED over the N frames of the minibatch, so that a rate of 0.008 at minibatch 256
    is 2.048 on the mean gradient. Layers with a rate of their own have g scaled by it, biases have no l2.

    NG-SGD is the same step along another direction: `direction` fills g.

    Attributes:
        gradient: g, (num_parameters,), of the last minibatch; not filled where the kernels take it up layer by layer.
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
        if buffers.kernels is not None and average is None and not self.momentum:
            filled = self.direction(network, buffers, rate / self.shared_by, buffers.scratch)
            for i, factor in enumerate(filled):
                self.apply_to_layer(i, network, buffers, rate, factor)
            buffers.descended(network)
            return
        made = self.gradient if buffers.low_gradient is None else buffers.low_gradient
        places = list(zip(*layer_views(network.layers, made), strict=True))
        filled = self.direction(network, buffers, rate / self.shared_by, places)
        for place, factor in zip(places, filled, strict=True):
            for part in place if factor != 1.0 else ():
                part.mul_(factor)
        if made is not self.gradient:
            self.gradient.copy_(made)
        if average is not None:
            average(self.gradient)
        self.apply(network, rate, frames=len(buffers.x))

    def apply_to_layer(self, i: int, network: Network, buffers: Buffers, rate: float, factor: float = 1.0) -> None:
        """The update of layer `i` from its part of `buffers.scratch`, times `factor`, by the kernels: taken up while it
        is in the cache, in one pass that also makes the bf16 copy of the new parameters."""
        assert buffers.kernels is not None
        assert buffers.low is not None
        layer, low, descend = network.layers[i], buffers.low, buffers.kernels.descend
        far, keep = rate * layer.weight_rate, 1.0 - rate * layer.weight_rate * self.l2 * len(buffers.x)
        if keep == 1.0 and layer.bias_rate == layer.weight_rate:
            descend(network.parts[i], low.parts[i], buffers.scratch_parts[i], far * factor)
            return
        weight, bias = buffers.scratch[i]
        descend(network.weights[i], low.weights[i], weight, far * factor, keep)
        descend(network.biases[i], low.biases[i], bias, rate * layer.bias_rate * factor)

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


def plain_gradient(network: Network, buffers: Buffers, rate: float, places: Places) -> Iterator[float]:
    """The gradient itself, whatever the rate."""
    for _ in gradient_by_layer(buffers, places):
        yield 1.0


def make_optimizer(recipe: OptimizerRecipe, network: Network) -> Sgd:
    """The optimizer that the recipe names."""
    direction = NaturalGradientDirection(network, recipe) if recipe.name == "ng-sgd" else plain_gradient
    return Sgd(network, momentum=recipe.momentum, l2=recipe.l2, direction=direction)
