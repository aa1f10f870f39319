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
def widens(device_type: str) -> bool:
    """Whether the device gives a product of bf16 matrices in float32, unrounded."""
    one = torch.ones(16, 16, dtype=torch.bfloat16, device=device_type)
    try:
        torch.ops.aten.mm.dtype_out(one, one, torch.float32, out=torch.empty(16, 16, device=device_type))
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return True
