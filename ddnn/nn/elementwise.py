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
from ddnn.nn.arithmetic import ACTIVATIONS
from ddnn.nn.layer import (
    Layer,
    LayerCall,
    Parameter,
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
class OfColumns(Layer):
    """A layer without a product that reads `width` columns."""

    width: int

    def __post_init__(self) -> None:
        check_sizes(width=self.width)

    @property
    def in_shape(self) -> Shape:
        return (self.width,)

    def backward(self, call: LayerCall) -> None:
        if call.grad_x is not None:
            self.propagate(call, call.grad_x)

    @abstractmethod
    def propagate(self, call: LayerCall, grad_x: Tensor) -> None:
        """grad_x <- the derivative with respect to x."""

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        pass


class Elementwise(OfColumns):
    """One whose output has the columns of its input."""

    @property
    def out_shape(self) -> Shape:
        return self.in_shape

    @property
    def units(self) -> None:
        return None

    def of_units(self, start: int, end: int, units: int) -> Layer:
        return replace(self, width=self.width // units * (end - start))

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

    def forward(self, call: LayerCall) -> None:
        ACTIVATIONS[self.function][0](call.y.copy_(call.x))

    def propagate(self, call: LayerCall, grad_x: Tensor) -> None:
        call.a.activation_backward_(self.function, grad_x.copy_(call.grad), call.y)

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
    def derivatives(self, call: LayerCall) -> Tensor:
        """(frames, width), the derivative with respect to the numbers, frame by frame."""

    def gradient(self, call: LayerCall, out: Views) -> None:
        call.a.column_sums(self.derivatives(call), out[self.kind])

    def gradient_norms(self, call: LayerCall) -> Tensor:
        return _row_norms(self.derivatives(call))

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        p[self.kind].fill_(self.start)


class Scale(PerColumn):
    """y = x * scale, per column (nnet1's Rescale). The gradient of the scale is the sum over frames of d * x."""

    kind: ClassVar[str] = "scale"
    start = 1.0
    component = nnet1.Rescale

    def forward(self, call: LayerCall) -> None:
        torch.mul(call.x, call.p.values["scale"], out=call.y)

    def propagate(self, call: LayerCall, grad_x: Tensor) -> None:
        torch.mul(call.grad, call.p.values["scale"], out=grad_x)

    def derivatives(self, call: LayerCall) -> Tensor:
        return call.grad * call.x


class Shift(PerColumn):
    """y = x + shift, per column (nnet1's AddShift). The gradient of the shift is the sum over frames of d."""

    kind: ClassVar[str] = "shift"
    start = 0.0
    component = nnet1.AddShift

    def forward(self, call: LayerCall) -> None:
        torch.add(call.x, call.p.values["shift"], out=call.y)

    def propagate(self, call: LayerCall, grad_x: Tensor) -> None:
        grad_x.copy_(call.grad)

    def derivatives(self, call: LayerCall) -> Tensor:
        return call.grad


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

    def forward(self, call: LayerCall) -> None:
        torch.mul(call.x, _slopes(call), out=call.y)

    def propagate(self, call: LayerCall, grad_x: Tensor) -> None:
        torch.mul(call.grad, _slopes(call), out=grad_x)

    def _derivatives(self, call: LayerCall) -> dict[str, Tensor]:
        return {"alpha": call.grad * call.x.clamp(min=0), "beta": call.grad * call.x.clamp(max=0)}

    def gradient(self, call: LayerCall, out: Views) -> None:
        for name, derivatives in self._derivatives(call).items():
            call.a.column_sums(derivatives, out[name])

    def gradient_norms(self, call: LayerCall) -> Tensor:
        """Of the slopes that are trained; a slope that is not moves by nothing."""
        parts = self._derivatives(call).items()
        norms = [_row_norms(part) for name, part in parts if self.parameters[name].learn_rate_coef]
        return torch.stack(norms).norm(dim=0) if norms else _row_norms(call.x[:, :0])

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        p["alpha"].fill_(self.alpha)
        p["beta"].fill_(self.beta)


def _row_norms(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))
    return norms


def _slopes(call: LayerCall) -> Tensor:
    return torch.where(call.x >= 0, call.p.values["alpha"], call.p.values["beta"])


@dataclass(frozen=True)
class LengthNorm(Elementwise):
    """y = x / |x| per row, without a floor: a row of zeros gives NaN. The derivative is d / |x|: Kaldi leaves out the term
    from the derivative of the norm."""

    kind: ClassVar[str] = "length-norm"
    component = nnet1.LengthNormComponent
    of_units = Layer.of_units  # the norm is of all columns

    @property
    def saved(self) -> Mapping[str, Shape]:
        return {"norm": (1,)}

    def forward(self, call: LayerCall) -> None:
        norm = call.saved["norm"].copy_(torch.linalg.vector_norm(call.x, dim=1, keepdim=True))
        torch.div(call.x, norm, out=call.y)

    def propagate(self, call: LayerCall, grad_x: Tensor) -> None:
        torch.div(call.grad, call.saved["norm"], out=grad_x)


@dataclass(frozen=True)
class Dropout(Elementwise):
    """y = x * mask / (1 - rate), where each value of the mask is 0 with probability `rate`, else 1, drawn again for each
    minibatch of training. Outside training y = x."""

    kind: ClassVar[str] = "dropout"
    component = nnet1.Dropout
    of_units = Layer.of_units  # each worker would draw a mask of its own

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

    def forward(self, call: LayerCall) -> None:
        self._dropped(call.x, call.y, call.saved)

    def propagate(self, call: LayerCall, grad_x: Tensor) -> None:
        self._dropped(call.grad, grad_x, call.saved)

    def _dropped(self, x: Tensor, out: Tensor, saved: Views) -> None:
        if self.rate:
            torch.mul(x, saved["mask"], out=out).mul_(1.0 / (1.0 - self.rate))
        else:
            out.copy_(x)

    def to_torch(self, p: Views) -> torch.nn.Module:
        return torch.nn.Dropout(self.rate)


@dataclass(frozen=True)
class Copy(OfColumns):
    """y[j] = x[columns[j]]: columns, counted from 0, may repeat, and need not all be there. No derivative passes it, as in Kaldi: what
    is below does not learn."""

    kind: ClassVar[str] = "copy"
    component = nnet1.Copy

    columns: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", tuple(self.columns))  # a list, as JSON has it
        if not self.columns or not all(type(column) is int and 0 <= column < self.width for column in self.columns):
            found = next((c for c in self.columns if not (type(c) is int and 0 <= c < self.width)), "none")
            raise ValueError(f"column {found!r} to copy, expected 0 to {self.width - 1}")

    @property
    def out_shape(self) -> Shape:
        return (len(self.columns),)

    def forward(self, call: LayerCall) -> None:
        torch.index_select(call.x, 1, _columns(self.columns, call.x.device), out=call.y)

    def propagate(self, call: LayerCall, grad_x: Tensor) -> None:
        grad_x.zero_()

    def to_nnet1(self, p: Views) -> list[nnet1.Component]:
        return [nnet1.Copy(self.columns, self.width)]

    @classmethod
    def from_nnet1(cls, component: Any) -> tuple[Layer, Tensor]:
        return cls(component.input_dim, component.columns), as_parameters()


@cache
def _columns(columns: tuple[int, ...], device: torch.device) -> Tensor:
    """(columns,) int64 on the device, made once: a GPU would wait for it in each forward pass."""
    return torch.tensor(columns, device=device)
