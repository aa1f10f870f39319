"""nnet1 components that ddnn's networks cannot be are refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kaldi_files import nnet1_bytes

from ddnn.kaldi.nnet1 import (
    Activation,
    AddShift,
    AffineTransform,
    Component,
    ParallelComponent,
    RbmComponent,
    Rescale,
    Splice,
)
from ddnn.kaldi.nnet1_file import read_nnet1, write_nnet1
from ddnn.nn.acoustic_model import from_nnet1, to_nnet1
from ddnn.util.errors import DataError


def affine(outputs: int, inputs: int) -> AffineTransform:
    return AffineTransform(np.ones((outputs, inputs), np.float32), np.zeros(outputs, np.float32))


def in_parallel(*components: Component) -> Component:
    return ParallelComponent((components,))


RBM = RbmComponent("bern", "bern", np.ones((6, 6), np.float32), *np.ones((2, 6), np.float32))
SHIFT, SCALE = AddShift(np.ones(6, np.float32)), Rescale(np.ones(6, np.float32))


@pytest.mark.parametrize(
    ("network", "front", "said"),
    [
        ([], [], "no layers"),
        ([Splice((0, 1), 3), affine(2, 6)], [], "component 1 is Splice, which is no layer"),
        ([Activation("softmax", 6)], [], "component 1, activation 'softmax', expected one of sigmoid, tanh, relu"),
        ([SHIFT, in_parallel(RBM, affine(2, 6))], [], "component 2, network 1, component 1 is RbmComponent"),
        (
            [in_parallel(in_parallel(affine(2, 6), Activation("softmax", 2)))],
            [],
            "component 1, network 1, component 1, network 0: softmax, which only the last layer of all can be",
        ),
        ([affine(4, 6), Activation("softmax", 4), affine(2, 4)], [], "component 2 is a softmax that is not the last"),
        ([Splice((0,), 6), affine(4, 6)], [], "--feature-transform"),
        ([affine(4, 6)], [SCALE, SHIFT], "Rescale, AddShift"),
        ([affine(4, 6)], [Splice((0, 1), 2)], "gives 4 dims, the network reads 6"),
        ([affine(4, 6)], [affine(6, 6)], "one splice, shift and rescale"),
    ],
)
def test_what_does_not_fit_is_refused(network: list[Component], front: list[Component], said: str) -> None:
    with pytest.raises(DataError) as caught:
        from_nnet1(tuple(network), tuple(front), Path("some.nnet"))
    assert said in str(caught.value)
    assert "some.nnet" in str(caught.value)


@pytest.mark.parametrize("name", ["init", "trained_a", "trained_c"])
def test_import_then_export_changes_nothing(golden: Path, tmp_path: Path, name: str) -> None:
    source = golden / f"nnet1/{name}.nnet"
    model = from_nnet1(read_nnet1(source), read_nnet1(golden / "nnet1/feature_transform.nnet"), source)
    network, front = to_nnet1(model)
    write_nnet1(tmp_path / "network", network)
    (tmp_path / "front").write_bytes(nnet1_bytes(front, binary=False))  # Kaldi left this one as text
    assert (tmp_path / "network").read_bytes() == source.read_bytes()
    assert (tmp_path / "front").read_bytes() == (golden / "nnet1/feature_transform.nnet").read_bytes()


def test_kaldis_an4_network_is_carried_through(kaldi_nnet1: Path, tmp_path: Path) -> None:
    source, transform = kaldi_nnet1 / "rbm_ce.nnet", kaldi_nnet1 / "feature_transform.nnet"
    network, front = to_nnet1(from_nnet1(read_nnet1(source), read_nnet1(transform), source))
    write_nnet1(tmp_path / "network", network)
    (tmp_path / "front").write_bytes(nnet1_bytes(front, binary=False))  # Kaldi left this one as text
    assert (tmp_path / "network").read_bytes() == source.read_bytes()
    assert (tmp_path / "front").read_bytes() == transform.read_bytes()
