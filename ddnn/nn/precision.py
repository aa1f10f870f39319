"""Which precision to train in: asked for, or measured on this machine, and checked against float32 before it is used.
Matrix units (AMX, Tensor Cores) multiply bf16 several times faster than float32, processors without them many times
slower: it is measured, with the network's own shapes."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.nn.arithmetic import Float32, make_arithmetic, matmul_out
from ddnn.nn.layers import training_flop_per_frame
from ddnn.nn.network import Network, Workspace
from ddnn.util.errors import UserError

log = logging.getLogger(__name__)

MIN_SPEEDUP = 1.2
"""bf16 is taken where its products are so many times as fast: the casts that go with it take a part of the gain."""

MIN_FLOP = 1e8
"""Below so many floating-point operations in the products of a minibatch they are not what takes the time."""

MEASURING_SECONDS = 0.5
ABORT_SLOWDOWN = 4.0  # where bf16 takes so many times as long, no more is measured
CPU_ROWS, CHECK_ROWS = 256, 32  # most frames of a minibatch to measure with on a CPU, and to check with

MAX_LOSS_ERROR, MAX_GRADIENT_ERROR = 0.02, 0.2
"""How far bf16 may be from float32, relative to it: in loss, and in the Euclidean norm of the gradient's difference."""


def choose_arithmetic(
    asked: Literal["auto", "float32", "bf16"],
    network: Network,
    minibatch: int,
    comm: Communicator | None = None,
    *,
    resumed: bool = False,
) -> Float32:
    """The arithmetic to train in, of the same precision on every worker: the first one measures. Logs which, and why.
    UserError: the resumed training was in bf16, which is numerically unsafe on this device.

    Args:
        asked: the recipe's `precision`. `auto`: bf16 where it is at least `MIN_SPEEDUP` times as fast.
        network: with the parameters that training starts from, on this worker's device.
        minibatch: frames.
        comm: collective where given.
        resumed: whether `asked` is the precision of a training that is resumed.
    """
    comm = comm or SingleProcess()
    if asked == "float32":
        return Float32()
    if asked == "auto" and training_flop_per_frame(network.layers) * minibatch < MIN_FLOP:
        log.info("precision float32: the network is too small for bf16 to matter")
        return Float32()
    measured = gemm_speedup(network, minibatch) if comm.rank == 0 else None
    speedup = float(comm.all_gather_object(measured)[0])
    faster = speedup >= MIN_SPEEDUP
    level = logging.WARNING if comm.rank == 0 else logging.INFO  # of workers, only warnings show
    result = f"bf16 GEMM {speedup:.2f} x float32 on this device"
    if asked == "auto" and not faster:
        log.info("%s: float32", result)
        return Float32()
    error = bf16_error(network, minibatch)
    if comm.all_reduce_min(error is None) == 0:
        first = next(one for one in comm.all_gather_object(error) if one is not None)
        unsafe = f"bf16 is numerically unsafe on this device: {first}"
        if resumed:
            raise UserError(
                f"the training to resume was in bf16, but {unsafe}",
                location="precision",
                hint="resume on a machine like the one that it was started on, or start a new run with precision: "
                "float32",
            )
        log.log(level, "%s. Training in float32", unsafe)
        return Float32()
    if faster:
        log.info("%s: bf16", result)
    else:
        log.log(level, "%s: bf16, as the recipe says; precision: float32 would be faster", result)
    return make_arithmetic("bf16", network.parameters.device)


def allow_tf32(allow: bool, device: torch.device) -> None:
    """Float32 products on a GPU in TF32, or in float32 itself. Of this process, until it is called again."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = allow
    elif allow:
        log.info("tf32 does nothing here: this worker computes on a CPU")


def gemm_speedup(network: Network, minibatch: int) -> float:
    """Time of the step's matrix products in float32 over that in bf16: above 1 bf16 is faster. The largest layers come
    first; those for which no time is left are not measured."""
    device = network.parameters.device
    frames = minibatch if device.type == "cuda" else min(minibatch, CPU_ROWS)
    shapes = Counter(layer.gemm for layer in network.layers if layer.gemm is not None)
    started, in_float32, in_bf16 = time.perf_counter(), 0.0, 0.0
    for gemm, count in sorted(shapes.items(), key=lambda item: -item[1] * math.prod(item[0])):
        plain, low = (
            _products(frames * gemm.rows, gemm.fan_in, gemm.fan_out, dtype, device)
            for dtype in (torch.float32, torch.bfloat16)
        )
        for factors, low_factors in zip(plain, low, strict=True):
            seconds, low_seconds = _fastest_in_turn(factors, low_factors)
            in_float32 += count * seconds
            in_bf16 += count * low_seconds
            if in_bf16 > ABORT_SLOWDOWN * in_float32:
                return in_float32 / in_bf16
        if time.perf_counter() - started > MEASURING_SECONDS:
            break
    return in_float32 / in_bf16 if shapes else 1.0


Factors = tuple[Tensor, Tensor, Tensor]  # two matrices, and where their product goes


def _products(rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> tuple[Factors, ...]:
    """The three matrix products of a layer, on noise: x W^T, d W and d^T x."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((rows, inputs), (rows, outputs), (outputs, inputs))
    x, d, weight = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return (
        (x, weight.t(), torch.empty_like(d)),
        (d, weight, torch.empty_like(x)),
        (d.t(), x, torch.empty_like(weight)),
    )


def _fastest_in_turn(one: Factors, other: Factors, rounds: int = 5) -> tuple[float, float]:
    """Seconds of either product, the fastest of some rounds; of one round where the other is hopelessly slow."""
    _seconds(one)
    _seconds(other)  # the first call of a kind prepares it
    found: list[tuple[float, float]] = []
    while len(found) < rounds and not (found and found[0][1] > ABORT_SLOWDOWN * found[0][0]):
        found.append((_seconds(one), _seconds(other)))
    return min(seconds for seconds, _ in found), min(seconds for _, seconds in found)


def _seconds(factors: Factors) -> float:
    device = factors[0].device
    calls = 10 if device.type == "cuda" else 1  # on a GPU a single one would show its launch
    return seconds_per_call(lambda: matmul_out(*factors), calls, device)


def seconds_per_call(function: Callable[[], object], calls: int, device: torch.device) -> float:
    """How long so many calls take, work on a GPU included, over their number."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / calls


def bf16_error(network: Network, minibatch: int) -> str | None:
    """What is wrong with bf16 on this device, by loss and gradient of a minibatch of noise in either precision. The
    gradients are those of the parameters as they are. None where nothing is wrong."""
    frames, device = min(minibatch, CHECK_ROWS), network.parameters.device
    try:
        expected_loss, expected = _loss_and_gradient(network, frames, Float32())
        loss, found = _loss_and_gradient(network, frames, make_arithmetic("bf16", device))
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    norm = float(torch.linalg.vector_norm(expected))
    gradient_error = float(torch.linalg.vector_norm(found.sub_(expected))) / max(norm, 1e-30)
    if not abs(loss - expected_loss) <= MAX_LOSS_ERROR * abs(expected_loss):
        return f"loss {loss:.6g} of a minibatch, {expected_loss:.6g} in float32"
    if not gradient_error <= MAX_GRADIENT_ERROR:
        return f"relative gradient error {gradient_error:.3g}, limit {MAX_GRADIENT_ERROR:g}"
    return None


def _loss_and_gradient(network: Network, frames: int, arithmetic: Float32) -> tuple[float, Tensor]:
    generator = torch.Generator().manual_seed(1)
    workspace = Workspace(network, frames, arithmetic)
    workspace.x.copy_(torch.randn(workspace.x.shape, generator=generator))
    labels = torch.randint(0, network.output_dim, (frames,), generator=generator).to(workspace.x.device)
    workspace.forward()
    loss, _ = workspace.cross_entropy(labels)
    workspace.backward()
    return float(loss), workspace.gradient(torch.empty_like(network.parameters))
