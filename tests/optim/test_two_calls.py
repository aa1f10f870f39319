"""Natural gradient's projection in two calls: as in one, and with the columns split over workers that sum H in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.threads import run_workers
from torch import Tensor
from twins import NaturalGradientTwin, kernels_for

from ddnn.distributed.communicator import Communicator
from ddnn.nn.arithmetic import Float32, Precision, Projection, make_arithmetic
from ddnn.optim.natural_gradient import NaturalGradient, NaturalGradientOptions, Side, gammas

COLUMNS, RANK = 40, 5
FORMS: dict[str, tuple[Precision, bool, bool]] = {  # precision, kernels, exact
    "float32": ("float32", False, False),
    "float32 by kernels": ("float32", True, False),
    "bf16": ("bf16", False, False),
    "bf16 by kernels": ("bf16", True, False),
    "bf16, exact": ("bf16", True, True),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> tuple[Float32, bool]:
    """An arithmetic, and whether it preconditions exactly."""
    precision, use_kernels, exact = FORMS[request.param]
    if use_kernels and not kernels_for(precision):
        pytest.skip("no compiled kernels that this processor can run")
    return make_arithmetic(precision, torch.device("cpu"), use_kernels=use_kernels), exact


def minibatches() -> list[Tensor]:
    """Rows of which a few directions have most of the variance."""
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(COLUMNS, COLUMNS, generator=generator) * torch.logspace(0, -1.5, COLUMNS)
    sizes = [64] * 18 + [50] * 4
    return [(torch.randn(n, COLUMNS, generator=generator) @ mix + 0.3).bfloat16() for n in sizes]


def new_rows(form: tuple[Float32, bool], n: int, columns: int, *, one: bool, fused: bool) -> Projection:
    arithmetic, exact = form
    scratch, (before, after, last) = torch.zeros(n, columns + one), torch.zeros(3, n)
    bias_column = last.to(arithmetic.bias_input_dtype) if one else None
    return arithmetic.projection(scratch, before, after, bias_column, exact=exact, fused=fused)


def new_preconditioner() -> NaturalGradient:
    return NaturalGradient(COLUMNS + 1, NaturalGradientOptions(RANK))


def whole(made: Tensor, rows: Projection) -> Tensor:
    """X^ with its bias column, in float32."""
    return made.float() if rows.bias_column is None else torch.cat([made.float(), rows.bias_column.float()[:, None]], 1)


def one_worker(form: tuple[Float32, bool], *, fused: bool) -> tuple[list[Tensor], NaturalGradient]:
    """gamma X^ of all minibatches, and the preconditioner behind them."""
    ng, results = new_preconditioner(), []
    for x in minibatches():
        rows = new_rows(form, len(x), COLUMNS, one=True, fused=fused)
        made = Side(ng, rows).precondition(x.to(form[0].dtype, copy=True))
        results.append(whole(made, rows) * gammas(rows.before, rows.after))
    return results, ng


def test_two_calls_are_as_one_pass(form: tuple[Float32, bool]) -> None:
    """To the same bits, in all that a training keeps; and near the twin in float64."""
    (fused, one), (apart, other) = (one_worker(form, fused=fused) for fused in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(fused, apart, strict=True))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    twin, bound = (
        NaturalGradientTwin(COLUMNS + 1, RANK, 4.0, 2000.0, 4),
        1e-4 if form[0].precision == "float32" else 0.006,
    )
    for x, found in zip(minibatches(), apart, strict=True):
        made, gamma = twin.step(torch.cat([x.double(), torch.ones(len(x), 1)], dim=1).numpy())
        expected = torch.from_numpy(made) * gamma
        assert (found - expected).norm() <= bound * expected.norm()


class SplitColumns:
    """One of the workers that share the columns of X, as model parallelism will have them: whole preconditioners, which
    learn the same; H, J and squares of norms of all workers' columns."""

    def __init__(self, comm: Communicator, form: tuple[Float32, bool], *, sums: bool) -> None:
        self.comm, self.form, self.sums, self.ng = comm, form, sums, new_preconditioner()
        self.is_last, self.cut = comm.rank == comm.world_size - 1, 23
        self.columns = slice(self.cut, None) if self.is_last else slice(self.cut)

    def own_w(self) -> Tensor:
        return self.ng.w[:, self.columns].contiguous()

    def sum(self, h: Tensor) -> Tensor:
        made = h.contiguous()
        if self.sums:
            self.comm.all_reduce(made)
        return made

    def learn(self, own_j: Tensor, norms: Tensor) -> None:
        width = self.ng.dim
        padded = torch.zeros(len(own_j), width)
        padded[:, self.columns] = own_j
        self.comm.all_reduce(padded)
        self.ng.j.copy_(padded)
        self.ng.update_from_j(norms)

    def norms(self, of_own_columns: Tensor) -> Tensor:
        squares = of_own_columns.square()
        self.comm.all_reduce(squares)
        return squares.sqrt()

    def precondition(self, x: Tensor) -> Tensor:
        """gamma X^ of the own columns."""
        ng, x = self.ng, x[:, self.columns].to(self.form[0].dtype, copy=True)
        rows = new_rows(self.form, len(x), x.shape[1], one=self.is_last, fused=False)
        for _ in range(ng.initial_updates(len(x))):
            wide, h = rows.load(x, self.own_w())
            self.learn(self.sum(h).t() @ wide, self.norms(rows.before))
            ng.finish_update()
        updates, own_j = ng.begin_minibatch(len(x)), torch.empty(0)
        w = self.own_w()
        rows.take(w)
        rows.project(x, w)
        rows.h = self.sum(rows.h)
        if updates and not rows.gives_j:
            wide, h = rows.rows_and_h(w)
            own_j = (h if h is rows.h else self.sum(h)).t() @ wide
        elif updates:
            own_j = torch.empty_like(w)
        made = whole(rows.remove(w, own_j if updates and rows.gives_j else None), rows)
        before, after = self.norms(rows.before), self.norms(rows.after)
        if updates:
            self.learn(own_j, before)
        return made * gammas(before, after)


@pytest.mark.parametrize("sums", [True, False])
def test_columns_over_two_workers_that_sum_h_are_those_of_one(form: tuple[Float32, bool], sums: bool) -> None:
    """To rounding; without the sum they are not, or nothing would be compared."""
    data = minibatches()

    def work(comm: Communicator) -> Any:
        worker = SplitColumns(comm, form, sums=sums)
        return [worker.precondition(x) for x in data], worker.ng.state_dict()

    (left, state), (right, other) = run_workers(2, work)
    expected, ng = one_worker(form, fused=True)
    rounding = 1e-5 if form[0].precision == "float32" else 2e-3
    off = [
        float((torch.cat(halves, dim=1) - x_hat).norm() / x_hat.norm())
        for *halves, x_hat in zip(left, right, expected, strict=True)
    ]
    assert all(torch.equal(value, other[name]) for name, value in state.items())
    if not sums:
        assert max(off) > 10 * rounding
        return
    assert max(off) <= rounding
    fisher, of_one = (torch.as_tensor(s["w"].T @ s["w"]) for s in (state, ng.state_dict()))
    assert (fisher - of_one).norm() <= rounding * of_one.norm()
