"""Convolution and pooling: along frequency as Kaldi's nnet1 has them (nnet-convolutional-component.h,
nnet-max-pooling-component.h, nnet-average-pooling-component.h), with its derivatives where they are not the true ones;
and over time and frequency, by the same rules.

A convolution is one matrix product each way: what each patch reads of a row is copied into a row of its own, but where
the patches follow each other as they are. A product for each patch on views of the input, nothing copied,
was no faster, nor was a batched one. Nothing here has been seen on a GPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from ddnn.kaldi import nnet1
from ddnn.nn.layer import (
    Gemm,
    Layer,
    LayerCall,
    Parameter,
    Shape,
    Views,
    as_array,
    as_parameters,
    check_coefs,
    check_sizes,
    limit_row_norms,
    numbers_of,
)
from ddnn.nn.products import matmul_out


def nearest_divisors(number: int, to: int) -> str:
    """The divisors of `number` next to `to`, below and above."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return " and ".join(map(str, [d for d in divisors if d <= to][-1:] + [d for d in divisors if d > to][:1]))


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

    def check(self, size: str, step: str, places: str) -> None:
        """ValueError, with the nearest sizes that fit, unless the windows cover all places. `size`, `step`: the keys of a
        recipe that say them; `places`: what the places are."""
        if self.span > self.length:
            if self.dilation > 1:
                dilated = f"with dilation {self.dilation} spans {self.span} of {self.length} {places}"
                raise ValueError(f"{size} {self.size} {dilated}")
            fit = f"{self.length} {places}; 1 to {self.length} do"
            if self.length == 1:
                fit = f"1 {places.removesuffix('es' if places == 'patches' else 's')}; 1 does"
            raise ValueError(f"{size} {self.size} does not fit into {fit}")
        moved = self.length - self.span
        rest = moved % self.step
        if rest and places == "patches" and self.step == self.size:  # pools that do not overlap
            fit = nearest_divisors(self.length, self.size)
            raise ValueError(f"{size} {self.size} does not divide {self.length} {places}; {fit} do")
        if rest:
            sizes = [fit for fit in (self.span + rest - self.step, self.span + rest) if fit > 0]
            raise ValueError(
                f"{size} {self.span} with {step} {self.step} leaves {rest} of {self.length} {places} over; "
                f"{size} {' and '.join(map(str, sizes))}, or {step} {nearest_divisors(moved, self.step)} fit"
            )

    @property
    def side_by_side(self) -> bool:
        """Whether every place is in one window, and those of a window follow each other."""
        return self.span == self.size and (self.windows == 1 or self.step == self.size)


class Grid(NamedTuple):
    """A row as (times, bands, channels), from slow to fast, or (times, channels, bands), and the windows over it."""

    time: Axis
    band: Axis
    channels: int
    channels_last: bool = True


def check_fields(layer: Layer, names: str) -> None:
    """ValueError unless these fields are sizes."""
    check_sizes(**{name: getattr(layer, name) for name in names.split()})


def row_of_pieces(in_features: int, stride: int, name: str) -> int:
    """How many pieces of `stride` values a row of nnet1 has. ValueError: the field `name` is not such a stride."""
    check_sizes(in_features=in_features, **{name: stride})
    if in_features % stride:
        fit = nearest_divisors(in_features, stride)
        raise ValueError(f"{name} {stride} does not divide {in_features} inputs; {fit} do")
    return in_features // stride


@dataclass(frozen=True)
class Convolution(Layer):
    """A convolution over time and frequency, linear: y[t', b', f] = b[f] + sum over i, c, j of W[f, (i, c, j)] x[t'
    `time_step` + i `time_dilation`, c, b' `band_step` + j], for all `channels` c. Weights have neither momentum nor weight
    decay, and the gradient is summed over the patches. ValueError: the sizes do not fit.

    A row is (times, channels, bands), as spliced features are, whose channels are the static features and their deltas;
    with `channels_last` (times, bands, channels), as the output of a convolution is, whose channels are its filters. A
    patch is a window of times and bands with all their channels; the elements of a filter have the order of the row. The
    output is (times', bands', filters).

    Filters that read all times move along the bands alone: they are nnet1's convolution, whose row has pieces of
    `patch_stride` values, and the fields become those of such a row, of one time: `channels` pieces of `bands` values each.

    A layer of a TDNN is one with the whole of a frame as its band, and that of the frames t-3, t, t+3 has `time_size` 3
    and `time_dilation` 3: `splice` within the network. Each frame of a minibatch computes all of its context, as its
    neighbors are elsewhere.

    `max_norm`: after each update a filter, its bias apart, whose L2 norm is above it is scaled down to it; 0 is none.
    `weight_stddev`, `bias_mean`, `bias_range`: W begins as N(0, stddev^2), b uniform in mean +- range/2.
    """

    kind: ClassVar[str] = "conv"
    component = nnet1.ConvolutionalComponent

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
        time, band = self._axes
        if time.size == time.span == time.length:
            band.check("patch", "step", "bands")
            self._merge_times()
        else:
            time.check("patch.time", "step.time", "frames")
            band.check("patch.bands", "step.bands", "bands")
        check_sizes(inputs=self.input_dim, outputs=self.output_dim)
        check_coefs(self.learn_rate_coef, self.bias_learn_rate_coef, self.max_norm)
        check_coefs(self.weight_stddev, self.bias_mean, self.bias_range)

    def _merge_times(self) -> None:
        """Makes the times further pieces of the row, and the channels inside the bands values of these."""
        pieces, wide = (self.times, self.channels) if self.channels_last else (self.times * self.channels, 1)
        merged = {
            "times": 1,
            "time_size": 1,
            "time_step": 1,
            "time_dilation": 1,
            "channels": pieces,
            "channels_last": False,
        }
        merged |= {name: getattr(self, name) * wide for name in ("bands", "band_size", "band_step")}
        for name, value in merged.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of_pieces(
        cls,
        in_features: int,
        patch_dim: int,
        patch_step: int,
        patch_stride: int,
        filters: int,
        *args: Any,
        **numbers: Any,
    ) -> Convolution:
        """By the fields of nnet1: the patch p takes `patch_dim` values of each piece of `patch_stride` values, from p
        `patch_step` on. Then the fields from `learn_rate_coef` on."""
        check_sizes(patch_dim=patch_dim, patch_step=patch_step, filters=filters)
        pieces = row_of_pieces(in_features, patch_stride, "patch_stride")
        return cls(1, pieces, patch_stride, 1, patch_dim, filters, 1, patch_step, 1, False, *args, **numbers)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Layer:
        return cls.of_pieces(**fields) if "patch_dim" in fields else cls(**fields)

    @property
    def _axes(self) -> tuple[Axis, Axis]:
        times = Axis(self.times, self.time_size, self.time_step, self.time_dilation)
        return times, Axis(self.bands, self.band_size, self.band_step)

    @cached_property
    def grid(self) -> Grid:
        return Grid(*self._axes, self.channels, self.channels_last)

    @property
    def in_shape(self) -> Shape:
        inner = (self.bands, self.channels) if self.channels_last else (self.channels, self.bands)
        return (self.times, *inner)

    @property
    def out_shape(self) -> Shape:
        return (self.grid.time.windows, self.grid.band.windows, self.filters)

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

    @property
    def units(self) -> int:
        return self.filters

    def of_units(self, start: int, end: int, units: int) -> Convolution:
        return replace(self, filters=end - start)

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

    def _rows(self, call: LayerCall) -> Tensor:
        """The patches of all frames, (frames * P, K), of which the forward pass has filled `saved`."""
        return (call.x if self._side_by_side else call.saved["patches"]).view(-1, self.fan_in)

    def forward(self, call: LayerCall) -> None:
        if not self._side_by_side:
            windows = self._windows(call.x, channels_last=self.grid.channels_last)
            call.saved["patches"].view(windows.shape).copy_(windows)
        call.a.affine(self._rows(call), *call.p.affine, "linear", call.y.view(-1, self.filters))

    def backward(self, call: LayerCall) -> None:
        grad_x, weight = call.grad_x, call.p.values["weight"]
        if grad_x is None:
            return
        if self._side_by_side:
            matmul_out(call.grad.view(-1, self.filters), weight, grad_x.view(-1, self.fan_in))
            return
        time, band, channels, channels_last = self.grid
        fold = grad_x
        if not channels_last and channels > 1:  # with the channels inside the bands longer runs are added
            weight = weight.view(-1, time.size, channels, band.size).transpose(2, 3).reshape(weight.shape)
            fold = torch.empty_like(grad_x)
        block = max(1, BLOCK // (self.patches * self.fan_in))
        for d, out in zip(torch.split(call.grad, block), torch.split(fold, block), strict=True):
            windows = self._windows(out.zero_(), channels_last=True)
            made = d.new_empty(len(d) * self.patches, self.fan_in)
            matmul_out(d.view(-1, self.filters), weight, made)
            parts = made.view(windows.shape)
            for part in self._apart:  # patches overlap: what reads a column twice cannot be added to at once
                windows[part] += parts[part]
        if fold is not grad_x:
            inside = fold.view(len(fold), time.length, band.length, channels).transpose(2, 3)
            grad_x.view(inside.shape).copy_(inside)

    def statistics(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        return self._rows(call), call.grad.view(-1, self.filters)

    def after_update(self, p: Views) -> bool:
        return limit_row_norms(p["weight"], self.max_norm)

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        p["weight"].copy_(torch.randn(p["weight"].shape, generator=generator) * self.weight_stddev)
        uniform = torch.rand(p["bias"].shape, generator=generator) - 0.5
        p["bias"].copy_(uniform * self.bias_range + self.bias_mean)

    def to_nnet1(self, p: Views) -> list[nnet1.Component]:
        if self.times > 1:
            raise ValueError("nnet1 has no component for a convolution over time")
        sizes = (self.input_dim, self.band_size, self.band_step, self.bands)
        numbers = (self.learn_rate_coef, self.bias_learn_rate_coef, self.max_norm)
        return [nnet1.ConvolutionalComponent(*sizes, as_array(p["weight"]), as_array(p["bias"]), *numbers)]

    @classmethod
    def from_nnet1(cls, component: Any) -> tuple[Layer, Tensor]:
        sizes = (component.input_dim, component.patch_dim, component.patch_step, component.patch_stride)
        layer = cls.of_pieces(*sizes, len(component.filters), **numbers_of(component, cls))
        return layer, as_parameters(component.filters, component.bias)


@dataclass(frozen=True)
class Pooling(Layer):
    """Pools of `time_size` times and `band_size` bands of a row (times, bands, channels), such as a convolution gives, each
    channel by itself; the output is (times', bands', channels). Pools may overlap. The derivative of an input is then, as
    in nnet1, divided by the number of pools that it takes part in. ValueError: the sizes do not fit."""

    times: int
    bands: int
    channels: int
    time_size: int
    band_size: int
    time_step: int
    band_step: int

    def __post_init__(self) -> None:
        check_fields(self, "times bands channels time_size band_size time_step band_step")
        check_sizes(inputs=self.input_dim)
        time, band, *_ = self.grid
        for axis, name in ((time, ".time"), (band, ".bands")) if self.times > 1 else ((time, ".time"), (band, "")):
            if axis.step > axis.size:
                skips = f"would skip patches between pools of {axis.size}; 1 to {axis.size} do not"
                raise ValueError(f"pool_step{name} {axis.step} {skips}")
            axis.check(f"pool{name}", f"pool_step{name}", "patches")

    @classmethod
    def of_patches(cls, in_features: int, pool_size: int, pool_step: int, pool_stride: int) -> Pooling:
        """By the fields of nnet1: a row has patches of `pool_stride` filters, one after another."""
        return cls(1, row_of_pieces(in_features, pool_stride, "pool_stride"), pool_stride, 1, pool_size, 1, pool_step)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Layer:
        return cls.of_patches(**fields) if "pool_size" in fields else cls(**fields)

    @cached_property
    def grid(self) -> Grid:
        times = Axis(self.times, self.time_size, self.time_step)
        return Grid(times, Axis(self.bands, self.band_size, self.band_step), self.channels)

    @property
    def in_shape(self) -> Shape:
        return (self.times, self.bands, self.channels)

    @property
    def out_shape(self) -> Shape:
        return (self.grid.time.windows, self.grid.band.windows, self.channels)

    @property
    def units(self) -> None:
        return None

    def of_units(self, start: int, end: int, units: int) -> Layer:
        if units != self.channels:  # of a model from elsewhere
            return super().of_units(start, end, units)
        return replace(self, channels=end - start)

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

    def forward(self, call: LayerCall) -> None:
        self._pool(self._members(call.x), call.y.view(-1, *self.out_shape))

    def backward(self, call: LayerCall) -> None:
        x, grad_x = call.x, call.grad_x
        if grad_x is None:
            return
        y, grad = (tensor.view(-1, *self.out_shape) for tensor in (call.y, call.grad))
        if self.grid.time.side_by_side and self.grid.band.side_by_side:
            for member, out in zip(self._members(x), self._members(grad_x), strict=True):
                self._derivative(member, y, grad, out)
            return
        part = torch.empty_like(grad)
        for member, out in zip(self._members(x), self._members(grad_x.zero_()), strict=True):
            out += self._derivative(member, y, grad, part)
        grad_x /= _times_read(self, x.device)

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        """Nothing: there are no parameters."""

    def to_nnet1(self, p: Views) -> list[nnet1.Component]:
        if self.times > 1:
            raise ValueError("nnet1 has no component for pooling over time")
        made: nnet1.Component = cast(Any, self.component)(self.input_dim, self.band_size, self.band_step, self.channels)
        return [made]

    @classmethod
    def from_nnet1(cls, component: Any) -> tuple[Layer, Tensor]:
        sizes = (component.input_dim, component.pool_size, component.pool_step, component.pool_stride)
        return cls.of_patches(*sizes), as_parameters()


@cache
def _times_read(layer: Pooling, device: torch.device) -> Tensor:
    """(1, input_dim): the pools that each input takes part in; made once."""
    counts = torch.zeros(1, layer.input_dim, device=device)
    for member in layer._members(counts):
        member += 1.0
    return counts


class MaxPooling(Pooling):
    """The largest of a pool, which is never below -1e20. Each input that equals it has all of its derivative."""

    kind: ClassVar[str] = "max-pool"
    component = nnet1.MaxPoolingComponent

    def _pool(self, members: Iterator[Tensor], y: Tensor) -> None:
        torch.clamp(next(members), min=-1e20, out=y)
        for member in members:
            torch.maximum(y, member, out=y)

    def _derivative(self, member: Tensor, y: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        return torch.eq(member, y, out=out).mul_(grad)  # a mask of bool would take ten times as long


class AveragePooling(Pooling):
    """The mean of a pool."""

    kind: ClassVar[str] = "average-pool"
    component = nnet1.AveragePoolingComponent

    @property
    def _size(self) -> int:
        return self.time_size * self.band_size

    def _pool(self, members: Iterator[Tensor], y: Tensor) -> None:
        y.copy_(next(members))
        for member in members:
            y += member
        y /= self._size

    def _derivative(self, member: Tensor, y: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        return torch.div(grad, self._size, out=out)
