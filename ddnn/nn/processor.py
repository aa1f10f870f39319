"""What this machine's processor can compute fast, by what Linux says of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ddnn.util.system import ROOT, read_lines


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
