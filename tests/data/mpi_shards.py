"""Run by mpirun: each worker loads its shard and leaves what it has in a file of its own. Judged in test_shards.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from ddnn.data.cached import Options
from ddnn.data.corpus import FeaturePipeline, load_planned
from ddnn.data.plan import shared_plan
from ddnn.data.shards import positions, shards
from ddnn.data.source import open_source
from ddnn.data.split import split_by_fraction
from ddnn.data.transform import normalising, plain_splice
from ddnn.kaldi import tables
from ddnn.kaldi.alignments import read_alignments
from ddnn.kaldi.tables import ScpEntry
from ddnn.parallel.connect import connect
from ddnn.parallel.failures import all_stop_on_error

CONTEXT, SEED, FRACTION = 2, 3, 0.3
PIPELINE = FeaturePipeline("mean-variance", 1)


def main(data: Path, pdfs: Path, out: Path) -> None:
    exchange = connect()
    headers = count_headers()
    with all_stop_on_error(exchange):
        alignments = read_alignments(pdfs)
        plan = shared_plan(exchange, data, alignments, max_missing=0.5)
        train, cv = split_by_fraction(plan, FRACTION, SEED)
        mine = sorted(
            shards(plan.num_frames, train, exchange.size)[exchange.rank]
            + shards(plan.num_frames, cv, exchange.size)[exchange.rank]
        )
        exchange.barrier()
        corpus = load_planned(
            plan,
            alignments,
            utterances=mine,
            context=CONTEXT,
            pipeline=PIPELINE,
            workers_on_host=exchange.local_size,
            exchange=exchange,
        )
        read = count_frames()
        options = Options(CONTEXT, PIPELINE, "float32", max_missing=0.5, cache=out / "cache")
        open_source(data, pdfs, options, exchange)
        made = len(read)
        source = open_source(data, pdfs, options, exchange)
        cached = source.load(mine, exchange)
        splice = plain_splice(corpus.dim, CONTEXT)
        transform = normalising(splice, corpus, positions(mine, train), exchange)
        # Utterances of the first worker alone: the others have nothing to add.
        of_one = normalising(splice, corpus, [0, 1] if exchange.rank == 0 else [], exchange)
        assert transform.shift is not None and transform.scale is not None
        assert of_one.shift is not None
        np.savez(
            out / f"{exchange.rank}.npz",
            headers=len(headers),
            names=np.array(corpus.utterances),
            planned=np.array(plan.utterances),
            speakers=np.array(corpus.speakers),
            lengths=plan.num_frames,
            counts=np.array(list(plan.counts.values())),
            frames=[len(corpus.rows_of([u])) for u in range(len(mine))],
            store=corpus.store.numpy(),
            labels=corpus.labels.numpy(),
            shift=transform.shift.numpy(),
            scale=transform.scale.numpy(),
            shift_of_one=of_one.shift.numpy(),
            cached_store=cached.store.numpy(),
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
    plain = getattr(tables.MatrixReader, method)

    def noted(self: tables.MatrixReader, entry: ScpEntry, *more: Any) -> Any:
        seen.append(entry.key)
        return plain(self, entry, *more)

    setattr(tables.MatrixReader, method, noted)
    return seen


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
