"""The NG-SGD step of a whole network against its parts in float64, put together naively."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from twins import NaturalGradientTwin, biases, cross_entropy_step, kernels_for, random_minibatch, weights

from ddnn.nn.arithmetic import Float32, Precision, make_arithmetic
from ddnn.nn.elementwise import Scale
from ddnn.nn.layers import Affine
from ddnn.nn.network import Network, Workspace, initialize
from ddnn.optim.natural_gradient import SETTLED, NaturalGradient, NaturalGradientOptions, Side, gammas
from ddnn.optim.ng_sgd import NgSgd, NgSgdOptions

LAYERS = (
    Affine(7, 6, "sigmoid", learn_rate_coef=10.0),
    Affine(6, 5, "tanh", learn_rate_coef=0.5, bias_learn_rate_coef=0.2),
    Affine(5, 4, "softmax", bias_learn_rate_coef=0.1),
)


def network(seed: int) -> tuple[Network, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    made = Network(LAYERS)
    made.parameters.copy_(torch.randn(made.parameters.shape, generator=generator))
    return made, generator


@pytest.mark.parametrize("scope", ["global", "local", "unscaled"])
@pytest.mark.parametrize(("l2", "max_change"), [(0.0, 0.0), (1e-3, 0.075), (0.0, 1e-3)])
def test_steps_equal_the_formulas(scope: Any, l2: float, max_change: float) -> None:
    made, generator = network(1)
    options = NgSgdOptions(rank_in=3, rank_out=2, l2=l2, max_change_per_sample=max_change, max_change_scope=scope)
    optimizer = NgSgd(made, options)
    twin_in = [NaturalGradientTwin(layer.in_features + 1, 3, 4.0, 2000.0, 4) for layer in LAYERS]
    twin_out = [NaturalGradientTwin(layer.out_features, 2, 4.0, 2000.0, 4) for layer in LAYERS]
    whole, rate, clipped = Workspace(made, 9), 0.3, 0
    for t in range(15):
        frames = 6 if t % 5 == 3 else 9  # the last minibatch of an epoch is smaller
        workspace = whole.of(frames)
        labels = random_minibatch(workspace, 4, generator)
        workspace.forward()
        cross_entropy_step(workspace, labels)
        workspace.backward()
        expected = []
        for i, layer in enumerate(LAYERS):
            x = torch.cat([workspace.inputs[i], torch.ones(frames, 1)], dim=1).double()
            (x_hat, gamma_in), (y_hat, gamma_out) = (
                twin_in[i].step(x.numpy()),
                twin_out[i].step(workspace.grad_outputs[i].double().numpy()),
            )
            x, y, gamma, kappa = torch.from_numpy(x_hat), torch.from_numpy(y_hat), gamma_in * gamma_out, 1.0
            if max_change:
                fastest = rate * max(layer.learn_rate_coef, layer.bias_learn_rate_coef)
                changes = (x.norm(dim=1) * y.norm(dim=1)).sum() * gamma * (1.0 if scope == "unscaled" else fastest)
                kappa = min(1.0, float(max_change * frames / changes))
                clipped += kappa < 1.0
            step = (gamma * kappa * y.t() @ x).float()
            weight = weights(made)[i] * (1 - rate * layer.learn_rate_coef * l2 * frames)
            expected += [(weight - rate * layer.learn_rate_coef * step[:, :-1]).flatten()]
            expected += [biases(made)[i] - rate * layer.bias_learn_rate_coef * step[:, -1]]
        optimizer.step(workspace, rate)
        torch.testing.assert_close(made.parameters, torch.cat(expected), rtol=1e-4, atol=1e-5)
    assert clipped > 0 or max_change == 0.0


def test_max_change_holds() -> None:
    """However large the rate, no layer moves by more than max_change per frame (scope global)."""
    made, generator = network(2)
    optimizer = NgSgd(made, NgSgdOptions(rank_in=3, rank_out=2, max_change_per_sample=0.01))
    workspace = Workspace(made, 20)
    for _ in range(5):
        before = made.parameters.clone()
        labels = random_minibatch(workspace, 4, generator)
        workspace.forward()
        cross_entropy_step(workspace, labels)
        workspace.backward()
        optimizer.step(workspace, 1e6)
        moved = Network(LAYERS, made.parameters - before)
        for weight, bias in zip(weights(moved), biases(moved), strict=True):
            assert torch.cat([weight.flatten(), bias]).norm() <= 0.01 * 20 * 1.001


def test_max_change_holds_in_a_layer_without_products() -> None:
    made = Network((Affine(7, 6, "sigmoid"), Scale(6, learn_rate_coef=10.0), Affine(6, 4, "softmax")))
    initialize(made, 1)
    optimizer, workspace = NgSgd(made, NgSgdOptions(max_change_per_sample=0.01)), Workspace(made, 20)
    before = made.views[1]["scale"].clone()
    labels = random_minibatch(workspace, 4, torch.Generator().manual_seed(1))
    workspace.forward()
    cross_entropy_step(workspace, labels)
    workspace.backward()
    optimizer.step(workspace, 1e6)
    assert 0.001 * 20 <= (made.views[1]["scale"] - before).norm() <= 0.01 * 20 * 1.001


@pytest.mark.parametrize("rate", [1e-3, 10.0])
def test_a_step_shared_by_workers_is_limited_as_one_at_the_rate_of_one(rate: float) -> None:
    """At N times the rate a worker moves N times as far as one alone, whether the limit holds it or not."""
    moved = []
    for workers in (1, 16):
        made, generator = network(3)
        optimizer = NgSgd(made, NgSgdOptions(rank_in=3, rank_out=2, max_change_per_sample=0.01))
        optimizer.included_lr_scale = workers
        workspace, before = Workspace(made, 20), made.parameters.clone()
        labels = random_minibatch(workspace, 4, generator)
        workspace.forward()
        cross_entropy_step(workspace, labels)
        workspace.backward()
        optimizer.step(workspace, workers * rate)
        moved.append((made.parameters - before) / workers)
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-4, atol=1e-5)


BF16 = {"pytorch": False, "kernels": True}
SIDES = [(columns, one, rank) for columns, one in ((40, False), (40, True), (33, True)) for rank in (5, 20)]


@pytest.fixture(params=BF16)
def bf16(request: pytest.FixtureRequest) -> Float32:
    """What bf16 is computed with on a CPU: PyTorch alone, and compiled kernels."""
    if BF16[request.param] and not kernels_for("bf16"):
        pytest.skip("no compiled kernels that this processor can run")
    return make_arithmetic("bf16", torch.device("cpu"), use_kernels=BF16[request.param])


@pytest.fixture(params=[*BF16, "float32"])
def fast(request: pytest.FixtureRequest) -> Float32:
    """The same, and what float32 is computed with where there are compiled kernels."""
    use_kernels = BF16.get(request.param, True)
    precision: Precision = "bf16" if request.param in BF16 else "float32"
    if use_kernels and not kernels_for(precision):
        pytest.skip("no compiled kernels that this processor can run")
    return make_arithmetic(precision, torch.device("cpu"), use_kernels=use_kernels)


class Rows:
    """One side of a layer in bf16: a preconditioner, with a minibatch after another, of which a few directions have most
    of the variance."""

    def __init__(self, columns: int, one: bool, rank: int) -> None:
        self.dim, self.one = columns + one, one
        self.ng = NaturalGradient(self.dim, NaturalGradientOptions(rank))
        generator = torch.Generator().manual_seed(1)
        mix = torch.randn(columns, columns, generator=generator) * torch.logspace(0, -2, columns)
        rows = [64] * 20 + [17] + [64] * 10
        self.data = [(torch.randn(n, columns, generator=generator) @ mix + 0.3).bfloat16() for n in rows]

    def feed(self, arithmetic: Float32, x: Tensor, **how: bool) -> Tensor:
        """gamma X^, in float32, with the column that 1 has become; `how`: `exact`, `fused`."""
        x, scratch, (before, after, last) = (
            x.to(arithmetic.dtype, copy=True),
            torch.empty(len(x), self.dim),
            torch.zeros(3, len(x)),
        )
        rows = arithmetic.projection(scratch, before, after, last if self.one else None, **how)
        out = Side(self.ng, rows).precondition(x)
        whole = torch.cat([out.float(), last[:, None]], dim=1) if self.one else out.float()
        return whole * gammas(before, after)

    def run(self, arithmetic: Float32, **how: bool) -> list[Tensor]:
        return [self.feed(arithmetic, x, **how) for x in self.data]


@pytest.mark.parametrize(("columns", "one", "rank"), SIDES)
def test_preconditioning_in_bf16_is_near_that_in_float32(fast: Float32, columns: int, one: bool, rank: int) -> None:
    exact, found = Rows(columns, one, rank), Rows(columns, one, rank)
    rounding = 1.0 if fast.precision == "bf16" else 1e-3
    for x, wanted, made in zip(exact.data, exact.run(fast, exact=True), found.run(fast), strict=True):
        assert (made - wanted).norm() <= 0.006 * rounding * wanted.norm()
        plain = torch.cat([x.float(), torch.ones(len(x), int(one))], dim=1)
        assert (plain - wanted).norm() > 0.2 * wanted.norm(), "nothing is taken away, and nothing compared"
    states = found.ng.state_dict(), exact.ng.state_dict()
    for name in ("d", "rho"):
        torch.testing.assert_close(states[0][name], states[1][name], rtol=0.06 * rounding, atol=0.0)
    projections = [state["w"].T @ state["w"] for state in states]
    assert (projections[0] - projections[1]).norm() <= 1e-3 * rounding**0.5 * projections[1].norm()


def test_a_mean_that_all_rows_have_keeps_what_rounding_could_take(fast: Float32) -> None:
    """As behind sigmoids: of the mean less than 2 % is left, and it decides the step of a bias. Were all factors
    just rounded, with the same error in all rows, 9 % of it would be wrong; and so the 1 that is appended."""
    exact, found = Rows(400, True, 20), Rows(400, True, 20)
    generator = torch.Generator().manual_seed(2)
    own = 0.3 + 0.4 * torch.rand(400, generator=generator)
    data = [(own + 0.05 * torch.randn(64, 400, generator=generator)).bfloat16() for _ in range(12)]
    wrong = []
    for x in data:
        wanted, made = exact.feed(fast, x, exact=True).mean(0), found.feed(fast, x).mean(0)
        wrong.append(
            torch.stack([(made - wanted).norm() / wanted.norm(), (made - wanted)[-1].abs() / wanted[-1].abs()])
        )
    assert (torch.stack(wrong)[3:].mean(0) <= 0.01).all()


@pytest.mark.parametrize(("columns", "one", "rank"), SIDES)
def test_exactly_is_in_float32_and_then_rounded(bf16: Float32, columns: int, one: bool, rank: int) -> None:
    side, twin = Rows(columns, one, rank), NaturalGradient(columns + one, NaturalGradientOptions(rank))
    for x in side.data:
        wide, x = torch.cat([x.float(), torch.ones(len(x), int(one))], dim=1), x.clone()
        padded = torch.zeros(len(x), 48)[:, : columns + one].copy_(wide)
        made, (before, after, last) = torch.zeros(len(x), 48)[:, : columns + one], torch.zeros(3, len(x))
        found = Side(side.ng, bf16.projection(made, before, after, last if one else None, exact=True)).precondition(x)
        torch.testing.assert_close(before, wide.norm(dim=1), rtol=1e-6, atol=0.0)
        in_float32 = Float32().projection(None, *torch.empty(2, len(x)))
        in_float32.arithmetic.load_rows = lambda *_: in_float32.before.copy_(before)  # type: ignore[method-assign]  # noqa: B023
        Side(twin, in_float32).precondition(padded)
        assert found is x and torch.equal(found, padded[:, :columns].bfloat16())
        torch.testing.assert_close(after, padded.norm(dim=1), rtol=1e-6, atol=0.0)
        assert not one or torch.equal(last.bfloat16(), padded[:, columns].bfloat16())
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in side.ng.state_dict().items())


@pytest.mark.parametrize("at", [0, 1, 7, 11, 14, 15])
def test_bf16_resumes_to_the_same_bits(fast: Float32, at: int) -> None:
    side, other = Rows(40, True, 5), Rows(40, True, 5)
    for x in side.data[:at]:
        side.feed(fast, x)
    other.ng.load_state_dict(side.ng.state_dict())
    for x in side.data[at:]:
        assert torch.equal(side.feed(fast, x), other.feed(fast, x))
    assert all(torch.equal(value, other.ng.state_dict()[name]) for name, value in side.ng.state_dict().items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 3, 11])
def test_in_bf16_what_is_not_finite_shows_and_does_not_stay(fast: Float32, bad: float, at: int) -> None:
    side, clean = Rows(40, True, 5), Rows(40, True, 5)
    for x in side.data[:at]:
        assert torch.equal(side.feed(fast, x), clean.feed(fast, x))
    state = {name: value for name, value in side.ng.state_dict().items() if name != "t"}
    broken = side.data[at].clone()
    broken[3, 4] = bad
    assert not side.feed(fast, broken).isfinite().any()
    assert all(torch.equal(value, side.ng.state_dict()[name]) for name, value in state.items())


def test_no_rows_and_one_column_in_bf16(fast: Float32) -> None:
    for columns, one, n in ((1, False, 5), (40, True, 0), (40, False, 0)):
        side, x = Rows(columns, one, 5), torch.randn(n, columns).bfloat16()
        assert torch.equal(side.feed(fast, x)[:, :columns], x.float())
        assert side.ng.t == 0


@pytest.mark.parametrize("exact", [False, True])
def test_the_option_says_how_bf16_is_preconditioned(
    bf16: Float32, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with the option is, to the bit, one of an arithmetic that knows no other way."""
    moved, projection = [], bf16.projection
    for only in (False, True):
        if only:
            monkeypatch.setattr(bf16, "projection", lambda *memory, **how: projection(*memory, **how | {"exact": True}))
        made, generator = network(4)
        optimizer, workspace = NgSgd(made, NgSgdOptions(rank_in=3, rank_out=2, exact=exact)), Workspace(made, 20, bf16)
        for _ in range(3):
            labels = random_minibatch(workspace, 4, generator)
            workspace.forward()
            cross_entropy_step(workspace, labels)
            workspace.backward()
            optimizer.step(workspace, 0.1)
        moved.append(made.parameters.clone())
    assert torch.equal(*moved) == exact


@pytest.mark.parametrize("exact", [False, True])
def test_in_bf16_a_settled_training_updates_a_quarter_as_often(fast: Float32, exact: bool) -> None:
    made, generator = network(5)
    optimizer, workspace = NgSgd(made, NgSgdOptions(rank_in=3, rank_out=2, exact=exact)), Workspace(made, 20, fast)
    optimizer.set_arithmetic(fast)

    def step() -> bool:
        labels = random_minibatch(workspace, 4, generator)
        workspace.forward()
        cross_entropy_step(workspace, labels)
        workspace.backward()
        before = [one.state_dict()["w"] for one in optimizer.preconditioners]
        optimizer.step(workspace, 0.1)
        changed = {
            not torch.equal(w, one.state_dict()["w"]) for w, one in zip(before, optimizer.preconditioners, strict=True)
        }
        (updated,) = changed
        return updated

    assert step()
    period = 16 if fast.precision == "bf16" and not exact else 4
    for t, changes in ((SETTLED - 12, 4), (SETTLED, period)):
        for one in optimizer.preconditioners:
            one.t = t
        assert [n for n in range(t, t + 12) if step()] == [n for n in range(t, t + 12) if (n - 10) % changes == 0]
