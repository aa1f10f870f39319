"""What a network computes in: float32, bf16 by PyTorch, or bf16 with compiled kernels. One object, chosen once.

Layers, losses and optimizers call the methods of the object that they are given and never ask which it is.
docs/explanation/precision.md says what is in which precision, and why. In bf16 the layers multiply with a copy of the parameters,
which `ddnn.nn.network.Workspace` refreshes; on a GPU its output layer is wider than the network's, by outputs of zero
weight that neither loss nor update sees. On a CPU `ddnn.nn.kernels` does the element-wise parts of bf16, where it is
compiled: biases before a sigmoid are then added in float32 to the rounded product, and the update refreshes the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from ddnn.nn.kernels import Kernels, load_library
from ddnn.nn.loss import SoftmaxCrossEntropy, SoftmaxCrossEntropyBFloat16
from ddnn.nn.products import affine_out, matmul_out, supports_float32_output

aten = torch.ops.aten
Precision = Literal["float32", "bf16"]
"""What activations, derivatives and the factors of matrix products are held in; parameters are float32 in either."""

KERNELS_THREADS = 2
"""Most threads of a worker with which kernels, which run on one, are used: PyTorch shares its passes among them all."""

CUDA_PAD_TO = 64
"""Of the outputs in bf16 on a GPU, whose library wants rows to start at multiples of 16 bytes, which those of 8806 do
not, and likes 128."""

MIN_ROW_MAJOR_RANK = 48
"""Ranks from which on X W^T is a third faster than its transpose; below, the transpose is. Measured."""

NUM_COMPENSATED_ROWS = 2
"""Number of leading rows of W whose rounding error in bf16 is compensated; `LEADING` in `kernels.c`. X^ keeps only
(k + 1) alpha / D of the direction k from 0, often 1 % of the first, so that an error of 0.2 % would be a fifth of what
is left, and the same in every row if that direction is their mean."""


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor, Tensor], object]]] = {
    "sigmoid": (torch.sigmoid_, lambda grad, y: aten.sigmoid_backward.grad_input(grad, y, grad_input=grad)),
    "tanh": (torch.tanh_, lambda grad, y: aten.tanh_backward.grad_input(grad, y, grad_input=grad)),
    "relu": (torch.relu_, lambda grad, y: aten.threshold_backward.grad_input(grad, y, 0, grad_input=grad)),
    "softmax": (lambda y: None, lambda grad, y: None),  # is part of the loss: the network gives logits
    "linear": (lambda y: None, lambda grad, y: None),
}
"""Activation -> y <- f(y), in place; grad <- grad * f'(x), in place, from y = f(x)."""


class Projection:
    """The rows X of one side of a layer, from which natural gradient takes their projection: X^ = X - H W, H = X W^T.

    In two calls, `project` and `remove`, between which workers that share the columns of X may sum their H. Both are in
    float32 here; this is the reference of the other classes. X is what `project` is given and, where there is a
    `bias_column`, a further column of ones.

    Args:
        arithmetic: what the rows are in.
        scratch: float32 memory of the size of X; None: that of x.
        before, after: (rows,) float32; once X^ is there they hold the norms of the rows of X and X^.
        bias_column: (rows,), for what becomes of the column of ones.

    Attributes:
        h: H, (rows, rank) float32, between the two calls.
        gives_j: whether `remove` fills J = H^T X; the Fisher matrix is updated from `rows_and_h` where it does not.
    """

    gives_j: ClassVar[bool] = False

    def __init__(
        self,
        arithmetic: Float32,
        scratch: Tensor | None,
        before: Tensor,
        after: Tensor,
        bias_column: Tensor | None = None,
    ) -> None:
        self.arithmetic, self.scratch, self.bias_column = arithmetic, scratch, bias_column
        self.before, self.after = before, after
        self.h = self._float32_h = before.new_empty(0, 0)

    def load(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """X, and H, in float32; the norms of the rows in `before`. w: (rank, columns of X) float32."""
        rows, rank = len(x), len(w)
        if self._float32_h.shape != (rows, rank):
            new = self.before.new_empty
            self._float32_h = new(rows, rank) if rank >= MIN_ROW_MAJOR_RANK else new(rank, rows).t()
        wide = x if self.scratch is None else self.scratch
        self.arithmetic.load_rows(x, wide, self.before)
        return wide, torch.mm(wide, w.t(), out=self._float32_h)

    def take(self, w: Tensor) -> None:
        """Before `project`, where w has other values than before: makes what depends on w alone."""

    def project(self, x: Tensor, w: Tensor) -> None:
        """h <- H, of x (rows, columns) and w."""
        self.x = x
        self.rows, self.h = self.load(x, w)

    def rows_and_h(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """X and H in float32, between the two calls."""
        return self.rows, self.h

    def remove(self, w: Tensor, j: Tensor | None = None) -> Tensor:
        """X <- X^; j (rank, columns of X) <- J, where it is given. Returns X^ without the bias column, in `dtype`, in the
        memory of x or in `scratch`."""
        self.rows.addmm_(self.h, w, alpha=-1.0)
        return self.arithmetic.store_rows(self.rows, self.x, self.after, self.bias_column)


class RoundedProjection(Projection):
    """In the memory of x, W and H rounded to its type, the norms of X^ those of what is rounded. H W takes away nearly all
    of the first `NUM_COMPENSATED_ROWS` directions: what rounding cut from their H and W is multiplied by itself. Waits for no GPU."""

    def __init__(self, *memory: Any) -> None:
        super().__init__(*memory)
        self._one = self.before.new_ones(())
        self._w = self._bias = torch.empty(0)

    def take(self, w: Tensor) -> None:
        """The factor of `remove`: W rounded, what rounding cut from its first rows, and these again."""
        columns, first = w.shape[1] - (self.bias_column is not None), slice(NUM_COMPENSATED_ROWS)
        low = w.to(self.arithmetic.dtype)
        rest = (w[first] - low[first]).to(low.dtype)
        parts = [low[:, :columns], rest[:, :columns], low[first, :columns]]
        if not len(self._w):
            self._w, self._bias = torch.cat(parts), low[:, columns:].clone()
        torch.cat(parts, out=self._w)  # a CUDA graph reads this memory
        self._bias.copy_(low[:, columns:])

    def project(self, x: Tensor, w: Tensor) -> None:
        self.x = x
        low = self._w[: len(w)]
        self.h = x.new_empty((len(x), len(w)), dtype=torch.float32)
        if self.arithmetic.gradient_dtype == torch.float32:
            matmul_out(x, low.t(), self.h)
        else:
            torch.mm(x.float(), low.float().t(), out=self.h)
        if self.bias_column is not None:
            self.h += self._bias.view(-1)

    def rows_and_h(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """H of the unrounded W."""
        return self.load(self.x, w)

    def remove(self, w: Tensor, j: Tensor | None = None) -> Tensor:
        x, h, last, rank = self.x, self.h, self.bias_column, len(w)
        torch.linalg.vector_norm(x, dim=1, dtype=torch.float32, out=self.before)
        if last is not None:
            self.before.hypot_(self._one)
            torch.sub(1.0, h @ w[:, x.shape[1]], out=last)
        factors = x.new_empty(len(x), len(self._w))
        rounded, again, rest = factors.split_with_sizes([rank, *2 * [(len(self._w) - rank) // 2]], dim=1)
        first = h[:, :NUM_COMPENSATED_ROWS]
        rounded.copy_(h)
        again.copy_(first)
        torch.sub(first, again, out=rest)
        x.addmm_(factors, self._w, alpha=-1.0)
        torch.linalg.vector_norm(x, dim=1, dtype=torch.float32, out=self.after)
        if last is not None:
            self.after.hypot_(last)
        return x


class KernelProjection(Projection):
    """In the memory of x by compiled kernels, in bf16 rounded as `RoundedProjection`. `fused`: where nothing happens
    between the two calls both are one pass over the rows, in `remove`, and `h` is not made."""

    gives_j = True

    def __init__(self, kernels: Kernels, *args: Any, fused: bool) -> None:
        super().__init__(*args)
        self.kernels, self.fused = kernels, fused

    def project(self, x: Tensor, w: Tensor) -> None:
        self.x = x
        if not self.fused:
            self.h = self.before.new_empty(len(x), len(w))
            self.kernels.remove_projection_(x, w, before=self.before, h=self.h)

    def remove(self, w: Tensor, j: Tensor | None = None) -> Tensor:
        given = {"before": self.before} if self.fused else {"h": self.h}
        self.kernels.remove_projection_(self.x, w, after=self.after, last=self.bias_column, j=j, **given)
        return self.x


class Float32:
    """Everything in float32. Base of the others, and the reference for their tests."""

    precision: ClassVar[Precision] = "float32"  # its name in recipes and checkpoints
    dtype: torch.dtype = torch.float32  # of activations and derivatives
    casts = False  # whether layers multiply with a copy of the parameters, in `dtype`
    x_dtype: torch.dtype = (
        torch.float32
    )  # of the network's input where the data writes it; a workspace makes it `dtype`
    gradient_dtype: torch.dtype = torch.float32  # in which a gradient is computed, before it becomes float32
    bias_input_dtype: torch.dtype = torch.float32  # of the weights of `column_sums`; strided ones are 3 times slower
    updates_by_layer = False  # whether `sgd_update` takes up a layer's gradient at once, while it is in the cache
    updates_rarely = False  # whether NG-SGD updates its Fisher matrices less often, once a training has settled
    pad_to = 1  # the outputs of the copy's last layer are a multiple of this
    # splices frames of `x_dtype` in one pass, where there is a kernel: `Kernels.gather_spliced`
    gather_kernel: Callable[[Tensor, Tensor, int, Tensor | None, Tensor | None, Tensor], None] | None = None

    def affine(self, x: Tensor, weight: Tensor, bias: Tensor, bias32: Tensor, activation: str, out: Tensor) -> None:
        """out (rows, fan_out) <- f(x W^T + b), f of `ACTIVATIONS`. `x`, `weight`, `bias`: (rows, fan_in), (fan_out,
        fan_in), (fan_out,), all of `dtype`. `bias32`: the bias in float32; padding has no part of it."""
        affine_out(x, weight, bias, out)
        ACTIVATIONS[activation][0](out)

    def activation_backward_(self, activation: str, grad: Tensor, y: Tensor) -> None:
        """grad <- grad * f'(x), in place, from y = f(x); both (rows, columns)."""
        ACTIVATIONS[activation][1](grad, y)

    def column_sums(self, grad: Tensor, out: Tensor, weights: Tensor | None = None) -> None:
        """out (columns,) of `gradient_dtype` <- the sum of the rows of grad (rows, columns), each times its weight, if
        there are any, (rows,) of `bias_input_dtype`; summed in float32."""
        if weights is None:
            torch.sum(grad, dim=0, dtype=out.dtype, out=out)
        else:
            matmul_out(grad.t(), weights, out)

    def cross_entropy(self, like: Tensor, pdfs: int, frames: int) -> SoftmaxCrossEntropy:
        """The loss of training on logits of `dtype`; arguments as of `SoftmaxCrossEntropy`."""
        return SoftmaxCrossEntropy(like, pdfs, frames)

    def load_rows(self, x: Tensor, out: Tensor, norms: Tensor) -> None:
        """out, float32, <- the rows of x, of `dtype`, with 1 in the column that it may have beyond x; norms (rows,) <-
        their Euclidean norms. In float32 `out` may be x itself."""
        if out is not x:
            columns = x.shape[1]
            out[:, :columns].copy_(x)
            out[:, columns:].fill_(1.0)
        torch.linalg.vector_norm(out, dim=1, out=norms)

    def store_rows(self, made: Tensor, x: Tensor, norms: Tensor, last: Tensor | None = None) -> Tensor:
        """What has become of rows that `load_rows` gave, in `dtype`, as factors of a product: in x or where they are.
        norms <- those of the rows. Where `last` (rows,) is given the last column goes there instead."""
        torch.linalg.vector_norm(made, dim=1, out=norms)
        if last is None:
            return made
        last.copy_(made[:, -1])
        return made[:, :-1]

    def projection(self, *memory: Any, exact: bool = False, fused: bool = True) -> Projection:
        """The `Projection` of this arithmetic, or where `exact` the one in float32; `memory`: its last arguments. `fused`:
        nothing happens between its two calls."""
        return Projection(self, *memory)

    def scale_(self, grads: Sequence[Tensor], scales: Tensor) -> Sequence[float]:
        """Multiplies each by its scale; returns the factors that are left to the update. Waits for no GPU."""
        for grad, scale in zip(grads, scales.unbind(), strict=True):
            grad.mul_(scale)
        return [1.0] * len(grads)

    def sgd_update(self, parameters: Tensor, copy: Tensor, gradient: Tensor, lr: float, decay: float = 1.0) -> None:
        """parameters <- decay * parameters - lr * gradient, and the copy that layers multiply with <- parameters; for
        those that update by layer."""
        raise NotImplementedError(f"{type(self).__name__} updates all layers at once")


class Float32Kernels(Float32):
    """The same on a CPU, NG-SGD's rows preconditioned in place by a compiled kernel, in float32 too."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def projection(self, *memory: Any, exact: bool = False, fused: bool = True) -> Projection:
        return Projection(self, *memory) if exact else KernelProjection(self.kernels, self, *memory, fused=fused)


class BFloat16(Float32):
    """Activations, derivatives and the factors of products in bf16, by PyTorch. `device`: on which gradients are
    computed in float32 where it supports that. `pad_to`: see `Float32`."""

    precision = "bf16"
    dtype = torch.bfloat16
    casts = True
    updates_rarely = True
    bias_input_dtype = torch.bfloat16

    def __init__(self, device: torch.device, pad_to: int = 1) -> None:
        self.pad_to = pad_to
        self.gradient_dtype = torch.float32 if supports_float32_output(device) else torch.bfloat16

    def cross_entropy(self, like: Tensor, pdfs: int, frames: int) -> SoftmaxCrossEntropy:
        return SoftmaxCrossEntropyBFloat16(like, pdfs, frames)

    def store_rows(self, made: Tensor, x: Tensor, norms: Tensor, last: Tensor | None = None) -> Tensor:
        return x.copy_(super().store_rows(made, x, norms, last))

    def projection(self, *memory: Any, exact: bool = False, fused: bool = True) -> Projection:
        return Projection(self, *memory) if exact else RoundedProjection(self, *memory)


class BFloat16Kernels(Float32Kernels, BFloat16):
    """The same on a CPU, the element-wise parts by compiled kernels: what is cast is measured in the same pass, and
    scaled where it is taken up."""

    x_dtype = torch.bfloat16
    bias_input_dtype = torch.float32
    updates_by_layer = True

    def __init__(self, kernels: Kernels) -> None:
        BFloat16.__init__(self, torch.device("cpu"))
        self.kernels = kernels
        self.gradient_dtype = torch.bfloat16
        self.gather_kernel = kernels.gather_spliced

    def affine(self, x: Tensor, weight: Tensor, bias: Tensor, bias32: Tensor, activation: str, out: Tensor) -> None:
        if activation == "sigmoid":
            torch.mm(x, weight.t(), out=out)
            self.kernels.sigmoid_(out, bias32)
        else:
            super().affine(x, weight, bias, bias32, activation, out)

    def activation_backward_(self, activation: str, grad: Tensor, y: Tensor) -> None:
        if activation == "sigmoid":
            self.kernels.sigmoid_backward_(grad, y)
        else:
            super().activation_backward_(activation, grad, y)

    def column_sums(self, grad: Tensor, out: Tensor, weights: Tensor | None = None) -> None:
        self.kernels.column_sums(grad, out, weights)

    def cross_entropy(self, like: Tensor, pdfs: int, frames: int) -> SoftmaxCrossEntropy:
        return _SoftmaxCrossEntropyKernels(self.kernels, like, pdfs, frames)

    def load_rows(self, x: Tensor, out: Tensor, norms: Tensor) -> None:
        self.kernels.bf16_to_float32_rows(x, out, norms)

    def store_rows(self, made: Tensor, x: Tensor, norms: Tensor, last: Tensor | None = None) -> Tensor:
        self.kernels.float32_to_bf16_rows(made, x, norms, last)
        return x

    def scale_(self, grads: Sequence[Tensor], scales: Tensor) -> Sequence[float]:
        return cast(list[float], scales.tolist())

    def sgd_update(self, parameters: Tensor, copy: Tensor, gradient: Tensor, lr: float, decay: float = 1.0) -> None:
        self.kernels.sgd_update(parameters, copy, gradient, lr, decay)


class _SoftmaxCrossEntropyKernels(SoftmaxCrossEntropy):
    def __init__(self, kernels: Kernels, like: Tensor, pdfs: int, frames: int) -> None:
        super().__init__(like, pdfs, frames)
        self._kernels, self._row = kernels, like.new_empty(pdfs)

    def __call__(self, logits: Tensor, labels: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        loss, num_correct = self._kernels.cross_entropy(logits, labels, grad, self._row)
        return torch.tensor(loss, dtype=torch.float64), torch.tensor(num_correct)


def make_arithmetic(
    precision: Precision, device: torch.device, *, use_kernels: bool = True, pad_to: int | None = None
) -> Float32:
    """The arithmetic of a precision on a device. `use_kernels`: on a CPU use compiled kernels, where there are any that
    the processor supports and nothing is padded. `pad_to`: in bf16, see `Float32.pad_to`; None: `CUDA_PAD_TO` on a GPU,
    1 elsewhere."""
    if pad_to is None:
        pad_to = CUDA_PAD_TO if device.type == "cuda" and precision == "bf16" else 1
    on_kernels = use_kernels and pad_to == 1 and device.type == "cpu" and torch.get_num_threads() <= KERNELS_THREADS
    kernels = load_library() if on_kernels else None
    if kernels is None or precision not in kernels.supported:
        return Float32() if precision == "float32" else BFloat16(device, pad_to)
    return Float32Kernels(kernels) if precision == "float32" else BFloat16Kernels(kernels)
