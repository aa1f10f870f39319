"""The memory that a training will need for what is allocated on purpose: refused before a frame is loaded where it is not
there; and where the features go, on a GPU that has room for them or in host memory.

Measured on CPUs: one worker took 87 to 98 % of the estimate less `LIBRARY_BYTES`, each of two 56 to 71 %. The figures
for GPUs have not been checked on one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike

import torch

from ddnn.distributed.communicator import Communicator
from ddnn.util.errors import DataError
from ddnn.util.system import available_memory, device_identity

log = logging.getLogger(__name__)

EVAL_BATCH = 1024  # frames in a block of cross-validation: full GEMM speed, and they stay in a CPU's cache
LIBRARY_BYTES = 64 << 20  # what libraries take of the host once they compute and communicate
RESERVED_BYTES = 2**30 + 2**29  # on a GPU: for the workspaces of libraries and for what an allocator cannot use
GPU_PARAMETER_COPIES = 10
"""Of 4 bytes a parameter: parameters, gradient, momentum, the best so far, the bf16 copies, the averaging's, those of
the check of a captured step."""
GPU_ACTIVATION_COPIES = 3
"""Inputs, outputs and derivatives; what NG-SGD and the loss work on; all of it in a captured graph too."""
WARN_FRACTION = 0.8  # of the available memory
Estimate = Mapping[str, int]  # what the memory is for -> bytes


@dataclass(frozen=True)
class TrainingFootprint:
    """What decides how much memory a training takes besides its frames."""

    num_parameters: int  # of the network
    activation_floats: int  # per frame: the network's input, outputs and derivatives of all layers
    batch_size: int  # frames of a minibatch
    parameter_copies: int = 3  # on a CPU, of 4 bytes per parameter: parameters, gradient, best so far, momentum, bf16
    # the same for averaging over workers: those that MPI and the strategy keep; 0 for one worker
    averaging_copies: int = 0
    natural_gradient_bytes: int = 0  # of NG-SGD; 0 without

    @property
    def parameter_bytes(self) -> int:
        """Of one copy."""
        return 4 * self.num_parameters

    def on_host(self, device_type: str) -> Estimate:
        """What one worker takes of the host, which beside a GPU only makes the first parameters and writes files."""
        one = self.parameter_bytes
        if device_type != "cpu":
            pinned = {"averaging": 2 * one} if self.averaging_copies else {}
            return {"files": 4 * one, **pinned, "libraries": LIBRARY_BYTES}
        estimate = {
            "parameters": self.parameter_copies * one,
            "activations": self._activations(),
            "files": 3 * one,  # a model being written takes two copies, a checkpoint that is read three
            "libraries": LIBRARY_BYTES,
            "natural gradient": self.natural_gradient_bytes,
            "averaging": self.averaging_copies * one,
        }
        return {part: size for part, size in estimate.items() if size}

    def least_on_gpu(self) -> int:
        """What it takes of a GPU at the least, so that nothing is refused that would fit."""
        return self.parameter_copies * self.parameter_bytes + self._activations()

    def on_gpu(self) -> int:
        """What it takes of a GPU, somewhat too high."""
        per_frame = 4 * GPU_ACTIVATION_COPIES * self.activation_floats
        activations = 2 * per_frame * max(self.batch_size, EVAL_BATCH)
        return GPU_PARAMETER_COPIES * self.parameter_bytes + activations + RESERVED_BYTES

    def _activations(self) -> int:
        """Of a minibatch, and of a block of cross-validation."""
        return 4 * (self.batch_size + EVAL_BATCH) * self.activation_floats


def frame_bytes(dtype: str, frames: int, rows: int, width: int) -> int:
    """What frames take: features and labels, and for each frame its index and two orders. `rows`: of the dataset,
    repeated edges included; 0 where it is not loaded but mapped. `width`: dimension of a row."""
    return rows * (width * (2 if dtype == "float16" else 4) + 4) + 3 * 8 * frames


def require_host_memory(estimate: Estimate, location: str | PathLike[str], comm: Communicator) -> None:
    """Compares what all workers of a host need with what it has. Collective: all workers get the same error.
    `estimate`: of this worker, without what it has already taken. `location`: the data, for the message. DataError: a
    host does not have it. Above 80 % of what it has is a warning."""
    everyone = comm.all_gather_object([comm.host, dict(estimate), available_memory()])
    for host in dict.fromkeys(str(one[0]) for one in everyone):
        here = [one for one in everyone if one[0] == host]
        known = [int(one[2]) for one in here if one[2] is not None]
        if not known:
            continue
        needed, available = sum(sum(one[1].values()) for one in here), min(known)
        parts = ", ".join(f"{part} {_size(size)}" for part, size in here[0][1].items())
        who = f"{len(here)} workers on {host}, each with" if len(here) > 1 else f"one process on {host} with"
        message = f"{who} about {parts}: {_size(needed)} of memory needed, {_size(available)} available"
        if needed > available:
            spread = "fewer workers on each" if len(here) > 1 else "more workers on more machines"
            hint = f"use machines (containers, jobs) with more memory, {spread}, fewer utterances"
            if "frames in float32" in here[0][1]:
                hint += ", or data.feature_dtype: float16, which halves the frames"
            raise DataError(message, location=location, hint=hint)
        if comm.rank == 0:
            scarce = needed > WARN_FRACTION * available
            log.log(logging.WARNING if scarce else logging.INFO, "memory%s: %s", " is scarce" * scarce, message)


def choose_feature_device(
    footprint: TrainingFootprint,
    feature_bytes: int,
    device: torch.device,
    comm: Communicator,
    *,
    on_host: bool = False,
) -> torch.device:
    """`device`, or the CPU where the frames do not fit on it beside the training. On a GPU collective. `feature_bytes`:
    `frame_bytes` of this worker. `on_host`: the CPU in any case (`data.feature_device: cpu`). DataError: training does
    not fit even without the frames."""
    if device.type != "cuda":
        return device
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # of an earlier training
    here = (comm.host, device_identity(device))
    free_on: dict[tuple[str, str], list[int]] = {}
    for host, uuid, free in comm.all_gather_object([*here, torch.cuda.mem_get_info(device)[0] + cached]):
        free_on.setdefault((host, uuid), []).append(free)
    shares = {gpu: min(free) // len(free) for gpu, free in free_on.items()}  # of the workers on a GPU
    least = footprint.least_on_gpu()
    for (host, uuid), free in shares.items():
        if least > free:
            parameters = footprint.parameter_copies * footprint.parameter_bytes
            raise DataError(
                f"training needs at least {least / 2**30:.1f} GiB of GPU memory, {free / 2**30:.1f} GiB are free on "
                f"{uuid} of {host}",
                location="minibatch_size" if least > 2 * parameters else "model",
                hint="take a smaller minibatch or network, or a GPU that nobody else uses",
            )
    if on_host:
        log.info("the features stay in host memory, as data.feature_device says")
        return torch.device("cpu")
    beside, free = footprint.on_gpu(), shares[here]
    figures = [round(size / 2**30, 1) for size in (feature_bytes, beside, free)]
    if feature_bytes + beside <= free:
        log.info("the features are on the GPU: %.1f GiB beside %.1f GiB for training, %.1f GiB are free", *figures)
        return device
    log.warning(
        "the features stay in host memory, and minibatches are read ahead: %.1f GiB beside %.1f GiB for training do "
        "not fit into the %.1f GiB that are free on the GPU; data.feature_dtype: float16 takes half of float32",
        *figures,
    )
    return torch.device("cpu")


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{-(-size // 2**20)} MiB"
