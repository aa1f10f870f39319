"""NG-SGD: SGD whose gradient is preconditioned on both sides of every affine layer (section 3 of arXiv 1410.7455).

As Kaldi's nnet2 `AffineComponentPreconditionedOnline::Update` (src/nnet2/nnet-component.cc), the code behind arXiv
1507.01239. For a layer with input X (N x D, 1 appended for the bias) and output derivative Y (N x K):

    X^, gamma_in = precondition([X 1]),    Y^, gamma_out = precondition(Y)
    dW = gamma_in * gamma_out * kappa * Y^^T X^

with kappa from the max-change rule. What `natural_gradient` keeps, the Fisher matrices, belongs to this worker.

In bf16, X and Y are widened to float32 and preconditioned there, as what preconditioning takes away may be nearly all
of X; X^ and Y^ are rounded for the last product alone, which is as large as the others of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from ddnn.kernels import Kernels
from ddnn.model.network import Buffers, Layer, Network
from ddnn.model.product import product
from ddnn.optim.natural_gradient import (
    MaxChangeMode,
    NaturalGradient,
    NaturalGradientOptions,
    gammas,
    max_change_factor,
)
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
        self.mode: MaxChangeMode = "before-rate" if recipe.max_change_mode == "before-rate" else "exact"
        self.inputs = [preconditioner(layer.inputs + 1, recipe.rank_in) for layer in network.layers]
        self.outputs = [preconditioner(layer.outputs, recipe.rank_out) for layer in network.layers]
        self._work = _Work(network.layers, network.parameters.device, frames=0)

    def __call__(
        self, network: Network, buffers: Buffers, rate: float, places: Iterable[tuple[Tensor, Tensor]]
    ) -> Iterator[float]:
        """Fills one layer after another of `places`, as `plain_gradient` of `ddnn.optim.sgd`, with the preconditioned
        gradient; overwrites `buffers.derivatives`, and in bf16 `buffers.outputs` too, with kernels `buffers.x`."""
        low = buffers.low is not None
        if self._work.made_for != (len(buffers.x), low):
            self._work = _Work(network.layers, network.parameters.device, len(buffers.x), low)
        work = self._work
        if buffers.kernels is not None:
            yield from self._by_kernels(buffers.kernels, buffers, rate, places)
            return
        for i, (x, y) in enumerate(zip(buffers.inputs(), buffers.derivatives, strict=True)):
            work.inputs[i].copy_(x)
            work.ones[i].fill_(1.0)
            self.inputs[i].precondition(work.extended[i], work.before_in[i], work.after_in[i])
            wide = work.wide[: y.numel()].view(y.shape).copy_(y) if low else y
            self.outputs[i].precondition(wide, work.before_out[i], work.after_out[i])
            if low:  # where X and Y were, that the last product finds them
                x.copy_(work.inputs[i])
                y.copy_(wide)
        scale = self._scale(rate)
        inputs = buffers.inputs() if low else work.inputs
        layers = zip(inputs, work.ones, buffers.derivatives, scale.unbind(), places, strict=True)
        for x, ones, y, factor, (weight, bias) in layers:
            y_t = y.mul_(factor).t()
            product(y_t, x, out=weight)
            # A product with a vector is three times quicker where the column is not strided.
            product(y_t, work.bias_input.copy_(ones), out=bias)
            yield 1.0

    def _by_kernels(
        self, kernels: Kernels, buffers: Buffers, rate: float, places: Iterable[tuple[Tensor, Tensor]]
    ) -> Iterator[float]:
        """The same in bf16 on a CPU: what is cast is measured in the same pass, and scaled where it is taken up."""
        work, inputs = self._work, buffers.inputs()
        for i, (x, y) in enumerate(zip(inputs, buffers.derivatives, strict=True)):
            kernels.widen_rows(x, work.extended[i], work.before_in[i])
            self.inputs[i].apply(work.extended[i], work.before_in[i])
            kernels.narrow_rows(work.extended[i], x, work.after_in[i], work.last[i])
            wide = work.wide[: y.numel()].view(y.shape)
            kernels.widen_rows(y, wide, work.before_out[i])
            self.outputs[i].apply(wide, work.before_out[i])
            kernels.narrow_rows(wide, y, work.after_out[i])
        layers = zip(inputs, work.last, buffers.derivatives, self._scale(rate).tolist(), places, strict=True)
        for x, last, y, factor, (weight, bias) in layers:
            product(y.t(), x, out=weight)
            kernels.sum_rows(y, bias, weights=last)
            yield factor

    def _scale(self, rate: float) -> Tensor:
        """(layers,) gamma_in gamma_out kappa, from the norms before and after preconditioning."""
        work = self._work
        scale = gammas(work.before, work.after).prod(dim=0)
        if self.max_change > 0.0:
            scale *= max_change_factor(work.after[0], work.after[1], scale, rate, self.max_change, self.mode)
        return scale


class _Work:
    """Memory for minibatches of `frames` frames and the views of it, made once.

    Attributes:
        extended: per layer [X 1], (frames, inputs + 1).
        inputs, ones: per layer its columns of X, (frames, inputs), and the last one, (frames,).
        bias_input: (frames,) for a copy of that last column; bf16 where the network computes so.
        last: (layers, frames), with kernels copies of those last columns.
        wide: in bf16 float32 memory for any layer's output derivative, (frames * outputs,).
        before, after: (2, layers, frames) norms of the rows before and after preconditioning; [0] inputs, [1] outputs.
        made_for: frames, and whether in bf16.
    """

    def __init__(self, layers: tuple[Layer, ...], device: torch.device, frames: int, low: bool = False) -> None:
        self.made_for = (frames, low)
        new = partial(torch.zeros, dtype=torch.float32, device=device)
        self.extended = [
            new(frames, -(-(layer.inputs + 1) // ALIGNMENT) * ALIGNMENT)[:, : layer.inputs + 1] for layer in layers
        ]
        self.inputs = [x[:, :-1] for x in self.extended]
        self.ones = [x[:, -1] for x in self.extended]
        self.bias_input = new(frames, dtype=torch.bfloat16 if low else torch.float32)
        self.last = new(len(layers), frames).unbind()
        self.wide = new(frames * max(layer.outputs for layer in layers) if low else 0)
        self.before, self.after = new(2, 2, len(layers), frames).unbind()
        self.before_in, self.before_out = self.before[0].unbind(), self.before[1].unbind()
        self.after_in, self.after_out = self.after[0].unbind(), self.after[1].unbind()
