"""What a layer is. The kinds of layers are in `ddnn.nn.layers`, `ddnn.nn.convolution` and `ddnn.nn.elementwise`.

What a layer is made of, computes and costs is known to its class alone. It holds no numbers: its parameters are views
of a network's flat buffer, its activations belong to a `ddnn.nn.network.Workspace`, and `ddnn.nn.arithmetic` computes.
Between layers a minibatch is a matrix of a row per frame, which a layer views as it needs. In the network's input a row
is ordered, from slow to fast, by frame offset, order of the deltas, and feature dimension.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.kaldi import nnet1
from ddnn.nn.arithmetic import Float32
from ddnn.nn.products import matmul_out

Shape = tuple[int, ...]
Views = Mapping[str, Tensor]  # tensors of a layer by name: its parameters, its part of a gradient


class Parameter(NamedTuple):
    """What a layer says of a parameter: its multiple of the learning rate (nnet1's LearnRateCoef), whether weight decay
    acts on it, and whether it has momentum: it has, but where Kaldi has none."""

    shape: Shape
    learn_rate_coef: float = 1.0
    l2: bool = False
    momentum: bool = True


class Params(NamedTuple):
    """A layer's parameters: `values`, in the arithmetic's type, to multiply with, perhaps padded to more outputs than
    the layer has; `float32`, of which they are a copy."""

    values: Views
    float32: Views

    @property
    def affine(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weight, bias and float32 bias, as `Float32.affine` wants them."""
        return self.values["weight"], self.values["bias"], self.float32["bias"]


class LayerCall(NamedTuple):
    """One layer on its way through a minibatch, with the memory that belongs to it there; all have a row per frame.

    `x`, `y`: its inputs and outputs. `grad`: the derivative of the summed loss with respect to y; after the backward pass
    what `gradient` and `statistics` want, such as the derivative before the activation. `grad_x`: memory for the same
    with respect to x; None in the lowest layer that is trained. `saved`: what it keeps between the two passes.
    """

    layer: Layer
    a: Float32
    p: Params
    x: Tensor
    y: Tensor
    grad: Tensor
    grad_x: Tensor | None
    saved: Views


class Gemm(NamedTuple):
    """A layer as a matrix product, as natural gradient sees it: for each frame `rows` rows of `fan_in` inputs (one of
    an affine layer, one per patch of a convolution) give as many rows of `fan_out`."""

    rows: int
    fan_in: int
    fan_out: int


def check_sizes(**sizes: object) -> None:
    """ValueError where one of these is no number of values that a layer may have."""
    for name, size in sizes.items():
        if not (type(size) is int and 0 < size <= nnet1.MAX_DIM):
            raise ValueError(f"{name} {size!r}, expected 1 to {nnet1.MAX_DIM}")


def check_coefs(*values: object) -> None:
    """ValueError where one of these is no finite number."""
    if not all(isinstance(v, int | float) and abs(v) <= sys.float_info.max for v in values):  # no NaN either
        raise ValueError(f"learning rate coefficients and other numbers {values!r}, expected finite ones")


def as_array(parameter: Tensor) -> NDArray[np.float32]:
    """A layer's numbers as a component's."""
    found: NDArray[np.float32] = parameter.cpu().contiguous().numpy()
    return found


def as_parameters(*arrays: NDArray[np.float32]) -> Tensor:
    """A copy of a component's numbers as a layer's part of the flat buffer."""
    return torch.cat([torch.zeros(0), *(torch.from_numpy(part.copy()).flatten() for part in arrays)])


def numbers_of(component: Any, layer: type[Layer]) -> dict[str, Any]:
    """The plain numbers of a component that the layer has fields for, by name. They have been float32 in a file: 0.1 is to
    stay 0.1."""
    names = {field.name for field in fields(layer)}
    numbers = {name: value for name, value in vars(component).items() if name in names and isinstance(value, float)}
    return {name: float(str(np.float32(value))) for name, value in numbers.items()}


def limit_row_norms(weight: Tensor, max_norm: float) -> bool:
    """nnet1's MaxNorm: scales each row of `weight` whose L2 norm is over `max_norm` down to it, in place, and leaves the
    others as they are; 0 is no limit. True where there is a limit; waits for no GPU."""
    if max_norm <= 0.0:
        return False
    norms = torch.linalg.vector_norm(weight, dim=1, keepdim=True)
    weight.mul_((max_norm / norms).clamp_(max=1.0))
    return True


def torch_activation(name: str) -> torch.nn.Module:
    """The module of one of `ddnn.nn.arithmetic.ACTIVATIONS`; of a softmax, which gives logits, as of no activation none."""
    modules = {"sigmoid": torch.nn.Sigmoid, "tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}
    return modules.get(name, torch.nn.Identity)()


@dataclass(frozen=True)
class Layer(ABC):
    """One layer; its fields are what its class is made from, and its `config`.

    Attributes:
        kind: its name in `LAYERS`, in model files and recipes.
        component: the component of nnet1 that it is; None where there is none.
        in_shape, out_shape: of a frame: (features,), or (channels, time, frequency).
        parameters: by name, in the order of the flat buffer; empty for a layer without parameters.
        gemm: its product, whose rows natural gradient preconditions; None: it is left with the plain gradient.
        saved: shapes per frame, by name, of what it keeps in memory from its forward to its backward pass.
        must_be_last: whether no layer may follow.
        label: a word or two for summaries.
    """

    kind: ClassVar[str]
    component: ClassVar[type[nnet1.Component] | None] = None

    @property
    @abstractmethod
    def in_shape(self) -> Shape: ...

    @property
    @abstractmethod
    def out_shape(self) -> Shape: ...

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        return {}

    @property
    def gemm(self) -> Gemm | None:
        return None

    @property
    def saved(self) -> Mapping[str, Shape]:
        return {}

    @property
    def parts(self) -> Mapping[str, Layer]:
        """The layers that natural gradient preconditions and limits each by itself, by what precedes the names of their
        parameters: itself, unless it is made of others."""
        return {"": self}

    def part_calls(self, call: LayerCall) -> Mapping[str, LayerCall]:
        """Those of its `parts`, within its own."""
        return {"": call}

    @property
    def must_be_last(self) -> bool:
        return False

    @property
    def label(self) -> str:
        return self.kind

    @property
    def input_dim(self) -> int:
        """Values of a frame that it reads."""
        return math.prod(self.in_shape)

    @property
    def output_dim(self) -> int:
        """Values of a frame that it gives."""
        return math.prod(self.out_shape)

    @property
    def num_parameters(self) -> int:
        """Length of its part of the flat buffer."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters.values())

    @property
    def flop_per_frame(self) -> int:
        """Floating-point operations of the products of a forward pass."""
        return 0 if self.gemm is None else 2 * math.prod(self.gemm)

    @property
    def activation_floats(self) -> int:
        """Values kept of a frame: output, derivative with respect to it, and `saved`."""
        return 2 * self.output_dim + sum(math.prod(shape) for shape in self.saved.values())

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Its parameters as views of its part of a flat buffer, (num_parameters,)."""
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        parts = torch.split(flat, list(map(math.prod, shapes.values())))
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    def without_noise(self) -> Layer:
        """The layer as it is outside training, of the same parameters; itself where nothing in it is random."""
        return self

    def draw(self, generator: torch.Generator, saved: Views) -> None:  # noqa: B027
        """Draws what is random in a minibatch of training into `saved`, before each forward pass."""

    def with_activation(self, function: str) -> Layer | None:
        """The layer with this activation behind its product; None where it has none, or another one already."""
        return None

    def padded(self, multiple: int) -> Layer:
        """As the last layer: the same with outputs rounded up to a multiple, of zero weight; itself where it cannot."""
        return self

    @property
    def units(self) -> int | None:
        """By which `of_units` splits it: a row of its output is (places, units), such as the patches and filters of a
        convolution, and so are the rows of its parameters, which may have one place for all. None: its units are those
        of the layer below, and each is computed from that unit of its input alone."""
        return self.output_dim

    def of_units(self, start: int, end: int, units: int) -> Layer:
        """The layer with its units from `start` to `end` of `units` alone: what one of several workers has, among which the
        layers of a network are split by columns. It reads all inputs, but where `units` is None only the same units of them.
        ValueError: it cannot be split."""
        raise ValueError(f"a {self.label} layer cannot be split by columns")

    @abstractmethod
    def forward(self, call: LayerCall) -> None:
        """y <- the layer's output for x."""

    @abstractmethod
    def backward(self, call: LayerCall) -> None:
        """grad_x, where there is one, <- the derivative with respect to x. May overwrite grad."""

    def gradient(self, call: LayerCall, out: Views) -> None:
        """out <- the gradient summed over the minibatch, after the backward pass; not called without parameters. That
        of a `gemm`: dW = d^T x, db = sum of d, from the rows of `statistics`."""
        self.gradient_of_rows(call.a, *self.statistics(call), out)

    def statistics(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        """Rows of its input, (frames * gemm.rows, gemm.fan_in), without the 1 for the bias, and rows of the derivative
        of its output, (frames * gemm.rows, gemm.fan_out), after the backward pass, frame by frame: what natural
        gradient preconditions, and may overwrite. Contiguous. For layers with a `gemm`."""
        return call.x, call.grad

    def gradient_of_rows(
        self, a: Float32, inputs: Tensor, grads: Tensor, out: Views, bias_input: Tensor | None = None
    ) -> None:
        """out <- the gradient from the rows of `statistics`. Once they are preconditioned, `bias_input`, (rows,), is
        what has become of the 1 of each row."""
        matmul_out(grads.t(), inputs, out["weight"])
        a.column_sums(grads, out["bias"], bias_input)

    def gradient_norms(self, call: LayerCall) -> Tensor:
        """(frames,) float32 or float64, the norm of each frame's part of the gradient, by which NG-SGD limits the step of layers
        without a `gemm`; not called without parameters."""
        raise NotImplementedError

    def after_update(self, p: Views) -> bool:
        """Brings the float32 parameters back to where they may be, such as within a largest norm, after each update;
        True if it may have changed any."""
        return False

    @abstractmethod
    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        """Draws initial parameters, on the CPU, so that a seed gives the same on every device; `first` and `last` say
        whether it is that layer of the network."""

    def config(self) -> dict[str, Any]:
        """All of it but its numbers, as JSON: `kind` and the fields of its class."""
        return {"kind": self.kind, **asdict(self)}

    def to_torch(self, p: Views) -> torch.nn.Module:
        """A copy of the layer as a module of PyTorch; ValueError where there is none."""
        raise ValueError(f"a {self.kind} layer cannot be a module of PyTorch")

    def to_nnet1(self, p: Views) -> list[nnet1.Component]:
        """The layer as Kaldi nnet1's components; ValueError where nnet1 has none."""
        raise ValueError(f"nnet1 has no component for a {self.kind} layer")

    @classmethod
    def from_nnet1(cls, component: Any) -> tuple[Layer, Tensor]:
        """The layer that a `component` of its class is, and its parameters, (num_parameters,)."""
        raise NotImplementedError

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Layer:
        """The layer of a `config` without its kind, perhaps of an earlier version or by nnet1's names."""
        return cls(**fields)
