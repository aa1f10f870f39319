"""Convolution along frequency and pooling, as Kaldi's nnet1 has them (nnet-convolutional-component.h,
nnet-max-pooling-component.h, nnet-average-pooling-component.h), with its derivatives where they are not the true ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor

from ddnn.kaldi import nnet1
from ddnn.nn.arithmetic import Float32, matmul_out
from ddnn.nn.layer import (
    Gemm,
    Layer,
    Parameter,
    Params,
    Shape,
    Views,
    as_array,
    as_given,
    as_parameters,
    check_coefs,
    check_sizes,
    limit_row_norms,
)


def nearest_divisors(number: int, to: int) -> str:
    """The divisors of `number` next to `to`, below and above, as text."""
    divisors = sorted({d for one in range(1, int(number**0.5) + 1) if number % one == 0 for d in (one, number // one)})
    below, above = [d for d in divisors if d < to][-1:], [d for d in divisors if d > to][:1]
    return " and ".join(map(str, below + above))


def check_pieces(name: str, whole: int, size: int, what: str) -> None:
    """ValueError, with the nearest sizes that fit, unless pieces of `size` make up `whole`."""
    if whole % size:
        raise ValueError(f"{name} {size} does not divide {whole} {what}; {nearest_divisors(whole, size)} would")


def window_count(name: str, length: int, size: int, step: int, what: str = "bands") -> int:
    """How often a window of `size`, moved by `step`, finds place in `length`, of which nothing may be left over.
    ValueError, with the nearest sizes and steps that fit: something is."""
    if size > length:
        raise ValueError(f"{name} {size} does not fit into {length} {what}; 1 to {length} do")
    rest = (length - size) % step
    if rest:
        sizes = [fit for fit in (size - step + rest, size + rest) if fit > 0]
        raise ValueError(
            f"{name} {size} moved by steps of {step} leaves {rest} of {length} {what} over; with this step "
            f"{name} {' and '.join(map(str, sizes))} fit, with this {name} steps of {nearest_divisors(length - size, step)}"
        )
    return 1 + (length - size) // step


@dataclass(frozen=True)
class Convolution(Layer):
    """nnet1's convolution: filters that move along each of the pieces of a row at once, y[p M + f] = b[f] + sum over k
    of W[f, k] x[column(p, k)]; linear, an activation is a layer of its own. ValueError: the sizes do not fit.

    A row has S pieces of `patch_stride` values. Patch p takes `patch_dim` values of each piece, from p `patch_step` on;
    element k = s `patch_dim` + i of a filter reads column s `patch_stride` + p `patch_step` + i. The output has the M
    filters of a patch side by side, patch after patch. Over the bands of spliced features, `patch_stride` is the number
    of bands of one stream (feature kind and frame offset). Over the output of another convolution, pools of M filters,
    the filters move along frequency where `patch_stride` is all of the row, `patch_dim` bands * M, `patch_step` a
    multiple of M. Weights have neither momentum nor weight decay, and the gradient is summed over the patches.

    `filters`: M. `max_norm`: after each update a filter, its bias apart, whose L2 norm is above it is scaled down to
    it; 0 is none. `weight_stddev`, `bias_mean`, `bias_range`: W begins as N(0, stddev^2), b uniform in mean +- range/2.
    """

    kind: ClassVar[str] = "conv"

    in_features: int
    patch_dim: int
    patch_step: int
    patch_stride: int
    filters: int
    learn_rate_coef: float = 1.0
    bias_learn_rate_coef: float = 1.0
    max_norm: float = 0.0
    weight_stddev: float = 0.1
    bias_mean: float = -2.0
    bias_range: float = 2.0

    def __post_init__(self) -> None:
        check_sizes(
            in_features=self.in_features,
            patch_dim=self.patch_dim,
            patch_step=self.patch_step,
            patch_stride=self.patch_stride,
            filters=self.filters,
        )
        check_pieces("patch_stride", self.in_features, self.patch_stride, "inputs")
        window_count("patch_dim", self.patch_stride, self.patch_dim, self.patch_step)
        check_sizes(outputs=self.output_dim)
        check_coefs(self.learn_rate_coef, self.bias_learn_rate_coef, self.max_norm)
        check_coefs(self.weight_stddev, self.bias_mean, self.bias_range)

    @cached_property
    def pieces(self) -> int:
        """S."""
        return self.in_features // self.patch_stride

    @cached_property
    def patches(self) -> int:
        """P."""
        return 1 + (self.patch_stride - self.patch_dim) // self.patch_step

    @cached_property
    def fan_in(self) -> int:
        """K, the values that a filter reads."""
        return self.pieces * self.patch_dim

    @property
    def in_shape(self) -> Shape:
        return (self.in_features,)

    @property
    def out_shape(self) -> Shape:
        return (self.patches, self.filters)

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        weight = Parameter((self.filters, self.fan_in), self.learn_rate_coef, momentum=False)
        return {"weight": weight, "bias": Parameter((self.filters,), self.bias_learn_rate_coef, momentum=False)}

    @cached_property
    def gemm(self) -> Gemm:
        return Gemm(self.patches, self.fan_in, self.filters)

    @cached_property
    def _side_by_side(self) -> bool:
        """Whether the patches follow each other in a row as it is."""
        return self.patches == 1 or (self.pieces == 1 and self.patch_step == self.patch_dim)

    @property
    def saved(self) -> Mapping[str, Shape]:
        return {} if self._side_by_side else {"patches": (self.patches, self.fan_in)}

    def _windows(self, x: Tensor) -> Tensor:
        """What each patch reads of x (frames, in_features), as a view of it: (frames, P, S, patch_dim)."""
        return x.view(len(x), self.pieces, -1).unfold(2, self.patch_dim, self.patch_step).transpose(1, 2)

    def _rows(self, x: Tensor, saved: Views) -> Tensor:
        """The patches of all frames, (frames * P, K), of which the forward pass has filled `saved`."""
        return x.view(-1, self.fan_in) if self._side_by_side else saved["patches"].view(-1, self.fan_in)

    def forward(self, a: Float32, p: Params, x: Tensor, y: Tensor, saved: Views) -> None:
        if saved:
            windows = self._windows(x)
            saved["patches"].view(windows.shape).copy_(windows)
        weight, bias, bias32 = p.values["weight"], p.values["bias"], p.float32["bias"]
        a.affine(self._rows(x, saved), weight, bias, bias32, "linear", y.view(-1, self.filters))

    def backward(
        self, a: Float32, p: Params, x: Tensor, y: Tensor, grad: Tensor, grad_x: Tensor | None, saved: Views
    ) -> None:
        if grad_x is None:
            return
        rows = grad.view(-1, self.filters)
        if self._side_by_side:
            matmul_out(rows, p.values["weight"], grad_x.view(-1, self.fan_in))
            return
        parts = torch.mm(rows, p.values["weight"]).view(len(grad), self.patches, self.pieces, self.patch_dim)
        windows = self._windows(grad_x.zero_())
        for patch in range(self.patches):  # neighbors overlap: each is a view that is added to
            windows[:, patch] += parts[:, patch]

    def statistics(self, x: Tensor, grad: Tensor, saved: Views) -> tuple[Tensor, Tensor]:
        return self._rows(x, saved), grad.view(-1, self.filters)

    def after_update(self, p: Views) -> bool:
        return limit_row_norms(p["weight"], self.max_norm)

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        p["weight"].copy_(torch.randn(p["weight"].shape, generator=generator) * self.weight_stddev)
        uniform = torch.rand(p["bias"].shape, generator=generator) - 0.5
        p["bias"].copy_(uniform * self.bias_range + self.bias_mean)

    def to_nnet1(self, p: Views) -> list[nnet1.Component]:
        sizes = (self.in_features, self.patch_dim, self.patch_step, self.patch_stride)
        numbers = (self.learn_rate_coef, self.bias_learn_rate_coef, self.max_norm)
        return [nnet1.ConvolutionalComponent(*sizes, as_array(p["weight"]), as_array(p["bias"]), *numbers)]

    @classmethod
    def from_nnet1(cls, components: Sequence[nnet1.Component]) -> tuple[Layer, Tensor, int] | None:
        if not isinstance(one := components[0], nnet1.ConvolutionalComponent):
            return None
        sizes = (one.input_dim, one.patch_dim, one.patch_step, one.patch_stride, len(one.filters))
        numbers = as_given(one.learn_rate_coef, one.bias_learn_rate_coef, one.max_norm)
        return cls(*sizes, *numbers), as_parameters(one.filters, one.bias), 1


@dataclass(frozen=True)
class Pooling(Layer):
    """Pools neighboring patches of a convolution, each filter by itself: pool q reads the patches q `pool_step` to
    q `pool_step` + `pool_size` - 1. A row has patches of `pool_stride` filters, one after another, and becomes pools of
    as many. Pools may overlap. The derivative of an input is then, as in nnet1, divided by the number of pools that it
    takes part in. ValueError: the sizes do not fit."""

    component: ClassVar[type[nnet1.MaxPoolingComponent | nnet1.AveragePoolingComponent]]

    in_features: int
    pool_size: int
    pool_step: int
    pool_stride: int

    def __post_init__(self) -> None:
        check_sizes(
            in_features=self.in_features,
            pool_size=self.pool_size,
            pool_step=self.pool_step,
            pool_stride=self.pool_stride,
        )
        check_pieces("pool_stride", self.in_features, self.pool_stride, "inputs")
        if self.pool_step > self.pool_size:
            raise ValueError(f"pool_step {self.pool_step} skips inputs; 1 to {self.pool_size} do not (pool_size)")
        window_count("pool_size", self.patches, self.pool_size, self.pool_step, "patches")

    @cached_property
    def patches(self) -> int:
        return self.in_features // self.pool_stride

    @cached_property
    def pools(self) -> int:
        return 1 + (self.patches - self.pool_size) // self.pool_step

    @property
    def in_shape(self) -> Shape:
        return (self.patches, self.pool_stride)

    @property
    def out_shape(self) -> Shape:
        return (self.pools, self.pool_stride)

    @cached_property
    def _shared(self) -> list[tuple[int, int, int]]:
        """Runs of patches, first and end, that several pools read, and how many."""
        runs, first = [], 0
        for count, run in groupby(map(self._pools_of, range(self.patches))):
            end = first + len(list(run))
            runs.append((first, end, count))
            first = end
        return [run for run in runs if run[2] > 1]

    def _pools_of(self, patch: int) -> int:
        first = max(0, -(-(patch - self.pool_size + 1) // self.pool_step))
        return min(self.pools - 1, patch // self.pool_step) - first + 1

    def _members(self, x: Tensor) -> Iterator[Tensor]:
        """Views of x (frames, in_features): the first member of every pool (frames, pools, filters), the second, ..."""
        patches = x.view(len(x), self.patches, self.pool_stride)
        span = (self.pools - 1) * self.pool_step + 1
        return (patches[:, r : r + span : self.pool_step] for r in range(self.pool_size))

    @abstractmethod
    def _pool(self, members: Iterator[Tensor], y: Tensor) -> None:
        """y (frames, pools, filters) <- the pools of their members."""

    @abstractmethod
    def _derivative(self, member: Tensor, y: Tensor, grad: Tensor, out: Tensor | None = None) -> Tensor:
        """The derivative with respect to one member of each pool, (frames, pools, filters), in `out` if given."""

    def forward(self, a: Float32, p: Params, x: Tensor, y: Tensor, saved: Views) -> None:
        self._pool(self._members(x), y.view(len(y), *self.out_shape))

    def backward(
        self, a: Float32, p: Params, x: Tensor, y: Tensor, grad: Tensor, grad_x: Tensor | None, saved: Views
    ) -> None:
        if grad_x is None:
            return
        y, grad = y.view(len(y), *self.out_shape), grad.view(len(y), *self.out_shape)
        if not self._shared:
            for member, out in zip(self._members(x), self._members(grad_x), strict=True):
                self._derivative(member, y, grad, out)
            return
        for member, out in zip(self._members(x), self._members(grad_x.zero_()), strict=True):
            out += self._derivative(member, y, grad)
        patches = grad_x.view(len(x), *self.in_shape)
        for first, end, count in self._shared:
            patches[:, first:end].div_(count)

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        """Nothing: there are no parameters."""

    def to_nnet1(self, p: Views) -> list[nnet1.Component]:
        return [self.component(self.in_features, self.pool_size, self.pool_step, self.pool_stride)]

    @classmethod
    def from_nnet1(cls, components: Sequence[nnet1.Component]) -> tuple[Layer, Tensor, int] | None:
        if not isinstance(one := components[0], cls.component):
            return None
        return cls(one.input_dim, one.pool_size, one.pool_step, one.pool_stride), as_parameters(), 1


@dataclass(frozen=True)
class MaxPooling(Pooling):
    """The largest of a pool, which is never below -1e20. Each input that equals it has all of its derivative."""

    kind: ClassVar[str] = "max-pool"
    component = nnet1.MaxPoolingComponent

    def _pool(self, members: Iterator[Tensor], y: Tensor) -> None:
        torch.clamp(next(members), min=-1e20, out=y)
        for member in members:
            torch.maximum(y, member, out=y)

    def _derivative(self, member: Tensor, y: Tensor, grad: Tensor, out: Tensor | None = None) -> Tensor:
        mask = torch.empty_like(grad) if out is None else out
        return torch.eq(member, y, out=mask).mul_(grad)  # a mask of bool would take ten times as long


@dataclass(frozen=True)
class AveragePooling(Pooling):
    """The mean of a pool."""

    kind: ClassVar[str] = "average-pool"
    component = nnet1.AveragePoolingComponent

    def _pool(self, members: Iterator[Tensor], y: Tensor) -> None:
        y.copy_(next(members))
        for member in members:
            y += member
        y /= self.pool_size

    def _derivative(self, member: Tensor, y: Tensor, grad: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.div(grad, self.pool_size, out=out)
