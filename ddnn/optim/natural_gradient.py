"""Online natural gradient (NG-SGD): the rows of a minibatch times an inverse Fisher matrix kept up to date as we go.

Povey, Zhang and Khudanpur, "Parallel training of DNNs with natural gradient and parameter averaging", 2014 (arXiv
1410.7455), as in Kaldi's `src/nnet3/natural-gradient-online.{h,cc}`, whose symbols are kept:

    N         rows of the minibatch (frames)            D         dimension of a row          r < D     rank
    X         N x D, rows to precondition: a layer's input with 1 appended, or its output derivative
    F         D x D = R^T diag(d) R + rho I             the estimate of the Fisher matrix, a smoothed scatter X^T X / N
    R, d, rho r x D with orthonormal rows; r; scalar    top eigenvectors of F, their eigenvalues above rho, and the rest
    alpha     F is smoothed: G = F + alpha/D tr(F) I = R^T diag(d) R + beta I,  beta = rho (1 + alpha) + alpha/D sum(d)
    eta       = min(1 - exp(-N / num_samples_history), 0.9), the share of the newest minibatch in F

**Applying it.** By Woodbury's identity  G^-1 = 1/beta (I - R^T E R),  e_i = 1 / (beta/d_i + 1).  With W = E^(1/2) R
kept in place of R, and the scale 1/beta dropped since gamma cancels it:

    H = X W^T (N x r),    X^ = X - H W,    gamma = sqrt(tr(X X^T) / tr(X^ X^^T)), 1 for an all-zero X

gamma X^ has the Frobenius norm of X.

**Updating F.** One step of the power method on T = eta X^T X / N + (1-eta) F:

    Y = R T = E^-.5 (J + (1-eta) (diag(d) + rho I) W),     J = (eta/N) H^T X   (r x D; Kaldi's J times eta/N)
    Z = Y Y^T = E^-.5 K E^-.5 + (1-eta) [E^-.5 L E^-.5 (diag(d) + rho I) + its transpose] + (1-eta)^2 (diag(d)+rho I)^2
        K = J J^T,  L = J W^T = (eta/N) H^T H   (r x r)
    Z = U C U^T  (eigenvalues descending; sqrt(C) estimates the top eigenvalues of T)
    R' = C^-.5 U^T Y,   d' = sqrt(C) - rho',   rho' such that tr(F') = tr(T):
    rho' = [eta/N tr(X X^T) + (1-eta) (D rho + sum(d)) - tr(sqrt(C))] / (D - r)
    W' = E'^.5 R' = A (J + (1-eta) (diag(d) + rho I) W),   A = E'^.5 C^-.5 U^T E^-.5

**Floors.** C at (rho (1-eta))^2, which it cannot be below but for roundoff; rho' and d' at max(1e-10, delta max
sqrt(C)). R is orthonormalized again if C was floored or cond(C) > 1e6, and max|R R^T - I| > 1e-3: R <- Chol(R R^T)^-1
R, or by Gram-Schmidt if that fails or the inverse factor holds an element of 100 or more.

**Start.** Row k of R has equal entries in columns k, k+r, ... (the first 1.1 times the others); rho = d = 1e-10, so
that e = 1 / (2 + (D+r) alpha/D); then 3 updates on the first minibatch, 1 if N <= r. An update follows the calls t =
0..10, and then those where t - 10 is a multiple of `update_period`; with `updates_rarely`, which Kaldi has not, from t =
1000 on of 4 `update_period`. A rank of D or more becomes D - 1; D = 1 needs no preconditioning.

**What is computed where.** X, H, J, K, L and W live on the device, in float32, except X and H where an arithmetic
rounds them (`ddnn.nn.arithmetic.Projection`). Z, C, U, d and rho are float64 on the
host. An update takes effect at the next call, so it is cut in three: the call that updates queues J, K, L and their
copy to pinned host memory and returns; before the next one `factor` does the r x r eigendecomposition on the host, and
`apply` queues W'. The numbers are those of an update on the spot. On a GPU the host and a stream beside that of the
training do both while the derivatives of the next minibatch are computed (`NgSgd.finish_updates`). What a minibatch
queues then depends on the host only in whether an update begins, so that a CUDA graph may hold it: `replayed` is the host's
part of such a minibatch. The orthonormality check, when C was floored or badly conditioned, waits for `apply` (it needs
W' W'^T); the 3 updates of the first minibatch wait for everything before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.nn.arithmetic import Projection
from ddnn.util.errors import DataError, UserError

_EPSILON = 1e-10  # floor of rho and d, and where they start
_INITIAL_UPDATES = 10  # updates made before any is skipped
SETTLED = 1000  # minibatches from which on `updates_rarely` has an effect
_RARELY = 4  # it multiplies `update_period` by this
_CONDITION = 1e6  # cond(C) above which the orthonormality of R is checked
_ORTHONORMAL = 1e-3  # largest |R R^T - I| left alone
_INVERSE_FACTOR = 100.0  # largest element of the inverse Cholesky factor that is trusted
_TINY = 1e-38  # makes 0 / 0 a 1, and is lost in any other norm

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class NaturalGradientOptions:
    """Options of one preconditioner."""

    rank: int  # r, the eigenvectors kept (20 for inputs, 80 for output derivatives; the paper's code 30 and 60)
    alpha: float = 4.0  # smoothing of the Fisher matrix with the identity
    num_samples_history: float = 2000.0  # time constant of the Fisher matrix, in rows
    update_period: int = 4  # minibatches per update, once the first 10 have been made
    delta: float = 5e-4  # floor of rho and d relative to the largest sqrt(C); at most 1e-2

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("rank", self.rank >= 1, "1 or more"),
            ("alpha", 0 <= self.alpha < math.inf, "0 or more"),
            ("num_samples_history", 0 < self.num_samples_history < math.inf, "over 0 and finite"),
            ("update_period", self.update_period >= 1, "1 or more minibatches"),
            ("delta", 0 < self.delta <= 1e-2, "over 0 and at most 0.01"),
        ):
            if not good:
                raise UserError(f"natural gradient: {name} is {getattr(self, name)}, expected {expected}")


class FisherUpdate(NamedTuple):
    """d and rho after an update, e of them, and whether R may be skewed by rounding: C was floored or badly conditioned."""

    d: Vector
    rho: float
    e: Vector
    may_be_skewed: bool


class NaturalGradient:
    """The preconditioner of one side of one layer; see the module for the mathematics.

    Args:
        dim: D, columns of every minibatch.
        options: rank and the rest.
        device: where the minibatches live.
        dtype: of all that lives there.
        columns: those of a minibatch that this worker has, of all `dim`.

    Every tensor and view that a minibatch needs is made once: at these sizes making a view costs as much as filling it.
    """

    def __init__(
        self,
        dim: int,
        options: NaturalGradientOptions,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        columns: slice = slice(None),
    ) -> None:
        self.dim, self.options, self.device, self.columns = dim, options, torch.device(device), columns
        self.rank = r = min(options.rank, dim - 1)
        self.t = 0
        self.updates_rarely = False
        self.rho = _EPSILON
        self.d: Vector = np.full(r, _EPSILON)
        e = 1.0 / (2.0 + (dim + r) * options.alpha / dim)
        self.w = (_first_r(r, dim) * math.sqrt(e))[:, columns].to(self.device, dtype).contiguous()
        self._w_t = self.w.T
        self.w_changes = 0  # how often W was given other values
        self.j = torch.empty_like(self.w)
        self._j_t = self.j.T
        # K, L and |X|_F travel to the host in one copy; A and the coefficients of W come back in another. On the CPU
        # the host's side is the same memory, and nothing is copied.
        on_gpu = self.device.type == "cuda"
        self._stats = torch.empty(2 * r * r + 1, dtype=dtype, device=self.device)
        self._stats_host = torch.empty(2 * r * r + 1, pin_memory=True) if on_gpu else self._stats
        self._k, self._l, self._norm = _split(self._stats, (r, r), (r, r), ())
        self._k_host, self._l_host, self._norm_host = (v.numpy() for v in _split(self._stats_host, (r, r), (r, r), ()))
        self._back = torch.empty(r * r + r, dtype=dtype, device=self.device)
        self._back_host = torch.empty(r * r + r, pin_memory=True) if on_gpu else self._back
        self._a, self._retained = _split(self._back, (r, r), (r, 1))
        self._a_host, self._retained_host = (v.numpy() for v in _split(self._back_host, (r, r), (r, 1)))
        self._pending_n = 0  # rows of the minibatch whose K and L are on their way to the host, 0 if none are
        self._update: FisherUpdate | None = None  # that `factor` has made, to be applied

    def initial_updates(self, n: int) -> int:
        """How many updates a minibatch of n rows makes before it is preconditioned: the first ever 3, or 1 if n <= r."""
        if self.rank == 0 or n == 0 or self.t:
            return 0
        return 1 if n <= self.rank else 3

    def begin_minibatch(self, n: int) -> bool:
        """Makes `w` that of the next minibatch, of n rows, and counts it. Returns whether the Fisher matrix is to be
        updated from it: by `update_from_rows` or `update_from_j`, before the next one begins."""
        self.finish_update()
        if self.rank == 0 or n == 0:  # D = 1: X^ is X; no rows: nothing to learn from
            return False
        self.t += 1
        return self.updates_at(self.t - 1)

    def update_from_rows(self, x: Tensor, h: Tensor, row_norms: Tensor) -> None:
        """Starts an update of the Fisher matrix: queues J, K and L from X (N, D), H and the norms of the rows of X, all
        float32, and their copy to the host. Waits for nothing. A NaN or infinity in X leaves the Fisher matrix as it was."""
        n = x.shape[0]
        scale = self._eta(n) / n
        # The factor goes in here, not later: without it K, a fourth power of the data, may overflow float32.
        torch.addmm(self.j, h.t(), x, beta=0.0, alpha=scale, out=self.j)
        if n > self.dim:
            torch.mm(self.j, self._w_t, out=self._l)
        else:
            torch.addmm(self._l, h.t(), h, beta=0.0, alpha=scale, out=self._l)
        self._send_statistics(row_norms)

    def update_from_j(self, row_norms: Tensor) -> None:
        """The same, `j` (r, D) being H^T X. L is J W^T, so that Z fits R and J however H was rounded."""
        n = row_norms.shape[0]
        self.j.mul_(self._eta(n) / n)
        torch.mm(self.j, self._w_t, out=self._l)
        self._send_statistics(row_norms)

    def updates_at(self, t: int) -> bool:
        """Whether the minibatch number `t`, from 0, starts an update of the Fisher matrix."""
        since = t - _INITIAL_UPDATES
        return since <= 0 or since % self.period_at(t) == 0

    def period_at(self, t: int) -> int:
        """Minibatches per update, around the minibatch number `t`, over 10."""
        return self.options.update_period * (_RARELY if self.updates_rarely and t >= SETTLED else 1)

    def count_from(self, t: int) -> None:
        """The next minibatch is number `t`; an update that is under way is finished first."""
        self.finish_update()
        self.t = t

    def state_dict(self) -> dict[str, Tensor]:
        """The state as copies on the host: `w` (r, D) float32, `d` (r,) float64, `rho` float64, `t` int64."""
        self.finish_update()
        return {name: value.to("cpu", copy=True) for name, value in self._state().items()}

    def _state(self) -> dict[str, Tensor]:
        numbers = torch.tensor(self.rho, dtype=torch.float64), torch.tensor(self.t, dtype=torch.int64)
        return {"w": self.w, "d": torch.from_numpy(self.d), "rho": numbers[0], "t": numbers[1]}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes up a state from `state_dict`, to the same bits. DataError: it does not fit; nothing is changed then."""
        wanted = self._state()
        hint = "resume with the ranks and layer sizes of the run that wrote the checkpoint, or from another checkpoint"
        if set(state) != set(wanted):
            raise DataError(f"natural gradient state holds {sorted(state)}, expected {sorted(wanted)}", hint=hint)
        for name, value in state.items():
            found, expected = (f"{tuple(one.shape)} of {one.dtype}" for one in (value, wanted[name]))
            if found != expected:
                raise DataError(f"natural gradient state: {name} is {found}, expected {expected}", hint=hint)
            positive = name == "w" or bool((value >= (0 if name == "t" else _EPSILON)).all())
            if not (positive and bool(torch.isfinite(value).all())):
                raise DataError(f"natural gradient state: {name} has values outside its range", hint=hint)
        self.w.copy_(state["w"][:, self.columns])
        self.w_changes += 1
        self.d = state["d"].cpu().numpy().copy()
        self.rho, self.t, self._pending_n, self._update = float(state["rho"]), int(state["t"]), 0, None

    def _eta(self, n: int) -> float:
        return min(1.0 - math.exp(-n / self.options.num_samples_history), 0.9)

    def _send_statistics(self, row_norms: Tensor) -> None:
        """Queues K, and the copy of K, L and |X|_F to the host."""
        torch.mm(self.j, self._j_t, out=self._k)
        torch.linalg.vector_norm(row_norms, out=self._norm)
        self._send_to_host()
        self._pending_n = row_norms.shape[0]

    def _send_to_host(self) -> None:
        if self._stats_host is not self._stats:
            self._stats_host.copy_(self._stats, non_blocking=True)

    def finish_update(self) -> None:
        """Brings W, d and rho up to date with the last minibatch, if that is still to be done; `begin_minibatch` and
        `state_dict` call it themselves. Waits for the device."""
        if self.pending and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.factor()
        self.apply()

    @property
    def pending(self) -> bool:
        """Whether an update has begun that is to be finished."""
        return self._pending_n > 0

    def factor(self) -> None:
        """The host's part of an update, once K and L are there; in any thread."""
        n, self._pending_n = self._pending_n, 0
        self._update = self._factor(n) if n else None

    def apply(self) -> None:
        """The device's part of an update after `factor`, in the current stream."""
        update, self._update = self._update, None
        if update is not None:
            self._apply_factor(update)

    def replayed(self, n: int) -> None:
        """The host's part of a minibatch of n rows whose work on the device a CUDA graph has done."""
        self.t += 1
        if self.updates_at(self.t - 1):
            self._pending_n = n

    def host_state(self) -> tuple[int, int]:
        """What a minibatch changes on the host, for `set_host_state`: capturing a CUDA graph changes nothing else."""
        return self.t, self._pending_n

    def set_host_state(self, state: tuple[int, int]) -> None:
        self.t, self._pending_n = state

    def _factor(self, n: int) -> FisherUpdate | None:
        """The r x r part of an update from a minibatch of n rows, by the host; None where the minibatch holds NaN or
        infinity: gamma and X^ show it, the Fisher matrix stays clean. A and the factors of W go to the pinned memory."""
        r, dim, eta, d, rho = self.rank, self.dim, self._eta(n), self.d, self.rho
        norm = float(self._norm_host)
        e_inv = 1.0 / np.sqrt(_e(d, rho, self.options.alpha, dim))
        retained = (1.0 - eta) * (d + rho)
        half = self._l_host * retained  # float64 from here on
        z = self._k_host + half
        z += half.T
        z *= e_inv
        z *= e_inv[:, None]
        diagonal = z.reshape(-1)[:: r + 1]
        diagonal += retained * retained
        trace = float(diagonal.sum())
        if not (math.isfinite(trace) and math.isfinite(norm)):
            return None
        z_scale = max(1.0, trace)
        z /= z_scale
        c, u = _eigh(z)
        c *= z_scale
        floor = (rho * (1.0 - eta)) ** 2
        largest, smallest = float(c[0]), float(c[-1])
        sqrt_c = np.sqrt(np.maximum(c, floor))
        trace_t = eta / n * norm**2 + (1.0 - eta) * (dim * rho + float(d.sum()))
        rho = (trace_t - float(sqrt_c.sum())) / (dim - r)
        low = max(_EPSILON, self.options.delta * float(sqrt_c[0]))
        d = np.maximum(sqrt_c - rho, low)  # with rho before its own floor, as Kaldi
        rho = max(rho, low)
        e = _e(d, rho, self.options.alpha, dim)
        np.multiply(u.T * e_inv, (np.sqrt(e) / sqrt_c)[:, None], out=self._a_host, casting="same_kind")
        self._retained_host[:, 0] = retained
        return FisherUpdate(d, rho, e, largest > _CONDITION * smallest or smallest < floor)

    def _apply_factor(self, update: FisherUpdate) -> None:
        """W, d and rho <- those after an update, by `j` and what `_factor` has left in the pinned memory."""
        if self._back_host is not self._back:
            self._back.copy_(self._back_host, non_blocking=True)
        self.j.addcmul_(self._retained, self.w)
        torch.mm(self._a, self.j, out=self.w)
        if update.may_be_skewed:
            self._orthonormalize(update.e)
        self.d, self.rho = update.d, update.rho
        self.w_changes += 1

    def _orthonormalize(self, e: Vector) -> None:
        orthonormalize(self.w, e)


class Side:
    """One side of a layer on its way through the minibatches: a preconditioner, and the rows that it makes X^.

    Workers that share the columns sum `rows.h` between `project` and `remove`. `gammas` makes gamma of `rows.before` and
    `rows.after`. A NaN or infinity in X makes gamma NaN."""

    def __init__(self, preconditioner: NaturalGradient, rows: Projection) -> None:
        self.preconditioner, self.rows = preconditioner, rows
        self._updates = False
        self._taken = -1

    def precondition(self, x: Tensor) -> Tensor:
        """X^, as `Projection.remove` gives it, of x as `Projection.project` wants it, which may be overwritten."""
        self.project(x)
        return self.remove()

    def project(self, x: Tensor) -> None:
        """Begins a minibatch, and makes H in `rows`."""
        ng, n = self.preconditioner, len(x)
        for _ in range(ng.initial_updates(n)):
            ng.update_from_rows(*self.rows.load(x, ng.w), self.rows.before)
            ng.finish_update()
        self._updates = ng.begin_minibatch(n)
        self.take_w()
        self.rows.project(x, ng.w)

    def take_w(self) -> None:
        """Gives `rows` the W of the next minibatch, where it has changed."""
        if self._taken != self.preconditioner.w_changes:
            self.rows.take(self.preconditioner.w)
            self._taken = self.preconditioner.w_changes

    def remove(self) -> Tensor:
        """X^, and an update of the Fisher matrix where it is due."""
        ng, rows = self.preconditioner, self.rows
        if not self._updates:
            return rows.remove(ng.w)
        if not rows.gives_j:
            ng.update_from_rows(*rows.rows_and_h(ng.w), rows.before)
            return rows.remove(ng.w)
        removed = rows.remove(ng.w, ng.j)
        ng.update_from_j(rows.before)
        return removed


def gammas(before: Tensor, after: Tensor) -> Tensor:
    """gamma = |X|_F / |X^|_F, by which X^ gets the norm of X, (...); 1 where X is zero. Waits for no device. `before`,
    `after`: (..., N) norms of the rows of X and X^; several preconditioners at once where there are leading dimensions.
    """
    norm: Tensor = torch.linalg.vector_norm(before, dim=-1).add_(_TINY)
    return norm.div_(torch.linalg.vector_norm(after, dim=-1).add_(_TINY))


def max_change_factor(
    in_norms: Tensor, out_norms: Tensor, gamma: Tensor, rate: float | Tensor, max_change: float
) -> Tensor:
    """kappa, by which a layer's step is shortened so that it changes no more than `max_change` per frame.

    kappa = min(1, max_change N / (rate gamma sum_i |x^_i| |y^_i|)), as `GetScalingFactor` of Kaldi's
    `src/nnet2/nnet-component.cc`. The rate multiplies the *sum* of the gradients over the minibatch.

    Args:
        in_norms, out_norms: (..., N) |x^_i|, |y^_i|; several layers at once where there are leading dimensions.
        gamma: (...), gamma_in * gamma_out.
        rate: learning rate, or (...) those of the layers; 1 limits the step at a rate of 1, so that the step at any rate is limited to rate *
            max_change per frame (the code of arXiv 1507.01239).
        max_change: per frame; over 0 (nnet2: 0.075).

    Returns:
        kappa (...), without waiting for the device. 1 for a step of 0; NaN for a step that is NaN.
    """
    step = (in_norms * out_norms).sum(dim=-1) * gamma * rate
    return (max_change * in_norms.shape[-1] / step).clamp(max=1.0)


def _first_r(rank: int, dim: int) -> Tensor:
    """The R to start from, (r, D) float64: Kaldi's `InitOrthonormalSpecial`."""
    columns = torch.arange(dim)
    r = torch.zeros(rank, dim, dtype=torch.float64)
    if rank:
        r[columns % rank, columns] = 1.0
        r.fill_diagonal_(1.1)
    return torch.nn.functional.normalize(r, dim=1)


def _split(flat: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Views of these shapes, one after the other."""
    parts = torch.split_with_sizes(flat, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _e(d: Vector, rho: float, alpha: float, dim: int) -> Vector:
    """e (r,) = 1 / (beta/d + 1) = d / (d + beta)."""
    return d / (d + (rho * (1.0 + alpha) + alpha * float(d.sum()) / dim))


def _eigh(z: Matrix) -> tuple[Vector, Matrix]:
    """Eigenvalues of a symmetric (r, r) matrix, descending, and its eigenvectors as columns."""
    c, u = torch.linalg.eigh(torch.from_numpy(z))  # by torch, so that torch's number of threads holds
    return c.numpy()[::-1].copy(), u.numpy()[:, ::-1]


def orthonormalize(w: Tensor, e: Vector) -> None:
    """Makes the rows of R = E^-.5 W orthonormal again, in place, if they are off by over 1e-3: Kaldi's
    `OnlineNaturalGradient::ReorthogonalizeRt1`. Waits for the device."""
    sqrt_e = torch.from_numpy(np.sqrt(e))
    scale = torch.outer(sqrt_e, sqrt_e)
    eye = torch.eye(len(e), dtype=torch.float64)
    # Float32 does to see that nothing is to be done.
    if float((torch.mm(w, w.T).cpu() / scale - eye).abs().max()) <= _ORTHONORMAL:
        return
    wide = w.double()  # an inverse factor of 100 would raise the roundoff of float32 to 1e-3
    o = torch.mm(wide, wide.T).cpu() / scale
    factor, failed = torch.linalg.cholesky_ex(o)
    if not int(failed):
        inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
        if float(inverse.max()) < _INVERSE_FACTOR:
            inverse *= sqrt_e.unsqueeze(1) / sqrt_e
            w.copy_(torch.mm(inverse.to(w.device), wide))
            return
    r = wide.cpu()
    _gram_schmidt(r)
    w.copy_(r * sqrt_e.unsqueeze(1))


def _gram_schmidt(r: Tensor) -> None:
    """Makes the rows of r (float64, host, no more rows than columns) orthonormal in place: Kaldi's `OrthogonalizeRows`.
    A row of which less than a tenth is left is projected once more; one that vanishes becomes a random one, of a
    generator of its own: the same input gives the same bits."""
    generator = torch.Generator().manual_seed(0)
    for i, row in enumerate(r):
        while True:
            before = float(row @ row)
            if math.isfinite(before) and before > 0.0:
                row -= (r[:i] @ row) @ r[:i]
                after = float(row @ row)
                if after > 0.01 * before:
                    row /= math.sqrt(after)
                    break
                if after > 0.0:
                    continue
            row.normal_(generator=generator)
