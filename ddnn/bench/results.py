"""The results of `ddnn bench`, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ddnn.nn.arithmetic import Precision


@dataclass(frozen=True)
class StepBench:
    """The result of one network, optimizer and precision.

    Attributes:
        frames_per_second: of the training step, median over the rounds.
        spread: smallest and largest of the rounds.
        gflops: floating-point operations of its matrix products per second of the whole step, in 10^9.
        gemm_gflops: the same operations per second of the matrix products alone, in the same precision: the limit.
        gemm_efficiency: `gflops` over `gemm_gflops`, median over the rounds, 0 to 1.
        time_ratio_to_sgd: time of a minibatch over that of plain SGD in the same round and precision, median.
        speedup_over_float32: frames/s over those in float32 in the same round, median; None without float32.
        shares: of the parts in the time of the step, medians. `gemm`: matrix products; `element_wise`: forward pass,
            loss, backward pass and gradient without them, with casts; `update`: of the parameters; `ng`: the additional
            time of an NG-SGD step; `data`: order, splice, normalization, labels; `other`: the rest. Parts are timed by
            themselves, so that the rest may be slightly below 0.
    """

    network: str
    optimizer: str
    precision: Precision
    minibatch: int
    frames_per_second: float
    spread: tuple[float, float]
    gflops: float
    gemm_gflops: float
    gemm_efficiency: float
    time_ratio_to_sgd: float
    speedup_over_float32: float | None
    shares: dict[str, float]


PARTS = ("gemm", "element_wise", "update", "ng", "data", "other")


@dataclass(frozen=True)
class BenchReport:
    """All results, and the machine on which they were measured."""

    machine: dict[str, str]
    results: tuple[StepBench, ...]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def as_text(self) -> str:
        """Two tables: speed, and fractions of time."""
        return "\n".join(
            [
                ", ".join(f"{k} {v}" for k, v in self.machine.items()),
                "network  optimizer  precision  minibatch   frames/s  (min .. max)        GFLOP/s  GEMM limit   share"
                "  time/SGD  speed/float32",
                *(_speed(r) for r in self.results),
                "",
                "fractions of the time of a step, in percent",
                "network  optimizer  precision " + "".join(f"{part.replace('_', '-'):>14}" for part in PARTS),
                *(_name(r) + "".join(f"{100 * r.shares[part]:14.1f}" for part in PARTS) for r in self.results),
            ]
        )


def _name(r: StepBench) -> str:
    return f"{r.network:8} {r.optimizer:10} {r.precision:10}"


def _speed(r: StepBench) -> str:
    spread = f"({r.spread[0]:.0f} .. {r.spread[1]:.0f})"
    speedup_over_float32 = "" if r.speedup_over_float32 is None else f"{r.speedup_over_float32:.3f}"
    return (
        f"{_name(r)} {r.minibatch:9d} {r.frames_per_second:10.0f}  {spread:18} {r.gflops:8.1f}  {r.gemm_gflops:10.1f}  "
        f"{100 * r.gemm_efficiency:5.1f} %  {r.time_ratio_to_sgd:8.3f}  {speedup_over_float32:>13}"
    )
