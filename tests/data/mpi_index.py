"""Run by mpirun: each worker loads its shard and leaves what it has in a file of its own. Checked in test_index.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from corpora import load_dataset

from ddnn.data.dataset import splice_only
from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.index import assign_shards, build_index, hold_out_fraction, local_positions
from ddnn.data.loading import Corpus, DataConfig
from ddnn.data.source import open_source
from ddnn.distributed.failures import abort_all_on_error
from ddnn.distributed.mpi import init_communicator
from ddnn.kaldi import archive
from ddnn.kaldi.alignments import read_alignments
from ddnn.kaldi.archive import ScpEntry
from ddnn.kaldi.data_dir import read_data_dir
from ddnn.training.normalization import estimate_normalization

SEED, FRACTION = 3, 0.3
FEATURES = FeatureConfig("mean-variance", 1, 2)


def main(data: Path, pdfs: Path, out: Path) -> None:
    comm = init_communicator()
    headers = count_headers()
    with abort_all_on_error(comm):
        alignments = read_alignments(pdfs)
        plan = build_index(read_data_dir(data), alignments, comm, max_skipped_fraction=0.5)
        train, cv = hold_out_fraction(plan, FRACTION, SEED)
        mine = sorted(
            assign_shards(plan.num_frames, train, comm.world_size)[comm.rank]
            + assign_shards(plan.num_frames, cv, comm.world_size)[comm.rank]
        )
        comm.barrier()
        corpus = load_dataset(plan, DataConfig(FEATURES), utterances=mine, comm=comm)
        read = count_frames()
        config = DataConfig(FEATURES, max_skipped_fraction=0.5, cache_dir=out / "cache")
        open_source([Corpus(data, pdfs)], config, comm)
        made = len(read)
        source = open_source([Corpus(data, pdfs)], config, comm)
        cached = source.load(mine, comm)
        splice = splice_only(corpus.dim, FEATURES.splice)
        transform = estimate_normalization(splice, corpus, local_positions(mine, train), comm)
        # Utterances of the first worker alone: the others have nothing to add.
        of_one = estimate_normalization(splice, corpus, [0, 1] if comm.rank == 0 else [], comm)
        assert transform.shift is not None and transform.scale is not None
        assert of_one.shift is not None
        np.savez(
            out / f"{comm.rank}.npz",
            headers=len(headers),
            names=np.array(corpus.utterances),
            planned=np.array(plan.utterances),
            speakers=np.array(corpus.speakers),
            lengths=plan.num_frames,
            counts=np.array(list(plan.counts.values())),
            frames=[len(corpus.rows_of([u])) for u in range(len(mine))],
            store=corpus.features.numpy(),
            labels=corpus.labels.numpy(),
            shift=transform.shift.numpy(),
            scale=transform.scale.numpy(),
            shift_of_one=of_one.shift.numpy(),
            cached_store=cached.features.numpy(),
            cached_labels=cached.labels.numpy(),
            read=[made, len(read) - made],
            files=len(list((out / "cache").iterdir())),
        )


def count_headers() -> list[str]:
    """Notes the utterances of which the header is read from now on."""
    return count("shape")


def count_frames() -> list[str]:
    """Notes the utterances of which the frames are read from now on."""
    return count("read")


def count(method: str) -> list[str]:
    seen: list[str] = []
    plain = getattr(archive.MatrixReader, method)

    def noted(self: archive.MatrixReader, entry: ScpEntry, *more: Any) -> Any:
        seen.append(entry.key)
        return plain(self, entry, *more)

    setattr(archive.MatrixReader, method, noted)
    return seen


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
