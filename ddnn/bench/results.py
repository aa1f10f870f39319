"""What `ddnn bench` found, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ddnn.model.network import Precision


@dataclass(frozen=True)
class StepBench:
    """What one network reached.

    Attributes:
        frames_per_second: of the training step, median over the rounds.
        spread: smallest and largest of the rounds.
        gflops: floating-point operations of its matrix products per second of the whole step, in 10^9.
        gemm_gflops: the same operations per second of the matrix products alone, in the same precision: the limit.
        share_of_limit: median over the rounds of the one over the other, 0 to 1.
        time_over_sgd: time of a minibatch over that of plain SGD in the same round and precision, median.
        over_float32: frames/s over those in float32 in the same round, median; None where float32 was not measured.
        shares: where the time goes, medians of the parts' shares in the step's time. `gemm`: matrix products;
            `element_wise`: what forward pass, loss, backward pass and gradient take beyond them, casts too; `update`:
            of the parameters; `ng`: what NG-SGD's step takes beyond SGD's; `data`: order, splice, normalisation,
            labels; `other`: the rest. Parts are timed by themselves: the rest may be a little below 0.
    """

    network: str
    optimizer: str
    precision: Precision
    minibatch: int
    frames_per_second: float
    spread: tuple[float, float]
    gflops: float
    gemm_gflops: float
    share_of_limit: float
    time_over_sgd: float
    over_float32: float | None
    shares: dict[str, float]


PARTS = ("gemm", "element_wise", "update", "ng", "data", "other")


@dataclass(frozen=True)
class BenchReport:
    """All results, and the machine they are from."""

    machine: dict[str, str]
    results: tuple[StepBench, ...]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def as_text(self) -> str:
        """Two tables: how fast, and where the time goes."""
        return "\n".join(
            [
                ", ".join(f"{k} {v}" for k, v in self.machine.items()),
                "network  optimizer  precision  minibatch   frames/s  (min .. max)        GFLOP/s  GEMM limit   share"
                "  time/SGD  speed/float32",
                *(_speed(r) for r in self.results),
                "",
                "share of the step's time, in percent",
                "network  optimizer  precision " + "".join(f"{part.replace('_', '-'):>14}" for part in PARTS),
                *(_name(r) + "".join(f"{100 * r.shares[part]:14.1f}" for part in PARTS) for r in self.results),
            ]
        )


def _name(r: StepBench) -> str:
    return f"{r.network:8} {r.optimizer:10} {r.precision:10}"


def _speed(r: StepBench) -> str:
    spread = f"({r.spread[0]:.0f} .. {r.spread[1]:.0f})"
    over_float32 = "" if r.over_float32 is None else f"{r.over_float32:.3f}"
    return (
        f"{_name(r)} {r.minibatch:9d} {r.frames_per_second:10.0f}  {spread:18} {r.gflops:8.1f}  {r.gemm_gflops:10.1f}  "
        f"{100 * r.share_of_limit:5.1f} %  {r.time_over_sgd:8.3f}  {over_float32:>13}"
    )
