"""Convolution and pooling: along frequency as Kaldi's nnet1 has them (nnet-convolutional-component.h,
nnet-max-pooling-component.h, nnet-average-pooling-component.h), with its derivatives where they are not the true ones;
and over time and frequency, by the same rules.

A convolution is one matrix product each way: what each patch reads of a row is copied into a row of its own, but where
the patches follow each other as they are. A product for each patch on views of the input, nothing copied,
was no faster, nor was a batched one. Nothing here has been seen on a GPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import ClassVar, NamedTuple

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


BLOCK = 2**20
"""Values of patches whose derivatives are made at once, in frames of a minibatch, so that they stay in the cache."""


class Axis(NamedTuple):
    """Windows along one axis of a row: of `size` places, `dilation` apart, moved by `step`; `length` places in all."""

    length: int
    size: int
    step: int
    dilation: int = 1

    @property
    def span(self) -> int:
        """Places from the first to the last that a window reads."""
        return (self.size - 1) * self.dilation + 1

    @property
    def windows(self) -> int:
        """How many there are."""
        return 1 + (self.length - self.span) // self.step

    @property
    def side_by_side(self) -> bool:
        """Whether every place is in one window, and those of a window follow each other."""
        return self.span == self.size and (self.windows == 1 or self.step == self.size)

    def shared(self) -> list[tuple[int, int, int]]:
        """Runs of places, first and end, and the number of windows that each of a run is in; without dilation."""
        read = [
            min(self.windows - 1, place // self.step) - max(0, -(-(place - self.size + 1) // self.step)) + 1
            for place in range(self.length)
        ]
        ends = [i for i in range(1, self.length) if read[i] != read[i - 1]] + [self.length]
        return [(first, end, read[first]) for first, end in zip([0, *ends], ends, strict=False)]


class Grid(NamedTuple):
    """A row as (times, bands, channels), from slow to fast, or (times, channels, bands), and the windows over it."""

    time: Axis
    band: Axis
    channels: int
    channels_last: bool = True


def check_fields(layer: Layer, names: str) -> None:
    """ValueError unless these fields are sizes."""
    check_sizes(**{name: getattr(layer, name) for name in names.split()})


class Filters(Layer):
    """What convolutions have in common. A patch reads a window of times and bands with all their channels; the elements
    of a filter have the order of the row. The output is (times', bands', filters). Weights have neither momentum nor
    weight decay, and the gradient is summed over the patches."""

    filters: int
    learn_rate_coef: float
    bias_learn_rate_coef: float
    max_norm: float
    weight_stddev: float
    bias_mean: float
    bias_range: float

    @property
    @abstractmethod
    def grid(self) -> Grid: ...

    def check(self) -> None:
        """ValueError: not a layer. To be called when the sizes have been checked."""
        check_sizes(inputs=self.input_dim, outputs=self.output_dim)
        check_coefs(self.learn_rate_coef, self.bias_learn_rate_coef, self.max_norm)
        check_coefs(self.weight_stddev, self.bias_mean, self.bias_range)

    @cached_property
    def patches(self) -> int:
        """P, of a row."""
        return self.grid.time.windows * self.grid.band.windows

    @cached_property
    def fan_in(self) -> int:
        """K, the values that a filter reads."""
        return self.grid.time.size * self.grid.channels * self.grid.band.size

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
        time, band, channels, channels_last = self.grid
        in_order = band.windows == 1 or (time.size == 1 and (channels_last or channels == 1))
        return in_order and time.side_by_side and band.side_by_side

    @property
    def saved(self) -> Mapping[str, Shape]:
        return {} if self._side_by_side else {"patches": (self.patches, self.fan_in)}

    def _windows(self, x: Tensor, *, channels_last: bool) -> Tensor:
        """What each patch reads of x (frames, input_dim), as a view of it: (frames, times', bands', times, bands,
        channels), or with channels before bands."""
        time, band, channels, _ = self.grid
        if channels_last:
            x = x.view(len(x), time.length, band.length, channels)
            x = x.unfold(1, time.span, time.step)[..., :: time.dilation]
            return x.unfold(2, band.size, band.step).permute(0, 1, 2, 4, 5, 3)
        x = x.view(len(x), time.length, channels, band.length)
        x = x.unfold(1, time.span, time.step)[..., :: time.dilation]
        return x.unfold(3, band.size, band.step).permute(0, 1, 3, 4, 2, 5)

    @cached_property
    def _apart(self) -> list[tuple[slice | int, ...]]:
        """Indices into `_windows`, channels last, of parts that read no column twice: patches, or elements, whichever are fewer."""
        time, band, *_ = self.grid
        every = slice(None)
        if self.patches <= time.size * band.size:
            return [(every, t, b) for t, b in product(range(time.windows), range(band.windows))]
        return [(every, every, every, i, j) for i, j in product(range(time.size), range(band.size))]

    def _rows(self, x: Tensor, saved: Views) -> Tensor:
        """The patches of all frames, (frames * P, K), of which the forward pass has filled `saved`."""
        return x.view(-1, self.fan_in) if self._side_by_side else saved["patches"].view(-1, self.fan_in)

    def forward(self, a: Float32, p: Params, x: Tensor, y: Tensor, saved: Views) -> None:
        if saved:
            windows = self._windows(x, channels_last=self.grid.channels_last)
            saved["patches"].view(windows.shape).copy_(windows)
        weight, bias, bias32 = p.values["weight"], p.values["bias"], p.float32["bias"]
        a.affine(self._rows(x, saved), weight, bias, bias32, "linear", y.view(-1, self.filters))

    def backward(
        self, a: Float32, p: Params, x: Tensor, y: Tensor, grad: Tensor, grad_x: Tensor | None, saved: Views
    ) -> None:
        if grad_x is None:
            return
        if self._side_by_side:
            matmul_out(grad.view(-1, self.filters), p.values["weight"], grad_x.view(-1, self.fan_in))
            return
        time, band, channels, channels_last = self.grid
        weight, fold = p.values["weight"], grad_x
        if not channels_last and channels > 1:  # with the channels inside the bands longer runs are added
            weight = weight.view(-1, time.size, channels, band.size).transpose(2, 3).reshape(weight.shape)
            fold = torch.empty_like(grad_x)
        block = max(1, BLOCK // (self.patches * self.fan_in))
        for d, out in zip(torch.split(grad, block), torch.split(fold, block), strict=True):
            windows = self._windows(out.zero_(), channels_last=True)
            made = d.new_empty(len(d) * self.patches, self.fan_in)
            matmul_out(d.view(-1, self.filters), weight, made)
            parts = made.view(windows.shape)
            for part in self._apart:  # patches overlap: what reads a column twice cannot be added to at once
                windows[part] += parts[part]
        if fold is not grad_x:
            inside = fold.view(len(fold), time.length, band.length, channels).transpose(2, 3)
            grad_x.view(inside.shape).copy_(inside)

    def statistics(self, x: Tensor, grad: Tensor, saved: Views) -> tuple[Tensor, Tensor]:
        return self._rows(x, saved), grad.view(-1, self.filters)

    def after_update(self, p: Views) -> bool:
        return limit_row_norms(p["weight"], self.max_norm)

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        p["weight"].copy_(torch.randn(p["weight"].shape, generator=generator) * self.weight_stddev)
        uniform = torch.rand(p["bias"].shape, generator=generator) - 0.5
        p["bias"].copy_(uniform * self.bias_range + self.bias_mean)


@dataclass(frozen=True)
class Convolution(Filters):
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
        check_fields(self, "in_features patch_dim patch_step patch_stride filters")
        check_pieces("patch_stride", self.in_features, self.patch_stride, "inputs")
        window_count("patch_dim", self.patch_stride, self.patch_dim, self.patch_step)
        self.check()

    @cached_property
    def grid(self) -> Grid:
        bands = Axis(self.patch_stride, self.patch_dim, self.patch_step)
        return Grid(Axis(1, 1, 1), bands, self.in_features // self.patch_stride, channels_last=False)

    @property
    def in_shape(self) -> Shape:
        return (self.in_features,)

    @property
    def out_shape(self) -> Shape:
        return (self.patches, self.filters)

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
class Convolution2d(Filters):
    """A convolution over time and frequency, linear: y[t', b', f] = b[f] + sum over i, c, j of W[f, (i, c, j)] x[t'
    `time_step` + i `time_dilation`, c, b' `band_step` + j], for all `channels` c. ValueError: the sizes do not fit.

    A row is (times, channels, bands), as spliced features are, whose channels are the static features and their deltas;
    with `channels_last` (times, bands, channels), as the output of a convolution is, whose channels are its filters.
    `time_size`, `band_size`: of a filter. nnet1 has no such component.

    A layer of a TDNN is one with the whole of a frame as its band, and that of the frames t-3, t, t+3 has `time_size` 3
    and `time_dilation` 3: `splice` within the network. Each frame of a minibatch computes all of its context, as its
    neighbors are elsewhere.
    """

    kind: ClassVar[str] = "conv2d"

    times: int
    channels: int
    bands: int
    time_size: int
    band_size: int
    filters: int
    time_step: int = 1
    band_step: int = 1
    time_dilation: int = 1
    channels_last: bool = False
    learn_rate_coef: float = 1.0
    bias_learn_rate_coef: float = 1.0
    max_norm: float = 0.0
    weight_stddev: float = 0.1
    bias_mean: float = -2.0
    bias_range: float = 2.0

    def __post_init__(self) -> None:
        check_fields(self, "times channels bands time_size band_size filters time_step band_step time_dilation")
        if type(self.channels_last) is not bool:
            raise ValueError(f"channels_last {self.channels_last!r}, expected true or false")
        span = (
            "time_size"
            if self.time_dilation == 1
            else f"time_size {self.time_size} {self.time_dilation} apart, a span of"
        )
        window_count(span, self.times, self.grid.time.span, self.time_step, "frames")
        window_count("band_size", self.bands, self.band_size, self.band_step)
        self.check()

    @cached_property
    def grid(self) -> Grid:
        times = Axis(self.times, self.time_size, self.time_step, self.time_dilation)
        return Grid(times, Axis(self.bands, self.band_size, self.band_step), self.channels, self.channels_last)

    @property
    def in_shape(self) -> Shape:
        inner = (self.bands, self.channels) if self.channels_last else (self.channels, self.bands)
        return (self.times, *inner)

    @property
    def out_shape(self) -> Shape:
        return (self.grid.time.windows, self.grid.band.windows, self.filters)


class Pools(Layer):
    """What pooling layers have in common. A row is (times, bands, channels); a pool is a window of times and bands, each
    channel by itself, and the output (times', bands', channels). Pools may overlap. The derivative of an input is then,
    as in nnet1, divided by the number of pools that it takes part in."""

    @property
    @abstractmethod
    def grid(self) -> Grid: ...

    @property
    def in_shape(self) -> Shape:
        return (self.grid.time.length, self.grid.band.length, self.grid.channels)

    @property
    def out_shape(self) -> Shape:
        return (self.grid.time.windows, self.grid.band.windows, self.grid.channels)

    @cached_property
    def _shared(self) -> list[tuple[slice, slice, int]]:
        """Times and bands that several pools read, and how many do."""
        runs = product(self.grid.time.shared(), self.grid.band.shared())
        return [(slice(*t[:2]), slice(*b[:2]), t[2] * b[2]) for t, b in runs if t[2] * b[2] > 1]

    def _members(self, x: Tensor) -> Iterator[Tensor]:
        """Views of x (frames, input_dim): of every pool the first member (frames, times', bands', channels), the
        second, ..."""
        time, band, *_ = self.grid
        x = x.view(len(x), *self.in_shape)
        for r, s in product(range(time.size), range(band.size)):
            last = r + (time.windows - 1) * time.step, s + (band.windows - 1) * band.step
            yield x[:, r : last[0] + 1 : time.step, s : last[1] + 1 : band.step]

    @abstractmethod
    def _pool(self, members: Iterator[Tensor], y: Tensor) -> None:
        """y (frames, times', bands', channels) <- the pools of their members."""

    @abstractmethod
    def _derivative(self, member: Tensor, y: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        """out (frames, times', bands', channels) <- the derivative with respect to one member of each pool."""

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
        part = torch.empty_like(grad)
        for member, out in zip(self._members(x), self._members(grad_x.zero_()), strict=True):
            out += self._derivative(member, y, grad, part)
        shared = grad_x.view(len(x), *self.in_shape)
        for times, bands, count in self._shared:
            shared[:, times, bands].div_(count)

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        """Nothing: there are no parameters."""


class Largest(Pools):
    """The largest of a pool, which is never below -1e20. Each input that equals it has all of its derivative."""

    def _pool(self, members: Iterator[Tensor], y: Tensor) -> None:
        torch.clamp(next(members), min=-1e20, out=y)
        for member in members:
            torch.maximum(y, member, out=y)

    def _derivative(self, member: Tensor, y: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        return torch.eq(member, y, out=out).mul_(grad)  # a mask of bool would take ten times as long


class Mean(Pools):
    """The mean of a pool."""

    @property
    def _size(self) -> int:
        return self.grid.time.size * self.grid.band.size

    def _pool(self, members: Iterator[Tensor], y: Tensor) -> None:
        y.copy_(next(members))
        for member in members:
            y += member
        y /= self._size

    def _derivative(self, member: Tensor, y: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        return torch.div(grad, self._size, out=out)


@dataclass(frozen=True)
class Pooling(Pools):
    """Pools neighboring patches of a convolution, each filter by itself: pool q reads the patches q `pool_step` to
    q `pool_step` + `pool_size` - 1. A row has patches of `pool_stride` filters, one after another, and becomes pools of
    as many. ValueError: the sizes do not fit."""

    component: ClassVar[type[nnet1.MaxPoolingComponent | nnet1.AveragePoolingComponent]]

    in_features: int
    pool_size: int
    pool_step: int
    pool_stride: int

    def __post_init__(self) -> None:
        check_fields(self, "in_features pool_size pool_step pool_stride")
        check_pieces("pool_stride", self.in_features, self.pool_stride, "inputs")
        if self.pool_step > self.pool_size:
            raise ValueError(f"pool_step {self.pool_step} skips inputs; 1 to {self.pool_size} do not (pool_size)")
        window_count("pool_size", self.in_features // self.pool_stride, self.pool_size, self.pool_step, "patches")

    @cached_property
    def grid(self) -> Grid:
        patches = Axis(self.in_features // self.pool_stride, self.pool_size, self.pool_step)
        return Grid(Axis(1, 1, 1), patches, self.pool_stride)

    def to_nnet1(self, p: Views) -> list[nnet1.Component]:
        return [self.component(self.in_features, self.pool_size, self.pool_step, self.pool_stride)]

    @classmethod
    def from_nnet1(cls, components: Sequence[nnet1.Component]) -> tuple[Layer, Tensor, int] | None:
        if not isinstance(one := components[0], cls.component):
            return None
        return cls(one.input_dim, one.pool_size, one.pool_step, one.pool_stride), as_parameters(), 1


@dataclass(frozen=True)
class MaxPooling(Largest, Pooling):
    """`Largest` of neighboring patches."""

    kind: ClassVar[str] = "max-pool"
    component = nnet1.MaxPoolingComponent


@dataclass(frozen=True)
class AveragePooling(Mean, Pooling):
    """`Mean` of neighboring patches."""

    kind: ClassVar[str] = "average-pool"
    component = nnet1.AveragePoolingComponent


@dataclass(frozen=True)
class Pooling2d(Pools):
    """Pools of `time_size` times and `band_size` bands of a row (times, bands, channels), such as `Convolution2d` gives.
    ValueError: the sizes do not fit. nnet1 has no such component."""

    times: int
    bands: int
    channels: int
    time_size: int
    band_size: int
    time_step: int
    band_step: int

    def __post_init__(self) -> None:
        check_fields(self, "times bands channels time_size band_size time_step band_step")
        for name, what, axis in (("time", "frames", self.grid.time), ("band", "bands", self.grid.band)):
            if axis.step > axis.size:
                raise ValueError(f"{name}_step {axis.step} skips inputs; 1 to {axis.size} do not ({name}_size)")
            window_count(f"{name}_size", axis.length, axis.size, axis.step, what)
        check_sizes(inputs=self.input_dim)

    @cached_property
    def grid(self) -> Grid:
        times = Axis(self.times, self.time_size, self.time_step)
        return Grid(times, Axis(self.bands, self.band_size, self.band_step), self.channels)


@dataclass(frozen=True)
class MaxPooling2d(Largest, Pooling2d):
    """`Largest` of times and bands."""

    kind: ClassVar[str] = "max-pool2d"


@dataclass(frozen=True)
class AveragePooling2d(Mean, Pooling2d):
    """`Mean` of times and bands."""

    kind: ClassVar[str] = "average-pool2d"
