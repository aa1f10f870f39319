"""Matrix products in 32 or 16 bit, summed in float32 in either."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a b into `out`, for b a matrix or a vector; summed in float32.

    Args:
        out: of the type of a and b, or float32 where the device `widens`.
    """
    if out.dtype != a.dtype:
        columns = (1,) if b.dim() == 1 else b.shape[1:]
        torch.ops.aten.mm.dtype_out(a, b.view(-1, *columns), out.dtype, out=out.view(-1, *columns))
    elif b.dim() == 1:
        torch.mv(a, b, out=out)
    else:
        torch.mm(a, b, out=out)


@cache
def widens(device: torch.device) -> bool:
    """Whether the device gives products of bf16 matrices in float32, unrounded: it is tried."""
    ones = torch.ones(257, 16, dtype=torch.bfloat16, device=device)
    matrix, column = torch.empty(16, 16, device=device), torch.empty(16, device=device)
    try:
        product(ones.t(), ones, out=matrix)
        product(ones.t(), ones[:, 0].contiguous(), out=column)
    except RuntimeError:
        return False
    return bool((matrix == 257).all() and (column == 257).all())  # bf16 has 256 and 258
