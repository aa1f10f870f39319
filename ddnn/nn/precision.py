"""Which precision to train in: asked for, or by what the hardware is, and checked against float32 before it is used.
Matrix units (AMX, Tensor Cores) multiply bf16 several times faster than float32, processors without them many times
slower. No choice depends on a timing: the same recipe on the same hardware trains in the same precision."""

from __future__ import annotations

import logging
from typing import Literal

import torch
from torch import Tensor

from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.nn.arithmetic import Float32, make_arithmetic
from ddnn.nn.layers import training_flop_per_frame
from ddnn.nn.network import Network, Workspace
from ddnn.nn.products import Processor, onednn_isa_limit, processor
from ddnn.util.errors import UserError

log = logging.getLogger(__name__)

BF16_CAPABILITY = (8, 0)
"""The compute capability of the first GPUs with bf16 tensor cores."""

MIN_FLOP = 1e8
"""Below so many floating-point operations in the products of a minibatch they are not what takes the time."""

CHECK_ROWS = 32  # most frames of a minibatch to check with

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
    """The arithmetic to train in, of the same precision on every worker. Logs which, and why. UserError: the resumed
    training was in bf16, which is numerically unsafe on this device.

    Args:
        asked: the recipe's `precision`. `auto`: bf16 where it is fast on the hardware of all workers.
        network: with the parameters that training starts from, on this worker's device.
        minibatch: frames.
        comm: collective where given.
        resumed: whether `asked` is the precision of a training that is resumed.
    """
    comm, float32 = comm or SingleProcess(), make_arithmetic("float32", network.parameters.device)
    origin = "as before it was resumed" if resumed else "as the recipe says"
    if asked == "float32":
        log.info("precision float32, %s", origin)
        return float32
    if asked == "auto" and training_flop_per_frame(network.partition.layers(network.layers)) * minibatch < MIN_FLOP:
        log.info("precision float32: the network is too small for bf16 to matter")
        return float32
    facts = comm.all_gather_object([*bf16_is_fast(network.parameters.device), comm.host])
    reason, slow = facts[0][1], [rank for rank, (fast, _, _) in enumerate(facts) if not fast]
    if slow:
        where = f"worker {slow[0]} on {facts[slow[0]][2]}: " if comm.world_size > 1 else ""
        reason = where + facts[slow[0]][1]
    level = logging.WARNING if comm.rank == 0 else logging.INFO  # of workers, only warnings show
    if asked == "auto" and slow:
        log.log(level if len(slow) < comm.world_size else logging.INFO, "precision float32: %s", reason)
        return float32
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
        return float32
    if slow:
        log.log(level, "precision bf16, %s; float32 may be faster: %s", origin, reason)
    else:
        log.info("precision bf16%s: %s", "" if asked == "auto" else f", {origin}", reason)
    return make_arithmetic("bf16", network.parameters.device)


def allow_tf32(allow: bool, device: torch.device) -> None:
    """Float32 products on a GPU in TF32, or in float32 itself. Of this process, until it is called again."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = allow
        torch.backends.cudnn.allow_tf32 = allow  # on by default; ddnn's convolutions are products, not cuDNN's
    elif allow:
        log.info("tf32 does nothing here: this worker computes on a CPU")


def bf16_is_fast(device: torch.device, cpu: Processor | None = None) -> tuple[bool, str]:
    """Whether this worker's hardware multiplies bf16 faster than float32, and by which fact. Nothing is timed: the same
    hardware gives the same answer at every start, however busy it is. With AVX512-BF16, AMD's processors train twice as
    fast (docs/explanation/benchmarks.md), an Intel one whose AMX was masked at 0.65 times the speed of float32."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        fast = (major, minor) >= BF16_CAPABILITY
        return fast, f"this GPU (compute capability {major}.{minor}) has {'' if fast else 'no '}bf16 tensor cores"
    cpu = cpu or processor()
    this = f"this processor ({cpu.vendor} {cpu.family}/{cpu.model})" if cpu.vendor else "this processor"
    if (limit := onednn_isa_limit()) is not None:
        return False, f"{limit} limits which instructions PyTorch uses"
    amx, avx512_bf16 = {"amx_bf16", "amx_tile"} <= cpu.flags, "avx512_bf16" in cpu.flags
    if not amx and not avx512_bf16:
        return False, f"{this} has neither AMX nor AVX512-BF16"
    if cpu.vendor == "AuthenticAMD":
        return True, f"{this} has AVX512-BF16"
    if cpu.vendor != "GenuineIntel":
        return False, f"{this} is neither AMD's nor Intel's: bf16 has not been measured on it"
    if not amx:
        return False, f"{this} has AVX512-BF16 but no AMX, and then float32 is faster"
    return (True, f"{this} has AMX") if pytorch_has_amx() else (False, f"{this} has AMX, but PyTorch cannot use it")


def pytorch_has_amx() -> bool:
    """Whether PyTorch has a library that uses AMX, finds it, and Linux lets this process use it."""
    return bool(torch._C._has_mkldnn and torch.cpu._init_amx())


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
    logits = workspace.forward()
    loss_of = network.partition.cross_entropy(arithmetic, network.parameters, network.output_dim, frames)
    loss, _ = loss_of(logits, labels, workspace.derivative)
    workspace.backward()
    workspace.wait()
    return float(loss), workspace.gradient(torch.empty_like(network.parameters))
