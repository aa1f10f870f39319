"""What a network computes in: float32, bf16 by PyTorch, or bf16 with compiled kernels. One object, chosen once.

Layers, losses and optimizers call the methods of the object that they are given and never ask which it is.
docs/algorithms.md says what is in which precision, and why. In bf16 the layers multiply with a copy of the parameters,
which `ddnn.nn.network.Workspace` refreshes; on a GPU its output layer is wider than the network's, by outputs of zero
weight that neither loss nor update sees. On a CPU `ddnn.nn.kernels` does the element-wise parts of bf16, where it is
compiled: biases before a sigmoid are then added in float32 to the rounded product, and the update refreshes the copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor

from ddnn.nn.kernels import Kernels, load_library
from ddnn.nn.loss import SoftmaxCrossEntropy, SoftmaxCrossEntropyBFloat16
from ddnn.nn.processor import Processor, onednn_isa_limit, processor

aten = torch.ops.aten
Precision = Literal["float32", "bf16"]
"""What activations, derivatives and the factors of matrix products are held in; parameters are float32 in either."""

KERNELS_THREADS = 2
"""Most threads of a worker with which kernels, which run on one, are used: PyTorch shares its passes among them all."""

CUDA_PAD_TO = 64
"""Of the outputs in bf16 on a GPU, whose library wants rows to start at multiples of 16 bytes, which those of 8806 do
not, and likes 128. Not yet seen on a GPU."""

ONEDNN_FLOP = 1e7
"""Operations from which a product may be oneDNN's: a call of it takes 12 us more."""


LEADING = 2
"""Rows of W, which are ordered, that are not just rounded where X - X W^T W is computed in bf16. X^ keeps at least (k + 1)
alpha / D of row k from 0, of the first often 1 %, where rounding changes 0.2 %: by as much in all rows of X, if it is
their mean. Also in `kernels.c`."""


def matmul_out(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a b into `out`, for b a matrix or a vector; summed in float32. `out` is of the type of a and b, or float32 where
    `supports_float32_output(device)`. By oneDNN where `onednn_from` says so."""
    if out.dtype != a.dtype:
        columns = (1,) if b.dim() == 1 else b.shape[1:]
        aten.mm.dtype_out(a, b.view(-1, *columns), out.dtype, out=out.view(-1, *columns))
    elif b.dim() == 1:
        torch.mv(a, b, out=out)
    elif 2 * a.numel() * b.shape[1] >= onednn_from(a.dtype, a.device):
        out.copy_(onednn_product(a, b.t()))
    else:
        torch.mm(a, b, out=out)


def affine_out(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """out <- x W^T + b, as `matmul_out`."""
    if 2 * x.numel() * len(weight) >= onednn_from(x.dtype, x.device):
        out.copy_(onednn_product(x, weight, bias))
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T, plus b if there is one, by the operation that torch.compile uses for it. Plain: torch.mm."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, dense(weight), bias, "none", [], "")
    return made


def dense(matrix: Tensor) -> Tensor:
    """The matrix without gaps between its rows, or between its columns where these are contiguous: with gaps, as all
    columns but the last have, oneDNN multiplies 1000 times slower. A copy where there are any."""
    return matrix.contiguous() if matrix.stride(1) == 1 else matrix.t().contiguous().t()


@cache
def onednn_from(dtype: torch.dtype, device: torch.device, cpu: Processor | None = None) -> float:
    """The operations from which a product is `onednn_product`: `ONEDNN_FLOP` in float32 on an AMD processor with AVX-512,
    which MKL's, torch.mm's, leave unused there, if it is right, which is tried; else infinity. Nothing is timed."""
    if dtype != torch.float32 or device.type != "cpu" or onednn_isa_limit() is not None:
        return math.inf
    cpu = cpu or processor()
    if cpu.vendor != "AuthenticAMD" or "avx512f" not in cpu.flags:
        return math.inf
    x, weight, bias = (
        torch.arange(7.0 * 70).sin().view(70, 7).t(),
        torch.arange(70.0 * 40).cos().view(70, 40),
        torch.ones(40),
    )
    try:
        found = onednn_product(x, weight.t(), bias)
    except (AttributeError, RuntimeError):
        return math.inf
    expected = x.double() @ weight.double() + 1.0
    return ONEDNN_FLOP if torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5) else math.inf


@cache
def supports_float32_output(device: torch.device) -> bool:
    """Whether the device gives products of bf16 matrices in float32, unrounded: it is tried."""
    ones = torch.ones(257, 16, dtype=torch.bfloat16, device=device)
    matrix, column = torch.empty(16, 16, device=device), torch.empty(16, device=device)
    try:
        matmul_out(ones.t(), ones, out=matrix)
        matmul_out(ones.t(), ones[:, 0].contiguous(), out=column)
    except RuntimeError:
        return False
    return bool((matrix == 257).all() and (column == 257).all())  # bf16 has 256 and 258


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor, Tensor], object]]] = {
    "sigmoid": (torch.sigmoid_, lambda grad, y: aten.sigmoid_backward.grad_input(grad, y, grad_input=grad)),
    "tanh": (torch.tanh_, lambda grad, y: aten.tanh_backward.grad_input(grad, y, grad_input=grad)),
    "relu": (torch.relu_, lambda grad, y: aten.threshold_backward.grad_input(grad, y, 0, grad_input=grad)),
    "softmax": (lambda y: None, lambda grad, y: None),  # is part of the loss: the network gives logits
    "linear": (lambda y: None, lambda grad, y: None),
}
"""Activation -> y <- f(y), in place; grad <- grad * f'(x), in place, from y = f(x)."""


class Preconditioner(Protocol):
    """What an arithmetic knows of `ddnn.optim.natural_gradient.NaturalGradient`, which describes them."""

    w: Tensor
    j: Tensor

    def apply(self, x: Tensor, before: Tensor) -> None: ...

    def begin(self, n: int, rows: Callable[[], Tensor], before: Tensor) -> bool: ...

    def learn(self, x: Tensor, before: Tensor) -> None: ...

    def learn_from_j(self, before: Tensor) -> None: ...


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

    def precondition_exactly(
        self, by: Preconditioner, x: Tensor, made: Tensor, before: Tensor, after: Tensor, last: Tensor | None = None
    ) -> Tensor:
        """X <- X^, in float32. X is x (rows, columns) of `dtype`, and a further column of ones where `last` (rows,) is
        given, of which it gets what becomes of it. before, after (rows,) <- norms of the rows. made: float32 memory of
        the size of X, in float32 x itself where there is no `last`. Returns X^ without the last column, in `dtype`: in
        x or where it was made."""
        self.load_rows(x, made, before)
        by.apply(made, before)
        return self.store_rows(made, x, after, last)

    def precondition(
        self, by: Preconditioner, x: Tensor, made: Tensor, before: Tensor, after: Tensor, last: Tensor | None = None
    ) -> Tensor:
        """The same in the factors of this arithmetic."""
        return self.precondition_exactly(by, x, made, before, after, last)

    def _wide_rows(self, x: Tensor, out: Tensor, norms: Tensor) -> Tensor:
        self.load_rows(x, out, norms)
        return out

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

    def precondition(
        self, by: Preconditioner, x: Tensor, made: Tensor, before: Tensor, after: Tensor, last: Tensor | None = None
    ) -> Tensor:
        updates = by.begin(x.shape[0], partial(self._wide_rows, x, made, before), before)
        self.kernels.remove_projection_(x, by.w, before, after, last, by.j if updates else None)
        if updates:
            by.learn_from_j(before)
        return x


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

    def precondition(
        self, by: Preconditioner, x: Tensor, made: Tensor, before: Tensor, after: Tensor, last: Tensor | None = None
    ) -> Tensor:
        """In place, W and H = X W^T rounded to `dtype`, the norms after it those of what is rounded. H W takes away
        nearly all of the first `LEADING` directions: what rounding cut from their H and W is multiplied by itself.
        Waits for no GPU."""
        if by.begin(x.shape[0], partial(self._wide_rows, x, made, before), before):
            by.learn(self._wide_rows(x, made, before), before)
        columns = x.shape[1]
        low, w = by.w[:, :columns].to(self.dtype), by.w
        h = x.new_empty((x.shape[0], low.shape[0]), dtype=torch.float32)
        if self.gradient_dtype == torch.float32:
            matmul_out(x, low.t(), h)
        else:
            torch.mm(x.float(), low.float().t(), out=h)
        torch.linalg.vector_norm(x, dim=1, dtype=torch.float32, out=before)
        if last is not None:
            before.hypot_(before.new_ones(()))
            h += w[:, columns].to(self.dtype)
            torch.sub(1.0, h @ w[:, columns], out=last)
        rounded = h.to(self.dtype)
        rest_h = (h - rounded)[:, :LEADING].to(self.dtype)
        rest_w = (w[:LEADING, :columns] - low[:LEADING]).to(self.dtype)
        factors = torch.cat([rounded, rounded[:, :LEADING], rest_h], dim=1)
        x.addmm_(factors, torch.cat([low, rest_w, low[:LEADING]]), alpha=-1.0)
        torch.linalg.vector_norm(x, dim=1, dtype=torch.float32, out=after)
        if last is not None:
            after.hypot_(last)
        return x


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
