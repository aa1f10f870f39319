"""How networks are cut into stages and columns."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from ddnn.nn.convolution import Convolution, MaxPooling
from ddnn.nn.elementwise import Copy, Dropout, LengthNorm, Scale
from ddnn.nn.layers import Affine, mlp_layers, num_parameters
from ddnn.nn.layout import columns_of, cut, stages_of
from ddnn.nn.network import Network


@pytest.mark.parametrize(
    ("size", "parts", "granule", "widths"),
    [
        (8806, 4, 1, [2202, 2202, 2201, 2201]),
        (8806, 2, 64, [4416, 4390]),
        (50, 3, 1, [17, 17, 16]),
        (50, 50, 1, [1] * 50),
        (130, 3, 64, [64, 64, 2]),
        (7, 1, 64, [7]),
    ],
)
def test_cuts(size: int, parts: int, granule: int, widths: list[int]) -> None:
    cuts = cut(size, parts, granule)
    assert [end - start for start, end in cuts] == widths
    assert [end for _, end in cuts[:-1]] == [start for start, _ in cuts[1:]]
    assert (cuts[0][0], cuts[-1][1]) == (0, size)


def test_every_parameter_is_one_workers() -> None:
    """Random networks, columns and stages: the parts cover the whole vector once, and give it back."""
    generator = random.Random(1)
    for _ in range(200):
        widths = [generator.randint(1, 60) for _ in range(generator.randint(2, 9))]
        layers = tuple(Affine(a, b) for a, b in pairwise(widths))
        columns = generator.randint(1, min(8, *widths[1:]))
        sizes, left = list[int](), len(layers)
        while left:
            sizes.append(generator.randint(1, left))
            left -= sizes[-1]
        whole = torch.arange(num_parameters(layers))
        parts = [part for of_stage in stages_of(layers, sizes, columns) for part in of_stage]
        taken = [part.take(whole) for part in parts]
        assert torch.equal(torch.cat(taken).sort().values, whole)
        back = torch.full_like(whole, -1)
        for part, own in zip(parts, taken, strict=True):
            assert num_parameters(part.layers) == len(own)
            part.put(own, back)
        assert torch.equal(back, whole)


def test_filters_and_what_follows_them() -> None:
    """2 places of 3 filters, of which the second worker has the last; also where a stage begins above them."""
    layers = (Convolution.of_pieces(4, 3, 1, 4, 3), Scale(6), Affine(6, 2))
    whole = torch.arange(num_parameters(layers))
    convolution, above = [6, 7, 8, 11], [12 + 2, 12 + 5, *range(24, 30), 31]
    assert columns_of(layers, 2)[1].take(whole).tolist() == [*convolution, *above]
    (_, lower), (_, upper) = stages_of(layers, [1, 2], 2)
    assert (lower.take(whole).tolist(), upper.take(whole).tolist()) == (convolution, above)
    assert [layer.input_dim for layer in (*lower.layers, *upper.layers)] == [4, 2, 6]


def test_a_part_has_the_rows_of_its_outputs() -> None:
    network = Network(mlp_layers(4, 1, 5, 7))
    network.parameters.copy_(torch.arange(network.num_parameters))
    (_, second) = columns_of(network.layers, 2)
    views = Network(second.layers, second.take(network.parameters)).views
    for own, whole, first in zip(views, network.views, (3, 4), strict=True):
        for name in ("weight", "bias"):
            assert torch.equal(own[name], whole[name][first:])


def test_what_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="64 found, expected at most 50: layer 2 has 50 outputs"):
        columns_of(mlp_layers(440, 1, 64, 50), 64)
    for layer in (Dropout(8, 0.5), LengthNorm(8), Copy(8, (1, 2)), MaxPooling.of_patches(8, 2, 2, 4)):
        with pytest.raises(ValueError, match=f"a {layer.label} layer cannot be split by columns"):
            columns_of((Affine(4, 8), layer), 2)
    with pytest.raises(ValueError, match="layer 1, scale, cannot be split by columns: the input is whole"):
        columns_of((Scale(4), Affine(4, 8)), 2)
    with pytest.raises(ValueError, match="8 found, expected at most 3: layer 1 has 3 filters"):
        columns_of((Convolution.of_pieces(36, 3, 1, 12, 3), Affine(30, 8)), 8)
