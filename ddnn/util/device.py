"""Where to compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from ddnn.util.errors import UserError


def choose_device(name: str, local_rank: int = 0, threads: int = 1) -> torch.device:
    """The device for a worker: `cpu`, `cuda` (the GPU of its local rank), or `auto` (a GPU where there is one).

    With more workers than GPUs on a host they share: `check_devices` says whether they may.

    Args:
        threads: CPU threads of this process from here on; more than one is slower on minibatches of a few hundred
            frames.

    Raises:
        UserError: `cuda` where no GPU can be used, or the GPU lets nobody else in.
    """
    torch.set_num_threads(threads)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "no GPU can be used: torch finds no CUDA device",
            location="--device cuda",
            hint="install a CUDA build of torch and check nvidia-smi, or use --device cpu",
        )
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    try:
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


def device_identity(device: torch.device) -> str:
    """The UUID of a GPU, or `cpu`. Two workers may both have a `cuda:0` that is not the same GPU, as under Slurm."""
    if device.type != "cuda":
        return device.type
    return str(torch.cuda.get_device_properties(device).uuid)


def check_devices(places: Iterable[Sequence[int | str]], share: bool) -> None:
    """Refuses several workers on one GPU, where `parallel.oversubscribe_gpus` does not allow it. Pure.

    Args:
        places: (rank, host, `device_identity`) of every worker.
        share: `parallel.oversubscribe_gpus`.

    Raises:
        UserError: names every GPU that is shared, its host and its workers.
    """
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
    raise UserError(
        f"{sum(map(len, workers.values()))} workers have {len(workers)} GPU{'s' * (len(workers) > 1)} between them: "
        + "; ".join(lines),
        location="parallel.workers, parallel.oversubscribe_gpus",
        hint="take one worker for each GPU, or set parallel.oversubscribe_gpus to true",
    )
