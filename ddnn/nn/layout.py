"""How a network is cut into parts for workers that hold it together: into stages of consecutive layers, and each layer
by its outputs into columns. Pure: no worker sends anything here, and all workers find the same cuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ddnn.nn.layer import Layer
from ddnn.nn.layers import num_parameters

Interval = tuple[int, int]
"""First, and one beyond the last."""


def cut(size: int, parts: int, granule: int = 1) -> list[Interval]:
    """`size` units in `parts` consecutive intervals, as equal as they can be, the first ones larger. All but the last hold a multiple
    of `granule` units, which products of GPUs may want. ValueError: one would be empty."""
    granules = -(-size // granule)
    if parts > granules:
        raise ValueError(f"{parts} found, expected at most {granules}")
    each, more = divmod(granules, parts)
    ends = accumulate((each + (part < more) for part in range(parts)), initial=0)
    return list(pairwise(min(size, granule * end) for end in ends))


@dataclass(frozen=True)
class Part:
    """What one worker holds of a network.

    Attributes:
        layers: its layers, each with its own outputs alone.
        intervals: where its parameters, one interval after another, are in the flat vector of the whole network.
    """

    layers: tuple[Layer, ...]
    intervals: tuple[Interval, ...]

    def take(self, whole: Tensor) -> Tensor:
        """Its flat vector (own parameters,), as a copy, from that of the whole network."""
        return torch.cat([whole[start:end] for start, end in self.intervals])

    def put(self, own: Tensor, whole: Tensor) -> None:
        """whole <- `own`, its flat vector, where that belongs."""
        at = 0
        for start, end in self.intervals:
            whole[start:end].copy_(own[at : at + end - start])
            at += end - start


def columns_of(layers: Sequence[Layer], columns: int, granule: int = 1, first: int = 0) -> list[Part]:
    """The parts of consecutive layers that are split by their outputs, one of each column. `first`: where their parameters
    begin in the flat vector of the whole network. ValueError: a layer has too few outputs, or cannot be split."""
    parts: list[tuple[list[Layer], list[Interval]]] = [([], []) for _ in range(columns)]
    for number, layer in enumerate(layers, start=1):
        try:
            cuts = cut(layer.units, columns, granule)
        except ValueError as error:
            raise ValueError(f"{error}: layer {number} has {layer.units} outputs") from error
        for (of_column, intervals), (start, end) in zip(parts, cuts, strict=True):
            of_column.append(layer.of_units(start, end))
            intervals.extend(_rows(layer, first, start, end))
        first += layer.num_parameters
    return [Part(tuple(of_column), tuple(intervals)) for of_column, intervals in parts]


def _rows(layer: Layer, first: int, start: int, end: int) -> Iterator[Interval]:
    """Where the parameters of the units from `start` to `end` are, those of the layer beginning at `first`."""
    for about in layer.parameters.values():
        row = torch.Size(about.shape[1:]).numel()
        yield first + start * row, first + end * row
        first += about.shape[0] * row


def stages_of(layers: Sequence[Layer], sizes: Sequence[int], columns: int = 1, granule: int = 1) -> list[list[Part]]:
    """The parts by stage and column; `sizes`: how many consecutive layers each stage has."""
    parts, at = list[list[Part]](), 0
    for size in sizes:
        first = num_parameters(layers[:at])
        parts.append(columns_of(layers[at : at + size], columns, granule, first))
        at += size
    return parts
