"""Small Kaldi data dirs for tests: separable classes, whole utterances, real archives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from kaldi_files import write_diag_gmms

from ddnn.data.dataset import AcousticDataset
from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.index import UtteranceIndex, build_index
from ddnn.data.loading import Corpus, DataConfig
from ddnn.data.source import DataSource, IndexedCorpus
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.kaldi.alignments import Alignments
from ddnn.kaldi.archive import write_int_vectors, write_matrices
from ddnn.kaldi.basic_types import BasicTypeWriter
from ddnn.kaldi.data_dir import read_data_dir
from ddnn.kaldi.fst import ARC, Fst, write_fst
from ddnn.kaldi.transition_model import write_left_to_right
from ddnn.training.model_evaluation import load_data_dir

DIM, PDFS = 4, 3


def labelled_utterances(
    count: int = 12, frames: int = 40, seed: int = 0, speaker: str = "spk"
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Features (frames, 4) whose mean says their pdf-id of 0..2, and the pdf-ids, per utterance; 4 speakers, `speaker`
    and a number."""
    rng = np.random.default_rng(seed)
    means = rng.normal(0.0, 2.0, (PDFS, DIM))
    features, labels = {}, {}
    for u in range(count):
        pdfs = np.repeat(rng.integers(0, PDFS, frames // 5), 5).astype(np.int32)
        name = f"{speaker}{u % 4}-utt{u:03d}"
        labels[name] = pdfs
        features[name] = (means[pdfs] + rng.normal(0.0, 1.0, (len(pdfs), DIM))).astype(np.float32)
    return features, labels


def unlike_utterances(count: int = 30, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """As `labelled_utterances`, but of 5 to 200 frames each, and spk0 to spk3 have 1, 2, 4 and 8 of 15 utterances."""
    whole, whole_labels = labelled_utterances(count, 200, seed)
    lengths = np.random.default_rng(seed).integers(5, 201, count)
    lengths[:2] = 5, 200
    features, labels = {}, {}
    for u, (old, frames) in enumerate(zip(whole, lengths, strict=True)):
        name = f"spk{(u % 15 + 1).bit_length() - 1}-utt{u:03d}"
        features[name], labels[name] = whole[old][:frames], whole_labels[old][:frames]
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


def write_model(path: Path, pdfs: Sequence[int] = range(PDFS)) -> Path:
    """A `final.mdl` of phones with one state each, phone p + 1 of `pdfs[p]`: transition-ids 2p + 1 and 2p + 2."""
    count = len(pdfs)
    ones = [np.ones((1, DIM))] * count
    with path.open("wb") as handle:
        triples = np.array([(p + 1, 0, pdf) for p, pdf in enumerate(pdfs)], np.int32)
        write_left_to_right(BasicTypeWriter(handle), count, 1, triples, np.full(count, 0.75))
        write_diag_gmms(handle, ones, ones, [np.ones(1)] * count)
    return path


def write_ali_dir(path: Path, labels: Mapping[str, np.ndarray], pdfs: int = PDFS) -> Path:
    """An alignment dir of one job: transition-ids in `ali.1.gz`, `final.mdl`, `num_jobs`."""
    path.mkdir(parents=True, exist_ok=True)
    write_model(path / "final.mdl", range(pdfs))
    write_int_vectors(path / "ali.1.gz", [(name, 2 * ids + 1) for name, ids in sorted(labels.items())])
    (path / "num_jobs").write_text("1\n")
    return path


def loop_of_words() -> Fst:
    """Words a, b, c in a loop; each is one state of pdf 0, 1, 2, entered by a transition and held by a self-loop."""
    arcs = [(2 * pdf + 2, pdf + 1, 0.5, pdf + 1) for pdf in range(3)]
    offsets = [0, 3]
    for pdf in range(3):
        arcs += [(2 * pdf + 1, 0, 0.1, pdf + 1), (0, 0, 0.0, 0)]
        offsets.append(len(arcs))
    return Fst(0, np.array([0, np.inf, np.inf, np.inf], np.float32), np.array(offsets), np.array(arcs, ARC))


def write_graph_dir(path: Path) -> Path:
    """A graph dir: `HCLG.fst` of `loop_of_words`, `words.txt`."""
    path.mkdir(parents=True, exist_ok=True)
    write_fst(path / "HCLG.fst", loop_of_words())
    (path / "words.txt").write_text("<eps> 0\na 1\nb 2\nc 3\n")
    return path


def write_matrix(path: Path, values: np.ndarray) -> Path:
    """A matrix alone in a file, binary, as Kaldi's final.mat."""
    with path.open("wb") as handle:
        writer = BasicTypeWriter(handle)
        writer.marker()
        writer.float_matrix(values)
    return path


def write_transforms(
    path: Path, keys: Sequence[str] = ("spk0", "spk1", "spk2", "spk3"), *, rows: int = DIM + 1, jobs: int = 2
) -> Path:
    """A Kaldi dir with transforms of `DIM` dims: final.mat of `rows` rows over 1+1+2 frames, the same for all dirs, with
    its splice_opts, and the trans.* of these speakers or utterances in `jobs` jobs; without `rows` no final.mat."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "cmvn_opts").write_text("--norm-means=false\n")
    if rows:
        write_matrix(path / "final.mat", np.random.default_rng(7).normal(size=(rows, 4 * DIM)).astype(np.float32))
        (path / "splice_opts").write_text("--left-context=1 --right-context=2\n")
    write_trans(path, keys, rows or 3 * DIM, jobs)
    return path


def write_trans(path: Path, keys: Sequence[str], dim: int, jobs: int = 1) -> None:
    """trans.1, trans.2, ... of `jobs` jobs, and num_jobs; those of a key are always the same."""
    path.mkdir(parents=True, exist_ok=True)
    for job in range(jobs):
        made = []
        for key in keys[job::jobs]:
            rng = np.random.default_rng(list(key.encode()))
            linear = np.eye(dim) + rng.normal(0.0, 0.3, (dim, dim))
            made.append((key, np.column_stack([linear, rng.normal(size=dim)]).astype(np.float32)))
        write_matrices(path / f"trans.{job + 1}", path / "scp", made)
    (path / "scp").unlink(missing_ok=True)
    (path / "num_jobs").write_text(f"{jobs}\n")


def write_recipe(path: Path, data: Path, pdfs: Path, more: str = "") -> Path:
    """A recipe that trains in a second."""
    path.write_text(
        f"data:\n  train: '{data}'\n  alignments: '{pdfs}'\n  splice: 1\n  cv: {{fraction: 0.25}}\n"
        "model: {hidden_layers: 1, hidden_units: 8}\nminibatch_size: 16\n"
        "schedule: {initial_learning_rate: 0.05, max_epochs: 3}\n" + more
    )
    return path


def load_all(
    data: Path,
    alignments: Alignments | None,
    splice: int = 2,
    features: FeatureConfig = FeatureConfig(),  # noqa: B008 (frozen)
    transforms: Path | None = None,
    **config: Any,
) -> AcousticDataset:
    """A whole data dir; `config` as of `DataConfig`."""
    return load_data_dir(data, alignments, DataConfig(replace(features, splice=splice), **config), transforms)


def load_dataset(
    index: UtteranceIndex,
    config: DataConfig,
    utterances: Sequence[int] | None = None,
    comm: Communicator | None = None,
) -> AcousticDataset:
    """Indexed utterances, all or some, from their archives."""
    path, comm = index.directory.path, comm or SingleProcess()
    source = DataSource((IndexedCorpus(Corpus(path, path), index),), config)
    return source.load(range(len(index.entries)) if utterances is None else utterances, comm)


def index_of(data: Path, alignments: Alignments | None, max_skipped_fraction: float | None = 0.05) -> UtteranceIndex:
    """What one worker finds in a data dir."""
    return build_index(read_data_dir(data), alignments, max_skipped_fraction=max_skipped_fraction)
