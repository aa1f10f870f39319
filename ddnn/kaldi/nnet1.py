"""The components of Kaldi's nnet1 networks.

Follows the headers of kaldi `nnet/`: `nnet-affine-transform.h`, `nnet-activation.h`, `nnet-parametric-relu.h`,
`nnet-various.h`, `nnet-rbm.h`, `nnet-convolutional-component.h`, `nnet-max-pooling-component.h`,
`nnet-average-pooling-component.h` and `nnet-parallel-component.h`. A component takes rows (frames x input_dim) and gives
rows (frames x output_dim).

The fields of a component's dataclass are what a file has of it: `nnet1_file` reads and writes them by name and type. A new
component is a dataclass here and a line of `nnet1_file._TYPES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ddnn.util.arrays import Float32Array

# The dim of a component without weights is in the file alone: it must not claim what no layer has.
MAX_DIM = 1_000_000
MAX_DEPTH = 8  # of networks within networks

Kind = Literal["sigmoid", "tanh", "relu", "softmax"]
Units = Literal["bern", "gauss"]
Vector = Float32Array
Matrix = Float32Array


class _Weighted:
    """A component whose dims are those of its weight matrix."""

    weight: Matrix

    @property
    def input_dim(self) -> int:
        return int(self.weight.shape[1])

    @property
    def output_dim(self) -> int:
        return int(self.weight.shape[0])


class _Elementwise:
    """A component that keeps the dim of its input."""

    dim: int

    @property
    def input_dim(self) -> int:
        return self.dim

    @property
    def output_dim(self) -> int:
        return self.dim


class _PerUnit(_Elementwise):
    """A component whose first field is a vector over its units."""

    @property
    def dim(self) -> int:  # type: ignore[override]
        return len(next(iter(vars(self).values())))


def _check_dim(name: str, vector: Vector, expected: int) -> None:
    if len(vector) != expected:
        raise ValueError(f"{name} has the dim {len(vector)}, expected {expected}")


@dataclass(frozen=True, eq=False)
class AffineTransform(_Weighted):
    """`<AffineTransform>`: y = x W^T + b."""

    weight: Matrix  # (output_dim, input_dim)
    bias: Vector  # (output_dim,)
    learn_rate_coef: float = 1.0
    bias_learn_rate_coef: float = 1.0
    max_norm: float = 0.0  # limit of the L2 norm of a row of `weight`; 0: none

    def __post_init__(self) -> None:
        _check_dim("bias", self.bias, self.output_dim)


@dataclass(frozen=True)
class Activation(_Elementwise):
    """`<Sigmoid>`, `<Tanh>`, `<Softmax>`; relu is a `<ParametricRelu>` with slopes 1 and 0 that are not trained."""

    kind: Kind
    dim: int


@dataclass(frozen=True, eq=False)
class ParametricRelu(_PerUnit):
    """`<ParametricRelu>`: y = x * (alpha if x >= 0 else beta), column by column; a coefficient of 0: not trained."""

    alpha: Vector
    beta: Vector
    alpha_learn_rate_coef: float = 0.0
    beta_learn_rate_coef: float = 0.0

    def __post_init__(self) -> None:
        _check_dim("beta", self.beta, self.dim)


@dataclass(frozen=True)
class LengthNormComponent(_Elementwise):
    """`<LengthNormComponent>`: y = x / |x|, frame by frame."""

    dim: int


@dataclass(frozen=True)
class Dropout(_Elementwise):
    """`<Dropout>`: in training each value is 0 with probability `rate`, else divided by 1 - rate. ValueError: no rate."""

    dim: int
    rate: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= np.float32(self.rate) < 1:
            raise ValueError(f"the dropout rate {self.rate:g}, expected at least 0 and less than 1")


def _count_windows(name: str, length: int, size: int, step: int) -> int:
    """How many windows of `size`, `step` apart, reach exactly from 0 to `length`. ValueError: none do."""
    if min(size, step) < 1 or size > length or (length - size) % step:
        raise ValueError(f"{name} of {size} at steps of {step} do not fit into {length} exactly")
    return 1 + (length - size) // step


@dataclass(frozen=True, eq=False)
class ConvolutionalComponent:
    """`<ConvolutionalComponent>`: the input is `input_dim / patch_stride` streams side by side; patch p is the columns
    p * patch_step to p * patch_step + patch_dim of every stream, and output column p * len(filters) + f is the product of
    patch and filter f, plus its bias. ValueError: sizes that do not fit."""

    input_dim: int
    patch_dim: int
    patch_step: int
    patch_stride: int
    filters: Matrix  # (filters, streams * patch_dim), stream by stream
    bias: Vector  # (filters,)
    learn_rate_coef: float = 1.0
    bias_learn_rate_coef: float = 1.0
    max_norm: float = 0.0  # limit of the L2 norm of a filter; 0: none

    def __post_init__(self) -> None:
        if self.patch_stride < 1 or self.input_dim % self.patch_stride:
            raise ValueError(f"PatchStride {self.patch_stride} does not divide the input dim {self.input_dim}")
        _count_windows("patches", self.patch_stride, self.patch_dim, self.patch_step)
        streams, weights = self.input_dim // self.patch_stride, self.filters.shape[1]
        if weights != streams * self.patch_dim:
            expected = f"{streams * self.patch_dim} ({streams} streams of PatchDim {self.patch_dim})"
            raise ValueError(f"the filters have {weights} weights each, expected {expected}")
        _check_dim("bias", self.bias, len(self.filters))

    @property
    def output_dim(self) -> int:
        patches = _count_windows("patches", self.patch_stride, self.patch_dim, self.patch_step)
        return patches * len(self.filters)


@dataclass(frozen=True)
class _Pooling:
    """The input is `input_dim / pool_stride` patches of `pool_stride` filters; pool q takes of each filter patches
    q * pool_step to q * pool_step + pool_size. ValueError: sizes that do not fit."""

    input_dim: int
    pool_size: int
    pool_step: int
    pool_stride: int

    def __post_init__(self) -> None:
        if self.pool_stride < 1 or self.input_dim % self.pool_stride:
            raise ValueError(f"PoolStride {self.pool_stride} does not divide the input dim {self.input_dim}")
        if self.output_dim and self.pool_step > self.pool_size:
            raise ValueError(f"PoolStep {self.pool_step} skips patches, expected at most PoolSize {self.pool_size}")

    @property
    def output_dim(self) -> int:
        patches = self.input_dim // self.pool_stride
        return self.pool_stride * _count_windows("pools", patches, self.pool_size, self.pool_step)


class MaxPoolingComponent(_Pooling):
    """`<MaxPoolingComponent>`: the largest value of each pool."""


class AveragePoolingComponent(_Pooling):
    """`<AveragePoolingComponent>`: the mean of each pool."""


@dataclass(frozen=True)
class Splice:
    """`<Splice>`: frame t becomes frames t + o side by side for o in `offsets`; outside, the first or last frame."""

    offsets: tuple[int, ...]
    input_dim: int

    def __post_init__(self) -> None:
        if any(abs(offset) > MAX_DIM for offset in self.offsets):
            raise ValueError(f"frame offsets {min(self.offsets)} to {max(self.offsets)}, expected within {MAX_DIM}")

    @property
    def output_dim(self) -> int:
        return len(self.offsets) * self.input_dim


@dataclass(frozen=True)
class Copy:
    """`<Copy>`: output column j is input column `columns[j]`, counted from 0 (in files from 1)."""

    columns: tuple[int, ...]
    input_dim: int

    def __post_init__(self) -> None:
        if wrong := [column for column in self.columns if not 0 <= column < self.input_dim]:
            raise ValueError(f"column {wrong[0] + 1} found, expected 1 to {self.input_dim}")

    @property
    def output_dim(self) -> int:
        return len(self.columns)


@dataclass(frozen=True, eq=False)
class AddShift(_PerUnit):
    """`<AddShift>`: y = x + shift; `shift` float32 (dim,)."""

    shift: Vector
    learn_rate_coef: float = 1.0


@dataclass(frozen=True, eq=False)
class Rescale(_PerUnit):
    """`<Rescale>`: y = x * scale, element by element; `scale` float32 (dim,)."""

    scale: Vector
    learn_rate_coef: float = 1.0


@dataclass(frozen=True, eq=False)
class RbmComponent(_Weighted):
    """`<Rbm>`: forward as an affine layer and a sigmoid (hidden units "bern"; "gauss": no sigmoid)."""

    visible: Units
    hidden: Units
    weight: Matrix  # (hidden, visible)
    visible_bias: Vector
    hidden_bias: Vector

    def __post_init__(self) -> None:
        _check_dim("visible_bias", self.visible_bias, self.input_dim)
        _check_dim("hidden_bias", self.hidden_bias, self.output_dim)


@dataclass(frozen=True)
class ParallelComponent:
    """`<ParallelComponent>`: networks that read the input's columns one after another, and whose outputs are side by
    side. ValueError: there are none, or one without components."""

    networks: tuple[tuple[Component, ...], ...]

    def __post_init__(self) -> None:
        if not self.networks or not all(self.networks):
            raise ValueError("no nested network, or one without components")

    @property
    def input_dim(self) -> int:
        return sum(network[0].input_dim for network in self.networks)

    @property
    def output_dim(self) -> int:
        return sum(network[-1].output_dim for network in self.networks)


Component = (
    AffineTransform
    | Activation
    | ParametricRelu
    | LengthNormComponent
    | Dropout
    | ConvolutionalComponent
    | MaxPoolingComponent
    | AveragePoolingComponent
    | Splice
    | AddShift
    | Rescale
    | Copy
    | RbmComponent
    | ParallelComponent
)
