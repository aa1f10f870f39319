"""Networks: layers over one flat parameter buffer, and the memory in which a minibatch passes through them. Forward and
backward are written out, after Kaldi's nnet1 (nnet-affine-transform.h, nnet-activation.h, nnet-loss.cc): natural
gradient needs each layer's input and output derivative. The tests hold both against torch.autograd in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ddnn.nn.arithmetic import Float32
from ddnn.nn.layer import Layer, LayerCall, Params, Views
from ddnn.nn.layers import num_parameters
from ddnn.nn.partition import Link, Partition
from ddnn.util.errors import DataError


def tensor_like(expected: Tensor, state: Mapping[str, Tensor], name: str, location: Path | None = None) -> Tensor:
    """The tensor of this name in a state; DataError where it is missing, or of another shape or type."""
    found = state.get(name)
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        shown = "nothing" if found is None else f"{tuple(found.shape)} {found.dtype}"
        raise DataError(f"{name}: {shown} found, {tuple(expected.shape)} {expected.dtype} expected", location=location)
    return found


class Network:
    """Layers over one flat parameter buffer.

    Whoever changes `parameters` in place calls `parameters_changed` afterwards: workspaces in bf16 multiply with a copy
    that they refresh only then.

    Attributes:
        layers: first to last.
        parameters: (num_parameters,) float32, layer by layer, each in the order of its `Layer.parameters`.
        views: of each layer, its parameters by name, views into `parameters`.
        version: how often the parameters have changed.
        partition: how the workers of a replica share the network, of which this object has this worker's layers and
            parameters: all of them, unless several share it.
        frozen: numbers of the layers that keep the parameters that they have now, bit for bit: optimizers leave them
            as they are, and the rounding of an averaging is undone.
        lowest_trainable: number of the first layer that has parameters and is not frozen, at which the backward pass
            ends.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        parameters: Tensor | None = None,
        frozen: Iterable[int] = (),
        partition: Partition | None = None,
    ) -> None:
        self.layers, self.partition = tuple(layers), partition or Partition()
        self.num_parameters = num_parameters(self.layers)
        self.parameters = torch.zeros(self.num_parameters) if parameters is None else parameters
        if self.parameters.shape != (self.num_parameters,):
            raise ValueError(f"{tuple(self.parameters.shape)} parameters given, ({self.num_parameters},) expected")
        self.views = self.split(self.parameters)
        self.version = 0
        self.frozen = frozenset(frozen)
        trainable = (i for i, one in enumerate(self.layers) if i not in self.frozen and one.num_parameters)
        self.lowest_trainable = next(trainable, 0)
        parts = torch.split(self.parameters, [layer.num_parameters for layer in self.layers])
        self._kept = [(part, part.clone()) for i, part in enumerate(parts) if i in self.frozen]

    @property
    def input_dim(self) -> int:
        return self.layers[0].input_dim

    @property
    def output_dim(self) -> int:
        return self.layers[-1].output_dim

    @property
    def shapes(self) -> list[torch.Size]:
        """Those of the tensors that `parameters` consists of, one after another."""
        return [tensor.shape for views in self.views for tensor in views.values()]

    def split(self, flat: Tensor) -> list[dict[str, Tensor]]:
        """Per layer the named parts of a flat buffer laid out like `parameters`, such as a gradient."""
        parts = torch.split(flat, [layer.num_parameters for layer in self.layers])
        return [layer.views(part) for layer, part in zip(self.layers, parts, strict=True)]

    def parameters_changed(self) -> None:
        """To be called after every change of `parameters` in place."""
        for part, kept in self._kept:
            part.copy_(kept)
        self.version += 1

    def load_parameters(self, flat: Tensor) -> None:
        """parameters <- flat (num_parameters,), of any device."""
        self.parameters.copy_(flat)
        self.parameters_changed()

    def state_dict(self) -> dict[str, Tensor]:
        """`parameters` of the whole network; the tensor in use, where this worker has all of it."""
        return {"parameters": self.partition.whole(self.parameters)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state_dict`; DataError where it does not fit."""
        self.load_parameters(self.own_vector(state, "parameters", self.parameters))

    def own_vector(self, state: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
        """This worker's part, of the size and dtype of `like`, of a flat vector of the whole network in a state; DataError
        as `tensor_like`."""
        size = self.partition.num_parameters(len(like))
        return self.partition.own(tensor_like(like.new_empty(size, device="meta"), state, name))

    def load_lower_layers(self, below: Network) -> None:
        """The first layers <- the parameters of another network, all of whose layers they are."""
        self.parameters[: below.num_parameters].copy_(below.parameters)
        self.parameters_changed()

    def to(self, device: torch.device) -> Network:
        return Network(self.layers, self.parameters.to(device), self.frozen, self.partition)

    def with_frozen(self, frozen: Iterable[int]) -> Network:
        """The same network, of the same parameters, whose layers of these numbers are frozen."""
        return Network(self.layers, self.parameters, frozen, self.partition)

    def part_of(self, partition: Partition) -> Network:
        """This worker's part, where workers share this network."""
        layers, parameters = partition.own_layers(self.layers), partition.own(self.parameters)
        frozen = {i - partition.first_layer for i in self.frozen} & set(range(len(layers)))
        return Network(layers, parameters, frozen, partition)

    def whole(self) -> Network:
        """The network that this is a part of, on each worker; itself where it is all of it. Collective over a replica."""
        partition = self.partition
        layers, parameters = partition.layers(self.layers), partition.whole(self.parameters)
        return self if parameters is self.parameters else Network(layers, parameters)


class Workspace:
    """Memory for one minibatch of at most `frames` frames, taken once, and the passes through it.

    A minibatch is used once. The backward pass overwrites derivatives; the step of NG-SGD (`ddnn.optim.ng_sgd`) also overwrites
    activations and `x` with preconditioned rows. Who needs them afterwards, for a second loss or a line search, copies them
    before the step, or fills `x` and runs the passes again.

    Args:
        network: whose parameters are read.
        frames: of a minibatch at most.
        arithmetic: what to compute in; float32 where it is not given.
        generator: on the network's device, of what layers such as dropout draw in each forward pass. Without one they do
            as outside training.
        links: below each layer and above the last; where they are not given, those of the network's partition.

    Attributes:
        x: (frames, input_dim), the network's input, of the arithmetic's `x_dtype`; to be filled, unless it is received from
            another worker.
        inputs: per layer (frames, input_dim), what it reads.
        activations: per layer (frames, output_dim), after its activation; logits of the last.
        grad_outputs: per layer (frames, output_dim), of the summed loss with respect to `activations`; after the
            backward pass what `Layer.backward` leaves there.
        compute: the network that is multiplied with: `network`, or its copy, the last layer padded.
        calls: per layer what it works on. Outputs and derivatives are the memory of those two, with further columns in
            the last layer where it is padded: the derivatives there are 0, the outputs nobody's.
        layer_gradients: where gradients are not computed in float32, per layer memory for its gradient, all in the same
            place; else empty.
    """

    def __init__(
        self,
        network: Network,
        frames: int,
        arithmetic: Float32 | None = None,
        generator: torch.Generator | None = None,
        links: Sequence[Link] | None = None,
    ) -> None:
        self.network, self.arithmetic, self.generator = network, arithmetic or Float32(), generator
        a, new = self.arithmetic, network.parameters.new_empty
        self.links = network.partition.links(network.layers, a.dtype) if links is None else links
        *below, last = network.layers if generator is not None else without_noise(network.layers)
        layers = (*below, last.padded(a.pad_to))
        self._layers = layers
        columns, dtype = self.links[0].received or (network.input_dim, a.x_dtype)
        x = new(frames, columns, dtype=dtype)
        x_derivative = torch.zeros_like(x if self.receives else x[:0])
        first_input, first_derivative = self.links[0].memory(x, x_derivative)
        if first_input.dtype != a.dtype:
            first_input = new(frames, network.input_dim, dtype=a.dtype)
        outputs = [new(frames, layer.output_dim, dtype=a.dtype) for layer in layers]
        saved = [{k: new(frames, *shape, dtype=a.dtype) for k, shape in layer.saved.items()} for layer in layers]
        derivatives = [torch.zeros_like(y) for y in outputs]
        between = [link.memory(*each) for link, *each in zip(self.links[1:-1], outputs, derivatives, strict=False)]
        inputs = [(first_input, first_derivative), *between]
        self._memory = x, x_derivative, inputs, outputs, derivatives, saved
        self.compute = network
        if a.casts:
            self.compute = Network(layers, network.parameters.new_zeros(num_parameters(layers), dtype=a.dtype))
            self.compute.version = -1
        self._copies = list(_copies(network, self.compute))
        by_layer = network.layers if a.gradient_dtype != torch.float32 else ()
        block = new(max((layer.num_parameters for layer in by_layer), default=0), dtype=a.gradient_dtype)
        self.layer_gradients = [layer.views(block[: layer.num_parameters]) for layer in by_layer]
        self._part: Workspace | None = None
        self._use(slice(frames))

    @property
    def receives(self) -> bool:
        """Whether the input comes from another worker."""
        return self.links[0].received is not None

    def _use(self, part: slice) -> None:
        """Makes the views of these rows of the memory."""
        x, x_derivative, inputs, outputs, derivatives, saved = self._memory
        self.x = x[part]
        self._lowest = 0 if self.receives else self.network.lowest_trainable
        input_derivatives: list[Tensor | None] = [memory[part] for _, memory in inputs]
        without = 0 if self.receives else self._lowest + 1
        input_derivatives[:without] = [None] * without
        params = map(Params, self.compute.views, self.network.views)
        self.inputs = [memory[part] for memory, _ in inputs]
        rows = zip(self._layers, params, self.inputs, outputs, derivatives, input_derivatives, saved, strict=True)
        self.calls = [
            LayerCall(
                layer,
                self.arithmetic,
                p,
                x,
                y[part],
                grad[part],
                grad_x,
                {k: v[part] for k, v in kept.items()},
            )
            for layer, p, x, y, grad, grad_x, kept in rows
        ]
        dims = [layer.output_dim for layer in self.network.layers]
        self.activations = [call.y[:, :dim] for call, dim in zip(self.calls, dims, strict=True)]
        self.grad_outputs = [call.grad[:, :dim] for call, dim in zip(self.calls, dims, strict=True)]
        self._derivatives_below = [x_derivative[part], *self.grad_outputs[:-1]]

    def of(self, frames: int) -> Workspace:
        """The same memory for a minibatch of `frames` frames; of the last other size its views are kept."""
        if frames == len(self.x):
            return self
        if self._part is None or len(self._part.x) != frames:
            self._part = self.rows(slice(frames))
        return self._part

    def rows(self, part: slice) -> Workspace:
        """These rows of the memory, for passes of their own."""
        workspace = copy.copy(self)
        workspace._part = None
        workspace._use(part)
        return workspace

    def state_dict(self) -> dict[str, Tensor]:
        """`generator`, the state of the generator, uint8, where there is one."""
        return {} if self.generator is None else {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes up what `state_dict` gave, to the same bits; DataError where it does not fit."""
        if self.generator is None:
            return
        try:
            self.generator.set_state(tensor_like(self.generator.get_state(), state, "generator"))
        except RuntimeError as error:
            raise DataError(f"generator: not the state of one of these: {error}") from error

    def refresh(self) -> None:
        """Brings the copy of the parameters up to date, where there is one and they have changed."""
        if self.compute.version != self.network.version:
            for low, original in self._copies:
                low.copy_(original)
            self.compute.version = self.network.version

    def copy_updated(self) -> None:
        """To be called after a change of the parameters that has made the same of the copy."""
        self.network.parameters_changed()
        self.compute.version = self.network.version

    def forward(self) -> Tensor:
        """From `x` through all layers; returns the logits."""
        self.refresh()
        outputs = self.x
        for call, below in zip(self.calls, self.links, strict=False):
            below.forward(outputs, call.x)
            if self.generator is not None:
                call.layer.draw(self.generator, call.saved)
            call.layer.forward(call)
            outputs = call.y
        outputs = self.activations[-1]
        self.links[-1].forward(outputs, outputs)
        return outputs

    @property
    def derivative(self) -> Tensor:
        """(frames, output_dim): that of the objective with respect to the logits, to be filled before `backward`."""
        return self.grad_outputs[-1]

    @property
    def output_arithmetic(self) -> Float32:
        """That of the logits and their derivative."""
        return self.arithmetic

    def backward(self) -> None:
        """From the derivative of the logits back to that of the lowest trainable layer, in place in `grad_outputs`, or to that of
        the input that was received."""
        last = self.grad_outputs[-1]
        self.links[-1].backward(last, last)
        for i in range(len(self.calls) - 1, self._lowest - 1, -1):
            call = self.calls[i]
            call.layer.backward(call)
            if call.grad_x is not None:
                self.links[i].backward(call.grad_x, self._derivatives_below[i])

    def wait(self) -> None:
        """Returns once all that passes have sent has arrived."""
        for link in self.links:
            link.wait()

    def call_of(self, i: int) -> LayerCall:
        """That of layer `i` after the backward pass, without padding: for its gradient."""
        layer, grad = self.network.layers[i], self.grad_outputs[i]
        return self.calls[i]._replace(layer=layer, grad=grad)

    def layer_gradient(self, i: int, out: Views) -> None:
        """out, of `gradient_dtype`, <- the gradient of the loss summed over the minibatch of layer `i`."""
        if out:
            call = self.call_of(i)
            call.layer.gradient(call, out)

    def gradient(self, flat: Tensor) -> Tensor:
        """flat (num_parameters,) float32 <- the gradient of the loss summed over the minibatch."""
        for i, views in enumerate(self.network.split(flat)):
            made = self.layer_gradients[i] if self.layer_gradients else views
            self.layer_gradient(i, made)
            for name in views if made is not views else ():
                views[name].copy_(made[name])
        return flat


class WideOutput(Workspace):
    """A workspace for forward passes whose last product, and what follows it, are in float32, for a loss that compares
    models: in bf16 the logits, which may be off by 0.03, and the weights of that layer make nearly all of its error."""

    def __init__(self, network: Network, frames: int, arithmetic: Float32) -> None:
        """`network`: with a product that is not its first layer's."""
        first = max(i for i, layer in enumerate(network.layers) if layer.gemm is not None)
        below, partition = num_parameters(network.layers[:first]), network.partition
        links = partition.links(network.layers, arithmetic.dtype)
        upper = Network(network.layers[first:], network.parameters[below:], partition=partition)
        self._output = Workspace(upper, frames, links=[Link(), *links[first + 1 :]])
        self._between = links[first]
        lower = Network(network.layers[:first], network.parameters[:below], partition=partition)
        super().__init__(lower, frames, arithmetic, links=[*links[:first], Link()])

    def _use(self, part: slice) -> None:
        super()._use(part)
        self._output = self._output.of(len(self.x))

    def forward(self) -> Tensor:
        self._between.forward(super().forward(), self._output.x)
        return self._output.forward()

    @property
    def derivative(self) -> Tensor:
        return self._output.derivative

    @property
    def output_arithmetic(self) -> Float32:
        return self._output.arithmetic


def evaluation_workspace(network: Network, frames: int, arithmetic: Float32) -> Workspace:
    """For the forward passes and losses by which models are compared."""
    partition = network.partition
    products = sum(layer.gemm is not None for layer in partition.layers(network.layers))
    if not arithmetic.casts or products < 2:
        return Workspace(network, frames)
    if not partition.is_last:
        return Workspace(network, frames, arithmetic)
    if all(layer.gemm is None for layer in network.layers[1:]):  # the others are another stage's
        return Workspace(network, frames, links=partition.links(network.layers, arithmetic.dtype))
    return WideOutput(network, frames, arithmetic)


def without_noise(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """`Layer.without_noise` of each."""
    return tuple(layer.without_noise() for layer in layers)


def noise_generator(network: Network, seed: int, rank: int) -> torch.Generator | None:
    """A generator for the workspace in which the worker `rank` trains, on the network's device; None where no layer
    draws anything. Workers draw differently."""
    if without_noise(network.layers) == network.layers:
        return None
    generator = torch.Generator(network.parameters.device)
    return generator.manual_seed((seed * 1_000_003 + 104_729 + rank * 2_654_435_761) % 2**63)


def _copies(network: Network, compute: Network) -> Iterator[tuple[Tensor, Tensor]]:
    """Copies and originals: all layers that are laid out alike in one piece, then the others by parameter."""
    if compute is network:
        return
    padded = compute.num_parameters != network.num_parameters
    alike = num_parameters(network.layers[:-1] if padded else network.layers)
    yield compute.parameters[:alike], network.parameters[:alike]
    if alike < network.num_parameters:
        for name, original in network.views[-1].items():
            yield compute.views[-1][name][tuple(slice(size) for size in original.shape)], original


def initialize(network: Network, seed: int) -> None:
    """Random initial parameters, each layer's by its own rule (`Layer.initialize`), one after another. Drawn on the
    CPU, so that a seed gives the same network on every device."""
    generator = torch.Generator().manual_seed(seed)
    end = len(network.layers) - 1
    first = True  # as long as no product is below: dropout or a scale does not make the next layer the second
    for i, (layer, views) in enumerate(zip(network.layers, network.views, strict=True)):
        layer.initialize(views, generator, first=first, last=i == end)
        first = first and layer.flop_per_frame == 0
    network.parameters_changed()
