"""Online natural gradient against Kaldi's own steps, and against a naive float64 twin."""

from __future__ import annotations

from pathlib import Path

import kaldiio
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from twins import Matrix, NaturalGradientTwin, kernels_for

from ddnn.nn.arithmetic import make_arithmetic
from ddnn.optim.natural_gradient import NaturalGradient, NaturalGradientOptions, Side, gammas, max_change_factor
from ddnn.util.errors import DataError, UserError


def precondition(ng: NaturalGradient, x: Tensor, kernels: bool = False) -> Tensor:
    """Turns x into X^ in place, and returns gamma; as a training in float32 does it where there are compiled kernels, or
    exactly."""
    before, after = torch.empty(2, len(x))
    rows = make_arithmetic("float32", x.device, use_kernels=kernels).projection(None, before, after)
    assert Side(ng, rows).precondition(x) is x
    return gammas(before, after)


def relative(found: Matrix, wanted: Matrix) -> float:
    """Frobenius norm of the error, relative; absolute where the wanted matrix is zero."""
    return float(np.linalg.norm(found - wanted) / (np.linalg.norm(wanted) or 1.0))


def skewed(rng: np.random.Generator, n: int, dim: int) -> Matrix:
    """Rows with a spectrum that falls by 1.5 orders of magnitude, rotated."""
    basis = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    return rng.standard_normal((n, dim)) * np.logspace(0, -1.5, dim) @ basis


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(
    ("name", "rank", "period", "tolerance"),
    [("n64_d40_r10_p4", 10, 4, 1e-4), ("n128_d100_r20_p1", 20, 1, 1e-4), ("n16_d30_r20_p4", 20, 4, 2e-2)],
)
def test_kaldi_steps(golden: Path, name: str, rank: int, period: int, tolerance: float, kernels: bool) -> None:
    if kernels and not kernels_for("float32"):
        pytest.skip("no compiled kernels that this processor can run")
    folder = golden / "ng"
    steps = {key: torch.from_numpy(np.array(m)) for key, m in kaldiio.load_ark(str(folder / f"{name}.ark"))}
    scales = dict(line.replace("[", "").replace("]", "").split() for line in (folder / f"{name}.scale.txt").open())
    ng: NaturalGradient | None = None
    for key, scale in scales.items():
        x, wanted = steps[f"{key}-in"].clone(), steps[f"{key}-out"]
        ng = ng or NaturalGradient(x.shape[1], NaturalGradientOptions(rank, update_period=period))
        all_zero = not x.any()
        gamma = precondition(ng, x, kernels)
        if all_zero:
            assert not x.any() and gamma == 1.0, key
            continue
        assert relative(x.double().numpy(), wanted.double().numpy()) <= tolerance, key
        assert abs(float(gamma) / float(scale) - 1) <= tolerance, key
    assert ng is not None and ng.t == len(scales) >= 8


@pytest.mark.parametrize(
    ("n", "dim", "rank", "period"),
    [
        (64, 40, 10, 4),
        (200, 33, 8, 1),
        (50, 120, 20, 2),
        (256, 513, 20, 4),
        (90, 12, 40, 3),
        (70, 2, 5, 1),
        (64, 21, 20, 4),
    ],
)
@pytest.mark.parametrize("kernels", [False, True])
def test_twin(n: int, dim: int, rank: int, period: int, kernels: bool) -> None:
    if kernels and not kernels_for("float32"):
        pytest.skip("no compiled kernels that this processor can run")
    rng = np.random.default_rng(dim)
    twin = NaturalGradientTwin(dim, rank, 4.0, 2000.0, period)
    ng = NaturalGradient(dim, NaturalGradientOptions(rank, update_period=period))
    assert ng.rank == min(rank, dim - 1)
    mix = skewed(rng, dim, dim)
    for t in range(24):
        data = 3.0 * rng.standard_normal((n - t, dim)) @ mix
        x = torch.from_numpy(data).float()
        wanted, gamma = twin.step(x.double().numpy())
        found = precondition(ng, x, kernels)
        assert relative(x.double().numpy(), wanted) <= 1e-4, t
        assert abs(float(found) / gamma - 1) <= 1e-4, t
    ng.finish_update()
    assert abs(ng.rho / twin.rho - 1) <= 1e-3
    assert relative(ng.d, twin.d) <= 1e-4


@pytest.mark.parametrize(("n", "dim", "rank"), [(5, 30, 20), (3, 50, 40), (12, 20, 19), (1, 9, 4)])
def test_twin_with_fewer_rows_than_rank(n: int, dim: int, rank: int) -> None:
    """Directions that the data does not determine are noise, so the two may differ there; the result must not."""
    rng = np.random.default_rng(n)
    twin = NaturalGradientTwin(dim, rank, 4.0, 2000.0, 1)
    ng = NaturalGradient(dim, NaturalGradientOptions(rank, update_period=1))
    for t in range(20):
        x = torch.from_numpy(rng.standard_normal((n, dim))).float()
        wanted, gamma = twin.step(x.double().numpy())
        found = precondition(ng, x)
        assert relative(x.double().numpy(), wanted) <= 5e-2, t
        assert abs(float(found) / gamma - 1) <= 5e-2, t


def orthonormality(ng: NaturalGradient) -> float:
    """Largest |R R^T - I|."""
    ng.finish_update()
    beta = ng.rho * (1 + ng.options.alpha) + ng.options.alpha * ng.d.sum() / ng.dim
    r = ng.w.double() * torch.from_numpy(beta / ng.d + 1).sqrt().unsqueeze(1)
    return float((r @ r.T - torch.eye(ng.rank)).abs().max())


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 40),
    dim=st.integers(1, 30),
    rank=st.integers(1, 35),
    scales=st.lists(st.floats(-6, 6), min_size=1, max_size=14),
    kind=st.sampled_from(["noise", "low-rank", "repeated rows", "constant columns", "zero columns", "one row", "zero"]),
    period=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_nothing_makes_nan(n: int, dim: int, rank: int, scales: list[float], kind: str, period: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ng = NaturalGradient(dim, NaturalGradientOptions(rank, update_period=period))
    for scale in scales:
        data = rng.standard_normal((n, dim))
        if kind == "low-rank":
            data = data[:, :1] * data[:1]
        elif kind == "repeated rows":
            data[:] = data[0]
        elif kind == "constant columns":
            data[:, ::2] = 1.0
        elif kind == "zero columns":
            data[:, ::2] = 0.0
        elif kind == "one row":
            data[1:] = 0.0
        elif kind == "zero":
            data[:] = 0.0
        before = torch.from_numpy(data * 10.0**scale).float()
        x = before.clone()
        gamma = precondition(ng, x)
        assert torch.isfinite(x).all() and torch.isfinite(gamma)
        assert float(gamma) >= 0.999  # X^ is never longer than X
        assert float(gamma * x.norm()) == pytest.approx(float(before.norm()), rel=1e-4)
        if kind == "zero":
            assert gamma == 1.0 and not x.any()
    state = ng.state_dict()
    assert all(torch.isfinite(value).all() for value in state.values())
    assert not ng.rank or (ng.d.min() >= 1e-10 and ng.rho >= 1e-10)
    # K is float32, as Kaldi's, so C that jumps by 1e5 in one step costs some orthonormality; 0.046 is the most seen.
    assert not ng.rank or orthonormality(ng) < 0.1


def test_the_first_zero_minibatches_do_no_harm() -> None:
    ng = NaturalGradient(12, NaturalGradientOptions(4))
    for _ in range(15):
        x = torch.zeros(8, 12)
        assert precondition(ng, x) == 1.0 and not x.any()
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    assert torch.isfinite(precondition(ng, x)) and torch.isfinite(x).all()


def test_common_directions_are_damped() -> None:
    """What the method is for: a direction of large variance comes out smaller relative to the others."""
    rng = np.random.default_rng(0)
    ng = NaturalGradient(20, NaturalGradientOptions(3))
    for _ in range(20):
        data = rng.standard_normal((128, 20))
        data[:, 7] *= 30
        x = torch.from_numpy(data).float()
        precondition(ng, x)
    ratio = float(x[:, 7].std() / x[:, 3].std())
    assert 2.0 < ratio < 10.0, ratio  # 30 before


def test_nan_shows_and_does_not_stay() -> None:
    options = NaturalGradientOptions(4, update_period=1)
    ng, clean = NaturalGradient(10, options), NaturalGradient(10, options)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(32, 10, generator=g)
    precondition(ng, x.clone())
    precondition(clean, x.clone())
    bad = torch.randn(32, 10, generator=g)
    bad[3, 4] = float("nan")
    assert torch.isnan(precondition(ng, bad)) and torch.isnan(bad).any()
    wanted, found = x.clone(), x.clone()
    assert torch.equal(precondition(clean, wanted), precondition(ng, found))
    assert torch.equal(wanted, found)


def test_strided_rows() -> None:
    """A layer may keep its input and the appended 1 in a wider buffer."""
    a, b = NaturalGradient(9, NaturalGradientOptions(3)), NaturalGradient(9, NaturalGradientOptions(3))
    for seed in range(3):
        x = torch.randn(40, 9, generator=torch.Generator().manual_seed(seed))
        wide = torch.full((40, 16), 5.0)
        wide[:, :9] = x
        assert float(precondition(a, x)) == pytest.approx(float(precondition(b, wide[:, :9])), rel=1e-5)
        torch.testing.assert_close(wide[:, :9], x, rtol=1e-4, atol=1e-5)
        assert (wide[:, 9:] == 5.0).all()


@pytest.mark.parametrize("at", [0, 1, 7, 11, 14, 15])
def test_resume_to_the_same_bits(at: int) -> None:
    options = NaturalGradientOptions(5, update_period=4)
    g = torch.Generator().manual_seed(3)
    data = [torch.randn(30, 16, generator=g) for _ in range(20)]
    ng = NaturalGradient(16, options)
    for x in data[:at]:
        precondition(ng, x.clone())
    other = NaturalGradient(16, options)
    other.load_state_dict(ng.state_dict())
    for x in data[at:]:
        wanted, found = x.clone(), x.clone()
        assert torch.equal(precondition(ng, wanted), precondition(other, found))
        assert torch.equal(wanted, found)


def test_state_that_does_not_fit_is_refused() -> None:
    ng = NaturalGradient(8, NaturalGradientOptions(3))
    precondition(ng, torch.randn(20, 8, generator=torch.Generator().manual_seed(0)))
    state = ng.state_dict()
    for name, value in (
        ("w", state["w"][:2]),
        ("w", state["w"].double()),
        ("w", state["w"] * float("nan")),
        ("d", -state["d"]),
        ("d", state["d"][:1]),
        ("rho", torch.tensor(0.0, dtype=torch.float64)),
        ("t", torch.tensor(-1)),
    ):
        with pytest.raises(DataError, match=f"natural gradient state: {name} "):
            ng.load_state_dict({**state, name: value})
    with pytest.raises(DataError, match="holds"):
        ng.load_state_dict({"w": state["w"]})
    assert all(torch.equal(state[name], value) for name, value in ng.state_dict().items())


@pytest.mark.parametrize(
    "bad", [{"rank": 0}, {"alpha": -1.0}, {"num_samples_history": 0.0}, {"update_period": 0}, {"delta": 0.5}]
)
def test_options_out_of_range(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        NaturalGradientOptions(**{"rank": 4, **bad})  # type: ignore[arg-type]


def test_a_minibatch_without_rows_teaches_nothing() -> None:
    ng = NaturalGradient(8, NaturalGradientOptions(3))
    assert precondition(ng, torch.zeros(0, 8)) == 1.0 and ng.t == 0


@pytest.mark.parametrize(("mode", "rate"), [("global", 0.5), ("global", 1e-4), ("unscaled", 0.5), ("unscaled", 1e-4)])
def test_max_change(mode: str, rate: float) -> None:
    g = torch.Generator().manual_seed(0)
    x, y, gamma = torch.randn(50, 9, generator=g), torch.randn(50, 7, generator=g), torch.tensor(1.7)
    products = sum(float(a.double().norm() * b.double().norm()) for a, b in zip(x, y, strict=True))
    wanted = min(1.0, 0.075 * 50 / ((rate if mode == "global" else 1.0) * 1.7 * products))
    kappa = max_change_factor(x.norm(dim=1), y.norm(dim=1), gamma, rate if mode == "global" else 1.0, 0.075)
    assert kappa.shape == () and float(kappa) == pytest.approx(wanted, rel=1e-5)
    step = float(kappa) * 1.7 * torch.linalg.matrix_norm(y.T @ x) * (rate if mode == "global" else 1.0)
    assert step <= 0.075 * 50


def test_max_change_of_no_step_and_of_nan() -> None:
    zero, one = torch.zeros(4), torch.tensor(1.0)
    assert max_change_factor(zero, zero, one, 0.1, 0.075) == 1.0
    assert max_change_factor(zero, zero, one, 0.0, 0.075) == 1.0
    assert torch.isnan(max_change_factor(zero * float("nan"), zero, one, 0.1, 0.075))


@pytest.mark.parametrize(("history", "rows_rank"), [(20.0, 30), (200.0, 6)])
def test_caps_and_floors_are_the_twins(history: float, rows_rank: int) -> None:
    """Minibatches of more than 2.3 histories, whose share is capped; minibatches without anything beside the eigenvectors
    of F, so that rho comes to its floor, and d is made of rho as it was before."""
    rng, n = np.random.default_rng(1), 64
    basis = np.logspace(0, -0.75, rows_rank)[:, None] * np.linalg.qr(rng.standard_normal((30, 30)))[0][:rows_rank]
    twin = NaturalGradientTwin(30, 6, 4.0, history, 1)
    ng = NaturalGradient(30, NaturalGradientOptions(6, num_samples_history=history, update_period=1))
    for _ in range(12):
        x = rng.standard_normal((n, rows_rank)) @ basis
        wanted, gamma = twin.step(x)
        found = torch.from_numpy(x).float()
        assert float(precondition(ng, found)) == pytest.approx(gamma, rel=1e-3)
        assert relative(found.double().numpy(), wanted) < 1e-3
        ng.finish_update()
        np.testing.assert_allclose(ng.d, twin.d, rtol=1e-3)
        assert ng.rho == pytest.approx(twin.rho, rel=1e-3)


def test_counting_from_another_number_finishes_the_update() -> None:
    made = torch.Generator().manual_seed(1)
    first, second = (NaturalGradient(10, NaturalGradientOptions(3)) for _ in range(2))
    for ng in (first, second):
        precondition(ng, torch.randn(20, 10, generator=made.manual_seed(1)))
    first.count_from(5)
    wanted = second.state_dict()
    assert {name for name, value in first.state_dict().items() if not torch.equal(value, wanted[name])} == {"t"}
    assert first.t == 5
