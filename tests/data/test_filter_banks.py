"""Filter banks on their way into a network, in Kaldi's order: CMVN with variance per speaker, deltas, splice and
normalization equal Kaldi's own numbers, on small data (tests/golden/conv) and on spoken digits (recipes/fsdd)."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import load_all

from ddnn.data.dataset import AcousticDataset, gather, splice_only
from ddnn.data.feature_reader import FeatureConfig
from ddnn.kaldi.archive import MatrixReader, iterate_matrices, read_scp
from ddnn.kaldi.data_dir import add_deltas
from ddnn.kaldi.nnet1 import AddShift, Rescale, Splice
from ddnn.kaldi.nnet1_file import read_nnet1
from ddnn.training.normalization import estimate_normalization


def data_dir(golden: Path, name: str, folder: Path, *, with_stats: bool) -> Path:
    """The static features of tests/golden/conv as a data dir, with Kaldi's CMVN statistics or without."""
    folder.mkdir()
    for source in (golden / "conv").glob(f"{name}.static.*"):
        shutil.copy(source, folder / source.name)
    (folder / f"{name}.static.scp").rename(folder / "feats.scp")
    shutil.copy(golden / "conv/utt2spk", folder)
    if with_stats:
        shutil.copy(golden / f"conv/{name}.cmvn.ark", folder)
        shutil.copy(golden / f"conv/{name}.cmvn.scp", folder / "cmvn.scp")
    return folder


def frames_of(dataset: AcousticDataset, u: int) -> np.ndarray:
    first = int(dataset.offsets[u])
    return dataset.features[first : first + int(dataset.num_frames[u])].numpy()


@pytest.mark.parametrize("with_stats", [True, False], ids=["cmvn.scp", "computed"])
@pytest.mark.parametrize("name", ["bands8", "bands10"])
def test_cmvn_and_deltas_are_kaldis(golden: Path, tmp_path: Path, name: str, with_stats: bool) -> None:
    """The statics are normalized, then the deltas are taken, of the statics also where an utterance begins and ends."""
    data = data_dir(golden, name, tmp_path / "data", with_stats=with_stats)
    found = load_all(data, None, 1, FeatureConfig(cmvn="mean-variance", deltas=2))
    expected = dict(iterate_matrices(golden / f"conv/{name}.feats.ark"))
    assert list(found.utterances) == list(expected) == ["amy-01", "amy-02", "bob-01"]
    for u, utterance in enumerate(found.utterances):
        assert found.dim == 3 * int(name[5:])
        np.testing.assert_allclose(frames_of(found, u), expected[utterance], rtol=0, atol=2e-6)
        # What the delta of the delta would be instead: the edges tell them apart.
        other = add_deltas(expected[utterance][:, : 2 * found.dim // 3], 1)[:, -found.dim // 3 :]
        assert np.abs(other - expected[utterance][:, -found.dim // 3 :])[[0, 1, -2, -1]].max() > 0.05


@pytest.mark.parametrize("name", ["bands8", "bands10"])
def test_splice_and_normalization_are_kaldis(golden: Path, tmp_path: Path, name: str) -> None:
    """Kaldi's feature transform is the statistics of these utterances, spliced."""
    data = data_dir(golden, name, tmp_path / "data", with_stats=True)
    dataset = load_all(data, None, 1, FeatureConfig(cmvn="mean-variance", deltas=2))
    transform = estimate_normalization(splice_only(dataset.dim, 1), dataset, [0, 1, 2])
    splice, shift, scale = read_nnet1(golden / f"conv/{name}.transform.nnet")
    assert isinstance(splice, Splice) and isinstance(shift, AddShift) and isinstance(scale, Rescale)
    assert tuple(splice.offsets) == transform.offsets
    assert transform.shift is not None and transform.scale is not None
    np.testing.assert_allclose(transform.shift.numpy(), shift.shift, rtol=0, atol=2e-6)
    np.testing.assert_allclose(transform.scale.numpy(), scale.scale, rtol=2e-6)
    rows = dataset.rows_of([2])
    found = gather(dataset, transform, rows, torch.empty(len(rows), transform.output_dim))
    kaldis = dict(iterate_matrices(golden / f"conv/{name}.feats.ark"))["bob-01"].astype(np.float64)
    padded = np.concatenate([kaldis[:1], kaldis, kaldis[-1:]])
    spliced = np.concatenate([padded[:-2], padded[1:-1], padded[2:]], axis=1)
    np.testing.assert_allclose(found.numpy(), (spliced + shift.shift) * scale.scale, rtol=0, atol=1e-5)


def test_spoken_digits_are_normalized_as_kaldi_does(fsdd: Path, shared: Path) -> None:
    """Compressed archives of 8 bits, deltas, splice: Kaldi's own feature transform, of all but the held-out speaker."""
    assert b"\0BCM " in (fsdd / "train/feats.ark").read_bytes()[:40]  # compressed, one byte per value
    dataset = load_all(fsdd / "train", None, 5, FeatureConfig(deltas=2))
    held_out = set((fsdd / "cv_speakers.txt").read_text().split())
    kept = [u for u, name in enumerate(dataset.utterances) if name.partition("-")[0] not in held_out]
    assert len(dataset.utterances) - len(kept) == 106 and int(dataset.num_frames.sum()) == 157_593
    transform = estimate_normalization(splice_only(120, 5), dataset, kept)
    _, shift, scale = read_nnet1(shared / "fsdd/kaldi_nnet1/feature_transform.nnet")
    assert isinstance(shift, AddShift) and isinstance(scale, Rescale)
    assert transform.shift is not None and transform.scale is not None
    np.testing.assert_allclose(transform.shift.numpy(), shift.shift, rtol=0, atol=2e-6)
    np.testing.assert_allclose(transform.scale.numpy(), scale.scale, rtol=2e-5)
    with MatrixReader() as reader:
        statics = reader.read(read_scp(fsdd / "train/feats.scp")[7])
    np.testing.assert_array_equal(frames_of(dataset, 7)[:, :40], statics)
