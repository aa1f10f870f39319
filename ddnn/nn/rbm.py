"""Restricted Boltzmann machines trained by one step of contrastive divergence (CD-1), to start a network from.

Hinton, "A practical guide to training restricted Boltzmann machines", 2010, as in Kaldi's nnet1:
`src/nnet/nnet-rbm.h` (propagation, update, guard), `src/nnetbin/rbm-train-cd1-frmshuff.cc` (sampling, momentum),
`src/nnet/nnet-loss.cc` (`Mse`).

With v+ (N x vis) the data, W (hid x vis) the weight, b and a the hidden and visible bias, s the logistic sigmoid:

    h+ = s(v+ W^T + b)            h^ ~ Bernoulli(h+)
    v- = h^ W + a                 Gauss visible: the mean, no noise
    v- = s(h^ W + a)              Bernoulli visible: the probability, not sampled
    h- = s(v- W^T + b)
    dW <- m dW + (e'/N) (h+^T v+ - h-^T v-) - e' l W,   W <- W + dW;    a and b likewise, without l

Rates multiply the **mean** gradient over the minibatch, unlike those of the trainer.

**Momentum.** The schedule is m = min(0.9, 0.5 + 0.01 floor(frames / 500,000)), and e' = e (1 - m), so that the
effective rate stays e. Kaldi's tool carries a slip, kept on by default there ("Apply bug which led to better
results", option `--with-bug=true` of rbm-train-cd1-frmshuff.cc): the first minibatch runs with the momentum of the
schedule (which finds empty buffers), every later one with 0.9, while e' follows the schedule; the effective rate then
starts at 5 e. `kaldi_momentum` chooses; it is on by default here too.

**Guard** (Gauss visible). Where the reconstruction's standard deviation, over all elements of the minibatch, is more
than twice the data's, the weights are about to explode: W, a and b are scaled by std(v+) / std(v-), the momentum is
cleared, e' is reduced to 0.9 of itself, and the minibatch's update is skipped. e' stays reduced until the schedule
next sets it: after the very first minibatch, and each time another 500,000 frames are full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ddnn.nn.partition import Partition
from ddnn.util.errors import DivergedError

_GUARD_RATIO, _GUARD_SLOWDOWN = 2.0, 0.9


@dataclass(frozen=True)
class Cd1Options:
    """How an RBM is trained."""

    rate: float  # e, on the mean gradient (0.01 Gauss, 0.4 Bernoulli)
    l2: float = 2e-4  # weight decay l
    momentum: float = 0.5  # where the schedule starts
    momentum_max: float = 0.9  # where it ends
    momentum_steps: int = 40  # from start to end
    momentum_step_period: int = 500_000  # frames per step
    kaldi_momentum: bool = True  # apply `momentum_max` from the second minibatch on, as Kaldi does


class Rbm:
    """An RBM with all its state: training continues from it to the same bits, given the state of the generator too.

    It starts untrained: W ~ N(0, stddev^2), b = 0, a = 0 (Gauss) or logit of `visible_mean` (Bernoulli).

    Args:
        visible, hidden: dimensions.
        generator: draws W on its own device, where the RBM then lives.
        visible_mean: (vis,) mean of each visible unit over the training data. Given, the visible units are Bernoulli,
            the hidden units of an RBM below, else Gauss, normalized features; hidden units are Bernoulli.
        stddev: of W.

    Attributes:
        gauss: whether the visible units are.
        weight, hidden_bias, visible_bias: W, (hid, vis) float32; b, (hid,); a, (vis,).
        parameters: the flat buffer of which these three are views.
        weight_change, hidden_bias_change, visible_bias_change: dW, db, da, the momentum.
        momentum_buffer: the flat buffer of which these three are views.
        frames: frames trained on so far, which the momentum follows.
        rate_factor: e' is multiplied by it; under 1 after the guard has struck.
        guard_count: how often it has.
    """

    partition = Partition()  # one worker holds all of it
    shapes = ()  # workers average RBMs by all-reduce, which asks for none

    def __init__(
        self,
        visible: int,
        hidden: int,
        generator: torch.Generator,
        visible_mean: Tensor | None = None,
        stddev: float = 0.1,
    ) -> None:
        self.gauss = visible_mean is None
        self.frames, self.rate_factor, self.guard_count = 0, 1.0, 0
        self.parameters = torch.zeros(hidden * visible + hidden + visible, device=generator.device)
        self.momentum_buffer = torch.zeros_like(self.parameters)
        sizes = [hidden * visible, hidden, visible]
        weight, self.hidden_bias, self.visible_bias = torch.split(self.parameters, sizes)
        self.weight = weight.view(hidden, visible).normal_(0.0, stddev, generator=generator)
        change, self.hidden_bias_change, self.visible_bias_change = torch.split(self.momentum_buffer, sizes)
        self.weight_change = change.view(hidden, visible)
        if visible_mean is not None:
            mean = visible_mean.to(generator.device, torch.float64)
            self.visible_bias += torch.logit(mean.clamp(1e-4, 0.9999)).float()
        self._memory: tuple[Tensor, ...] = ()

    def parameters_changed(self) -> None:
        """To be called after a change of `parameters` in place; nothing is derived from them."""

    def untrained_error(self, variance: float) -> float:
        """Expected error of a frame before training, about: `variance`, of all visible units together, and what random
        weights add where half of the hidden units are on. Of Bernoulli units the largest that there can be."""
        if not self.gauss:
            return 0.5 * len(self.visible_bias)
        noise = self.weight.square().sum() + self.weight.sum(dim=0).square().sum()
        return 0.5 * (variance + 0.25 * float(noise))

    def clear_momentum(self) -> None:
        self.momentum_buffer.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """`parameters` and `momentum_buffer`, not copies, and `counters` (3,) float64: frames, rate_factor and
        guard_count."""
        counters = torch.tensor([self.frames, self.rate_factor, self.guard_count], dtype=torch.float64)
        return {"parameters": self.parameters, "momentum_buffer": self.momentum_buffer, "counters": counters}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state_dict`, to the same bits. RuntimeError or ValueError where it does not fit."""
        frames, self.rate_factor, guard_count = state["counters"].tolist()
        self.frames, self.guard_count = int(frames), int(guard_count)
        for name in ("parameters", "momentum_buffer"):
            getattr(self, name).copy_(state[name].view(len(self.parameters)))

    def buffers(self, n: int) -> tuple[Tensor, ...]:
        """h+, h-, h^ (n, hid), v- and v+ - v- (n, vis): the first n rows of memory that is kept."""
        if not self._memory or self._memory[0].shape[0] < n:
            hidden, visible = self.weight.shape
            self._memory = tuple(self.weight.new_empty(n, dim) for dim in (hidden, hidden, hidden, visible, visible))
        return tuple(memory[:n] for memory in self._memory)


def scheduled_momentum(frames: int, options: Cd1Options) -> float:
    """m after `frames` frames."""
    steps = frames // options.momentum_step_period
    if steps >= options.momentum_steps:
        return options.momentum_max
    return options.momentum + steps * (options.momentum_max - options.momentum) / options.momentum_steps


def rate_and_momentum(frames: int, options: Cd1Options) -> tuple[float, float]:
    """e' (before the guard's factor) and the momentum applied to the minibatch that follows `frames` frames."""
    m = scheduled_momentum(frames, options)
    rate = options.rate * (1.0 - m)
    return rate, options.momentum_max if options.kaldi_momentum and frames > 0 else m


def propagate(rbm: Rbm, v: Tensor, out: Tensor | None = None) -> Tensor:
    """h+ = s(v W^T + b), (N, hid), from v (N, vis); into `out` where given."""
    return torch.addmm(rbm.hidden_bias, v, rbm.weight.t(), out=out).sigmoid_()


def cd1_step(rbm: Rbm, v: Tensor, options: Cd1Options, generator: torch.Generator) -> Tensor:
    """Trains `rbm` on one minibatch, in place. DivergedError: a Gauss RBM receives or produces a value that is not
    finite. A Bernoulli RBM does not look, since that would wait for the device: its error is NaN then.

    Args:
        v: v+, (N, vis) float32.
        generator: draws h^, one uniform number a hidden unit and frame.

    Returns:
        Half the squared reconstruction error, summed over dimensions and frames, 0-dim float64 on the device. Kaldi
        reports its average over all frames of all passes.
    """
    n = v.shape[0]
    h_data, h_model, h_drawn, v_model, difference = rbm.buffers(n)
    propagate(rbm, v, h_data)
    torch.rand(h_drawn.shape, generator=generator, out=h_drawn)
    torch.lt(h_drawn, h_data, out=h_drawn)
    torch.addmm(rbm.visible_bias, h_drawn, rbm.weight, out=v_model)
    if not rbm.gauss:
        v_model.sigmoid_()
    propagate(rbm, v_model, h_model)
    torch.sub(v, v_model, out=difference)
    error: Tensor = 0.5 * torch.linalg.vector_norm(difference, dim=1).square().sum(dtype=torch.float64)
    if not rbm.gauss or not _guard(rbm, v, v_model):
        rate, momentum = rate_and_momentum(rbm.frames, options)
        rate *= rbm.rate_factor
        rbm.weight_change.addmm_(h_data.t(), v, beta=momentum, alpha=rate / n)
        rbm.weight_change.addmm_(h_model.t(), v_model, alpha=-rate / n)
        rbm.weight_change.add_(rbm.weight, alpha=-rate * options.l2)
        rbm.visible_bias_change.mul_(momentum).add_(difference.sum(0), alpha=rate / n)
        rbm.hidden_bias_change.mul_(momentum).add_(h_data.sub_(h_model).sum(0), alpha=rate / n)
        rbm.weight.add_(rbm.weight_change)
        rbm.visible_bias.add_(rbm.visible_bias_change)
        rbm.hidden_bias.add_(rbm.hidden_bias_change)
    period = options.momentum_step_period
    if rbm.frames == 0 or (rbm.frames + n) // period != rbm.frames // period:
        rbm.rate_factor = 1.0  # Kaldi's tool sets the rate again
    rbm.frames += n
    return error


def _guard(rbm: Rbm, v: Tensor, v_model: Tensor) -> bool:
    """True if the reconstruction spreads too wide; `rbm` is scaled down then, and the minibatch must be skipped."""
    data, model = torch.stack([v.var(correction=0), v_model.var(correction=0)]).sqrt().tolist()
    if not (math.isfinite(data) and math.isfinite(model)):
        raise DivergedError(
            f"RBM: standard deviation {data} of the data, {model} of its reconstruction, after {rbm.frames} frames",
            hint="look for NaN and huge values in the features",
        )
    if _GUARD_RATIO * data >= model:
        return False
    rbm.parameters.mul_(data / model)
    rbm.clear_momentum()
    rbm.rate_factor *= _GUARD_SLOWDOWN
    rbm.guard_count += 1
    return True
