"""How a network is cut into parts for workers that hold it together: into stages of consecutive layers, and each layer
by its outputs into columns. Pure: no worker sends anything here, and all workers find the same cuts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise

import torch
from torch import Tensor

from ddnn.distributed.cost import PASS_FLOP, partition
from ddnn.nn.layer import Layer

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


def columns_of(layers: Sequence[Layer], columns: int, granule: int = 1) -> list[Part]:
    """The parts of a network whose layers are split by their units, one of each column. ValueError: a layer has too few, or
    cannot be split."""
    (parts,) = stages_of(layers, [len(layers)], columns, granule)
    return parts


def stage_sizes(layers: Sequence[Layer], stages: int) -> list[int]:
    """How many consecutive layers each stage has, so that the slowest takes the least time by the operations of their products: a
    pure function of the layers. Layers without parameters follow those below. ValueError: a stage would have no parameters."""
    starts = [i for i, layer in enumerate(layers) if layer.num_parameters]
    if stages > len(starts):
        raise ValueError(f"{stages} found, expected at most {len(starts)}: a stage holds at least one layer")
    bounds = [0, *starts[1:], len(layers)]
    costs = [(2 + (i > 0)) * layer.flop_per_frame + PASS_FLOP * layer.output_dim for i, layer in enumerate(layers)]
    blocks = partition([sum(costs[start:end]) for start, end in pairwise(bounds)], stages)
    return [bounds[block.stop] - bounds[block.start] for block in blocks]


def stages_of(layers: Sequence[Layer], sizes: Sequence[int], columns: int = 1, granule: int = 1) -> list[list[Part]]:
    """The parts by stage and column; `sizes`: how many consecutive layers each stage has. ValueError as `columns_of`."""
    split = _split(layers, columns, granule)
    return [[_part(of_column) for of_column in zip(*islice(split, size), strict=True)] for size in sizes]


def _part(of_column: Iterable[tuple[Layer, list[Interval]]]) -> Part:
    layers, intervals = zip(*of_column, strict=True)
    return Part(layers, tuple(chain.from_iterable(intervals)))


def _split(layers: Sequence[Layer], columns: int, granule: int) -> Iterator[list[tuple[Layer, list[Interval]]]]:
    """Of each layer the parts of the columns, with the intervals of their parameters."""
    first = units = 0
    for number, layer in enumerate(layers, start=1):
        if columns == 1:
            yield [(layer, [(first, first := first + layer.num_parameters)])]
            continue
        units = units if layer.units is None else layer.units
        if not units:
            raise ValueError(
                f"layer {number}, {layer.label}, cannot be split by columns: the input is whole on every worker"
            )
        try:
            cuts = cut(units, columns, granule)
        except ValueError as error:
            which = "outputs" if units == layer.output_dim else "filters"
            raise ValueError(f"{error}: layer {number} has {units} {which}") from error
        yield [(layer.of_units(*each, units), list(_rows(layer, first, *each, units))) for each in cuts]
        first += layer.num_parameters


def _rows(layer: Layer, first: int, start: int, end: int, units: int) -> Iterator[Interval]:
    """Where the parameters of the units from `start` to `end` are, those of the layer beginning at `first`."""
    for about in layer.parameters.values():
        row = torch.Size(about.shape[1:]).numel()
        for _ in range(about.shape[0] // units):
            yield first + start * row, first + end * row
            first += units * row
