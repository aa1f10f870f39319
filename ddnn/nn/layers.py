"""The kinds of layers, and networks of them. A new kind is a class and a line in `LAYERS`; what a layer promises is in
`ddnn.nn.layer`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from ddnn.kaldi import nnet1
from ddnn.nn.arithmetic import ACTIVATIONS, Float32, matmul_out
from ddnn.nn.layer import Gemm, Layer, Parameter, Params, Shape, Views


@dataclass(frozen=True)
class Affine(Layer):
    """y = f(x W^T + b). The activation belongs to the layer, so that compiled code can fuse the two. ValueError: one of
    these is no value for it.

    `activation`: one of `ACTIVATIONS`; `softmax` only last, and then the network gives pre-softmax activations.
    `learn_rate_coef`, `bias_learn_rate_coef`: multiples of the learning rate (nnet1's LearnRateCoef and
    BiasLearnRateCoef). `max_norm`: nnet1's MaxNorm, carried through import and export; 0 is none.
    """

    kind: ClassVar[str] = "affine"

    in_features: int
    out_features: int
    activation: str = "sigmoid"
    learn_rate_coef: float = 1.0
    bias_learn_rate_coef: float = 1.0
    max_norm: float = 0.0

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r}")
        if not all(type(n) is int and n > 0 for n in (self.in_features, self.out_features)):
            raise ValueError(f"{self.in_features!r} inputs, {self.out_features!r} outputs")
        numbers = (self.learn_rate_coef, self.bias_learn_rate_coef, self.max_norm)
        if not all(isinstance(v, int | float) and abs(v) <= sys.float_info.max for v in numbers):  # no NaN either
            raise ValueError(f"learning rate coefficients and maximum norm {numbers!r}")

    @property
    def in_shape(self) -> Shape:
        return (self.in_features,)

    @property
    def out_shape(self) -> Shape:
        return (self.out_features,)

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        weight = Parameter((self.out_features, self.in_features), self.learn_rate_coef, l2=True)
        return {"weight": weight, "bias": Parameter((self.out_features,), self.bias_learn_rate_coef)}

    @cached_property
    def gemm(self) -> Gemm:
        return Gemm(1, self.in_features, self.out_features)

    @property
    def must_be_last(self) -> bool:
        return self.activation == "softmax"

    @property
    def label(self) -> str:
        return self.activation

    def padded(self, multiple: int) -> Affine:
        return replace(self, out_features=-(-self.out_features // multiple) * multiple)

    def forward(self, a: Float32, p: Params, x: Tensor, y: Tensor, saved: Views) -> None:
        a.affine(x, p.values["weight"], p.values["bias"], p.float32["bias"], self.activation, y)

    def backward(
        self, a: Float32, p: Params, x: Tensor, y: Tensor, grad: Tensor, grad_x: Tensor | None, saved: Views
    ) -> None:
        """As `Layer.backward`; leaves in `grad` the derivative before the activation."""
        a.activation_backward_(self.activation, grad, y)
        if grad_x is not None:
            matmul_out(grad, p.values["weight"], grad_x)

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        """As Kaldi nnet1's utils/nnet/make_nnet_proto.py: W ~ N(0, s^2), s = 3.5 sqrt(2 / (inputs + outputs)), the
        first layer's times sqrt(1/12); hidden biases uniform in (-4, 0), output bias 0. tanh and ReLU layers have their
        biases around 0: (-4, 0) is where sigmoids start."""
        weight, bias = p["weight"], p["bias"]
        deviation = 3.5 * math.sqrt(2.0 / (self.in_features + self.out_features))
        if first:
            deviation *= math.sqrt(1.0 / 12.0)
        if self.activation == "relu":
            deviation = math.sqrt(2.0 / self.in_features)  # He et al. 2015: 3.5 would explode without squashing
        weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
        if last or self.activation != "sigmoid":
            bias.zero_()
        else:
            bias.copy_(torch.rand(bias.shape, generator=generator) * 4.0 - 4.0)

    def to_nnet1(self, p: Views) -> list[nnet1.Component]:
        """An AffineTransform, and the activation where it is not linear."""
        weight, bias = (p[name].cpu().contiguous().numpy() for name in ("weight", "bias"))
        affine = nnet1.AffineTransform(weight, bias, self.learn_rate_coef, self.bias_learn_rate_coef, self.max_norm)
        if self.activation == "linear":
            return [affine]
        return [affine, nnet1.Activation(cast(Any, self.activation), self.out_features)]

    @classmethod
    def from_nnet1(cls, components: Sequence[nnet1.Component]) -> tuple[Layer, Tensor, int] | None:
        """An AffineTransform, with the activation that follows it, if one does."""
        affine, *rest = components
        if not isinstance(affine, nnet1.AffineTransform):
            return None
        out_features, in_features = affine.weight.shape
        stored = (affine.learn_rate_coef, affine.bias_learn_rate_coef, affine.max_norm)
        numbers = [float(str(np.float32(value))) for value in stored]  # float32 in the file: 0.1 is to stay 0.1
        activation = rest[0].kind if rest and isinstance(rest[0], nnet1.Activation) else "linear"
        layer = cls(in_features, out_features, activation, *numbers)
        parameters = [torch.from_numpy(part.copy()).flatten() for part in (affine.weight, affine.bias)]
        return layer, torch.cat(parameters), 1 + (activation != "linear")


LAYERS: dict[str, type[Layer]] = {"affine": Affine}  # every kind of layer, by the name in model files and recipes


def layer_from_config(config: Mapping[str, Any]) -> Layer:
    """The layer of a `Layer.config`, which anybody may have written. KeyError, TypeError, ValueError: it is none."""
    kind = config["kind"]
    if kind not in LAYERS:
        raise ValueError(f"kind of layer {kind!r} found, expected one of {', '.join(LAYERS)}")
    made: Layer = cast(Any, LAYERS[kind])(**{name: value for name, value in config.items() if name != "kind"})
    return made


def mlp_layers(
    input_dim: int,
    hidden_layers: int,
    hidden_units: int,
    output_dim: int,
    activation: str = "sigmoid",
    *,
    on_dbn: bool = False,
) -> tuple[Layer, ...]:
    """The recipe's shorthand for a network: equal hidden layers, then softmax over the pdfs. `on_dbn`: whether the
    hidden layers come from RBMs. The output bias learns at 0.1 of the rate (nnet1's make_nnet_proto), but nnet1 makes
    the output layer on a DBN without that."""
    dims = [input_dim] + [hidden_units] * hidden_layers
    hidden = tuple(Affine(a, b, activation) for a, b in pairwise(dims))
    return (*hidden, Affine(dims[-1], output_dim, "softmax", bias_learn_rate_coef=1.0 if on_dbn else 0.1))


def check_layers(layers: Sequence[Layer]) -> None:
    """Raises ValueError where these layers, first to last, are no network."""
    if not layers:
        raise ValueError("no layers")
    for i, layer in enumerate(layers):
        if layer.must_be_last and i != len(layers) - 1:
            raise ValueError(f"layer {i}: {layer.label}, which only the last layer can be")
        if i and layer.input_dim != layers[i - 1].output_dim:
            given = layers[i - 1].output_dim
            raise ValueError(f"layer {i} reads {layer.input_dim} dims, the one before gives {given}")


def num_parameters(layers: Sequence[Layer]) -> int:
    """Length of their flat buffer."""
    return sum(layer.num_parameters for layer in layers)


def activation_floats(layers: Sequence[Layer]) -> int:
    """Values that a workspace keeps of a frame: the input, and of each layer output, derivative and what it saves."""
    return layers[0].input_dim + sum(layer.activation_floats for layer in layers)


def training_flop_per_frame(layers: Sequence[Layer]) -> int:
    """Floating-point operations in the products of a training step: 7.5 million for 440-4x512-616. Three times those of
    the forward pass, but twice for the first layer: nobody needs the derivative of the input."""
    return 3 * sum(layer.flop_per_frame for layer in layers) - layers[0].flop_per_frame
