"""The deep neural network: affine layers with activations, softmax over the pdfs, all parameters in one flat buffer.

Forward and backward are written out, after Kaldi's nnet1 (nnet-affine-transform.h, nnet-activation.h, nnet-loss.cc):
an optimizer needs each layer's input and output derivative, which is where natural gradient works. The tests hold
both against torch.autograd in float64.

In bf16 the parameters stay float32: what is updated, averaged and saved. Each forward pass casts the flat buffer once
and multiplies with that copy; activations and derivatives are bf16, products are summed in float32, biases are added
before the product is rounded. docs/algorithms.md says what is in which precision, and why. On a GPU that copy's output
layer is wider than the network's, by outputs of zero weight that neither loss nor update sees.

On a CPU `ddnn.kernels` does the element-wise parts of bf16, where it is compiled: biases before a sigmoid are then
added in float32 to the rounded product. What the update changes it casts at once; the next forward pass then casts
nothing, unless someone else has changed the parameters meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from ddnn.kernels import Kernels, load_kernels
from ddnn.model.loss_memory import LossMemory
from ddnn.model.product import product, widens

Precision = Literal["float32", "bf16"]
"""What activations, derivatives and the factors of matrix products are held in; parameters are float32 in either."""

ACTIVATIONS = ("sigmoid", "tanh", "relu", "softmax", "linear")


@dataclass(frozen=True)
class Layer:
    """Shape and learning rates of one layer: y = activation(x W^T + b).

    Attributes:
        inputs, outputs: dimensions.
        activation: one of `ACTIVATIONS`; `softmax` only last, and then the network gives pre-softmax activations.
        weight_rate, bias_rate: multiples of the learning rate (nnet1's LearnRateCoef, BiasLearnRateCoef).
        max_norm: nnet1's MaxNorm, carried through import and export; 0 is none.
    """

    inputs: int
    outputs: int
    activation: str
    weight_rate: float = 1.0
    bias_rate: float = 1.0
    max_norm: float = 0.0

    @property
    def num_parameters(self) -> int:
        """Weights and biases."""
        return self.outputs * (self.inputs + 1)


class Network:
    """Layers over one flat parameter buffer.

    Attributes:
        layers: first to last.
        parameters: (num_parameters,) float32; per layer the weight (outputs x inputs, row-major), then the bias.
        weights, biases: views into `parameters`, one a layer.
        parts: both of a layer as one flat view, one a layer.
    """

    def __init__(self, layers: tuple[Layer, ...], parameters: Tensor | None = None) -> None:
        self.layers = layers
        total = sum(layer.num_parameters for layer in layers)
        self.parameters = torch.zeros(total) if parameters is None else parameters
        if self.parameters.shape != (total,):
            raise ValueError(f"{tuple(self.parameters.shape)} parameters given, ({total},) expected")
        self.weights, self.biases = layer_views(layers, self.parameters)
        self.parts = list(torch.split(self.parameters, [layer.num_parameters for layer in layers]))

    @property
    def input_dim(self) -> int:
        """Dimension of the (spliced) input."""
        return self.layers[0].inputs

    @property
    def output_dim(self) -> int:
        """Number of pdfs."""
        return self.layers[-1].outputs

    def to(self, device: torch.device) -> Network:
        """A network of the same layers with its parameters on `device`."""
        return Network(self.layers, self.parameters.to(device))


def layer_views(layers: tuple[Layer, ...], flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Per layer the weight (outputs, inputs) and bias (outputs,) parts of a flat buffer laid out like parameters."""
    weights, biases, at = [], [], 0
    for layer in layers:
        size = layer.inputs * layer.outputs
        weights.append(flat[at : at + size].view(layer.outputs, layer.inputs))
        biases.append(flat[at + size : at + layer.num_parameters])
        at += layer.num_parameters
    return weights, biases


def hidden_stack(
    inputs: int, hidden_layers: int, hidden_units: int, outputs: int, activation: str
) -> tuple[Layer, ...]:
    """Equal hidden layers, then softmax; the output bias learns at 0.1 of the rate (nnet1's make_nnet_proto)."""
    dims = [inputs] + [hidden_units] * hidden_layers
    hidden = tuple(Layer(a, b, activation) for a, b in pairwise(dims))
    return (*hidden, Layer(dims[-1], outputs, "softmax", bias_rate=0.1))


class Buffers:
    """Memory for one minibatch of at most `frames` frames, taken once.

    Attributes:
        x: (frames, input_dim), the network's input; float32, with kernels bf16.
        outputs: per layer (frames, outputs), after the activation; pre-softmax for the last.
        derivatives: per layer (frames, outputs), of the summed loss with respect to the layer's affine output.
        padded_outputs, padded_derivatives: what the products read and write. The same memory as those two, in bf16 with
            further columns in the last layer: the derivatives there are 0, the outputs nobody's.
        precision: of `outputs` and `derivatives`.
        low: in bf16 the network's bf16 copy, as of the last forward pass, its last layer padded; else None.
        low_gradient: in bf16 (num_parameters,) bf16, where the device cannot give a product of bf16 matrices in
            float32; else None.
        losses: memory of `ddnn.model.loss`.
        kernels: in bf16 on a CPU what does the element-wise parts, where it is compiled; else None.
        scratch: with kernels, per layer weight and bias of its shapes, bf16, all in the same memory; else empty.
        scratch_parts: both of a layer as one flat view.

    Args:
        multiple: in bf16 the last layer is padded to a multiple of so many outputs; None: `CUDA_MULTIPLE` on a GPU, 1
            elsewhere.
        compiled: use kernels where there are any.
    """

    def __init__(
        self,
        network: Network,
        frames: int,
        precision: Precision = "float32",
        multiple: int | None = None,
        compiled: bool = True,
    ) -> None:
        new, low = network.parameters.new_empty, precision == "bf16"
        if multiple is None:
            multiple = CUDA_MULTIPLE if network.parameters.device.type == "cuda" else 1
        layers = padded(network.layers, multiple) if low else network.layers
        dtype = torch.bfloat16 if low else network.parameters.dtype
        self.precision = precision
        self.x = new(frames, network.input_dim)
        self._first = new(frames, network.input_dim, dtype=dtype) if low else self.x
        self.padded_outputs = [new(frames, layer.outputs, dtype=dtype) for layer in layers]
        self.padded_derivatives = [torch.zeros_like(y) for y in self.padded_outputs]
        self.outputs, self.derivatives = (
            [y[:, : layer.outputs] for y, layer in zip(whole, network.layers, strict=True)]
            for whole in (self.padded_outputs, self.padded_derivatives)
        )
        self.kernels: Kernels | None = None
        if low and compiled and layers == network.layers and network.parameters.device.type == "cpu":
            self.kernels = load_kernels() if torch.get_num_threads() <= KERNELS_THREADS else None
        self.low: Network | None = None
        self.low_gradient: Tensor | None = None
        if low:
            self.low = Network(layers, new(sum(layer.num_parameters for layer in layers), dtype=dtype).zero_())
            if self.kernels is not None or not widens(network.parameters.device):
                self.low_gradient = torch.empty_like(network.parameters, dtype=dtype)
        self.losses = LossMemory(network.parameters, network.output_dim, frames, low)
        self._cast = _Cast()
        self.scratch: list[tuple[Tensor, Tensor]] = []
        self.scratch_parts: list[Tensor] = []
        if self.kernels is not None:
            self.x = self._first
            block = new(max(layer.num_parameters for layer in layers), dtype=dtype)
            for layer in layers:
                part = block[: layer.num_parameters]
                weights, biases = layer_views((layer,), part)
                self.scratch.append((weights[0], biases[0]))
                self.scratch_parts.append(part)

    def of(self, frames: int) -> Buffers:
        """The first `frames` rows of the same memory."""
        if frames == len(self.x):
            return self
        part = Buffers.__new__(Buffers)
        vars(part).update(vars(self))
        part._first = self._first[:frames]
        part.x = part._first if self.x is self._first else self.x[:frames]
        part.outputs = [y[:frames] for y in self.outputs]
        part.derivatives = [d[:frames] for d in self.derivatives]
        part.padded_outputs = [y[:frames] for y in self.padded_outputs]
        part.padded_derivatives = [d[:frames] for d in self.padded_derivatives]
        return part

    def inputs(self) -> list[Tensor]:
        """Per layer, what it read: x (in bf16 its copy), then the outputs of the layer before."""
        return [self._first, *self.outputs[:-1]]

    def take_up(self, network: Network) -> Network:
        """The network to multiply with: `network`, or its bf16 copy made anew; the input is cast along with it."""
        if self.low is None:
            return network
        if self.x is not self._first:
            self._first.copy_(self.x)
        if self._cast.is_of(network.parameters):
            return self.low
        self._cast.parameters = None
        shared = len(network.parameters) - network.output_dim  # up to the last bias, which padding moves
        self.low.parameters[:shared].copy_(network.parameters[:shared])
        self.low.biases[-1][: network.output_dim].copy_(network.biases[-1])
        return self.low

    def descended(self, network: Network) -> None:
        """To be called once `kernels` have brought parameters and bf16 copy to the next values, both of them."""
        torch.autograd.graph.increment_version(network.parameters)  # other buffers of this network shall see it
        self._cast.parameters, self._cast.version = network.parameters, network.parameters._version


@dataclass
class _Cast:
    """What `Buffers.low` is the bf16 copy of, if that is known. All parts of one memory share it, as they share `low`.

    Attributes:
        parameters: the network's; None: not known.
        version: torch's count of the changes made to them in place.
    """

    parameters: Tensor | None = None
    version: int = 0

    def is_of(self, parameters: Tensor) -> bool:
        """Whether they are the same, and as they were."""
        return self.parameters is parameters and self.version == parameters._version


KERNELS_THREADS = 2
"""Most threads of a worker with which kernels, which run on one, are used: PyTorch shares its passes among them all."""

CUDA_MULTIPLE = 64
"""Of the outputs in bf16 on a GPU, whose library wants rows to start at multiples of 16 bytes, which those of 8806 do
not, and likes 128. Not yet seen on a GPU."""


def padded(layers: tuple[Layer, ...], multiple: int) -> tuple[Layer, ...]:
    """The same layers with the last one's outputs rounded up to a multiple."""
    *below, last = layers
    return (*below, replace(last, outputs=-(-last.outputs // multiple) * multiple))


def forward(network: Network, buffers: Buffers) -> Tensor:
    """From `buffers.x` through all layers; returns the last layer's output (frames, outputs), before softmax."""
    made, y = buffers.take_up(network), buffers.inputs()[0]
    for i, (layer, weight, bias) in enumerate(zip(made.layers, made.weights, made.biases, strict=True)):
        out = buffers.padded_outputs[i]
        if layer.activation == "sigmoid" and buffers.kernels is not None:
            y = torch.mm(y, weight.t(), out=out)
            buffers.kernels.sigmoid_(y, network.biases[i])
            continue
        y = torch.addmm(bias, y, weight.t(), out=out)
        if layer.activation == "sigmoid":
            y.sigmoid_()
        elif layer.activation == "tanh":
            y.tanh_()
        elif layer.activation == "relu":
            y.relu_()
    return buffers.outputs[-1]


def cross_entropy(activations: Tensor, labels: Tensor, derivative: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy over a minibatch and the number of frames classified rightly, both 0-dim, on the device.

    Args:
        activations: (frames, pdfs) before softmax.
        labels: (frames,) int64 pdf-ids.
        derivative: filled with softmax - target, (frames, pdfs), where given.
    """
    target = labels[:, None]
    right = (activations.argmax(dim=1) == labels).sum()
    log_posteriors = torch.log_softmax(activations, dim=1)
    loss = -log_posteriors.gather(1, target).sum(dtype=torch.float64)
    if derivative is not None:
        torch.exp(log_posteriors, out=derivative)
        derivative.scatter_add_(1, target, derivative.new_full((1, 1), -1.0).expand_as(target))
    return loss, right


def backward(network: Network, buffers: Buffers) -> None:
    """From the last layer's derivative back to the first's, in place in `buffers.derivatives`."""
    network = network if buffers.low is None else buffers.low
    for i in range(len(network.layers) - 1, 0, -1):
        below = network.layers[i - 1].activation
        y, d = buffers.outputs[i - 1], buffers.derivatives[i - 1]
        torch.mm(buffers.padded_derivatives[i], network.weights[i], out=d)
        if below == "sigmoid" and buffers.kernels is not None:
            buffers.kernels.sigmoid_backward_(d, y)
        elif below == "sigmoid":
            torch.ops.aten.sigmoid_backward.grad_input(d, y, grad_input=d)
        elif below == "tanh":
            torch.ops.aten.tanh_backward.grad_input(d, y, grad_input=d)
        elif below == "relu":
            torch.ops.aten.threshold_backward.grad_input(d, y, 0, grad_input=d)


def gradient(network: Network, buffers: Buffers, flat: Tensor) -> Tensor:
    """Gradient of the loss summed over the minibatch, into `flat` (num_parameters,): dW = d^T x, db = sum of d."""
    made = flat if buffers.low_gradient is None else buffers.low_gradient
    for _ in gradient_by_layer(buffers, zip(*layer_views(network.layers, made), strict=True)):
        pass
    return flat if made is flat else flat.copy_(made)


def gradient_by_layer(buffers: Buffers, places: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """The gradient of `gradient`, one layer filled after another, from the first on.

    Args:
        places: per layer weight and bias, of the precision that products have. They may share their memory, if each
            layer is taken up before the next is asked for.
    """
    for x, d, (weight, bias) in zip(buffers.inputs(), buffers.derivatives, places, strict=True):
        product(d.t(), x, out=weight)
        if buffers.kernels is None:
            torch.sum(d, dim=0, dtype=bias.dtype, out=bias)
        else:
            buffers.kernels.sum_rows(d, bias)
        yield
