"""NG-SGD: SGD whose gradient is preconditioned on both sides of every layer (section 3 of arXiv 1410.7455).

As Kaldi's nnet2 `AffineComponentPreconditionedOnline::Update` (src/nnet2/nnet-component.cc), the code behind arXiv
1507.01239. For a layer with input X (N x D, 1 appended for the bias) and output derivative Y (N x K):

    X^, gamma_in = precondition([X 1]),    Y^, gamma_out = precondition(Y)
    dW = gamma_in * gamma_out * kappa * Y^^T X^

with kappa from the max-change rule. What `natural_gradient` keeps, the Fisher matrices, belongs to this worker.

A layer that gives P rows for each frame (`Layer.gemm`) has N P rows in X and Y. Its history is P times as long, so
that it counts frames, and kappa is in frames too. A layer without such rows has its plain gradient, limited alike by
the norms of the frames' gradients. In bf16, X and Y are preconditioned in float32, as what preconditioning takes away
may be nearly all of X; X^ and Y^ are rounded for the last product alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ddnn.nn.arithmetic import Float32
from ddnn.nn.layer import Gemm, Layer, Views
from ddnn.nn.network import Network, Workspace
from ddnn.optim.natural_gradient import NaturalGradient, NaturalGradientOptions, gammas, max_change_factor
from ddnn.optim.sgd import Sgd, SgdOptions

FEW_FILTERS = 32  # up to so many the rank of their derivative is a quarter of their number, at most


@dataclass(frozen=True)
class NgSgdOptions(SgdOptions):
    """Options of NG-SGD; the first five as in `NaturalGradientOptions`.

    `max_change_scope`: `global` limits the step by the frames of all workers, `local` by the worker's own (nnet2), so
    that `Sgd.included_lr_scale` is to stay 1; `unscaled` limits the step at a learning rate of 1, so that the step at
    `lr` is limited to lr * max_change per frame (the code of arXiv 1507.01239)."""

    rank_in: int = 20  # of a layer's input
    rank_out: int = 80  # of its output derivative
    alpha: float = 4.0
    num_samples_history: float = 2000.0
    update_period: int = 4
    max_change: float = 0.075  # a step that would change a layer by more than this per frame is shortened; 0: never
    max_change_scope: Literal["global", "local", "unscaled"] = "global"

    def sides(self, gemm: Gemm) -> tuple[tuple[int, int], tuple[int, int]]:
        """Dimension and rank of a layer's two preconditioners, of the input with 1 appended and of the derivative. Of a
        convolution with few filters a rank near their number would take away most of the derivative."""
        few = gemm.rows > 1 and gemm.fan_out <= FEW_FILTERS
        rank_out = min(self.rank_out, max(1, gemm.fan_out // 4)) if few else self.rank_out
        return (gemm.fan_in + 1, self.rank_in), (gemm.fan_out, rank_out)

    def num_bytes(self, layers: Sequence[Layer], minibatch: int) -> int:
        """As `SgdOptions.num_bytes`: per side of a layer W and its update, in float64 as it begins; per minibatch the
        inputs once more, H, and the largest derivative."""
        gemms = [layer.gemm for layer in layers if layer.gemm is not None]
        matrices = sum(4 * 4 * min(rank, dim - 1) * dim for gemm in gemms for dim, rank in self.sides(gemm))
        projections = sum(2 * rank * gemm.rows for gemm in gemms for _, rank in self.sides(gemm))
        rows = sum(gemm.rows * gemm.fan_in for gemm in gemms)
        return matrices + 4 * minibatch * (projections + rows + max((g.rows * g.fan_out for g in gemms), default=0))


class NgSgd(Sgd):
    """SGD along the natural gradient. `input_preconditioners`, `grad_preconditioners`: by the number of a layer that
    has a `gemm`, those of its input (with 1 appended) and of its output derivative."""

    def __init__(self, network: Network, options: NgSgdOptions | None = None) -> None:
        options = options or NgSgdOptions()
        super().__init__(network, options)
        self._options = options
        self.input_preconditioners: dict[int, NaturalGradient] = {}
        self.grad_preconditioners: dict[int, NaturalGradient] = {}
        for i in self.trainable:
            layer = network.layers[i]
            if layer.gemm is not None:
                rest = (options.alpha, options.num_samples_history * layer.gemm.rows, options.update_period)
                self.input_preconditioners[i], self.grad_preconditioners[i] = (
                    NaturalGradient(dim, NaturalGradientOptions(rank, *rest), network.parameters.device)
                    for dim, rank in options.sides(layer.gemm)
                )
        self._memory = _Memory(network, 0, Float32())

    @property
    def preconditioners(self) -> list[NaturalGradient]:
        return [one for one in (*self.input_preconditioners.values(), *self.grad_preconditioners.values()) if one.rank]

    def fill_gradient(self, workspace: Workspace, lr: float, out: Sequence[Views]) -> Iterator[tuple[int, float]]:
        """As `Sgd.fill_gradient`; overwrites the workspace's derivatives and, in bf16, activations and input."""
        a, options = workspace.arithmetic, self._options
        limited_lr = 1.0 if options.max_change_scope == "unscaled" else lr
        if self._memory.made_for != (len(workspace.x), a):
            self._memory = _Memory(self.network, 0, a)  # of another size: first given back
            self._memory = _Memory(self.network, len(workspace.x), a)
        memory = self._memory
        rows: dict[int, tuple[Tensor, Tensor]] = {}
        for i, of in memory.layers.items():
            x, grad = workspace.statistics(i)
            a.load_rows(x, of.inputs, of.in_before)
            self.input_preconditioners[i].apply(of.inputs, of.in_before)
            inputs = a.store_rows(of.inputs, x, of.in_after, of.bias_input)
            float32_grad = memory.float32_grad[: grad.numel()].view(grad.shape) if a.casts else grad
            a.load_rows(grad, float32_grad, of.grad_before)
            self.grad_preconditioners[i].apply(float32_grad, of.grad_before)
            rows[i] = inputs, a.store_rows(float32_grad, grad, of.grad_after)
        factors: dict[int, float] = {}
        for layers, scales in memory.scales(limited_lr, options.max_change):
            factors |= zip(layers, a.scale_([rows[i][1] for i in layers], scales), strict=True)
        for i in self.trainable:
            if i in rows:
                self.network.layers[i].gradient_of_rows(a, *rows[i], out[i], memory.layers[i].bias_input)
                yield i, factors[i]
            else:
                yield i, self._plain_gradient(i, workspace, limited_lr, out[i])

    def _plain_gradient(self, i: int, workspace: Workspace, lr: float, out: Views) -> float:
        """Fills the plain gradient of a layer without `gemm`, so that it changes no more than `max_change` per
        frame."""
        workspace.layer_gradient(i, out)
        if self.network.layers[i].num_parameters and self._options.max_change > 0.0:
            norms = workspace.gradient_norms(i)
            one = norms.new_ones(())
            kappa = max_change_factor(norms, one, one, lr, self._options.max_change)
            for part in out.values():
                part.mul_(kappa)
        return 1.0


class _LayerMemory(NamedTuple):
    """`inputs`: [X 1], (rows, fan_in + 1) float32, and its last column once more, in one piece; and (rows,) norms of
    the rows of X and Y before and after preconditioning."""

    inputs: Tensor
    bias_input: Tensor
    in_before: Tensor
    in_after: Tensor
    grad_before: Tensor
    grad_after: Tensor


class _Memory:
    """Memory for minibatches of `frames` frames in one arithmetic, made once. `layers`: by their numbers.
    `float32_grad`: for arithmetics that need a copy, float32 memory for any layer's output derivative."""

    def __init__(self, network: Network, frames: int, arithmetic: Float32) -> None:
        self.made_for = frames, arithmetic
        trainable = ((i, layer) for i, layer in enumerate(network.layers) if i not in network.frozen)
        gemms = {i: layer.gemm for i, layer in trainable if layer.gemm is not None}
        new = partial(torch.zeros, dtype=torch.float32, device=network.parameters.device)
        self.layers: dict[int, _LayerMemory] = {}
        # Layers with as many rows per frame have their norms in one piece: [0] inputs, [1] derivatives; (2, layers, N).
        self._groups: list[tuple[int, list[int], Tensor, Tensor]] = []
        for rows in dict.fromkeys(gemm.rows for gemm in gemms.values()):
            layers = [i for i, gemm in gemms.items() if gemm.rows == rows]
            before, after = new(2, 2, len(layers), rows * frames).unbind()
            self._groups.append((rows, layers, before, after))
            for k, i in enumerate(layers):
                columns = gemms[i].fan_in + 1
                inputs = new(rows * frames, -(-columns // 16) * 16)[:, :columns]  # GEMMs want their rows aligned
                bias_input = new(rows * frames, dtype=arithmetic.bias_input_dtype)
                self.layers[i] = _LayerMemory(inputs, bias_input, before[0, k], after[0, k], before[1, k], after[1, k])
        largest = max((gemm.rows * gemm.fan_out for gemm in gemms.values()), default=0)
        self.float32_grad = new(frames * largest if arithmetic.casts else 0)

    def scales(self, lr: float, max_change: float) -> Iterator[tuple[list[int], Tensor]]:
        """Layers and their gamma_in gamma_out kappa, from the norms before and after preconditioning."""
        for rows, layers, before, after in self._groups:
            scale = gammas(before, after).prod(dim=0)
            if max_change > 0.0:
                scale *= max_change_factor(after[0], after[1], scale, lr, max_change / rows)
            yield layers, scale


def make_optimizer(options: SgdOptions, network: Network) -> Sgd:
    return NgSgd(network, options) if isinstance(options, NgSgdOptions) else Sgd(network, options)
