"""This machine: cores, processor, GPUs, and memory, also under the limits of control groups."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddnn.util.errors import UserError
from ddnn.util.text import plural

if TYPE_CHECKING:
    import torch  # takes seconds, and a launcher needs none of it

ROOT = Path("/")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slurm_job_id(environment: Mapping[str, str]) -> str:
    """The Slurm job that this process is part of; empty outside Slurm. ARRAY_TASK of a task of an array: the task that
    starts last has the number of the array as its own, which in scontrol means all tasks."""
    array = environment.get("SLURM_ARRAY_JOB_ID", "")
    return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else environment.get("SLURM_JOB_ID", "")


def cpu_name() -> str:
    """The processor's model name, else its architecture."""
    lines = read_lines(ROOT / "proc/cpuinfo")
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def device_name(device: str) -> str:
    """The GPU's name if `device` (cpu, cuda, auto) uses one, else the processor's with its number of cores."""
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    return f"{cpu_name()}, {usable_cores()} cores"


def choose_device(name: str, local_rank: int = 0, threads: int = 1) -> torch.device:
    """The device for a worker: `cpu`, `cuda` (the GPU of its local rank), or `auto` (a GPU where there is one).

    Workers share the GPUs of a host that has too few. `threads`: CPU threads of this process from here on; more than
    one is slower on minibatches of a few hundred frames. UserError: `cuda` where no GPU can be used, or the GPU lets
    nobody else in.
    """
    import torch

    torch.set_num_threads(threads)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        hint = "install a CUDA build of torch and check nvidia-smi, or use --device cpu"
        raise UserError("no GPU can be used: torch finds no CUDA device", location="--device cuda", hint=hint)
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    try:
        use_device(device)
        torch.zeros(1, device=device)
    except RuntimeError as error:
        if "busy or unavailable" not in str(error):
            raise
        raise UserError(
            f"GPU {device.index} is taken: another process has it, and it is in exclusive mode (or is being reset)",
            location=f"--device {name}",
            hint="take fewer workers or another GPU (CUDA_VISIBLE_DEVICES), or allow sharing: nvidia-smi -c DEFAULT",
        ) from error
    return device


def use_device(device: torch.device) -> None:
    """Makes `device` the current GPU of the calling thread, which starts with GPU 0. Otherwise pinned memory and streams
    would be created on GPU 0, which may belong to another worker. No-op on CPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_identity(device: torch.device) -> str:
    """The UUID of a GPU, or `cpu`. Two workers may both have a `cuda:0` that is not the same GPU, as under Slurm."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def compute_units(device: torch.device, host: str) -> list[Any]:
    """Of this process: the kind of its processor, its host, and the cores that it may use; or of its GPU."""
    import torch

    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), host, [device_identity(device)]]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(usable_cores()))
    return [cpu_name(), host, cores]


def compute_resources(units: Sequence[Sequence[Any]]) -> tuple[str, float]:
    """From `compute_units` of all workers: the kinds of processor or GPU, and the cores (or GPUs) that each worker has,
    on the host on which it has the fewest."""
    shares = []
    for host in {host for _, host, _ in units}:
        core_sets = [set(cores) for _, name, cores in units if name == host]
        shares.append(len(set.union(*core_sets)) / len(core_sets))
    return "; ".join(sorted({kind for kind, _, _ in units})), min(shares)


def check_devices(places: Iterable[Sequence[int | str]], share: bool) -> None:
    """Refuses several workers on one GPU unless they may `share` one (`parallel.oversubscribe_gpus`). `places`: (rank,
    host, `device_identity`) of every worker. UserError: names every GPU that is shared, its host and its workers."""
    workers: defaultdict[int | str, list[int | str]] = defaultdict(list)
    hosts: dict[int | str, int | str] = {}
    for rank, host, device in places:
        if device != "cpu":
            workers[device].append(rank)
            hosts[device] = host
    shared = [device for device, ranks in workers.items() if len(ranks) > 1]
    if share or not shared:
        return
    lines = [f"workers {', '.join(map(str, workers[gpu]))} share GPU {gpu} of {hosts[gpu]}" for gpu in shared]
    number = sum(map(len, workers.values()))
    message = f"{number} workers have {plural(len(workers), 'GPU')} between them: {'; '.join(lines)}"
    hint = "take one worker for each GPU, or set parallel.oversubscribe_gpus to true"
    raise UserError(message, location="parallel.workers, parallel.oversubscribe_gpus", hint=hint)


def available_memory(root: Path = ROOT) -> int | None:
    """Bytes that this process can have without swapping: what the machine has left, or what its control group allows
    (a container's, a Slurm job's) if that is less. None where the system does not say. `root`: where proc and sys are.
    """
    machine = [line.split()[1] for line in read_lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    limits = [*(int(kilobytes) * 1024 for kilobytes in machine), *_left_to_control_groups(root)]
    return max(0, min(limits)) if limits else None


def _left_to_control_groups(root: Path) -> Iterator[int]:
    """The limit less what is in use, of the control groups of this process and all above them, of version 1 and 2."""
    for line in read_lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            mounted, limits, usage, prefix = "", ["memory.max", "memory.high"], "memory.current", ""
        elif "memory" in controllers.split(","):
            mounted, limits, usage, prefix = "memory", ["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_"
        else:
            continue
        parts = [part for part in path.strip().split("/") if part not in ("", "..")]
        for length in range(len(parts), -1, -1):  # up to where they are mounted: in a container often all there is
            group = root.joinpath("sys/fs/cgroup", mounted, *parts[:length])
            limit = min((size for name in limits if (size := _number(group / name)) is not None), default=None)
            used = _number(group / usage)
            if limit is not None and used is not None:
                counts = (line.split() for line in read_lines(group / "memory.stat"))
                cached = (f"{prefix}inactive_file", f"{prefix}active_file")  # counts as used, but gives way
                yield limit - used + sum(int(count[1]) for count in counts if len(count) == 2 and count[0] in cached)


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none, as in "max"."""
    lines = read_lines(path)
    return int(lines[0]) if lines and lines[0].isascii() and lines[0].strip().isdigit() else None


def read_lines(path: Path) -> list[str]:
    """The lines of a file of the system; none where there is no such file."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
