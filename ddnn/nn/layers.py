"""The kinds of layers, and networks of them. A new kind is a class and a line in `LAYERS`; what a layer promises is in
`ddnn.nn.layer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ddnn.kaldi import nnet1
from ddnn.nn.arithmetic import ACTIVATIONS
from ddnn.nn.convolution import AveragePooling, Convolution, MaxPooling
from ddnn.nn.elementwise import Activation, Copy, Dropout, LengthNorm, ParametricRelu, Scale, Shift
from ddnn.nn.layer import (
    Gemm,
    Layer,
    LayerCall,
    Parameter,
    Params,
    Shape,
    Views,
    as_array,
    as_parameters,
    check_coefs,
    check_sizes,
    limit_row_norms,
    numbers_of,
    torch_activation,
)
from ddnn.nn.products import matmul_out


@dataclass(frozen=True)
class Affine(Layer):
    """y = f(x W^T + b). The activation belongs to the layer, so that compiled code can fuse the two. ValueError: one of
    these is no value for it.

    `activation`: one of `ACTIVATIONS`; `softmax` only last, and then the network gives pre-softmax activations.
    `learn_rate_coef`, `bias_learn_rate_coef`: multiples of the learning rate (nnet1's LearnRateCoef and
    BiasLearnRateCoef). `max_norm`: nnet1's MaxNorm, the largest L2 norm of a row of W after each update; 0 is none.
    """

    kind: ClassVar[str] = "affine"
    component = nnet1.AffineTransform

    in_features: int
    out_features: int
    activation: str = "sigmoid"
    learn_rate_coef: float = 1.0
    bias_learn_rate_coef: float = 1.0
    max_norm: float = 0.0

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r}")
        check_sizes(in_features=self.in_features, out_features=self.out_features)
        check_coefs(self.learn_rate_coef, self.bias_learn_rate_coef, self.max_norm)

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

    def with_activation(self, function: str) -> Affine | None:
        return replace(self, activation=function) if self.activation == "linear" else None

    def padded(self, multiple: int) -> Affine:
        return replace(self, out_features=-(-self.out_features // multiple) * multiple)

    def of_units(self, start: int, end: int, units: int) -> Affine:
        return replace(self, out_features=end - start)

    def forward(self, call: LayerCall) -> None:
        call.a.affine(call.x, *call.p.affine, self.activation, call.y)

    def backward(self, call: LayerCall) -> None:
        """Leaves in `grad` the derivative before the activation."""
        call.a.activation_backward_(self.activation, call.grad, call.y)
        if call.grad_x is not None:
            matmul_out(call.grad, call.p.values["weight"], call.grad_x)

    def after_update(self, p: Views) -> bool:
        return limit_row_norms(p["weight"], self.max_norm)

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        """As Kaldi nnet1's utils/nnet/make_nnet_proto.py: W ~ N(0, s^2), s = 3.5 sqrt(2 / (inputs + outputs)), the
        first layer's times sqrt(1/12); hidden biases uniform in (-4, 0), output bias 0. tanh and ReLU layers have their
        biases around 0: (-4, 0) is where sigmoids start."""
        weight, bias = p["weight"], p["bias"]
        deviation = 3.5 * math.sqrt(2.0 / (self.in_features + self.out_features))
        if first:
            deviation *= math.sqrt(1.0 / 12.0)
        if self.activation in ("relu", "linear"):  # linear: below a parametric ReLU
            deviation = math.sqrt(2.0 / self.in_features)  # He et al. 2015: 3.5 would explode without squashing
        weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
        if last or self.activation != "sigmoid":
            bias.zero_()
        else:
            bias.copy_(torch.rand(bias.shape, generator=generator) * 4.0 - 4.0)

    def to_torch(self, p: Views) -> torch.nn.Module:
        linear = torch.nn.Linear(self.in_features, self.out_features, device="meta")  # draws no random numbers
        linear.load_state_dict({name: values.clone() for name, values in p.items()}, assign=True)
        return torch.nn.Sequential(linear, torch_activation(self.activation))

    def to_nnet1(self, p: Views) -> list[nnet1.Component]:
        """An AffineTransform, and the activation where it is not linear."""
        numbers = (self.learn_rate_coef, self.bias_learn_rate_coef, self.max_norm)
        affine = nnet1.AffineTransform(as_array(p["weight"]), as_array(p["bias"]), *numbers)
        if self.activation == "linear":
            return [affine]
        return [affine, nnet1.Activation(cast(Any, self.activation), self.out_features)]

    @classmethod
    def from_nnet1(cls, component: Any) -> tuple[Layer, Tensor]:
        """Linear; `layers_from_nnet1` adds the activation that follows it."""
        out_features, in_features = component.weight.shape
        layer = cls(in_features, out_features, "linear", **numbers_of(component, cls))
        return layer, as_parameters(component.weight, component.bias)


@dataclass(frozen=True)
class Parallel(Layer):
    """Networks side by side: the columns of the input are dealt out to them in order, and their outputs are put side by
    side (nnet1's ParallelComponent). Momentum, weight decay and rates are those of the layers inside. Names of parameters
    and of what is saved begin with the number of the network and of its layer: "0.1.weight"."""

    kind: ClassVar[str] = "parallel"
    component = nnet1.ParallelComponent

    networks: tuple[tuple[Layer, ...], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.networks, list | tuple) or not self.networks:
            raise ValueError("no networks side by side")
        made = tuple(
            tuple(layer_from_config(one) if isinstance(one, Mapping) else one for one in n) for n in self.networks
        )
        object.__setattr__(self, "networks", made)  # JSON has lists of configs
        if self.depth > nnet1.MAX_DEPTH:
            raise ValueError(f"networks within networks, {self.depth} deep, expected at most {nnet1.MAX_DEPTH}")
        for n, layers in enumerate(made):
            try:
                check_layers(layers)
            except ValueError as error:
                raise ValueError(f"network {n}: {error}") from error
            if layers[-1].must_be_last:
                raise ValueError(f"network {n}: {layers[-1].label}, which only the last layer of all can be")

    @property
    def depth(self) -> int:
        nested = [layer.depth for layers in self.networks for layer in layers if isinstance(layer, Parallel)]
        return 1 + max(nested, default=0)

    @cached_property
    def in_dims(self) -> list[int]:
        """Of each network."""
        return [layers[0].input_dim for layers in self.networks]

    @cached_property
    def out_dims(self) -> list[int]:
        return [layers[-1].output_dim for layers in self.networks]

    @property
    def in_shape(self) -> Shape:
        return (sum(self.in_dims),)

    @property
    def out_shape(self) -> Shape:
        return (sum(self.out_dims),)

    @cached_property
    def layers(self) -> Mapping[str, Layer]:
        """Those of all networks, by the beginning of the names of their parameters."""
        return {f"{n}.{i}.": layer for n, layers in enumerate(self.networks) for i, layer in enumerate(layers)}

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        return {prefix + name: of for prefix, layer in self.layers.items() for name, of in layer.parameters.items()}

    @cached_property
    def saved(self) -> Mapping[str, Shape]:
        """Of each network `N.x` and `N.grad`, its input and the derivative with respect to it; of each layer `N.I.y` and
        `N.I.grad`, the same of its output, and what it saves itself."""
        shapes: dict[str, Shape] = {}
        for n, dim in enumerate(self.in_dims):
            shapes |= {f"{n}.x": (dim,), f"{n}.grad": (dim,)}
        for prefix, layer in self.layers.items():
            shapes |= {f"{prefix}y": (layer.output_dim,), f"{prefix}grad": (layer.output_dim,)}
            shapes |= {prefix + name: shape for name, shape in layer.saved.items()}
        return shapes

    @property
    def flop_per_frame(self) -> int:
        return sum(layer.flop_per_frame for layer in self.layers.values())

    def without_noise(self) -> Parallel:
        return Parallel(tuple(tuple(layer.without_noise() for layer in layers) for layers in self.networks))

    def draw(self, generator: torch.Generator, saved: Views) -> None:
        for prefix, layer in self.layers.items():
            layer.draw(generator, _inside(saved, prefix))

    def _calls(self, call: LayerCall) -> dict[str, LayerCall]:
        """Those of the layers inside."""
        calls = {}
        for n, layers in enumerate(self.networks):
            x, grad_x = call.saved[f"{n}.x"], None if call.grad_x is None else call.saved[f"{n}.grad"]
            for i, layer in enumerate(layers):
                prefix = f"{n}.{i}."
                params, own = Params(*(_inside(views, prefix) for views in call.p)), _inside(call.saved, prefix)
                calls[prefix] = LayerCall(layer, call.a, params, x, own["y"], own["grad"], grad_x, own)
                x, grad_x = own["y"], own["grad"]
        return calls

    def _outputs(self, call: LayerCall, name: str) -> list[Tensor]:
        """The memory of this name of the last layer of each network."""
        return [call.saved[f"{n}.{len(layers) - 1}.{name}"] for n, layers in enumerate(self.networks)]

    def forward(self, call: LayerCall) -> None:
        for n, columns in enumerate(torch.split(call.x, self.in_dims, dim=1)):
            call.saved[f"{n}.x"].copy_(columns)
        for inner in self._calls(call).values():
            inner.layer.forward(inner)
        torch.cat(self._outputs(call, "y"), dim=1, out=call.y)

    def backward(self, call: LayerCall) -> None:
        for grad, columns in zip(
            self._outputs(call, "grad"), torch.split(call.grad, self.out_dims, dim=1), strict=True
        ):
            grad.copy_(columns)
        for inner in reversed(self._calls(call).values()):
            inner.layer.backward(inner)
        if call.grad_x is not None:
            torch.cat([call.saved[f"{n}.grad"] for n in range(len(self.networks))], dim=1, out=call.grad_x)

    def gradient(self, call: LayerCall, out: Views) -> None:
        for prefix, inner in self._calls(call).items():
            if inner.layer.num_parameters:
                inner.layer.gradient(inner, _inside(out, prefix))

    @cached_property
    def parts(self) -> Mapping[str, Layer]:
        return {prefix + rest: part for prefix, layer in self.layers.items() for rest, part in layer.parts.items()}

    def part_calls(self, call: LayerCall) -> Mapping[str, LayerCall]:
        inner = self._calls(call).items()
        return {prefix + rest: part for prefix, one in inner for rest, part in one.layer.part_calls(one).items()}

    def after_update(self, p: Views) -> bool:
        return any([layer.after_update(_inside(p, prefix)) for prefix, layer in self.layers.items()])

    def initialize(self, p: Views, generator: torch.Generator, *, first: bool, last: bool) -> None:
        """Each layer by its own rule; the first of each network is first where this layer is."""
        for prefix, layer in self.layers.items():
            layer.initialize(_inside(p, prefix), generator, first=first and prefix.endswith(".0."), last=False)

    def config(self) -> dict[str, Any]:
        return {"kind": self.kind, "networks": [[layer.config() for layer in layers] for layers in self.networks]}

    def to_nnet1(self, p: Views) -> list[nnet1.Component]:
        networks = []
        for n, layers in enumerate(self.networks):
            parts = (layer.to_nnet1(_inside(p, f"{n}.{i}.")) for i, layer in enumerate(layers))
            networks.append(tuple(component for part in parts for component in part))
        return [nnet1.ParallelComponent(tuple(networks))]

    @classmethod
    def from_nnet1(cls, component: Any) -> tuple[Layer, Tensor]:
        made = [layers_from_nnet1(network, f"network {n}, ") for n, network in enumerate(component.networks, start=1)]
        return cls(tuple(layers for layers, _ in made)), torch.cat([parameters for _, parameters in made])


def _inside(views: Views, prefix: str) -> Views:
    """Of tensors by name those whose name begins so, by the rest of it."""
    return {name.removeprefix(prefix): value for name, value in views.items() if name.startswith(prefix)}


KINDS: tuple[type[Layer], ...] = (
    Affine,
    Convolution,
    MaxPooling,
    AveragePooling,
    Activation,
    Scale,
    Shift,
    ParametricRelu,
    LengthNorm,
    Dropout,
    Copy,
    Parallel,
)
LAYERS: dict[str, type[Layer]] = {kind.kind: kind for kind in KINDS}  # by the name in model files and recipes
LAYERS |= {"conv2d": Convolution, "max-pool2d": MaxPooling, "average-pool2d": AveragePooling}  # of earlier model files


def layer_from_config(config: Mapping[str, Any], input_dim: int | None = None) -> Layer:
    """The layer of a `Layer.config`, which anybody may have written. `input_dim`: that of its `width` or `in_features`
    where it does not give them. KeyError, TypeError, ValueError: it is none."""
    kind = config["kind"]
    if kind not in LAYERS:
        raise ValueError(f"kind of layer {kind!r} found, expected one of {', '.join(LAYERS)}")
    sizes = {"width", "in_features"} & {field.name for field in fields(LAYERS[kind])}
    follow = {} if input_dim is None else dict.fromkeys(sizes, input_dim)
    return LAYERS[kind].from_fields({**follow, **{name: value for name, value in config.items() if name != "kind"}})


def layers_from_nnet1(components: Sequence[nnet1.Component], within: str = "") -> tuple[tuple[Layer, ...], Tensor]:
    """The layers that these components are, and their parameters, (num_parameters,); `within`: of what they are part,
    for messages. ValueError: they are none."""
    layers, parameters = list[Layer](), [torch.zeros(0)]
    for number, component in enumerate(components, start=1):
        name = f"{within}component {number}"
        if layers and layers[-1].must_be_last:
            raise ValueError(f"{within}component {number - 1} is a {layers[-1].label} that is not the last component")
        if layers and isinstance(component, nnet1.Activation) and (fused := layers[-1].with_activation(component.kind)):
            layers[-1] = fused
            continue
        kind = next((kind for kind in LAYERS.values() if kind.component is type(component)), None)
        if kind is None:
            raise ValueError(f"{name} is {type(component).__name__}, which is no layer")
        try:
            layer, values = kind.from_nnet1(component)
        except ValueError as error:
            raise ValueError(f"{name}, {error}") from error
        layers.append(layer)
        parameters.append(values)
    check_layers(layers)
    return tuple(layers), torch.cat(parameters)


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


def layer_sizes(layers: Sequence[Layer]) -> tuple[int, ...]:
    """The dims of a network: of its input, and of what its layers give. Layers without a product that change no dims are
    not among them."""
    dims = (layer.output_dim for layer in layers if layer.flop_per_frame or layer.output_dim != layer.input_dim)
    return (layers[0].input_dim, *dims)


def describe_sizes(layers: Sequence[Layer]) -> str:
    """The `layer_sizes` of a network as text, "440-1024-1024-616"."""
    return "-".join(map(str, layer_sizes(layers)))


def describe_layers(layers: Sequence[Layer]) -> str:
    """The layers in a few words, with the shape of their output where they change it: "conv 33x128, max-pool 11x128, scale,
    shift, sigmoid"."""
    words = []
    for layer in layers:
        shape = "x".join(str(size) for size in layer.out_shape if size > 1) or "1"
        words.append(layer.label if layer.in_shape == layer.out_shape and not layer.gemm else f"{layer.label} {shape}")
    return ", ".join(words)


def activation_floats(layers: Sequence[Layer]) -> int:
    """Values that a workspace keeps of a frame: the input, and of each layer output, derivative and what it saves."""
    return layers[0].input_dim + sum(layer.activation_floats for layer in layers)


def training_flop_per_frame(layers: Sequence[Layer]) -> int:
    """Floating-point operations in the products of a training step: 7.5 million for 440-4x512-616. Three times those of
    the forward pass, but twice for the first layer: nobody needs the derivative of the input."""
    return 3 * sum(layer.flop_per_frame for layer in layers) - layers[0].flop_per_frame
