"""How much memory a training takes, estimated before its features are loaded: what would not fit is refused then.

Measured on CPUs: one worker took 87 to 98 % of the estimate less `LIBRARY_BYTES`, each of two 56 to 71 %. The figures for
GPUs have not been checked on one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from ddnn.data.source import DataSource
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.util.errors import DataError
from ddnn.util.system import available_memory, device_identity

log = logging.getLogger(__name__)

LIBRARY_BYTES = 64 << 20  # of the host, for libraries once they compute and communicate
RESERVED_BYTES = 2**30 + 2**29  # of a GPU, for the workspaces of libraries and for what an allocator cannot use
GPU_PARAMETER_COPIES = 10
"""Of 4 bytes a parameter: parameters, gradient, momentum, the best so far, the bf16 copies, the averaging's, those of
the check of a captured step."""
GPU_ACTIVATION_COPIES = 3
"""Inputs, outputs and derivatives; what NG-SGD and the loss work on; all of it in a captured graph too."""
WARN_FRACTION = 0.8  # of the available memory

Estimate = Mapping[str, int]  # purpose -> bytes


@dataclass(frozen=True)
class TrainingMemory:
    """What one worker of a training needs besides its frames."""

    cpu: Estimate  # of the host, for a training on the CPU
    beside_gpu: Estimate  # of the host, which beside a GPU only makes the first parameters and writes files
    gpu: int  # of the GPU, in bytes, somewhat too high
    min_gpu: int  # of the GPU, in bytes, somewhat too low: nothing is refused that would fit

    def on_host(self, device_type: str) -> Estimate:
        return self.cpu if device_type == "cpu" else self.beside_gpu


def frames_memory(source: DataSource, utterances: Sequence[int], *, mapped: bool = True) -> Estimate:
    """What the frames of these utterances need: features and labels, and for each frame its index and two orders. With
    `mapped`, the whole cache file of a single corpus is not loaded but mapped; several are copied into one dataset."""
    features, num_frames = source.config.features, source.index.num_frames[list(utterances)]
    is_all = len(source.parts) == 1 and len(utterances) == len(source.index.entries)
    rows = 0 if mapped and is_all and source.parts[0].cache is not None else features.rows(num_frames)
    value_bytes = 2 if features.dtype == "float16" else 4
    size = rows * (source.width * value_bytes + 4) + 3 * 8 * int(num_frames.sum())
    return {f"frames in {features.dtype}": size}


def place_features(
    memory: TrainingMemory,
    source: DataSource,
    utterances: Sequence[int],
    device: torch.device,
    comm: Communicator,
    *,
    on_host: bool = False,
) -> torch.device:
    """Where this worker keeps the frames of `utterances`, which are not loaded yet, for a training on `device`. `on_host`:
    on the CPU in any case (`data.feature_device: cpu`). Collective. DataError: there is not enough memory."""
    comm.barrier()  # what was loaded before is there: all workers ask for memory together
    require_host_memory({**frames_memory(source, utterances), **memory.on_host(device.type)}, source.data, comm)
    feature_bytes = sum(frames_memory(source, utterances, mapped=False).values())
    return choose_feature_device(memory, feature_bytes, device, comm, on_host=on_host)


def require_host_memory(
    estimate: Estimate, location: str | PathLike[str], comm: Communicator, level: int = logging.INFO
) -> None:
    """Compares what all workers of a host need with what it has. Collective: all workers get the same error.
    `estimate`: of this worker, without what it has already taken. `location`: the data, for the message. DataError: a
    host has less. Above 80 % of what it has is a warning, else it is logged at `level`."""
    workers = comm.all_gather_object([comm.host, dict(estimate), available_memory()])
    _check_hosts(workers, location, level if comm.rank == 0 else None)


def _check_hosts(workers: Sequence[Sequence[Any]], location: str | PathLike[str], level: int | None) -> None:
    """As `require_host_memory`. `workers`: the host of each, its estimate and what is available there, None if unknown.
    `level`: None to log nothing."""
    for host in dict.fromkeys(str(worker[0]) for worker in workers):
        estimates = [estimate for name, estimate, _ in workers if name == host]
        available_bytes = [int(size) for name, _, size in workers if name == host and size is not None]
        if not available_bytes:
            continue
        needed, available = sum(sum(estimate.values()) for estimate in estimates), min(available_bytes)
        parts = ", ".join(f"{purpose} {describe_bytes(size)}" for purpose, size in estimates[0].items())
        who = f"one process on {host} needs"
        if len(estimates) > 1:
            who, parts = f"{len(estimates)} workers on {host} need", f"each: {parts}"
        message = (
            f"{who} about {describe_bytes(needed)} of memory ({parts}), and {describe_bytes(available)} are available"
        )
        if needed > available:
            key, hint = _memory_hint(estimates[0], len(estimates), available)
            raise DataError(message, location=key or location, hint=hint)
        if level is not None and needed > WARN_FRACTION * available:
            log.warning("memory is scarce: %s", message)
        elif level is not None:
            log.log(level, "memory: %s", message)


def _memory_hint(estimate: Estimate, workers: int, available: int) -> tuple[str | None, str]:
    """The section of the recipe that does not fit into what is `available` to the workers of a host, None for the frames,
    and what to do. `estimate`: of one of these workers. The frames are divided among all workers; each has all the
    rest, or its part of a model that several share."""
    frames = sum(size for purpose, size in estimate.items() if purpose.startswith("frames"))
    model, larger = sum(estimate.values()) - frames, "machines (containers, jobs) with more memory"
    if workers * model <= available:
        spread = "more machines with fewer workers on each" if workers > 1 else "more workers on more machines"
        hint = f"use {larger}, {spread}, fewer utterances"
        if "frames in float32" in estimate:
            hint += ", or data.feature_dtype: float16, which halves the frames"
        return None, hint
    hint = (
        f"each worker holds {describe_bytes(model)} for the model, so that more workers help only where they share it "
    )
    hint += "(parallel.columns, parallel.stages): lower model.hidden_units or model.hidden_layers (in model.layers units, filters or repeat)"
    if 2 * estimate.get("activations", 0) > model:
        hint += " or minibatch_size"
    if "momentum" in estimate:
        hint += ", set optimizer.momentum: 0"
    if "optimizer" in estimate:
        hint += ", set optimizer.name: sgd"
    if workers > 1:
        hint += ", use fewer workers on each machine"
    return "model", f"{hint}, or use {larger}"


def choose_feature_device(
    memory: TrainingMemory, feature_bytes: int, device: torch.device, comm: Communicator, *, on_host: bool = False
) -> torch.device:
    """`device`, or the CPU where the frames do not fit on it beside the training. On a GPU collective. `feature_bytes`:
    what this worker's frames take. `on_host`: the CPU in any case. DataError: the training does not fit even without
    the frames."""
    if device.type != "cuda":
        return device
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # of an earlier training
    here = (comm.host, device_identity(device))
    free_on: dict[tuple[str, str], list[int]] = {}
    for host, uuid, free in comm.all_gather_object([*here, torch.cuda.mem_get_info(device)[0] + cached]):
        free_on.setdefault((host, uuid), []).append(free)
    shares = {gpu: min(free) // len(free) for gpu, free in free_on.items()}  # of the workers on a GPU
    for (host, uuid), free in shares.items():
        if memory.min_gpu > free:
            raise DataError(
                f"training needs at least {memory.min_gpu / 2**30:.1f} GiB of GPU memory, {free / 2**30:.1f} GiB are "
                f"free on {uuid} of {host}",
                location="minibatch_size" if 2 * memory.cpu["activations"] > memory.min_gpu else "model",
                hint="take a smaller minibatch or network, or a GPU that nobody else uses",
            )
    if on_host:
        log.info("the features stay in host memory, as data.feature_device says")
        return torch.device("cpu")
    gibibytes = [round(size / 2**30, 1) for size in (feature_bytes, memory.gpu, shares[here])]
    if feature_bytes + memory.gpu <= shares[here]:
        log.info("the features are on the GPU: %.1f GiB beside %.1f GiB for training, %.1f GiB are free", *gibibytes)
        return device
    log.warning(
        "the features stay in host memory, and minibatches are read ahead: %.1f GiB beside %.1f GiB for training do "
        "not fit into the %.1f GiB that are free on the GPU; data.feature_dtype: float16 takes half of float32",
        *gibibytes,
    )
    return torch.device("cpu")


def describe_memory(memory: TrainingMemory, source: DataSource, shards: Sequence[Sequence[int]], device: str) -> str:
    """What each worker would need. DataError where all of them together would be refused on this machine."""
    place = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    host, available, beside_frames = SingleProcess().host, available_memory(), memory.on_host(place)
    frames = [frames_memory(source, shard, mapped=False) for shard in shards]
    _check_hosts([[host, {**size, **beside_frames}, available] for size in frames], source.data, logging.DEBUG)
    largest = max(frames, key=lambda size: sum(size.values()))
    parts = {**largest, **memory.cpu}
    needed = ", ".join(f"{purpose} {describe_bytes(size)}" for purpose, size in parts.items())
    on_gpu = describe_bytes(sum(largest.values()) + memory.gpu)
    return f"memory of each worker: about {describe_bytes(sum(parts.values()))} on a CPU ({needed}), {on_gpu} on a GPU"


def describe_bytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{-(-size // 2**20)} MiB"
