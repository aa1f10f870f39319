"""Adam: Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015.

    m <- beta1 m + (1 - beta1) g,    v <- beta2 v + (1 - beta2) g^2
    W <- W - lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)

g is summed over the minibatch, as in `Sgd`, which changes nothing but what `epsilon` is added to: a step has the length of the
learning rate, whatever the scale of the gradient. Weight decay is that of `Sgd`, and so not part of g (AdamW, Loshchilov and
Hutter, 2019, whose factor is l2 times the frames of a minibatch).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddnn.nn.layer import Layer
from ddnn.nn.network import Network, Workspace, tensor_like
from ddnn.optim.sgd import Sgd, SgdOptions


@dataclass(frozen=True)
class AdamOptions(SgdOptions):
    """Options of Adam; `momentum` is beta1."""

    momentum: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def num_bytes(self, layers: Sequence[Layer], minibatch: int) -> int:
        """v and the direction of the step."""
        return 2 * 4 * sum(layer.num_parameters for layer in layers)


class Adam(Sgd):
    """Adam. Each worker has its own v; m is what `momentum_buffer` is to SGD, and all parameters have it.

    Attributes:
        second_moment: v, (num_parameters,).
        matrices: the weights, by layer and name, whose direction is another one than Adam's: of Muon and Shampoo.
        steps: (2,) float64 on the device, so that a CUDA graph counts too: minibatches since m and v were zero.
    """

    def __init__(self, network: Network, options: AdamOptions | None = None) -> None:
        options = options or AdamOptions()
        super().__init__(network, options)
        self.beta2, self.epsilon = options.beta2, options.epsilon
        self.second_moment, self._direction = torch.zeros_like(self.gradient), torch.zeros_like(self.gradient)
        self._directions = network.split(self._direction)
        self._betas = self.gradient.new_tensor([options.momentum, options.beta2], dtype=torch.float64)
        self.steps = torch.zeros_like(self._betas)
        self.matrices = list[tuple[int, str]]()
        self._state = {"steps": self.steps}  # beside the vectors: tensors by name, all zero at the start

    def updates_by_layer(self, workspace: Workspace) -> bool:
        return False

    def find_direction(self) -> Tensor:
        beta1, beta2 = self.momentum, self.beta2
        self.momentum_buffer.lerp_(self.gradient, 1.0 - beta1)
        self.second_moment.mul_(beta2).addcmul_(self.gradient, self.gradient, value=1.0 - beta2)
        self.steps += 1.0
        of_m, of_v = 1.0 - self._betas**self.steps
        torch.div(self.second_moment, of_v, out=self._direction).sqrt_().add_(self.epsilon)
        torch.div(self.momentum_buffer, self._direction, out=self._direction).div_(of_m)
        for i, name in self.matrices:
            gradient, mean, direction = (v[i][name] for v in (self._views, self._momenta, self._directions))
            self.change_direction(i, name, gradient, mean, direction)
        self._scale(self._directions)
        return self._direction

    def weights(self) -> list[tuple[int, str]]:
        """The weight matrices that are trained, by layer and name."""
        views = self.network.views
        return [(i, name) for i in self.trainable for name, view in views[i].items() if view.ndim == 2]

    def change_direction(self, i: int, name: str, gradient: Tensor, mean: Tensor, direction: Tensor) -> None:
        """`direction` of a matrix among `matrices`, Adam's until then, <- another one; `gradient` and `mean`: g and m."""

    def clear_momentum(self) -> None:
        """As `Sgd`. After a minibatch that was not finite everything begins again from zero."""
        super().clear_momentum()
        self.steps[0] = 0.0
        if not bool(self.second_moment.isfinite().all()):
            for tensor in (self.second_moment, *self._state.values()):
                tensor.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """As `Sgd`, and `second_moment` of the whole network, `steps`."""
        return super().state_dict() | {
            "second_moment": self.network.partition.whole(self.second_moment),
            **self._state,
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = {"second_moment", *self._state}
        super().load_state_dict({name: value for name, value in state.items() if name not in own})
        self.second_moment.copy_(self.network.own_vector(state, "second_moment", self.second_moment))
        for name, tensor in self._state.items():
            tensor.copy_(tensor_like(tensor, state, name))
