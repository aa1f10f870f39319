"""Layers that ddnn does not have, to see that a layer is one class and a line in `LAYERS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddnn.nn.layer import Gemm, Layer, LayerCall, Parameter, Shape, Views


@dataclass(frozen=True)
class Filters(Layer):
    """A convolution along a row: `filters` filters of `size` values, moved by `step`, on a row of `width`."""

    kind: ClassVar[str] = "filters"

    width: int
    size: int
    step: int
    filters: int
    activation: str = "tanh"

    @property
    def patches(self) -> int:
        return 1 + (self.width - self.size) // self.step

    @property
    def in_shape(self) -> Shape:
        return (self.width,)

    @property
    def out_shape(self) -> Shape:
        return (self.patches, self.filters)

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        shapes = {"weight": (self.filters, self.size), "bias": (self.filters,)}
        return {name: Parameter(shape, momentum=False) for name, shape in shapes.items()}  # as nnet1's convolution

    @property
    def gemm(self) -> Gemm:
        return Gemm(self.patches, self.size, self.filters)

    @property
    def saved(self) -> Mapping[str, Shape]:
        return {"patches": (self.patches, self.size)}

    def forward(self, call: LayerCall) -> None:
        patches = call.saved["patches"].copy_(call.x.unfold(1, self.size, self.step)).view(-1, self.size)
        call.a.affine(patches, *call.p.affine, self.activation, call.y.view(-1, self.filters))

    def backward(self, call: LayerCall) -> None:
        call.a.activation_backward_(self.activation, call.grad, call.y)
        if call.grad_x is None:
            return
        call.grad_x.zero_()
        for patch, d in enumerate(call.grad.view(-1, self.patches, self.filters).unbind(1)):
            first = patch * self.step
            call.grad_x[:, first : first + self.size] += d @ call.p.values["weight"]

    def statistics(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        return call.saved["patches"].view(-1, self.size), call.grad.view(-1, self.filters)

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        p["weight"].copy_(torch.randn(p["weight"].shape, generator=generator) / self.size**0.5)
        p["bias"].zero_()


@dataclass(frozen=True)
class Gain(Layer):
    """y = x * gain, per column, no gain above `largest`: parameters that are no matrix."""

    kind: ClassVar[str] = "gain"

    width: int
    largest: float = 1e9

    @property
    def in_shape(self) -> Shape:
        return (self.width,)

    @property
    def out_shape(self) -> Shape:
        return (self.width,)

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        return {"gain": Parameter((self.width,), learn_rate_coef=0.5)}

    def forward(self, call: LayerCall) -> None:
        torch.mul(call.x, call.p.values["gain"], out=call.y)

    def backward(self, call: LayerCall) -> None:
        if call.grad_x is not None:
            torch.mul(call.grad, call.p.values["gain"], out=call.grad_x)

    def gradient(self, call: LayerCall, out: Views) -> None:
        call.a.column_sums(call.grad * call.x, out["gain"])

    def gradient_norms(self, call: LayerCall) -> Tensor:
        return torch.linalg.vector_norm((call.grad * call.x).float(), dim=1)

    def after_update(self, p: Views) -> bool:
        above = bool((p["gain"] > self.largest).any())
        p["gain"].clamp_(max=self.largest)
        return above

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        p["gain"].fill_(1.0)


@dataclass(frozen=True)
class Pool(Layer):
    """The mean of each two neighboring positions of (positions, channels): no parameters."""

    kind: ClassVar[str] = "pool"

    positions: int
    channels: int

    @property
    def in_shape(self) -> Shape:
        return (self.positions, self.channels)

    @property
    def out_shape(self) -> Shape:
        return (self.positions // 2, self.channels)

    def forward(self, call: LayerCall) -> None:
        pairs = call.x.view(-1, self.positions // 2, 2, self.channels)
        torch.mean(pairs, 2, out=call.y.view(-1, *self.out_shape))

    def backward(self, call: LayerCall) -> None:
        if call.grad_x is not None:
            pairs = call.grad_x.view(-1, self.positions // 2, 2, self.channels)
            pairs.copy_(call.grad.view(-1, *self.out_shape)[:, :, None].expand_as(pairs)).mul_(0.5)

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        assert not p


TOYS: dict[str, type[Layer]] = {"filters": Filters, "gain": Gain, "pool": Pool}
