"""Plain stochastic gradient descent (Kaldi nnet1: nnet-train-frmshuff, nnet-affine-transform.h Update)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from ddnn.nn.arithmetic import Float32
from ddnn.nn.layer import Layer, Views
from ddnn.nn.network import Network, Workspace
from ddnn.optim.natural_gradient import NaturalGradient
from ddnn.util.errors import DataError


@dataclass(frozen=True)
class SgdOptions:
    """Options of SGD."""

    momentum: float = 0.0  # share of the last step's gradient that is kept, 0 to under 1
    l2: float = 0.0  # weight decay, per frame, before it is multiplied by the learning rate
    max_gradient_norm: float = 0.0  # of the gradient per frame; a longer one is scaled down to it. 0: never

    def num_bytes(self, layers: Sequence[Layer], minibatch: int) -> int:
        """What the optimizer takes of memory besides gradient and momentum, at most."""
        return 0


class Sgd:
    """c <- momentum * c + g;  W <- W - lr * l2 * N * W - lr * c;  b <- b - lr * c.

    g is the gradient of the loss SUMMED over the N frames of the minibatch, so that a learning rate of 0.008 at
    minibatch 256 is 2.048 on the mean gradient. Parameters with a learning rate coefficient of their own have g scaled
    by it; which of them have l2 and momentum, their layer says.

    NG-SGD is the same step along another direction: it overrides `prepare` and `fill_gradient`. Adam makes its direction from
    the gradient of all layers: it overrides `find_direction`.

    Attributes:
        network: whose parameters are updated.
        trainable: numbers of its layers that are not frozen.
        gradient: g, (num_parameters,), of the last minibatch; not filled where layers are updated one by one.
        momentum_buffer: c, (num_parameters,); the gradient itself where momentum is 0.
        included_lr_scale: by what the rates given to `step` are divided before NG-SGD limits its step.
    """

    def __init__(self, network: Network, options: SgdOptions | None = None) -> None:
        options = options or SgdOptions()
        self.network = network
        self.momentum, self.l2, self.max_gradient_norm = options.momentum, options.l2, options.max_gradient_norm
        self.included_lr_scale = 1.0
        self.gradient = network.parameters.new_zeros(network.parameters.shape)
        self.momentum_buffer = self.gradient.clone() if self.momentum else self.gradient
        self._views = network.split(self.gradient)
        # What the layers ask for beside the plain step, found once: small operations are as dear as their arithmetic.
        self._scaled: list[tuple[int, str, float]] = []
        self._without_momentum: list[tuple[Tensor, Tensor]] = []
        self._decayed: list[tuple[Tensor, float]] = []
        self.trainable = [i for i in range(len(network.layers)) if i not in network.frozen]
        self._momenta = network.split(self.momentum_buffer)
        for i in self.trainable:
            layer, parameters, gradient, buffer = network.layers[i], network.views[i], self._views[i], self._momenta[i]
            for name, about in layer.parameters.items():
                if about.learn_rate_coef != 1.0:
                    self._scaled.append((i, name, about.learn_rate_coef))
                if not about.momentum:
                    self._without_momentum.append((buffer[name], gradient[name]))
                if about.l2:
                    self._decayed.append((parameters[name], about.learn_rate_coef))

    def set_lr_scale(self, lr_scale: float) -> None:
        """Before a step: the factor for the number of workers that the rates given to `step` contain, so that NG-SGD can
        limit its step by one worker's rate."""
        self.included_lr_scale = lr_scale

    def set_arithmetic(self, arithmetic: Float32) -> None:
        """Before the first step: what the workspaces of all steps compute in."""

    @property
    def preconditioners(self) -> list[NaturalGradient]:
        """Those of NG-SGD, without those of rank 0, which have no state; of SGD none."""
        return list(chain(*self.sides))

    @property
    def sides(self) -> list[list[NaturalGradient]]:
        """The same, those of inputs and those of output derivatives."""
        return []

    def clear_momentum(self) -> None:
        """Forgets the momentum. At each epoch too: nnet1 runs one process per epoch, and each starts from none."""
        if self.momentum:
            self.momentum_buffer.zero_()

    def step(self, workspace: Workspace, lr: float, average: Callable[[Tensor], None] | None = None) -> None:
        """One update from the layer inputs and output derivatives of a minibatch, after its backward pass. `average`:
        what workers that average gradients do with theirs, in place, before it is applied."""
        self.finish_updates()
        self.prepare(workspace, lr / self.included_lr_scale)
        by_layer = average is None and self.updates_by_layer(workspace)
        views = workspace.layer_gradients or self._views
        for i in self.trainable:
            factor = self.fill_gradient(i, workspace, views[i])
            if by_layer:
                self.update_layer(i, workspace, lr, factor)
                continue
            for part in views[i].values() if factor != 1.0 else ():
                part.mul_(factor)
            self.collect_gradient(i, workspace)
        if by_layer:
            workspace.copy_updated()
            self._after_update()
        else:
            self.step_along_gradient(len(workspace.x), lr, average)

    def step_along_gradient(self, frames: int, lr: float, average: Callable[[Tensor], None] | None = None) -> None:
        """The rest of a step on `frames` frames, over which `gradient` is summed."""
        if average is not None:
            average(self.gradient)
        self.update(lr, frames)
        self._after_update()

    def _after_update(self) -> None:
        if any([self.network.layers[i].after_update(self.network.views[i]) for i in self.trainable]):
            self.network.parameters_changed()

    def finish_updates(self) -> None:
        """Before a step: finishes the updates of Fisher matrices that the last one began. A GPU may have other work until then,
        which does not read them."""

    def phase(self, frames: int) -> Hashable | None:
        """After `finish_updates`: what the operations of a step on `frames` frames depend on beside their number and the
        learning rate; a CUDA graph of them does for every step in this phase. None: the step may wait for the device."""
        return ()

    def replayed(self, frames: int) -> None:
        """The host's part of a step whose operations a CUDA graph has done."""
        self.network.parameters_changed()

    def prepare(self, workspace: Workspace, lr: float) -> None:
        """What a step does once for all layers, before their gradients; `lr`: of one worker."""

    def fill_gradient(self, i: int, workspace: Workspace, out: Views) -> float:
        """out, of the arithmetic's `gradient_dtype`, <- what the step of the trainable layer `i` goes along, but for the
        factor that is returned. The layers may share the memory of `out`: each is used before the next is filled."""
        workspace.layer_gradient(i, out)
        return 1.0

    def collect_gradient(self, i: int, workspace: Workspace) -> None:
        """The part of layer `i` in `gradient` <- what the workspace has computed in a type of its own."""
        for name, made in workspace.layer_gradients[i].items() if workspace.layer_gradients else ():
            self._views[i][name].copy_(made)

    def updates_by_layer(self, workspace: Workspace) -> bool:
        """Whether each layer is updated right after its gradient was computed, while that is in the cache."""
        return workspace.arithmetic.updates_by_layer and not self.momentum and not self.max_gradient_norm

    def update_layer(self, i: int, workspace: Workspace, lr: float, factor: float = 1.0) -> None:
        """The update of layer `i` from workspace.layer_gradients[i], times `factor`, of its parameters and the copy of
        them that layers multiply with."""
        network, compute, update = self.network, workspace.compute, workspace.arithmetic.sgd_update
        for name, about in network.layers[i].parameters.items():
            step = lr * about.learn_rate_coef
            decay = 1.0 - step * self.l2 * len(workspace.x) if about.l2 else 1.0
            parameters, copy = network.views[i][name], compute.views[i][name]
            update(parameters, copy, workspace.layer_gradients[i][name], step * factor, decay)

    def update(self, lr: float, frames: int) -> None:
        """The update of all layers from `gradient`, summed over `frames` frames."""
        if self.max_gradient_norm:  # waits for no GPU; a gradient that is not finite becomes NaN
            norm = self.network.partition.norm(self.gradient)
            self.gradient.mul_((self.max_gradient_norm * frames / norm).clamp_(max=1.0))
        direction = self.find_direction()
        if self.l2:
            for parameters, coef in self._decayed:
                parameters.mul_(1.0 - lr * coef * self.l2 * frames)
        self.network.parameters.add_(direction, alpha=-lr)
        self.network.parameters_changed()

    def find_direction(self) -> Tensor:
        """(num_parameters,), which times the learning rate is subtracted, from `gradient`."""
        self._scale(self._views)
        if self.momentum:
            self.momentum_buffer.mul_(self.momentum).add_(self.gradient)
            for buffer, gradient in self._without_momentum:
                buffer.copy_(gradient)
        return self.momentum_buffer

    def _scale(self, views: Sequence[Views]) -> None:
        """The layers' views of a vector times the learning rate coefficients of their parameters."""
        for i, name, coef in self._scaled:
            views[i][name].mul_(coef)

    def state_dict(self) -> dict[str, Tensor]:
        """What goes from minibatch to minibatch: `momentum_buffer` of the whole network, where there is momentum, the tensor
        in use, and `preconditioner.N.*`, see `NaturalGradient.state_dict`. Collective over a replica."""
        partition, found = self.network.partition, dict[str, Tensor]()
        for i, preconditioner in zip(self._numbers()[0], self.preconditioners, strict=True):
            found |= {f"preconditioner.{i}.{name}": value for name, value in preconditioner.state_dict().items()}
        found = partition.of_all_stages(found)
        return found | ({"momentum_buffer": partition.whole(self.momentum_buffer)} if self.momentum else {})

    def _numbers(self) -> tuple[list[int], int]:
        """Those of this worker's preconditioners, and how many the whole network has. Collective over a replica."""
        return self.network.partition.numbers([len(side) for side in self.sides])

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes up what `state_dict` gave, to the same bits; DataError where it does not fit."""
        rest = {name: value for name, value in state.items() if name != "momentum_buffer" or not self.momentum}
        parts = []
        own, total = self._numbers()
        for i in range(total):
            prefix = f"preconditioner.{i}."
            names = [name for name in rest if name.startswith(prefix)]
            parts.append({name.removeprefix(prefix): rest.pop(name) for name in names})
        if rest:
            raise DataError(f"the optimizer's state holds {', '.join(sorted(rest))}, which this optimizer has not")
        if self.momentum:
            self.momentum_buffer.copy_(self.network.own_vector(state, "momentum_buffer", self.momentum_buffer))
        for i, preconditioner in zip(own, self.preconditioners, strict=True):
            preconditioner.load_state_dict(parts[i])
