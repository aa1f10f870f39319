"""CD-1 against a float64 twin, the guard, the momentum, and learning."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ddnn.nn.rbm import Cd1Options, Rbm, cd1_step, propagate, rate_and_momentum, scheduled_momentum
from ddnn.util.errors import DivergedError

Matrix = NDArray[np.float64]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def machine(kind: str, visible: int = 7, hidden: int = 5, stddev: float = 0.3) -> Rbm:
    mean = None if kind == "gauss" else torch.linspace(0.0, 1.0, visible)
    return Rbm(visible, hidden, seeded(), mean, stddev)


def minibatch(kind: str, n: int, visible: int, seed: int) -> torch.Tensor:
    v = torch.randn(n, visible, generator=seeded(seed))
    return v if kind == "gauss" else v.sigmoid()


def sigmoid(x: Matrix) -> Matrix:
    return 1 / (1 + np.exp(-x))


def double(x: torch.Tensor) -> Matrix:
    return x.double().numpy().copy()


@pytest.mark.parametrize("as_kaldi", [True, False])
@pytest.mark.parametrize("kind", ["gauss", "bernoulli"])
def test_twin(kind: str, as_kaldi: bool) -> None:
    """Steps of different sizes, across a step of the momentum, with the hidden states drawn alike."""
    options = Cd1Options(rate=0.1, l2=0.01, momentum_step_period=40, momentum_steps=4, kaldi_momentum=as_kaldi)
    rbm, generator, draws = machine(kind), seeded(1), seeded(1)
    w, b, a = double(rbm.weight), double(rbm.hidden_bias), double(rbm.visible_bias)
    dw, db, da = 0 * w, 0 * b, 0 * a
    frames = 0
    for t, n in enumerate([20, 12, 20, 20, 9, 20]):
        data = minibatch(kind, n, 7, t)
        m = 0.5 + 0.1 * min(frames // 40, 4)
        rate, m = 0.1 * (1 - m), 0.9 if as_kaldi and t > 0 else m
        v = double(data)
        h = sigmoid(v @ w.T + b)
        drawn = (torch.rand(n, 5, generator=draws).numpy() < h).astype(np.float64)
        back = drawn @ w + a
        back = back if kind == "gauss" else sigmoid(back)
        h_back = sigmoid(back @ w.T + b)
        dw = m * dw + rate / n * (h.T @ v - h_back.T @ back) - rate * 0.01 * w
        db, da = m * db + rate * (h - h_back).mean(0), m * da + rate * (v - back).mean(0)
        w, b, a = w + dw, b + db, a + da
        frames += n

        error = cd1_step(rbm, data, options, generator)
        assert error.shape == () and float(error) == pytest.approx(0.5 * ((v - back) ** 2).sum(), rel=1e-5)
        for found, wanted in ((rbm.weight, w), (rbm.hidden_bias, b), (rbm.visible_bias, a)):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert rbm.frames == frames == 101 and rbm.guard_count == 0


def test_schedule() -> None:
    """Kaldi's: 0.01 more every 500,000 frames, at most 0.9, reached after 20 million."""
    o = Cd1Options(rate=0.4)
    for frames, wanted in (
        (0, 0.5),
        (499_999, 0.5),
        (500_000, 0.51),
        (19_999_999, 0.89),
        (20_000_000, 0.9),
        (10**9, 0.9),
    ):
        assert scheduled_momentum(frames, o) == pytest.approx(wanted, abs=1e-12), frames
    assert rate_and_momentum(0, o) == pytest.approx((0.2, 0.5))
    assert rate_and_momentum(100, o) == pytest.approx((0.2, 0.9))
    assert rate_and_momentum(1_000_000, o) == pytest.approx((0.4 * 0.48, 0.9))
    plain = Cd1Options(rate=0.4, kaldi_momentum=False)
    assert rate_and_momentum(100, plain) == pytest.approx((0.2, 0.5))
    assert rate_and_momentum(1_000_000, plain) == pytest.approx((0.4 * 0.48, 0.52))


def test_init() -> None:
    rbm = Rbm(300, 200, seeded())
    assert rbm.weight.shape == (200, 300) and float(rbm.weight.std()) == pytest.approx(0.1, rel=0.02)
    assert not rbm.hidden_bias.any() and not rbm.visible_bias.any()
    assert torch.equal(rbm.weight, Rbm(300, 200, seeded()).weight)
    mean = torch.tensor([0.0, 0.2, 0.5, 1.0])
    found = Rbm(4, 3, seeded(), mean).visible_bias
    wanted = [np.log(p / (1 - p)) for p in (1e-4, 0.2, 0.5, 0.9999)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_propagate() -> None:
    rbm, v = machine("gauss"), minibatch("gauss", 11, 7, 3)
    rbm.hidden_bias += 0.3
    wanted = sigmoid(double(v) @ double(rbm.weight).T + double(rbm.hidden_bias))
    np.testing.assert_allclose(propagate(rbm, v), wanted, rtol=1e-5)
    out = torch.empty(11, 5)
    assert propagate(rbm, v, out) is out and torch.equal(out, propagate(rbm, v))


def test_guard() -> None:
    """A reconstruction of over twice the spread scales the parameters, clears the momentum and skips the update."""
    rbm, options, generator = machine("gauss"), Cd1Options(rate=0.1), seeded(2)
    v = minibatch("gauss", 40, 7, 0)
    for _ in range(3):
        cd1_step(rbm, v, options, generator)
    assert rbm.guard_count == 0 and rbm.weight_change.any()
    rbm.weight *= 50.0
    before, draws = copy.deepcopy(rbm), torch.Generator()
    draws.set_state(generator.get_state())
    drawn = (torch.rand(40, 5, generator=draws) < propagate(rbm, v)).double()
    back = drawn @ rbm.weight.double() + rbm.visible_bias.double()
    cd1_step(rbm, v, options, generator)
    scale = float(v.double().std(correction=0) / back.std(correction=0))
    assert scale < 0.5
    for name in ("weight", "hidden_bias", "visible_bias"):
        torch.testing.assert_close(getattr(rbm, name), getattr(before, name) * scale, rtol=1e-4, atol=1e-7)
        assert not getattr(rbm, f"{name}_change").any()
    assert rbm.guard_count == 1 and rbm.rate_factor == 0.9 and rbm.frames == 160
    cd1_step(rbm, v, options, generator)  # now of the right spread, at 0.9 of the rate
    assert rbm.guard_count == 1 and rbm.rate_factor == 0.9 and rbm.weight_change.any()


def test_guard_slows_down_until_the_schedule_sets_the_rate() -> None:
    options, v = Cd1Options(rate=0.1, momentum_step_period=100), minibatch("gauss", 40, 7, 0)
    rbm = machine("gauss", stddev=50.0)
    cd1_step(rbm, v, options, seeded(2))
    assert rbm.guard_count == 1 and rbm.rate_factor == 1.0  # the first minibatch: the rate is set after it
    factors = []
    for t in range(3):
        rbm.weight.fill_(50.0)
        cd1_step(rbm, v, options, seeded(t))
        factors.append(rbm.rate_factor)
    assert rbm.guard_count == 4 and factors == pytest.approx([0.9, 1.0, 0.9])  # after 80, 120, 160 frames


def test_bernoulli_needs_no_guard() -> None:
    rbm = machine("bernoulli", stddev=50.0)
    cd1_step(rbm, minibatch("bernoulli", 40, 7, 0), Cd1Options(rate=0.4), seeded())
    assert rbm.guard_count == 0 and rbm.weight_change.any()


def test_values_that_are_not_finite_are_refused() -> None:
    v = minibatch("gauss", 10, 7, 0)
    v[3, 2] = float("nan")
    with pytest.raises(DivergedError, match="standard deviation nan of the data"):
        cd1_step(machine("gauss"), v, Cd1Options(rate=0.01), seeded())
    bad = machine("bernoulli")
    error = cd1_step(bad, v.sigmoid(), Cd1Options(rate=0.4), seeded())
    assert torch.isnan(error)


@pytest.mark.parametrize("kind", ["gauss", "bernoulli"])
def test_same_seed_same_bits_also_after_a_resume(kind: str) -> None:
    options = Cd1Options(rate=0.05, momentum_step_period=100)
    whole, generator = machine(kind), seeded(5)
    batches = [minibatch(kind, n, 7, n) for n in (30, 40, 20, 31, 32)]
    for v in batches[:2]:
        cd1_step(whole, v, options, generator)
    resumed, other = machine(kind, stddev=0.7), torch.Generator()
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    other.set_state(generator.get_state())
    for v in batches[2:]:
        assert torch.equal(cd1_step(whole, v, options, generator), cd1_step(resumed, v, options, other))
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    for name in ("weight", "hidden_bias", "visible_bias"):
        assert torch.equal(getattr(whole, name), getattr(resumed, name)), name
        assert torch.equal(getattr(whole, f"{name}_change"), getattr(resumed, f"{name}_change")), name
    with pytest.raises((RuntimeError, ValueError)):
        machine(kind, visible=8).load_state_dict(whole.state_dict())


def test_weights_and_momentum_are_views_of_flat_buffers() -> None:
    rbm = machine("gauss")
    cd1_step(rbm, minibatch("gauss", 10, 7, 0), Cd1Options(rate=0.1), seeded())
    for flat, suffix in ((rbm.parameters, ""), (rbm.momentum_buffer, "_change")):
        parts = [getattr(rbm, f"{name}{suffix}").flatten() for name in ("weight", "hidden_bias", "visible_bias")]
        assert torch.equal(flat, torch.cat(parts)) and flat.any()
    rbm.clear_momentum()
    assert not rbm.weight_change.any() and not rbm.hidden_bias_change.any() and not rbm.visible_bias_change.any()


@pytest.mark.parametrize(("kind", "rate", "fall"), [("gauss", 0.01, 0.5), ("bernoulli", 0.1, 0.5)])
def test_learns(kind: str, rate: float, fall: float) -> None:
    """Four prototypes with a little noise: the reconstruction error falls to less than half of what it was."""
    g = seeded(7)
    prototypes = torch.randint(0, 2, (4, 24), generator=g).float()
    labels = torch.randint(0, 4, (2000,), generator=g)
    v = prototypes[labels]
    if kind == "gauss":
        v = (v - v.mean(0)) / v.std(0).clamp(min=1e-3) + 0.1 * torch.randn(v.shape, generator=g)
    mean = None if kind == "gauss" else v.mean(0)
    rbm = Rbm(24, 16, g, mean)
    options = Cd1Options(rate=rate)
    errors = []
    for _ in range(15):
        order = torch.randperm(2000, generator=g)
        errors.append(sum(float(cd1_step(rbm, v[rows], options, g)) for rows in order.split(100)) / 2000)
    assert errors[-1] < fall * errors[0], errors
    assert rbm.frames == 30_000 and rbm.guard_count == 0
