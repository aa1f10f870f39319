"""Small Kaldi data dirs for tests: separable classes, whole utterances, real archives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ddnn.kaldi.tables import write_matrices

DIM, PDFS = 4, 3


def labelled_utterances(
    count: int = 12, frames: int = 40, seed: int = 0
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Features (frames, 4) whose mean says their pdf-id of 0..2, and the pdf-ids, per utterance; 4 speakers."""
    rng = np.random.default_rng(seed)
    means = rng.normal(0.0, 2.0, (PDFS, DIM))
    features, labels = {}, {}
    for u in range(count):
        pdfs = np.repeat(rng.integers(0, PDFS, frames // 5), 5).astype(np.int32)
        name = f"spk{u % 4}-utt{u:03d}"
        labels[name] = pdfs
        features[name] = (means[pdfs] + rng.normal(0.0, 1.0, (len(pdfs), DIM))).astype(np.float32)
    return features, labels


def write_data_dir(path: Path, features: Mapping[str, np.ndarray]) -> Path:
    """A data dir with `feats.ark`, `feats.scp`, `utt2spk`."""
    path.mkdir(parents=True, exist_ok=True)
    write_matrices(path / "feats.ark", path / "feats.scp", sorted(features.items()))
    (path / "utt2spk").write_text("".join(f"{name} {name.split('-')[0]}\n" for name in sorted(features)))
    return path


def write_pdfs(path: Path, labels: Mapping[str, np.ndarray]) -> Path:
    """A text archive of pdf-ids."""
    path.write_text("".join(f"{name} {' '.join(map(str, pdfs))}\n" for name, pdfs in sorted(labels.items())))
    return path


def write_recipe(path: Path, data: Path, pdfs: Path, more: str = "") -> Path:
    """A recipe that trains in a second."""
    path.write_text(
        f"data:\n  train: '{data}'\n  alignments: '{pdfs}'\n  splice: 1\n  cv: {{fraction: 0.25}}\n"
        "model: {hidden_layers: 1, hidden_units: 8}\nminibatch: 16\n"
        "schedule: {initial: 0.05, epochs: 3}\n" + more
    )
    return path
