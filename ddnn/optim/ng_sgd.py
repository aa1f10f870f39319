"""NG-SGD: SGD whose gradient is preconditioned on both sides of every affine layer (section 3 of arXiv 1410.7455).

As Kaldi's nnet2 `AffineComponentPreconditionedOnline::Update` (src/nnet2/nnet-component.cc), the code behind arXiv
1507.01239. For a layer with input X (N x D, 1 appended for the bias) and output derivative Y (N x K):

    X^, gamma_in = precondition([X 1]),    Y^, gamma_out = precondition(Y)
    dW = gamma_in * gamma_out * kappa * Y^^T X^

with kappa from the max-change rule. What `natural_gradient` keeps, the Fisher matrices, belongs to this worker.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddnn.model.network import Buffers, Layer, Network, layer_views
from ddnn.optim.natural_gradient import NaturalGradient, NaturalGradientOptions, max_change_factor
from ddnn.recipe.schema import Optimizer as OptimizerRecipe

ALIGNMENT = 16
"""Floats between the starts of two rows are a multiple of this: GEMMs are slower on rows that are not aligned."""


class NaturalGradientDirection:
    """The direction of NG-SGD's step, in place of the gradient.

    Attributes:
        inputs, outputs: the preconditioners of each layer's input (with 1 appended) and output derivative.
    """

    def __init__(self, network: Network, recipe: OptimizerRecipe) -> None:
        def preconditioner(dim: int, rank: int) -> NaturalGradient:
            options = NaturalGradientOptions(rank, recipe.alpha, recipe.num_samples_history, recipe.update_period)
            return NaturalGradient(dim, options, network.parameters.device)

        self.max_change = recipe.max_change_per_sample
        self.mode = recipe.max_change_mode
        self.inputs = [preconditioner(layer.inputs + 1, recipe.rank_in) for layer in network.layers]
        self.outputs = [preconditioner(layer.outputs, recipe.rank_out) for layer in network.layers]
        self._extended: list[Tensor] = []

    def __call__(self, network: Network, buffers: Buffers, rate: float, flat: Tensor) -> Tensor:
        """Fills `flat` (num_parameters,) with the preconditioned gradient; overwrites `buffers.derivatives`."""
        weights, biases = layer_views(network.layers, flat)
        frames = len(buffers.x)
        if not self._extended or len(self._extended[0]) < frames:
            self._extended = [_aligned_rows(frames, layer, flat) for layer in network.layers]
        for i, (layer, x) in enumerate(zip(network.layers, buffers.inputs(), strict=True)):
            extended = self._extended[i][:frames, : layer.inputs + 1]
            extended[:, :-1].copy_(x)
            extended[:, -1].fill_(1.0)
            y = buffers.derivatives[i]
            gamma = self.inputs[i].precondition(extended) * self.outputs[i].precondition(y)
            if self.max_change > 0.0:
                norms = self.inputs[i].row_norms, self.outputs[i].row_norms
                gamma = gamma * max_change_factor(*norms, gamma, rate, self.max_change, self.mode)
            y.mul_(gamma)
            torch.mm(y.t(), extended[:, :-1], out=weights[i])
            torch.mv(y.t(), extended[:, -1], out=biases[i])
        return flat


def _aligned_rows(frames: int, layer: Layer, like: Tensor) -> Tensor:
    columns = -(-(layer.inputs + 1) // ALIGNMENT) * ALIGNMENT
    return like.new_zeros(frames, columns)
