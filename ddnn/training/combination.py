"""What may be delivered in place of the last accepted epoch's model: means of models along the training.

A model that still jumps (a high learning rate, rare averagings of many workers) jumps around a better one, which a mean
comes close to (Polyak and Juditsky 1992; Izmailov et al., arXiv 1803.05407; Kaldi's nnet2 and nnet3 end with
nnet-combine). Training never sees the means. `Trainer.finish` evaluates them all, and delivers the one with the lowest
cross-validation loss, where that is no higher than the last accepted epoch's.

Sums are float64. They are formed once, or once an averaging, so that nobody notices their cost; the mean of epochs is
then correct to the last bit of float32, and a moving average does not stop where its steps fall below that bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sized

import torch
from torch import Tensor

from ddnn.distributed.groups import Groups
from ddnn.nn.network import Network, tensor_like
from ddnn.runs.checkpoint import prefixed, unprefixed
from ddnn.util.errors import DataError


class Combination:
    """What the training loop tells of its models. Passes it on to `parts`, each with candidates of its own; without any
    the final model is that of the last accepted epoch. All methods are collective."""

    def __init__(self, **parts: Combination) -> None:
        self.parts = parts

    def after_minibatch(self) -> None:
        """The network was updated, and averaged where that was due."""
        for part in self.parts.values():
            part.after_minibatch()

    def end_epoch(self) -> None:
        """All workers have the epoch's model."""
        for part in self.parts.values():
            part.end_epoch()

    def keep(self, epoch: int, loss: float) -> None:
        """That model was accepted; `loss`: in cross-validation."""
        for part in self.parts.values():
            part.keep(epoch, loss)

    def revert(self) -> None:
        """It was rejected: training continues from the one before."""
        for part in self.parts.values():
            part.revert()

    def candidates(self) -> Iterator[tuple[str, Tensor]]:
        """Names and parameters, (num_parameters,) float32, the same bits on every worker."""
        for part in self.parts.values():
            yield from part.candidates()

    def state_dict(self) -> dict[str, Tensor]:
        """This worker's own state, for a checkpoint; tensors in use, not copies."""
        states = ((name, part.state_dict()) for name, part in self.parts.items())
        return {key: value for name, state in states for key, value in prefixed(name, state).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state_dict`; DataError where it does not fit."""
        for name, part in self.parts.items():
            part.load_state_dict(unprefixed(name, state))

    def shared_state_dict(self) -> dict[str, Tensor]:
        """What is the same on all workers."""
        states = ((name, part.shared_state_dict()) for name, part in self.parts.items())
        return {key: value for name, state in states for key, value in prefixed(name, state).items()}

    def load_shared_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores `shared_state_dict`; DataError where it does not fit."""
        for name, part in self.parts.items():
            part.load_shared_state_dict(unprefixed(name, state))


class MeanOfEpochs(Combination):
    """The means of the parameters after the last 2, 3, ... `most` accepted epochs, or of as many as there are.

    Attributes:
        models: number and parameters, (num_parameters,) float32, of these epochs, oldest first.
    """

    def __init__(self, network: Network, most: int) -> None:
        super().__init__()
        self.network, self.models = network, deque[tuple[int, Tensor]](maxlen=most)

    def keep(self, epoch: int, loss: float) -> None:
        self.models.append((epoch, self.network.parameters.clone()))

    def candidates(self) -> Iterator[tuple[str, Tensor]]:
        total, epochs = torch.zeros_like(self.network.parameters, dtype=torch.float64), list[int]()
        for epoch, parameters in reversed(self.models):
            total += parameters
            epochs.insert(0, epoch)
            if len(epochs) > 1:
                yield f"mean of {_epochs(epochs)}", (total / len(epochs)).float()

    def shared_state_dict(self) -> dict[str, Tensor]:
        epochs = torch.tensor([epoch for epoch, _ in self.models], dtype=torch.int64)
        whole = self.network.partition.whole
        return {"epochs": epochs, **{f"model.{epoch}": whole(parameters) for epoch, parameters in self.models}}

    def load_shared_state_dict(self, state: Mapping[str, Tensor]) -> None:
        epochs = state.get("epochs", torch.zeros(0))
        if epochs.dtype != torch.int64 or epochs.dim() != 1 or len(epochs) > (self.models.maxlen or 0):
            raise DataError("the epochs of which the mean is taken are missing or too many")
        like = self.network.parameters
        for epoch in epochs.tolist():
            self.models.append((epoch, self.network.own_vector(state, f"model.{epoch}", like).to(like, copy=True)))


class BestEpoch(Combination):
    """The accepted epoch with the lowest cross-validation loss, where it is not the last one.

    Attributes:
        parameters: (num_parameters,) float32.
        epoch, loss, last: its number and loss, and the number of the last epoch; 0 before the first.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network, self.parameters = network, network.parameters.clone()
        self.epoch, self.loss, self.last = 0, math.inf, 0

    def keep(self, epoch: int, loss: float) -> None:
        self.last = epoch
        if loss < self.loss:
            self.epoch, self.loss = epoch, loss
            self.parameters.copy_(self.network.parameters)

    def candidates(self) -> Iterator[tuple[str, Tensor]]:
        if self.epoch != self.last:
            yield f"epoch {self.epoch}", self.parameters

    def shared_state_dict(self) -> dict[str, Tensor]:
        numbers = torch.tensor([self.epoch, self.loss, self.last], dtype=torch.float64)
        return {"parameters": self.network.partition.whole(self.parameters), "numbers": numbers}

    def load_shared_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.parameters.copy_(self.network.own_vector(state, "parameters", self.parameters))
        numbers = tensor_like(torch.zeros(3, dtype=torch.float64), state, "numbers")
        if not bool((numbers >= 0).all()):  # false for NaN too
            raise DataError("numbers: an epoch and its loss expected")
        self.epoch, self.loss, self.last = int(numbers[0]), float(numbers[1]), int(numbers[2])


class MovingAverage(Combination):
    """An exponential moving average of the parameters over the training: `period` minibatches apart, where workers
    average, and at the end of each epoch. A model that was t epochs ago weighs exp(-t / `epochs`) times the time that
    it covers. Each worker has its own within an epoch; at its end all take their mean, which is what the moving
    average of the mean model would be.

    Attributes:
        mean: (num_parameters,) float64.
        weight: the sum of its weights, in epochs.
        kept, kept_weight: the same after the last accepted epoch, float32; from there it goes on after a rejected one.
    """

    def __init__(self, network: Network, groups: Groups, batches: Sized, *, epochs: float, period: int) -> None:
        """`batches`: this worker's minibatches of the epoch under way."""
        super().__init__()
        self.network, self.groups, self.batches, self.epochs, self.period = network, groups, batches, epochs, period
        self.kept, self.mean = network.parameters.clone(), network.parameters.double()
        self.weight, self.kept_weight, self._minibatches = 0.0, 0.0, 0

    def after_minibatch(self) -> None:
        self._minibatches += 1
        if self._minibatches >= self.period:
            self._add()

    def _add(self) -> None:
        time, self._minibatches = max(1, self._minibatches) / max(1, len(self.batches)), 0
        self.weight = self.weight * math.exp(-time / self.epochs) + time
        self.mean.lerp_(self.network.parameters.double(), time / self.weight)

    def end_epoch(self) -> None:
        if self._minibatches or not self.weight:  # without weight: a worker that has no minibatch
            self._add()
        finite = bool(self.mean.isfinite().all())  # not of a worker whose model was not, until it was excluded
        if not self.groups.replica.all_reduce_min(finite):
            self.mean.copy_(self.network.parameters)
        mean = self.mean.cpu()
        self.groups.data.all_reduce(mean)
        self.mean.copy_(mean.div_(self.groups.data.world_size))

    def keep(self, epoch: int, loss: float) -> None:
        self.kept.copy_(self.mean)
        self.kept_weight = self.weight

    def revert(self) -> None:
        self.mean.copy_(self.kept)
        self.weight, self._minibatches = self.kept_weight, 0

    def candidates(self) -> Iterator[tuple[str, Tensor]]:
        if not self.kept_weight:  # no epoch was accepted
            return
        unit = "epoch" if self.epochs == 1 else "epochs"
        yield f"moving average over about {self.epochs:g} {unit}", self.kept

    def shared_state_dict(self) -> dict[str, Tensor]:
        return {"kept": self.network.partition.whole(self.kept)}

    def load_shared_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.kept.copy_(self.network.own_vector(state, "kept", self.kept))

    def state_dict(self) -> dict[str, Tensor]:
        numbers = torch.tensor([self.weight, self.kept_weight, self._minibatches], dtype=torch.float64)
        return {"mean": self.network.partition.whole(self.mean), "numbers": numbers}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.mean.copy_(self.network.own_vector(state, "mean", self.mean))
        numbers = tensor_like(torch.zeros(3, dtype=torch.float64), state, "numbers")
        if not bool((numbers >= 0).all() & numbers.isfinite().all()):
            raise DataError("numbers: weights of a moving average expected")
        self.weight, self.kept_weight, self._minibatches = *numbers[:2].tolist(), int(numbers[2])


def _epochs(numbers: list[int]) -> str:
    """ "epochs 6 to 8", "epochs 3, 5 and 6"."""
    if numbers[-1] - numbers[0] == len(numbers) - 1 > 1:
        return f"epochs {numbers[0]} to {numbers[-1]}"
    return f"epochs {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
