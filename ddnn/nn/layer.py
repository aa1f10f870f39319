"""What a layer is: the base of all kinds of layers, which `ddnn.nn.layers` lists.

What a layer is made of, computes and costs is known to its class alone. A layer holds no numbers: its parameters are
views of a network's flat buffer, its activations belong to a `ddnn.nn.network.Workspace`, and how the numbers are
computed is the business of `ddnn.nn.arithmetic`.

Between layers a minibatch is a matrix of a row per frame; a layer whose shapes have several dimensions views a row as
it needs. In the network's input a row is ordered, from slow to fast, by frame offset, order of the deltas, and feature
dimension.

Natural gradient sees a layer as a product of matrices: rows of its input times its weight. An affine layer has one such
row per frame, a convolution one per frame and patch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from ddnn.kaldi import nnet1
from ddnn.nn.arithmetic import Float32

Shape = tuple[int, ...]
Views = Mapping[str, Tensor]
"""Tensors of a layer by name: its parameters, its part of a gradient."""


class Params(NamedTuple):
    """A layer's parameters: `values`, in the arithmetic's type, to multiply with; `float32`, of which they are a copy.

    The values may be padded to more outputs than the layer has.
    """

    values: Views
    float32: Views


class Gemm(NamedTuple):
    """A layer as a matrix product: for each frame `rows` rows of `fan_in` inputs give as many rows of `fan_out`."""

    rows: int
    fan_in: int
    fan_out: int


Self = TypeVar("Self", bound="Layer")


class Layer(ABC):
    """One layer.

    Attributes:
        kind: its name in `LAYERS`, in model files and recipes.
        in_shape, out_shape: of a frame: (features,), or (channels, time, frequency).
        parameters: their shapes by name, in the order of the flat buffer; empty for a layer without parameters.
        learn_rate_coefs: multiples of the learning rate, by parameter (nnet1's LearnRateCoef).
        l2: names of the parameters that weight decay acts on.
        momentum: names of those with momentum; all, but where Kaldi has none.
        gemm: its product, whose rows natural gradient preconditions; None: it is left with the plain gradient.
        saved: shapes per frame, by name, of what it keeps in memory from its forward to its backward pass.
        must_be_last: whether no layer may follow.
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def in_shape(self) -> Shape:
        pass

    @property
    @abstractmethod
    def out_shape(self) -> Shape:
        pass

    @property
    def parameters(self) -> Mapping[str, Shape]:
        return {}

    @property
    def learn_rate_coefs(self) -> Mapping[str, float]:
        return dict.fromkeys(self.parameters, 1.0)

    @property
    def l2(self) -> frozenset[str]:
        return frozenset()

    @property
    def momentum(self) -> frozenset[str]:
        return frozenset(self.parameters)

    @property
    def gemm(self) -> Gemm | None:
        return None

    @property
    def saved(self) -> Mapping[str, Shape]:
        return {}

    @property
    def must_be_last(self) -> bool:
        return False

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
        return sum(math.prod(shape) for shape in self.parameters.values())

    @property
    def flop_per_frame(self) -> int:
        """Floating-point operations of the products of a forward pass."""
        return 0 if self.gemm is None else 2 * math.prod(self.gemm)

    @property
    def activation_floats(self) -> int:
        """Values kept of a frame: output, derivative with respect to it, and `saved`."""
        return 2 * self.output_dim + sum(math.prod(shape) for shape in self.saved.values())

    @property
    def label(self) -> str:
        """A word or two for summaries."""
        return self.kind

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Its parameters as views of its part of a flat buffer, (num_parameters,)."""
        parts = torch.split(flat, [math.prod(shape) for shape in self.parameters.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.parameters.items(), parts, strict=True)}

    def padded(self: Self, multiple: int) -> Self:
        """As the last layer: the same with outputs rounded up to a multiple, of zero weight; itself where it cannot."""
        return self

    @abstractmethod
    def forward(self, a: Float32, p: Params, x: Tensor, y: Tensor, saved: Views) -> None:
        """y (frames, output_dim) <- the layer's output for x (frames, input_dim)."""

    @abstractmethod
    def backward(
        self, a: Float32, p: Params, x: Tensor, y: Tensor, grad: Tensor, grad_x: Tensor | None, saved: Views
    ) -> None:
        """grad_x (frames, input_dim) <- the derivative of the summed loss with respect to x.

        Args:
            x, y: as of the forward pass.
            grad: (frames, output_dim), the derivative with respect to y; may be overwritten by what `gradient` and
                `statistics` want, such as the derivative before the activation.
            grad_x: None for the first layer.
        """

    @abstractmethod
    def gradient(self, a: Float32, x: Tensor, grad: Tensor, saved: Views, out: Views) -> None:
        """out <- the gradient summed over the minibatch, after the backward pass; not called without parameters."""

    def statistics(self, x: Tensor, grad: Tensor, saved: Views) -> tuple[Tensor, Tensor]:
        """Rows of its input, (frames * gemm.rows, gemm.fan_in), without the 1 for the bias, and rows of the derivative
        of its output, (frames * gemm.rows, gemm.fan_out), after the backward pass, frame by frame: what natural
        gradient preconditions, and may overwrite. Contiguous. For layers with a `gemm`.
        """
        raise NotImplementedError

    def preconditioned_gradient(
        self, a: Float32, inputs: Tensor, bias_input: Tensor, grads: Tensor, out: Views
    ) -> None:
        """out <- the gradient from the rows of `statistics`, once they are preconditioned.

        Args:
            bias_input: (rows,), what has become of the 1 of each row.
        """
        a.matmul(grads.t(), inputs, out["weight"])
        a.weighted_column_sums(grads, bias_input, out["bias"])

    def gradient_norms(self, x: Tensor, grad: Tensor, saved: Views) -> Tensor:
        """(frames,) float32, the norm of each frame's part of the gradient, by which NG-SGD limits the step of layers
        without a `gemm`; not called without parameters."""
        raise NotImplementedError

    def after_update(self, p: Views) -> bool:
        """Brings the float32 parameters back to where they may be, such as within a largest norm, after each update;
        True if it has changed any."""
        return False

    @abstractmethod
    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        """Draws initial parameters, on the CPU, so that a seed gives the same on every device.

        Args:
            first, last: whether it is the first, the last layer of the network.
        """

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """All of it but its numbers, as JSON: `kind` and the arguments of its class."""

    @classmethod
    def from_config(cls: type[Self], config: Mapping[str, Any]) -> Self:
        """The layer of a `config`, which anybody may have written.

        Raises:
            TypeError, ValueError: it has other keys, or values that are none.
        """
        return cls(**{name: value for name, value in config.items() if name != "kind"})

    def to_nnet1(self, p: Views) -> list[nnet1.Component]:
        """The layer as Kaldi nnet1's components; ValueError where nnet1 has none."""
        raise ValueError(f"nnet1 has no component for a {self.kind} layer")

    @classmethod
    def from_nnet1(cls, components: Sequence[nnet1.Component]) -> tuple[Layer, Tensor, int] | None:
        """The layer that the first of these components, one or more, are; None where they are not of this kind.

        Returns:
            The layer, its parameters (num_parameters,), and how many components they are.
        """
        return None
