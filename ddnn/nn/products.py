"""Matrix products, and what this machine's processor can compute fast, by what Linux says of it."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ddnn.util.system import ROOT, read_lines

aten = torch.ops.aten

ONEDNN_FLOP = 1e7
"""Operations from which a product may be oneDNN's: a call of it takes 12 us more."""


class Processor(NamedTuple):
    """The first processor by /proc/cpuinfo; empty or 0 where that does not name something, as on ARM."""

    vendor: str  # GenuineIntel, AuthenticAMD
    family: int
    model: int
    flags: frozenset[str]


def processor(root: Path = ROOT) -> Processor:
    lines = [line.partition(":") for line in read_lines(root / "proc/cpuinfo")]
    fields = {name.strip(): value.strip() for name, _, value in reversed(lines)}  # the first processor's remain
    family, model = (int(text) if (text := fields.get(name, "")).isdecimal() else 0 for name in ("cpu family", "model"))
    return Processor(fields.get("vendor_id", ""), family, model, frozenset(fields.get("flags", "").split()))


def onednn_isa_limit() -> str | None:
    """The assignment in the environment that keeps oneDNN, PyTorch's library of products, from instructions that the
    processor has; None if there is none."""
    name = next((name for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA") if name in os.environ), None)
    limit = "ALL" if name is None else os.environ[name]
    return None if limit.upper() in ("ALL", "DEFAULT") else f"ONEDNN_MAX_CPU_ISA={limit}"


def matmul_out(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a b into `out`, for b a matrix or a vector; summed in float32. `out` is of the type of a and b, or float32 where
    `supports_float32_output(device)`. By oneDNN where `onednn_from` says so."""
    if out.dtype != a.dtype:
        columns = (1,) if b.dim() == 1 else b.shape[1:]
        aten.mm.dtype_out(a, b.view(-1, *columns), out.dtype, out=out.view(-1, *columns))
    elif b.dim() == 1:
        torch.mv(a, b, out=out)
    elif 2 * a.numel() * b.shape[1] >= onednn_from(a.dtype, a.device):
        out.copy_(onednn_product(a, b.t()))
    else:
        torch.mm(a, b, out=out)


def affine_out(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """out <- x W^T + b, as `matmul_out`."""
    if 2 * x.numel() * len(weight) >= onednn_from(x.dtype, x.device):
        out.copy_(onednn_product(x, weight, bias))
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T, plus b if there is one, by the operation that torch.compile uses for it. Plain: torch.mm."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, dense(weight), bias, "none", [], "")
    return made


def dense(matrix: Tensor) -> Tensor:
    """The matrix without gaps between its rows, or between its columns where these are contiguous: with gaps, as all
    columns but the last have, oneDNN multiplies 1000 times slower. A copy where there are any."""
    return matrix.contiguous() if matrix.stride(1) == 1 else matrix.t().contiguous().t()


@cache
def onednn_from(dtype: torch.dtype, device: torch.device, cpu: Processor | None = None) -> float:
    """The operations from which a product is `onednn_product`: `ONEDNN_FLOP` in float32 on an AMD processor with AVX-512,
    which MKL's, torch.mm's, leave unused there, if it is right, which is tried; else infinity. Nothing is timed."""
    if dtype != torch.float32 or device.type != "cpu" or onednn_isa_limit() is not None:
        return math.inf
    cpu = cpu or processor()
    if cpu.vendor != "AuthenticAMD" or "avx512f" not in cpu.flags:
        return math.inf
    x, weight, bias = (
        torch.arange(7.0 * 70).sin().view(70, 7).t(),
        torch.arange(70.0 * 40).cos().view(70, 40),
        torch.ones(40),
    )
    try:
        found = onednn_product(x, weight.t(), bias)
    except (AttributeError, RuntimeError):
        return math.inf
    expected = x.double() @ weight.double() + 1.0
    return ONEDNN_FLOP if torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5) else math.inf


@cache
def supports_float32_output(device: torch.device) -> bool:
    """Whether the device gives products of bf16 matrices in float32, unrounded: it is tried."""
    ones = torch.ones(257, 16, dtype=torch.bfloat16, device=device)
    matrix, column = torch.empty(16, 16, device=device), torch.empty(16, device=device)
    try:
        matmul_out(ones.t(), ones, out=matrix)
        matmul_out(ones.t(), ones[:, 0].contiguous(), out=column)
    except RuntimeError:
        return False
    return bool((matrix == 257).all() and (column == 257).all())  # bf16 has 256 and 258
