"""The components of Kaldi nnet1 networks that ddnn knows.

Follows the headers kaldi `nnet/nnet-affine-transform.h`, `nnet-activation.h`, `nnet-parametric-relu.h`,
`nnet-various.h` and `nnet-rbm.h`. A component takes rows (frames x input_dim) and gives rows (frames x output_dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ddnn.errors import DataError

# The dim of a component without weights stands in the file alone: it must not claim what no layer has.
MAX_DIM = 1_000_000

Kind = Literal["sigmoid", "tanh", "relu", "softmax"]
Units = Literal["bern", "gauss"]
Vector = NDArray[np.float32]
Matrix = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Affine:
    """`<AffineTransform>`: y = x W^T + b.

    Args:
        weight: float32 (output_dim, input_dim).
        bias: float32 (output_dim,).
        learn_rate_coef, bias_learn_rate_coef: factors on the learning rate.
        max_norm: limit of the L2 norm of a row of `weight`; 0: none.
    """

    weight: Matrix
    bias: Vector
    learn_rate_coef: float = 1.0
    bias_learn_rate_coef: float = 1.0
    max_norm: float = 0.0

    @property
    def input_dim(self) -> int:
        return int(self.weight.shape[1])

    @property
    def output_dim(self) -> int:
        return int(self.weight.shape[0])


@dataclass(frozen=True)
class Activation:
    """`<Sigmoid>`, `<Tanh>`, `<Softmax>`; relu is a `<ParametricRelu>` with slopes 1 and 0 that are not trained."""

    kind: Kind
    dim: int

    @property
    def input_dim(self) -> int:
        return self.dim

    @property
    def output_dim(self) -> int:
        return self.dim


@dataclass(frozen=True)
class Splice:
    """`<Splice>`: frame t becomes frames t + o side by side for o in `offsets`; outside, the first or last frame."""

    offsets: tuple[int, ...]
    input_dim: int

    @property
    def output_dim(self) -> int:
        return len(self.offsets) * self.input_dim


@dataclass(frozen=True, eq=False)
class AddShift:
    """`<AddShift>`: y = x + shift; `shift` float32 (dim,)."""

    shift: Vector
    learn_rate_coef: float = 1.0

    @property
    def input_dim(self) -> int:
        return len(self.shift)

    @property
    def output_dim(self) -> int:
        return len(self.shift)


@dataclass(frozen=True, eq=False)
class Rescale:
    """`<Rescale>`: y = x * scale, element by element; `scale` float32 (dim,)."""

    scale: Vector
    learn_rate_coef: float = 1.0

    @property
    def input_dim(self) -> int:
        return len(self.scale)

    @property
    def output_dim(self) -> int:
        return len(self.scale)


@dataclass(frozen=True, eq=False)
class Rbm:
    """`<Rbm>`: forward as an affine layer and a sigmoid (hidden units "bern"; "gauss": no sigmoid).

    Args:
        visible, hidden: kind of the units, "bern" or "gauss".
        weight: float32 (hidden, visible).
        visible_bias: float32 (visible,).
        hidden_bias: float32 (hidden,).
    """

    visible: Units
    hidden: Units
    weight: Matrix
    visible_bias: Vector
    hidden_bias: Vector

    @property
    def input_dim(self) -> int:
        return int(self.weight.shape[1])

    @property
    def output_dim(self) -> int:
        return int(self.weight.shape[0])


Component = Affine | Activation | Splice | AddShift | Rescale | Rbm


def check_components(components: Sequence[Component], where: str | PathLike[str]) -> None:
    """Raises DataError unless there are components, each sound in itself, whose dims chain.

    Args:
        components: a network, from input to output.
        where: the file concerned, for messages.
    """
    if not components:
        raise DataError("not a Kaldi nnet1 network: it has no component", where=where)
    for number, component in enumerate(components, start=1):
        _check_component(component, number, where)
    for number, (one, next_one) in enumerate(pairwise(components), start=1):
        if one.output_dim != next_one.input_dim:
            raise DataError(
                f"component {number} ({type(one).__name__}) has the output dim {one.output_dim}, "
                f"but component {number + 1} ({type(next_one).__name__}) the input dim {next_one.input_dim}",
                where=where,
                mend="check that the parts of the network belong together",
            )


def _check_component(component: Component, number: int, where: str | PathLike[str]) -> None:
    name = f"component {number} ({type(component).__name__})"
    dims = (component.output_dim, component.input_dim)
    if not all(1 <= dim <= MAX_DIM for dim in dims):
        raise DataError(f"{name} has the dims {dims[0]} x {dims[1]}, expected 1 to {MAX_DIM}", where=where)
    expected: dict[str, tuple[int, ...]] = {"weight": dims, "bias": dims[:1], "hidden_bias": dims[:1]}
    expected |= {"shift": dims[:1], "scale": dims[:1], "visible_bias": dims[1:]}
    for field, value in vars(component).items():
        if isinstance(value, np.ndarray) and value.shape != expected[field]:
            raise DataError(f"{name}: {field} has the dims {value.shape}, expected {expected[field]}", where=where)
        if isinstance(value, np.ndarray | float):
            with np.errstate(over="ignore", invalid="ignore"):
                finite = np.isfinite(np.asarray(value, np.float32)).all()
            if not finite:
                raise DataError(f"{name}: {field} has a value that is not finite", where=where)
