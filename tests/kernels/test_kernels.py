"""Each compiled kernel against float64 and its plain counterpart, and that it keeps to the memory it is given."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from twins import kernels_for

from ddnn.data.dataset import AcousticDataset, InputTransform, gather
from ddnn.nn.arithmetic import BFloat16, BFloat16Kernels
from ddnn.nn.kernels import Kernels, load_library
from ddnn.nn.loss import SoftmaxCrossEntropyBFloat16

pytestmark = pytest.mark.skipif(not kernels_for("bf16"), reason="no compiled kernels that this processor can run")

BF16, F32 = torch.bfloat16, torch.float32
TINY = 2.0**-126
"""The smallest normal number of float32 and bf16. What is smaller may become 0, and e^x ends there."""
EXPONENTIAL = 1e-5
"""Relative error of the kernels' e^x."""
UNIT = 2.0**-24
"""Relative error of a sum or product rounded to float32."""

SETTINGS = settings(max_examples=40, deadline=None)
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([1, 15, 16, 17, 63, 64, 65, 127, 128, 129]))
KINDS = st.sampled_from(["normal", "small", "large", "zero", "mixed"])
SEEDS = st.integers(0, 10_000)


def kernels() -> Kernels:
    loaded = load_library()
    assert loaded is not None
    return loaded


def noise(shape: tuple[int, ...], kind: str, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    """Normal numbers of one size; `mixed` has sizes, zeros, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator)
    made *= {"normal": 1.0, "small": 1e-30, "large": 1e30, "zero": 0.0, "mixed": 1.0}[kind]
    if kind == "mixed":
        odd = torch.tensor([1e-30, -1e30, 0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-39])
        which = torch.randint(0, 60, shape, generator=generator)
        made = torch.where(which < len(odd), odd[which.clamp(max=len(odd) - 1)], made)
    return made.to(dtype)


GUARDS = {BF16: (torch.int16, 0x7FE5), F32: (torch.int32, 0x7FE00005), torch.int64: (torch.int64, -987654321)}


class Guarded:
    """A tensor in the middle of a larger one, at an odd place. What lies around it is NaN (integers: no label) with
    bits that no computation gives: who reads it gets NaN, who writes there is found out."""

    AROUND = 81

    def __init__(self, values: Tensor) -> None:
        integer, self._guard = GUARDS[values.dtype]
        self._bits = torch.full((values.numel() + 2 * self.AROUND,), self._guard, dtype=integer)
        self._inside = self._bits[self.AROUND : -self.AROUND]
        self.tensor = self._inside.view(values.dtype).view(values.shape).copy_(values)
        self._given = self._inside.clone()

    @property
    def intact(self) -> bool:
        """Whether nothing was written beyond the tensor."""
        around = torch.cat([self._bits[: self.AROUND], self._bits[-self.AROUND :]])
        return bool((around == self._guard).all())

    @property
    def unchanged(self) -> bool:
        """Whether nothing was written at all."""
        return self.intact and torch.equal(self._inside, self._given)


def unfilled(*shape: int, dtype: torch.dtype = BF16) -> Guarded:
    """Memory for a result, NaN."""
    return Guarded(torch.full(shape, float("nan"), dtype=dtype))


def assert_rounded_once(found: Tensor, exact: Tensor, error: Tensor | float) -> None:
    """`found`, bf16, is a number within `error` (and TINY) of `exact`, float64, rounded to nearest; and is NaN or
    infinite where that is."""
    assert found.dtype == BF16 and exact.dtype == torch.float64 and found.shape == exact.shape
    finite = exact.isfinite()
    torch.testing.assert_close(found[~finite].double(), exact[~finite], rtol=0.0, atol=0.0, equal_nan=True)
    error = torch.as_tensor(error, dtype=torch.float64).expand_as(exact)[finite] + TINY
    low, high = ((exact[finite] + sign * error).float().bfloat16() for sign in (-1, 1))
    wrong = ~((low <= found[finite]) & (found[finite] <= high))
    assert not wrong.any(), (found[finite][wrong], exact[finite][wrong])


def assert_neighbours(found: Tensor, plain: Tensor) -> None:
    """The same but for the last of bf16's 8 bits."""
    torch.testing.assert_close(found, plain, rtol=2**-7, atol=TINY, equal_nan=True)


def flushed(values: Tensor) -> Tensor:
    """Rounded to bf16, and what is then subnormal is 0."""
    low = values.bfloat16()
    return torch.where(low.abs() < TINY, torch.zeros_like(low), low)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


def test_sigmoid_of_every_number() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16).view(-1, 128)
    y = Guarded(every)
    kernels().sigmoid_(y.tensor, torch.zeros(128))
    exact = torch.sigmoid(every.double())
    assert_rounded_once(y.tensor, exact, EXPONENTIAL * exact)
    assert_neighbours(y.tensor, every.clone().sigmoid_())
    assert y.intact


@SETTINGS
@given(rows=st.integers(0, 5), columns=SIZES, kinds=st.tuples(KINDS, KINDS), seed=SEEDS)
def test_sigmoid_adds_the_bias_in_float32(rows: int, columns: int, kinds: tuple[str, str], seed: int) -> None:
    values, biases = noise((rows, columns), kinds[0], seed), noise((columns,), kinds[1], seed + 1, F32)
    y, bias = Guarded(values), Guarded(biases)
    kernels().sigmoid_(y.tensor, bias.tensor)
    x = values.double() + biases.double()
    exact = torch.sigmoid(x)
    of_the_sum = 2 * UNIT * x.abs() * exact * (1 - exact)
    assert_rounded_once(y.tensor, exact, EXPONENTIAL * exact + of_the_sum.nan_to_num())
    assert_neighbours(y.tensor, (values.float() + biases).sigmoid_().bfloat16())
    assert y.intact and bias.unchanged


@SETTINGS
@given(rows=st.integers(0, 5), columns=SIZES, kind=KINDS, seed=SEEDS)
def test_sigmoid_backward(rows: int, columns: int, kind: str, seed: int) -> None:
    derivative, outputs = noise((rows, columns), kind, seed), noise((rows, columns), "mixed", seed + 1).float()
    outputs = torch.sigmoid(4 * outputs).bfloat16()  # between 0 and 1, both included
    d, y = Guarded(derivative), Guarded(outputs)
    kernels().sigmoid_backward_(d.tensor, y.tensor)
    wide = outputs.double()
    exact = derivative.double() * (wide * (1 - wide))
    assert_rounded_once(d.tensor, exact, 4 * UNIT * exact.abs())
    assert_neighbours(d.tensor, torch.ops.aten.sigmoid_backward(derivative, outputs))
    assert d.intact and y.unchanged


@SETTINGS
@given(rows=st.integers(0, 70), columns=SIZES, weighted=st.booleans(), kind=KINDS, seed=SEEDS)
def test_column_sums(rows: int, columns: int, weighted: bool, kind: str, seed: int) -> None:
    values, factors = noise((rows, columns), kind, seed), noise((rows,), "normal", seed + 1, F32)
    d, out, weights = Guarded(values), unfilled(columns), Guarded(factors)
    kernels().column_sums(d.tensor, out.tensor, weights.tensor if weighted else None)
    wide = values.double() * factors.double()[:, None] if weighted else values.double()
    plain = (values.float().t() @ factors).bfloat16() if weighted else values.sum(0)
    for sums in (out.tensor, plain):
        assert_rounded_once(sums, wide.sum(0), (rows + 1) * UNIT * wide.abs().sum(0))
    assert out.intact and d.unchanged and weights.unchanged


def test_rows_are_summed_in_float32() -> None:
    out = unfilled(3)
    kernels().column_sums(torch.ones(600, 3, dtype=BF16), out.tensor)
    assert out.tensor.tolist() == [600.0] * 3, "bf16 sums end at 256"


def assert_norms(found: Tensor, of: Tensor) -> None:
    """Of the rows, summed in float32: it ends at squares of 3e38, and those below 1e-38 count for nothing."""
    squares = of.double().square().sum(1)
    exact = torch.where(squares > torch.finfo(F32).max, float("inf"), squares).sqrt()
    torch.testing.assert_close(found.double(), exact, rtol=(of.shape[1] + 4) * UNIT, atol=1e-18, equal_nan=True)
    plain, finite = torch.linalg.vector_norm(of, dim=1), exact.isfinite()  # it does not square what is alone in a row
    torch.testing.assert_close(found[finite], plain[finite], rtol=1e-5, atol=1e-18)


ROWS_APART = {
    "rows": st.integers(0, 6),
    "columns": SIZES,
    "one": st.booleans(),
    "gap": st.integers(0, 17),
    "kind": KINDS,
    "seed": SEEDS,
}


@SETTINGS
@given(**ROWS_APART)
def test_bf16_to_float32_rows(rows: int, columns: int, one: bool, gap: int, kind: str, seed: int) -> None:
    values = noise((rows, columns), kind, seed)
    x, norms, memory = Guarded(values), unfilled(rows, dtype=F32), unfilled(rows, columns + one + gap, dtype=F32)
    out = memory.tensor[:, : columns + one]
    kernels().bf16_to_float32_rows(x.tensor, out, norms.tensor)
    assert_equal(out, torch.cat([values.float(), torch.ones(rows, int(one))], dim=1))
    assert_norms(norms.tensor, out)
    assert memory.tensor[:, columns + one :].isnan().all()
    assert x.unchanged and norms.intact and memory.intact


@SETTINGS
@given(**ROWS_APART)
def test_float32_to_bf16_rows(rows: int, columns: int, one: bool, gap: int, kind: str, seed: int) -> None:
    values = torch.full((rows, columns + one + gap), float("nan"))
    values[:, : columns + one] = noise((rows, columns + one), kind, seed, F32)
    memory, out, norms, last = Guarded(values), unfilled(rows, columns), *(unfilled(rows, dtype=F32) for _ in range(2))
    x = memory.tensor[:, : columns + one]
    kernels().float32_to_bf16_rows(x, out.tensor, norms.tensor, last.tensor if one else None)
    assert_equal(out.tensor, flushed(x[:, :columns]))
    assert_norms(norms.tensor, x)
    if one:
        assert_equal(last.tensor, x[:, columns])
    assert memory.unchanged and out.intact and norms.intact and (last.intact if one else last.unchanged)


def projection(rank: int, dim: int, seed: int) -> Tensor:
    """W (rank, dim): up to dim orthogonal rows of lengths below 1, as preconditioning has them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.linalg.qr(torch.randn(dim, dim, generator=generator))[0][:rank]
    return (rows * torch.rand(len(rows), 1, generator=generator)).contiguous()


def removed(values: Tensor, one: bool, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """X with its ones, H of rounded W, and X - H W, W rounded but for its first two rows and the column of the ones, all
    in float64; and how far rounding H and float32 sums may be off in the last. In float32 only sums are rounded."""
    x, low = torch.cat([values.double(), torch.ones(len(values), int(one))], dim=1), w.double()
    low = flushed(w).double() if values.dtype == BF16 else low
    h, rounding = x @ low.T, torch.full((len(w),), 2.0**-8 if values.dtype == BF16 else 0.0)
    rounding[:2] = 2.0**-15 if values.dtype == BF16 else 0.0
    low[:2] = w[:2]
    if one:
        low[:, -1] = w[:, -1]
    of_sums = (x.shape[1] + 2) * UNIT * (x.abs() @ low.abs().T)
    error = (rounding * h.abs() + of_sums) @ low.abs() + (len(w) + 6) * UNIT * (x.abs() + h.abs() @ low.abs())
    return x, h, x - h @ low, error


REMOVED = {
    "rows": st.integers(0, 35),
    "columns": SIZES,
    "one": st.booleans(),
    "rank": st.integers(0, 100),
    "seed": SEEDS,
}
DTYPES = st.sampled_from([BF16, F32])


@SETTINGS
@given(**REMOVED, dtype=DTYPES, kind=st.sampled_from(["normal", "small", "zero", "mixed"]), learns=st.booleans())
def test_remove_projection(
    rows: int,
    columns: int,
    one: bool,
    rank: int,
    seed: int,
    dtype: torch.dtype,
    kind: str,
    learns: bool,
) -> None:
    values, dim = noise((rows, columns), kind, seed, dtype), columns + one
    of_w = projection(min(rank, dim), dim, seed)
    x, w, j = Guarded(values), Guarded(of_w), unfilled(*of_w.shape, dtype=F32)
    before, after, last = (unfilled(rows, dtype=F32) for _ in range(3))
    found = {"after": after.tensor, "last": last.tensor if one else None, "j": j.tensor if learns else None}
    kernels().remove_projection_(x.tensor, w.tensor, before=before.tensor, **found)
    wide, h, exact, error = removed(values, one, of_w)
    assert_norms(before.tensor, wide.float())
    finite = wide.isfinite().all(1)
    assert finite.all() or kind == "mixed"
    if dtype == BF16:
        assert_rounded_once(x.tensor[finite], exact[finite, :columns], error[finite, :columns])
    else:
        assert ((x.tensor - exact[:, :columns]).abs() <= error[:, :columns] + TINY)[finite].all()
    slack = error.norm(dim=1) + (dim + 4) * UNIT * exact.norm(dim=1) + 1e-18
    squared = finite & (exact.norm(dim=1) < 1e18)  # where squares are within float32
    assert ((after.tensor - exact.norm(dim=1)).abs() <= slack)[squared].all()
    assert not after.tensor[~finite].isfinite().any(), "or a training that diverges is not seen"
    if one:
        assert ((last.tensor - exact[:, columns]).abs() <= error[:, columns] + TINY)[finite].all()
        assert not len(of_w) or not last.tensor[~finite].isfinite().any()
    if learns and finite.all() and kind != "mixed":
        of_h = 2**-8 if dtype == BF16 else 0.0
        rounding = (of_h * h.abs() + (dim + 2) * UNIT * (wide.norm(dim=1, keepdim=True))).T @ wide.abs()
        sums = (rows + 2) * UNIT * h.abs().T @ wide.abs()
        assert ((j.tensor - h.T @ wide).abs() <= rounding + sums + TINY).all()
    elif learns and len(of_w) and not finite.all():
        assert not j.tensor.isfinite().all()
    assert w.unchanged and all(one.intact for one in (x, before, after)) and (last.intact if one else last.unchanged)
    assert j.intact if learns else j.unchanged


@SETTINGS
@given(**REMOVED)
def test_remove_projection_as_pytorch_does(rows: int, columns: int, one: bool, rank: int, seed: int) -> None:
    values, dim = noise((rows, columns), "normal", seed), columns + one
    w, found = projection(min(rank, dim), dim, seed), []
    for arithmetic in (BFloat16Kernels(kernels()), BFloat16(torch.device("cpu"))):
        x, (before, after, last) = values.clone(), torch.full((3, rows), float("nan"))
        of_rows = arithmetic.projection(torch.empty(rows, dim), before, after, last if one else None)
        of_rows.take(w)
        of_rows.project(x, w)
        assert of_rows.remove(w) is x
        found.append((x.float(), before, after, last if one else before))
    error = 2 * removed(values, one, w)[3]
    by_kernel, plain = found
    assert ((by_kernel[0] - plain[0]).abs() <= error[:, :columns] + 2**-7 * plain[0].abs() + TINY).all()
    torch.testing.assert_close(by_kernel[1], plain[1], rtol=1e-5, atol=0.0)
    slack = 2**-8 * plain[2] + error.norm(dim=1) + 1e-6
    assert ((by_kernel[2] - plain[2]).abs() <= slack).all() and ((by_kernel[3] - plain[3]).abs() <= slack + 1e-2).all()


@SETTINGS
@given(**REMOVED, dtype=DTYPES, learns=st.booleans())
def test_a_projection_in_two_calls_is_that_in_one(
    rows: int, columns: int, one: bool, rank: int, seed: int, dtype: torch.dtype, learns: bool
) -> None:
    """To the same bits; the first call leaves the rows as they are."""
    values, dim = noise((rows, columns), "normal", seed, dtype), columns + one
    w, results = projection(min(rank, dim), dim, seed), []
    for fused in (True, False):
        x, j, (before, after, last) = (
            Guarded(values),
            unfilled(*w.shape, dtype=F32),
            torch.full((3, rows), float("nan")),
        )
        h = unfilled(rows, len(w), dtype=F32)
        found = {"after": after, "last": last if one else None, "j": j.tensor if learns else None}
        if fused:
            kernels().remove_projection_(x.tensor, w, before=before, **found)
        else:
            kernels().remove_projection_(x.tensor, w, before=before, h=h.tensor)
            assert x.unchanged and h.intact
            kernels().remove_projection_(x.tensor, w, h=h.tensor, **found)
        assert x.intact and (j.intact if learns else j.unchanged)
        results.append([x.tensor, before, after, last if one else before, j.tensor if learns else before])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    wide, in_float64, *_ = removed(values, one, w)
    assert ((h.tensor - in_float64).abs() <= (dim + 4) * UNIT * (wide.abs() @ (1.01 * w.double().abs().T)) + TINY).all()


@SETTINGS
@given(**REMOVED, dtype=DTYPES, more=st.integers(1, 20))
def test_a_row_does_not_depend_on_those_beside_it(
    rows: int, columns: int, one: bool, rank: int, seed: int, dtype: torch.dtype, more: int
) -> None:
    values, dim = noise((rows + more, columns), "normal", seed, dtype), columns + one
    w, results = projection(min(rank, dim), dim, seed), []
    for n in (rows + more, rows):
        x, (before, after, last) = values[:n].clone(), torch.zeros(3, n)
        kernels().remove_projection_(x, w, before=before, after=after, last=last if one else None)
        results.append([part[:rows] for part in (x, before, after, last)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_threads_have_memory_of_their_own() -> None:
    """A call lets other threads run, and those work in memory of their own size."""
    made = torch.Generator().manual_seed(1)
    x, wrong = torch.randn(256, 440, generator=made).bfloat16(), list[int]()

    def work(rank: int) -> None:
        w, (before, after) = projection(rank, 440, rank), torch.zeros(2, 256)
        first = x.clone()
        kernels().remove_projection_(first, w, before=before, after=after)
        for _ in range(400):
            again = x.clone()
            kernels().remove_projection_(again, w, before=before, after=after)
            wrong.append(not torch.equal(again, first))

    threads = [Thread(target=work, args=(rank,)) for rank in (20, 40)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(wrong) == 800 and sum(wrong) == 0


def entropy(activations: Tensor, labels: Tensor) -> tuple[float, int, Tensor]:
    """Loss, number of right ones and derivative by the kernel; nothing else may have been written."""
    x, targets = Guarded(activations), Guarded(labels)
    d, row = unfilled(*activations.shape), unfilled(activations.shape[1], dtype=F32)
    try:
        loss, right = kernels().cross_entropy(x.tensor, targets.tensor, d.tensor, row.tensor)
    finally:
        assert d.intact and row.intact and x.unchanged and targets.unchanged
    return loss, right, d.tensor


@SETTINGS
@given(
    frames=st.integers(0, 12),
    pdfs=SIZES,
    kind=st.sampled_from(["normal", "whole", "wide", "large", "zero", "mixed"]),
    seed=SEEDS,
)
def test_cross_entropy(frames: int, pdfs: int, kind: str, seed: int) -> None:
    """`whole` numbers are often the same: then the first of the largest counts."""
    x = noise((frames, pdfs), "normal" if kind in ("whole", "wide") else kind, seed)
    x = x.round() if kind == "whole" else 30 * x if kind == "wide" else x
    labels = torch.randint(0, pdfs, (frames,), generator=torch.Generator().manual_seed(seed))
    if kind == "whole":
        labels[::2] = x[::2].argmax(1)
    loss, right, derivative = entropy(x, labels)

    wide = x.double()
    largest, logs = wide.amax(1), torch.log_softmax(wide, 1)
    own = logs.gather(1, labels[:, None]).squeeze(1)
    # A row's e^x are off by EXPONENTIAL, one of which is e^0: so is its logarithm. x - largest is rounded to float32.
    off = EXPONENTIAL + 4 * UNIT * (1 + (wide.gather(1, labels[:, None]).squeeze(1) - largest).abs())
    assert loss == pytest.approx(-float(own.sum()), rel=0.0, abs=float(off.nan_to_num(0.0, 0.0).sum()), nan_ok=True)

    p = logs.exp()
    exact = p - torch.nn.functional.one_hot(labels, pdfs)
    assert_rounded_once(derivative, exact, 3 * EXPONENTIAL * p * (1 - p) + 4 * UNIT * p)
    numbers = ~x.isnan().any(1)  # which of the others is the largest is nobody's business
    if numbers.all():
        assert right == int((x.argmax(1) == labels).sum())

    plain = SoftmaxCrossEntropyBFloat16(torch.empty(0), pdfs, max(frames, 1))
    plain_loss, plain_right = plain(x, labels, torch.empty_like(x))
    assert loss == pytest.approx(float(plain_loss), rel=1e-6, abs=2 * EXPONENTIAL * frames, nan_ok=True)
    assert right == int(plain_right) or not numbers.all()


def test_the_first_of_the_largest_is_right() -> None:
    for pdfs in (2, 16, 17, 40):
        x = torch.zeros(pdfs, pdfs, dtype=BF16)
        x[:, 0] = -0.0  # as large as 0
        assert entropy(x, torch.arange(pdfs))[1] == 1
        x[:, pdfs - 2 :] = 3.0
        assert [entropy(x[:1], torch.tensor([label]))[1] for label in range(pdfs)] == [0] * (pdfs - 2) + [1, 0]


@pytest.mark.parametrize("pdfs", [1, 16, 17, 50])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_makes_the_loss_nan_and_spares_the_others(pdfs: int, value: float) -> None:
    labels = torch.arange(3) % pdfs
    x = noise((3, pdfs), "normal", pdfs)
    expected = entropy(x, labels)[2]
    for at in range(pdfs):
        odd = x.clone()
        odd[1, at] = value
        loss, _, derivative = entropy(odd, labels)
        assert np.isnan(loss)
        assert derivative[1].isnan().all()
        assert torch.equal(derivative[::2], expected[::2])


def test_a_label_of_probability_0_has_an_infinite_loss() -> None:
    x = torch.tensor([[0.0, -float("inf"), 1.0]], dtype=BF16)
    loss, right, derivative = entropy(x, torch.tensor([1]))
    assert (loss, right) == (float("inf"), 0)
    assert_rounded_once(derivative, torch.softmax(x.double(), 1) - torch.eye(3)[1:2], 2 * EXPONENTIAL)


@pytest.mark.parametrize("label", [-1, 5, 2**40, -(2**63)])
def test_labels_outside(label: int) -> None:
    with pytest.raises(IndexError, match="of 5 pdfs"):
        entropy(torch.zeros(3, 5, dtype=BF16), torch.tensor([4, label, 0]))


@SETTINGS
@given(
    rows=st.integers(0, 5),
    columns=SIZES,
    kinds=st.tuples(KINDS, KINDS),
    rate=st.sampled_from([0.0, 0.008, 3.0]),
    keep=st.sampled_from([1.0, 0.999, 0.0]),
    seed=SEEDS,
)
def test_sgd_update(rows: int, columns: int, kinds: tuple[str, str], rate: float, keep: float, seed: int) -> None:
    before, gradient = noise((rows, columns), kinds[0], seed, F32), noise((rows, columns), kinds[1], seed + 1)
    parameters, low, g = Guarded(before), unfilled(rows, columns), Guarded(gradient)
    kernels().sgd_update(parameters.tensor, low.tensor, g.tensor, rate, keep)
    rate, keep = (float(torch.tensor(one, dtype=F32)) for one in (rate, keep))
    kept = keep * before.double()
    exact = kept - rate * gradient.double()
    # keep w and the sum are rounded to float32, each once.
    for found in (parameters.tensor, before.clone().mul_(keep).add_(gradient, alpha=-rate)):
        finite = exact.isfinite()
        assert_equal(found[~finite].double(), exact[~finite])
        # The plain path may round rate g by itself.
        allowed = 1.01 * UNIT * (kept.abs() + (exact - kept).abs() + exact.abs()) + 2.0**-149
        assert ((found.double() - exact).abs() <= allowed)[finite].all()
    assert_equal(low.tensor, flushed(parameters.tensor))
    assert parameters.intact and low.intact and g.unchanged


def test_without_l2_nothing_is_rounded_but_the_sum() -> None:
    parameters, gradient = noise((4, 33), "normal", 1, F32), noise((4, 33), "normal", 2)
    exact = parameters.double() - 0.25 * gradient.double()  # of few enough bits for float64
    kernels().sgd_update(parameters, torch.empty_like(gradient), gradient, 0.25)
    assert torch.equal(parameters, exact.float())


def corpus_of(store: Tensor, context: int) -> AcousticDataset:
    spoken = np.array([len(store) - 2 * context])
    return AcousticDataset(
        store, torch.zeros(len(store), dtype=torch.int32), ("u",), ("s",), np.array([context]), spoken, context
    )


@SETTINGS
@given(
    n=st.integers(0, 9),
    dim=st.sampled_from([1, 3, 16, 40]),
    context=st.integers(0, 3),
    shifted=st.booleans(),
    scaled=st.booleans(),
    kind=KINDS,
    seed=SEEDS,
)
def test_gather(n: int, dim: int, context: int, shifted: bool, scaled: bool, kind: str, seed: int) -> None:
    """The same operations as PyTorch's, in the same order, in float32: the same bits."""
    offsets = tuple(range(-context, context + 1))
    columns = dim * len(offsets)
    store = Guarded(noise((2 * context + 11, dim), kind, seed, F32))
    shift = Guarded(noise((columns,), "normal", seed + 1, F32)) if shifted else None
    scale = Guarded(noise((columns,), "normal", seed + 2, F32)) if scaled else None
    rows = Guarded(torch.randint(context, context + 11, (n,), generator=torch.Generator().manual_seed(seed)))
    out = unfilled(n, columns)
    vectors = [None if one is None else one.tensor for one in (shift, scale)]
    kernels().gather_spliced(store.tensor, rows.tensor, offsets[0], *vectors, out.tensor)
    transform = InputTransform(offsets, dim, *vectors)
    plain = gather(corpus_of(store.tensor, context), transform, rows.tensor, torch.empty(n, columns))
    assert_equal(out.tensor, flushed(plain))
    assert out.intact and all(one is None or one.unchanged for one in (store, rows, shift, scale))


@pytest.mark.parametrize(("row", "first"), [(1, -2), (8, 0), (2**62, 0), (-1, 0), (9, -1), (-(2**63), 0)])
def test_rows_outside(row: int, first: int) -> None:
    """10 frames of dim 4, splices of 3: the last begins at frame 7."""
    store, out = torch.zeros(10, 4), unfilled(2, 12)
    kernels().gather_spliced(store, torch.tensor([7 - first, -first]), first, None, None, out.tensor)
    assert not out.tensor.any()
    with pytest.raises(IndexError, match="reach beyond"):
        kernels().gather_spliced(store, torch.tensor([2, row]), first, None, None, out.tensor)
    assert out.intact
    with pytest.raises(IndexError, match="reach beyond"):
        kernels().gather_spliced(store[:2], torch.tensor([0]), 0, None, None, torch.empty(1, 12, dtype=BF16))


def test_gather_takes_the_kernel_where_it_can() -> None:
    """Of stores in float32, without gaps between the offsets; else the plain path gives the same."""

    class Counting:
        calls = 0

        def gather_spliced(self, *given: Any) -> None:
            self.calls += 1
            kernels().gather_spliced(*given)

    counting = Counting()
    arithmetic = BFloat16Kernels(counting)  # type: ignore[arg-type]
    rows = torch.tensor([5, 2, 7])
    for dtype, offsets, calls in ((F32, (-2, -1, 0), 1), (F32, (-2, 0), 1), (torch.float16, (-2, -1, 0), 1)):
        corpus = corpus_of(noise((10, 4), "normal", 1, F32).to(dtype), context=2)
        columns = 4 * len(offsets)
        transform = InputTransform(offsets, 4, torch.full((columns,), 0.3), torch.full((columns,), 1.7))
        low = gather(corpus, transform, rows, torch.empty(3, columns, dtype=BF16), arithmetic.gather_kernel)
        assert torch.equal(low, gather(corpus, transform, rows, torch.empty(3, columns)).bfloat16())
        assert counting.calls == calls
    with pytest.raises(ValueError, match="the dataset has 4 dims with context 2, the transform needs 4 with 3"):
        gather(corpus, InputTransform((-3,), 4), rows, torch.empty(3, 4, dtype=BF16), arithmetic.gather_kernel)


def low(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=BF16)


def remove(k: Kernels, **wrong: Tensor | None) -> None:
    """The call is right but for what is given."""
    zeros = {"x": low(3, 4), "w": torch.zeros(2, 5), **{name: torch.zeros(3) for name in ("before", "after", "last")}}
    k.remove_projection_(**{**zeros, "j": torch.zeros(2, 5), **wrong})


ROWS = torch.zeros(3, dtype=torch.int64)
WRONG: dict[str, tuple[type[Exception], Callable[[Kernels], object]]] = {
    "sigmoid of float32": (TypeError, lambda k: k.sigmoid_(torch.zeros(3, 2), torch.zeros(2))),
    "sigmoid of columns": (TypeError, lambda k: k.sigmoid_(low(3, 4)[:, :2], torch.zeros(2))),
    "sigmoid of no memory": (TypeError, lambda k: k.sigmoid_(low(3, 2).to("meta"), torch.zeros(2))),
    "sigmoid with a bias in bf16": (TypeError, lambda k: k.sigmoid_(low(3, 2), low(2))),
    "sigmoid with a short bias": (ValueError, lambda k: k.sigmoid_(low(3, 2), torch.zeros(1))),
    "sigmoid of three dimensions": (ValueError, lambda k: k.sigmoid_(low(3, 2, 4), torch.zeros(2, 4))),
    "sigmoid of a vector": (ValueError, lambda k: k.sigmoid_(low(3), torch.zeros(()))),
    "sigmoid backward of float16": (TypeError, lambda k: k.sigmoid_backward_(low(3), low(3).half())),
    "sigmoid backward of a transpose": (TypeError, lambda k: k.sigmoid_backward_(low(3, 2), low(2, 3).t())),
    "sigmoid backward of less": (ValueError, lambda k: k.sigmoid_backward_(low(3), low(2))),
    "sum of float32": (TypeError, lambda k: k.column_sums(torch.zeros(3, 2), low(2))),
    "sum into float32": (TypeError, lambda k: k.column_sums(low(3, 2), torch.zeros(2))),
    "sum of columns": (TypeError, lambda k: k.column_sums(low(3, 4)[:, :2], low(2))),
    "sum into less": (ValueError, lambda k: k.column_sums(low(3, 2), low(1))),
    "sum of a vector": (ValueError, lambda k: k.column_sums(low(3), low())),
    "sum of three dimensions": (ValueError, lambda k: k.column_sums(low(3, 2, 4), low(2, 4))),
    "sum with weights in bf16": (TypeError, lambda k: k.column_sums(low(3, 2), low(2), low(3))),
    "sum with few weights": (ValueError, lambda k: k.column_sums(low(3, 2), low(2), torch.zeros(2))),
    "widen float32": (
        TypeError,
        lambda k: k.bf16_to_float32_rows(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3)),
    ),
    "widen into bf16": (TypeError, lambda k: k.bf16_to_float32_rows(low(3, 2), low(3, 2), torch.zeros(3))),
    "widen into a transpose": (
        TypeError,
        lambda k: k.bf16_to_float32_rows(low(3, 2), torch.zeros(2, 3).t(), torch.zeros(3)),
    ),
    "widen with norms in bf16": (TypeError, lambda k: k.bf16_to_float32_rows(low(3, 2), torch.zeros(3, 2), low(3))),
    "widen into less": (ValueError, lambda k: k.bf16_to_float32_rows(low(3, 2), torch.zeros(3, 1), torch.zeros(3))),
    "widen into two more": (ValueError, lambda k: k.bf16_to_float32_rows(low(3, 2), torch.zeros(3, 4), torch.zeros(3))),
    "widen into fewer rows": (
        ValueError,
        lambda k: k.bf16_to_float32_rows(low(3, 2), torch.zeros(2, 2), torch.zeros(3)),
    ),
    "widen with few norms": (
        ValueError,
        lambda k: k.bf16_to_float32_rows(low(3, 2), torch.zeros(3, 2), torch.zeros(2)),
    ),
    "widen three dimensions": (
        ValueError,
        lambda k: k.bf16_to_float32_rows(low(3, 2, 4), torch.zeros(3, 2), torch.zeros(3)),
    ),
    "remove an H of fewer rows": (ValueError, lambda k: remove(k, before=None, h=torch.zeros(2, 2))),
    "remove no H": (ValueError, lambda k: remove(k, before=None)),
    "project to nowhere": (ValueError, lambda k: remove(k, after=None)),
    "remove from float64": (TypeError, lambda k: remove(k, x=torch.zeros(3, 4).double())),
    "remove from columns in float32": (TypeError, lambda k: remove(k, x=torch.zeros(3, 5)[:, :4])),
    "remove from columns": (TypeError, lambda k: remove(k, x=low(3, 5)[:, :4])),
    "remove from three dimensions": (ValueError, lambda k: remove(k, x=low(3, 4, 1))),
    "remove with W in bf16": (TypeError, lambda k: remove(k, w=low(2, 5))),
    "remove with W without the ones": (ValueError, lambda k: remove(k, w=torch.zeros(2, 4))),
    "remove with ones in W alone": (ValueError, lambda k: remove(k, last=None)),
    "remove with few norms": (ValueError, lambda k: remove(k, before=torch.zeros(2))),
    "remove with few norms afterwards": (ValueError, lambda k: remove(k, after=torch.zeros(2))),
    "remove with few last": (ValueError, lambda k: remove(k, last=torch.zeros(2))),
    "remove with last in bf16": (TypeError, lambda k: remove(k, last=low(3))),
    "remove into a j of fewer rows": (ValueError, lambda k: remove(k, j=torch.zeros(1, 5))),
    "remove into a transpose": (TypeError, lambda k: remove(k, j=torch.zeros(5, 2).t())),
    "narrow bf16": (TypeError, lambda k: k.float32_to_bf16_rows(low(3, 2), low(3, 2), torch.zeros(3))),
    "narrow a transpose": (
        TypeError,
        lambda k: k.float32_to_bf16_rows(torch.zeros(2, 3).t(), low(3, 2), torch.zeros(3)),
    ),
    "narrow into float32": (
        TypeError,
        lambda k: k.float32_to_bf16_rows(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3)),
    ),
    "narrow into columns": (
        TypeError,
        lambda k: k.float32_to_bf16_rows(torch.zeros(3, 2), low(3, 4)[:, :2], torch.zeros(3)),
    ),
    "narrow without the last": (
        ValueError,
        lambda k: k.float32_to_bf16_rows(torch.zeros(3, 3), low(3, 2), torch.zeros(3)),
    ),
    "narrow with no last": (
        ValueError,
        lambda k: k.float32_to_bf16_rows(torch.zeros(3, 2), low(3, 2), torch.zeros(3), torch.zeros(3)),
    ),
    "narrow with few last": (
        ValueError,
        lambda k: k.float32_to_bf16_rows(torch.zeros(3, 3), low(3, 2), torch.zeros(3), torch.zeros(2)),
    ),
    "narrow with few norms": (
        ValueError,
        lambda k: k.float32_to_bf16_rows(torch.zeros(3, 2), low(3, 2), torch.zeros(2)),
    ),
    "narrow three dimensions": (
        ValueError,
        lambda k: k.float32_to_bf16_rows(torch.zeros(3, 2), low(3, 2, 4), torch.zeros(3)),
    ),
    "entropy of float32": (TypeError, lambda k: k.cross_entropy(torch.zeros(3, 2), ROWS, low(3, 2), torch.zeros(2))),
    "entropy into columns": (
        TypeError,
        lambda k: k.cross_entropy(low(3, 2), ROWS, low(3, 4)[:, :2], torch.zeros(2)),
    ),
    "entropy of short labels": (
        TypeError,
        lambda k: k.cross_entropy(low(3, 2), ROWS.int(), low(3, 2), torch.zeros(2)),
    ),
    "entropy of few labels": (
        ValueError,
        lambda k: k.cross_entropy(low(3, 2), ROWS[:2], low(3, 2), torch.zeros(2)),
    ),
    "entropy into less": (ValueError, lambda k: k.cross_entropy(low(3, 2), ROWS, low(2, 2), torch.zeros(2))),
    "entropy with a short row": (ValueError, lambda k: k.cross_entropy(low(3, 2), ROWS, low(3, 2), torch.zeros(1))),
    "entropy with a row in bf16": (TypeError, lambda k: k.cross_entropy(low(3, 2), ROWS, low(3, 2), low(2))),
    "entropy of a vector": (ValueError, lambda k: k.cross_entropy(low(3), ROWS, low(3), torch.zeros(3))),
    "sgd_update in float64": (TypeError, lambda k: k.sgd_update(torch.zeros(3).double(), low(3), low(3), 0.1)),
    "sgd_update along float32": (TypeError, lambda k: k.sgd_update(torch.zeros(3), low(3), torch.zeros(3), 0.1)),
    "sgd_update of columns": (TypeError, lambda k: k.sgd_update(torch.zeros(3, 4)[:, 0], low(3), low(3), 0.1)),
    "sgd_update into less": (ValueError, lambda k: k.sgd_update(torch.zeros(3), low(2), low(3), 0.1)),
    "sgd_update along less": (ValueError, lambda k: k.sgd_update(torch.zeros(3), low(3), low(2), 0.1)),
    "gather of float64": (
        TypeError,
        lambda k: k.gather_spliced(torch.zeros(5, 2).double(), ROWS, 0, None, None, low(3, 4)),
    ),
    "gather into float32": (
        TypeError,
        lambda k: k.gather_spliced(torch.zeros(5, 2), ROWS, 0, None, None, torch.zeros(3, 4)),
    ),
    "gather at short rows": (
        TypeError,
        lambda k: k.gather_spliced(torch.zeros(5, 2), ROWS.int(), 0, None, None, low(3, 4)),
    ),
    "gather with a shift in bf16": (
        TypeError,
        lambda k: k.gather_spliced(torch.zeros(5, 2), ROWS, 0, low(4), None, low(3, 4)),
    ),
    "gather at few rows": (
        ValueError,
        lambda k: k.gather_spliced(torch.zeros(5, 2), ROWS[:2], 0, None, None, low(3, 4)),
    ),
    "gather with a short scale": (
        ValueError,
        lambda k: k.gather_spliced(torch.zeros(5, 2), ROWS, 0, None, torch.zeros(3), low(3, 4)),
    ),
    "gather of parts of frames": (
        ValueError,
        lambda k: k.gather_spliced(torch.zeros(5, 2), ROWS, 0, None, None, low(3, 3)),
    ),
    "gather of no dims": (ValueError, lambda k: k.gather_spliced(torch.zeros(5, 0), ROWS, 0, None, None, low(3, 0))),
    "gather of a vector": (ValueError, lambda k: k.gather_spliced(torch.zeros(5), ROWS, 0, None, None, low(3, 1))),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_a_kernel_does_not_take_it_refuses(message: str) -> None:
    error, call = WRONG[message]
    with pytest.raises(error):
        call(kernels())
