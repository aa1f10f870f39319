"""Layers that work on each column, or on a whole row, without a matrix product: Kaldi nnet1's activations as components of
their own, Rescale, AddShift, ParametricRelu, LengthNorm, Copy and Dropout.

Kaldi: `nnet-activation.h`, `nnet-parametric-relu.h`, `nnet-various.h`. None of them has momentum or weight decay, but
ParametricRelu, which has momentum. NG-SGD takes their plain gradient and limits its step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from ddnn.kaldi import nnet1
from ddnn.nn.arithmetic import ACTIVATIONS, Float32
from ddnn.nn.layer import (
    Layer,
    Parameter,
    Params,
    Shape,
    Views,
    as_array,
    as_parameters,
    check_coefs,
    check_sizes,
    numbers_of,
    torch_activation,
)

FUNCTIONS = tuple(name for name in ACTIVATIONS if name not in ("softmax", "linear"))


@dataclass(frozen=True)
class Elementwise(Layer):
    """A layer whose output has the columns of its input, `width` of them."""

    width: int

    def __post_init__(self) -> None:
        check_sizes(width=self.width)

    @property
    def in_shape(self) -> Shape:
        return (self.width,)

    @property
    def out_shape(self) -> Shape:
        return (self.width,)

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        pass

    def to_nnet1(self, p: Views) -> list[nnet1.Component]:
        """Its component has arrays and numbers of the same names."""
        if self.component is None:
            return super().to_nnet1(p)
        values: dict[str, Any] = {name: as_array(array) for name, array in p.items()} or {"dim": self.width}
        numbers = {
            field.name: getattr(self, field.name) for field in fields(self.component) if field.name not in values
        }
        return [self.component(**values, **numbers)]

    @classmethod
    def from_nnet1(cls, component: Any) -> tuple[Layer, Tensor]:
        arrays = [value for value in vars(component).values() if isinstance(value, np.ndarray)]
        return cls(component.dim, **numbers_of(component, cls)), as_parameters(*arrays)


@dataclass(frozen=True)
class Activation(Elementwise):
    """y = f(x), f of `FUNCTIONS`, where it does not follow an affine product: after Rescale and AddShift."""

    kind: ClassVar[str] = "activation"
    component = nnet1.Activation

    function: str = "sigmoid"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.function not in FUNCTIONS:
            raise ValueError(f"activation {self.function!r}, expected one of {', '.join(FUNCTIONS)}")

    @property
    def label(self) -> str:
        return self.function

    def forward(self, a: Float32, p: Params, x: Tensor, y: Tensor, saved: Views) -> None:
        ACTIVATIONS[self.function][0](y.copy_(x))

    def backward(
        self, a: Float32, p: Params, x: Tensor, y: Tensor, grad: Tensor, grad_x: Tensor | None, saved: Views
    ) -> None:
        if grad_x is not None:
            a.activation_backward_(self.function, grad_x.copy_(grad), y)

    def to_torch(self, p: Views) -> torch.nn.Module:
        return torch_activation(self.function)

    def to_nnet1(self, p: Views) -> list[nnet1.Component]:
        return [nnet1.Activation(cast(Any, self.function), self.width)]

    @classmethod
    def from_nnet1(cls, component: Any) -> tuple[Layer, Tensor]:
        return cls(component.dim, component.kind), as_parameters()


@dataclass(frozen=True)
class PerColumn(Elementwise):
    """A layer with one trained number for each column, which has the name of its kind and no momentum, and begins at `start`."""

    start: ClassVar[float]

    learn_rate_coef: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_coefs(self.learn_rate_coef)

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        return {self.kind: Parameter((self.width,), self.learn_rate_coef, momentum=False)}

    @abstractmethod
    def derivatives(self, x: Tensor, grad: Tensor) -> Tensor:
        """(frames, width), the derivative with respect to the numbers, frame by frame."""

    def gradient(self, a: Float32, x: Tensor, grad: Tensor, saved: Views, out: Views) -> None:
        a.column_sums(self.derivatives(x, grad), out[self.kind])

    def gradient_norms(self, x: Tensor, grad: Tensor, saved: Views) -> Tensor:
        return _row_norms(self.derivatives(x, grad))

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        p[self.kind].fill_(self.start)


class Scale(PerColumn):
    """y = x * scale, per column (nnet1's Rescale). The gradient of the scale is the sum over frames of d * x."""

    kind: ClassVar[str] = "scale"
    start = 1.0
    component = nnet1.Rescale

    def forward(self, a: Float32, p: Params, x: Tensor, y: Tensor, saved: Views) -> None:
        torch.mul(x, p.values["scale"], out=y)

    def backward(
        self, a: Float32, p: Params, x: Tensor, y: Tensor, grad: Tensor, grad_x: Tensor | None, saved: Views
    ) -> None:
        if grad_x is not None:
            torch.mul(grad, p.values["scale"], out=grad_x)

    def derivatives(self, x: Tensor, grad: Tensor) -> Tensor:
        return grad * x


class Shift(PerColumn):
    """y = x + shift, per column (nnet1's AddShift). The gradient of the shift is the sum over frames of d."""

    kind: ClassVar[str] = "shift"
    start = 0.0
    component = nnet1.AddShift

    def forward(self, a: Float32, p: Params, x: Tensor, y: Tensor, saved: Views) -> None:
        torch.add(x, p.values["shift"], out=y)

    def backward(
        self, a: Float32, p: Params, x: Tensor, y: Tensor, grad: Tensor, grad_x: Tensor | None, saved: Views
    ) -> None:
        if grad_x is not None:
            grad_x.copy_(grad)

    def derivatives(self, x: Tensor, grad: Tensor) -> Tensor:
        return grad


@dataclass(frozen=True)
class ParametricRelu(Elementwise):
    """y = x * (alpha if x >= 0 else beta), both slopes per column. Their gradients are the sums over frames of d *
    max(x, 0) and d * min(x, 0). A slope whose coefficient is 0, as by default in nnet1, is not trained. `alpha`, `beta`: where the slopes start."""

    kind: ClassVar[str] = "prelu"
    component = nnet1.ParametricRelu

    alpha_learn_rate_coef: float = 0.0
    beta_learn_rate_coef: float = 0.0
    alpha: float = 1.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_coefs(self.alpha_learn_rate_coef, self.beta_learn_rate_coef, self.alpha, self.beta)

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        coefs = {"alpha": self.alpha_learn_rate_coef, "beta": self.beta_learn_rate_coef}
        return {name: Parameter((self.width,), coef) for name, coef in coefs.items()}

    def forward(self, a: Float32, p: Params, x: Tensor, y: Tensor, saved: Views) -> None:
        torch.mul(x, _slopes(p, x), out=y)

    def backward(
        self, a: Float32, p: Params, x: Tensor, y: Tensor, grad: Tensor, grad_x: Tensor | None, saved: Views
    ) -> None:
        if grad_x is not None:
            torch.mul(grad, _slopes(p, x), out=grad_x)

    def gradient(self, a: Float32, x: Tensor, grad: Tensor, saved: Views, out: Views) -> None:
        a.column_sums(grad * x.clamp(min=0), out["alpha"])
        a.column_sums(grad * x.clamp(max=0), out["beta"])

    def gradient_norms(self, x: Tensor, grad: Tensor, saved: Views) -> Tensor:
        """Of the slopes that are trained; a slope that is not moves by nothing."""
        parts = ((self.alpha_learn_rate_coef, x.clamp(min=0)), (self.beta_learn_rate_coef, x.clamp(max=0)))
        norms = [_row_norms(grad * part) for coef, part in parts if coef]
        return torch.stack(norms).norm(dim=0) if norms else torch.zeros(len(x), device=x.device)

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        p["alpha"].fill_(self.alpha)
        p["beta"].fill_(self.beta)


def _row_norms(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    return norms


def _slopes(p: Params, x: Tensor) -> Tensor:
    return torch.where(x >= 0, p.values["alpha"], p.values["beta"])


@dataclass(frozen=True)
class LengthNorm(Elementwise):
    """y = x / |x| per row, without a floor: a row of zeros gives NaN. The derivative is d / |x|: Kaldi leaves out the term
    from the derivative of the norm."""

    kind: ClassVar[str] = "length-norm"
    component = nnet1.LengthNormComponent

    @property
    def saved(self) -> Mapping[str, Shape]:
        return {"norm": (1,)}

    def forward(self, a: Float32, p: Params, x: Tensor, y: Tensor, saved: Views) -> None:
        saved["norm"].copy_(torch.linalg.vector_norm(x, dim=1, keepdim=True))
        torch.div(x, saved["norm"], out=y)

    def backward(
        self, a: Float32, p: Params, x: Tensor, y: Tensor, grad: Tensor, grad_x: Tensor | None, saved: Views
    ) -> None:
        if grad_x is not None:
            torch.div(grad, saved["norm"], out=grad_x)


@dataclass(frozen=True)
class Dropout(Elementwise):
    """y = x * mask / (1 - rate), where each value of the mask is 0 with probability `rate`, else 1, drawn again for each
    minibatch of training. Outside training y = x."""

    kind: ClassVar[str] = "dropout"
    component = nnet1.Dropout

    rate: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.rate, int | float) and 0.0 <= self.rate < 1.0):
            raise ValueError(f"dropout rate {self.rate!r}, expected 0 or more and less than 1")

    @property
    def saved(self) -> Mapping[str, Shape]:
        return {"mask": (self.width,)} if self.rate else {}

    def without_noise(self) -> Dropout:
        return replace(self, rate=0.0)

    def draw(self, generator: torch.Generator, saved: Views) -> None:
        if self.rate:
            saved["mask"].bernoulli_(1.0 - self.rate, generator=generator)

    def forward(self, a: Float32, p: Params, x: Tensor, y: Tensor, saved: Views) -> None:
        self._dropped(x, y, saved)

    def backward(
        self, a: Float32, p: Params, x: Tensor, y: Tensor, grad: Tensor, grad_x: Tensor | None, saved: Views
    ) -> None:
        if grad_x is not None:
            self._dropped(grad, grad_x, saved)

    def _dropped(self, x: Tensor, out: Tensor, saved: Views) -> None:
        if self.rate:
            torch.mul(x, saved["mask"], out=out).mul_(1.0 / (1.0 - self.rate))
        else:
            out.copy_(x)

    def to_torch(self, p: Views) -> torch.nn.Module:
        return torch.nn.Dropout(self.rate)


@dataclass(frozen=True)
class Copy(Layer):
    """y[j] = x[columns[j]]: columns, counted from 0, may repeat, and need not all be there. No derivative passes it, as in Kaldi: what
    is below does not learn."""

    kind: ClassVar[str] = "copy"
    component = nnet1.Copy

    width: int  # of the input
    columns: tuple[int, ...]

    def __post_init__(self) -> None:
        check_sizes(width=self.width)
        object.__setattr__(self, "columns", tuple(self.columns))  # a list, as JSON has it
        if not self.columns or not all(type(column) is int and 0 <= column < self.width for column in self.columns):
            found = next((c for c in self.columns if not (type(c) is int and 0 <= c < self.width)), "none")
            raise ValueError(f"column {found!r} to copy, expected 0 to {self.width - 1}")

    @property
    def in_shape(self) -> Shape:
        return (self.width,)

    @property
    def out_shape(self) -> Shape:
        return (len(self.columns),)

    def forward(self, a: Float32, p: Params, x: Tensor, y: Tensor, saved: Views) -> None:
        torch.index_select(x, 1, _columns(self.columns, x.device), out=y)

    def backward(
        self, a: Float32, p: Params, x: Tensor, y: Tensor, grad: Tensor, grad_x: Tensor | None, saved: Views
    ) -> None:
        if grad_x is not None:
            grad_x.zero_()

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        pass

    def to_nnet1(self, p: Views) -> list[nnet1.Component]:
        return [nnet1.Copy(self.columns, self.width)]

    @classmethod
    def from_nnet1(cls, component: Any) -> tuple[Layer, Tensor]:
        return cls(component.input_dim, component.columns), as_parameters()


@cache
def _columns(columns: tuple[int, ...], device: torch.device) -> Tensor:
    """(columns,) int64 on the device, made once: a GPU would wait for it in each forward pass."""
    return torch.tensor(columns, device=device)
