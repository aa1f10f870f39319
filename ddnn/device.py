"""Where to compute."""

from __future__ import annotations

import torch

from ddnn.errors import UserError


def choose_device(name: str, local_rank: int = 0, threads: int = 1) -> torch.device:
    """The device for a worker: `cpu`, `cuda` (the GPU of its local rank), or `auto` (a GPU where there is one).

    Args:
        threads: CPU threads of this process from here on; more than one is slower on minibatches of a few hundred
            frames.

    Raises:
        UserError: `cuda` where no GPU can be used.
    """
    torch.set_num_threads(threads)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "no GPU can be used: torch finds no CUDA device",
            where="--device cuda",
            mend="install a CUDA build of torch and check nvidia-smi, or use --device cpu",
        )
    return torch.device("cuda", local_rank % torch.cuda.device_count())
