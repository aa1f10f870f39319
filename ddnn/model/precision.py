"""Which precision to train in: asked for, or measured on this machine, and checked against float32 before it is used.

Whether 16-bit products are faster is not looked up in a list of processors but measured, with the network's own shapes:
matrix units (AMX, Tensor Cores) multiply bf16 several times faster than float32, processors without them many times
slower.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Literal

import torch
from torch import Tensor

from ddnn.model.loss import cross_entropy_in_place
from ddnn.model.network import Buffers, Network, Precision, backward, forward, gradient
from ddnn.model.product import product
from ddnn.parallel.exchange import Exchange

log = logging.getLogger(__name__)

WORTHWHILE = 1.2
"""bf16 is taken where its products are so many times as fast: the casts that go with it take a part of the gain."""

SMALL = 1e8
"""Below so many floating-point operations in the products of a minibatch they are not what takes the time."""

MEASURING_SECONDS = 0.5
HOPELESS = 4.0
"""Where bf16 takes so many times as long, no more is measured."""

CPU_ROWS, CHECK_ROWS = 256, 32
"""Most frames of a minibatch to measure with on a CPU, and to check with."""

LARGEST_LOSS_ERROR, LARGEST_GRADIENT_ERROR = 0.02, 0.2
"""How far bf16 may be from float32, relative to it: in loss, and in the Euclidean norm of the gradient's difference."""


def choose_precision(
    asked: Literal["auto", "float32", "bf16"], network: Network, minibatch: int, exchange: Exchange | None = None
) -> Precision:
    """The precision to train in, the same on every worker: the first one measures. Says in the log which, and why.

    Args:
        asked: the recipe's `precision`. `auto`: bf16 where it is at least `WORTHWHILE` times as fast.
        network: with the parameters that training starts from, on this worker's device.
        minibatch: frames.
        exchange: collective where given.
    """
    exchange = exchange or Exchange()
    if asked == "float32":
        return "float32"
    if asked == "auto" and products_flop(network) * minibatch < SMALL:
        log.info("precision float32: the network is too small for bf16 to matter")
        return "float32"
    measured = gemm_ratio(network, minibatch) if exchange.rank == 0 else None
    ratio = float(exchange.gather(measured)[0])
    faster = ratio >= WORTHWHILE
    notice = logging.WARNING if exchange.rank == 0 else logging.INFO  # of workers, only warnings show
    said = f"bf16 GEMM {ratio:.2f} x float32 on this device"
    if asked == "auto" and not faster:
        log.info("%s: float32", said)
        return "float32"
    complaint = disagreement(network, minibatch)
    if exchange.agree_min(complaint is None) == 0:
        complaints = [one for one in exchange.gather(complaint) if one is not None]
        log.log(notice, "bf16 does not do on this device: %s. Training in float32", complaints[0])
        return "float32"
    if faster:
        log.info("%s: bf16", said)
    else:
        log.log(notice, "%s: bf16, as the recipe says; precision: float32 would be faster", said)
    return "bf16"


def allow_tf32(allow: bool, device: torch.device) -> None:
    """Float32 products on a GPU in TF32, or in float32 itself. Of this process, until it is called again."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = allow
    elif allow:
        log.info("tf32 does nothing here: this worker computes on a CPU")


def products_flop(network: Network) -> int:
    """Floating-point operations per frame in the matrix products of a training step: 7.5 million for 440-4x512-616.

    Three products a layer, but two for the first: nobody needs the derivative of the input.
    """
    sizes = [layer.inputs * layer.outputs for layer in network.layers]
    return 6 * sum(sizes) - 2 * sizes[0]


def gemm_ratio(network: Network, minibatch: int) -> float:
    """Time of the step's matrix products in float32 over that in bf16: above 1 bf16 is faster.

    The largest layers come first; those for which no time is left are not measured.
    """
    device = network.parameters.device
    rows = minibatch if device.type == "cuda" else min(minibatch, CPU_ROWS)
    shapes = Counter((layer.inputs, layer.outputs) for layer in network.layers)
    started, in_float32, in_bf16 = time.perf_counter(), 0.0, 0.0
    for (inputs, outputs), count in sorted(shapes.items(), key=lambda item: -item[1] * item[0][0] * item[0][1]):
        plain, low = (_products(rows, inputs, outputs, dtype, device) for dtype in (torch.float32, torch.bfloat16))
        for factors, low_factors in zip(plain, low, strict=True):
            seconds, low_seconds = _fastest_in_turn(factors, low_factors)
            in_float32 += count * seconds
            in_bf16 += count * low_seconds
            if in_bf16 > HOPELESS * in_float32:
                return in_float32 / in_bf16
        if time.perf_counter() - started > MEASURING_SECONDS:
            break
    return in_float32 / in_bf16


Factors = tuple[Tensor, Tensor, Tensor]
"""Two matrices, and where their product goes."""


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
    """Seconds of either product, the fastest of some rounds; of one round where the other's is hopeless."""
    _seconds(one)
    _seconds(other)  # the first call of a kind prepares it
    found: list[tuple[float, float]] = []
    while len(found) < rounds and not (found and found[0][1] > HOPELESS * found[0][0]):
        found.append((_seconds(one), _seconds(other)))
    return min(seconds for seconds, _ in found), min(seconds for _, seconds in found)


def _seconds(factors: Factors) -> float:
    on, calls = factors[0].device, 1
    if on.type == "cuda":
        calls = 10  # a single one would show its launch
        torch.cuda.synchronize(on)
    started = time.perf_counter()
    for _ in range(calls):
        product(*factors)
    if on.type == "cuda":
        torch.cuda.synchronize(on)
    return (time.perf_counter() - started) / calls


def disagreement(network: Network, minibatch: int) -> str | None:
    """What is wrong with bf16 on this device, by loss and gradient of a minibatch of noise in either precision.

    The gradients are those of the parameters as they are. None where nothing is wrong.
    """
    frames = min(minibatch, CHECK_ROWS)
    try:
        expected_loss, expected = _loss_and_gradient(network, frames, "float32")
        loss, found = _loss_and_gradient(network, frames, "bf16")
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    norm = float(torch.linalg.vector_norm(expected))
    error_of_gradient = float(torch.linalg.vector_norm(found.sub_(expected))) / max(norm, 1e-30)
    if not abs(loss - expected_loss) <= LARGEST_LOSS_ERROR * abs(expected_loss):
        return f"loss {loss:.6g} of a minibatch, {expected_loss:.6g} in float32"
    if not error_of_gradient <= LARGEST_GRADIENT_ERROR:
        return f"its gradient is off by {error_of_gradient:.3g} of that in float32"
    return None


def _loss_and_gradient(network: Network, frames: int, precision: Precision) -> tuple[float, Tensor]:
    generator = torch.Generator().manual_seed(1)
    buffers = Buffers(network, frames, precision)
    buffers.x.copy_(torch.randn(buffers.x.shape, generator=generator))
    labels = torch.randint(0, network.output_dim, (frames,), generator=generator).to(buffers.x.device)
    forward(network, buffers)
    loss, _ = cross_entropy_in_place(buffers, labels)
    backward(network, buffers)
    return float(loss), gradient(network, buffers, torch.empty_like(network.parameters))
