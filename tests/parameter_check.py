"""Finds whoever writes a network's parameters and does not say so.

The bf16 copy of the parameters is refreshed only after `Network.parameters_changed()`: a writer that forgets the call
makes layers multiply with stale weights. With `install`, which the tests and the scripts that they run under MPI call,
every forward pass, in float32 too, compares the bytes of the parameters with those of the same version before.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from torch import Tensor

from ddnn.nn.network import Network, Workspace


def digest(parameters: Tensor) -> int | None:
    """Of the bytes; None where they cannot be read."""
    return zlib.crc32(parameters.detach().numpy()) if parameters.device.type == "cpu" else None


def check(network: Network) -> None:
    """Raises AssertionError where the parameters are others than when this version was seen first."""
    seen: dict[int, int | None] = network.__dict__.setdefault("_digests", {})
    found = digest(network.parameters)
    if seen.setdefault(network.version, found) != found:
        raise AssertionError("the parameters were written without Network.parameters_changed()")


def checked(refresh: Callable[[Workspace], None]) -> Callable[[Workspace], None]:
    """`Workspace.refresh`, which begins every forward pass, with the check before it."""

    def refresh_and_check(self: Workspace) -> None:
        check(self.network)
        refresh(self)

    return refresh_and_check


def install() -> None:
    """For the rest of this process."""
    Workspace.refresh = checked(Workspace.refresh)  # type: ignore[method-assign]
