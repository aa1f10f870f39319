"""Run by mpirun: each worker loads its shard and leaves what it has in a file of its own. Judged in test_shards.py."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from ddnn.data.corpus import FeaturePipeline, load_planned
from ddnn.data.plan import shared_plan
from ddnn.data.shards import positions, shards
from ddnn.data.split import split_by_fraction
from ddnn.data.transform import normalising, plain_splice
from ddnn.kaldi import tables
from ddnn.kaldi.alignments import read_alignments
from ddnn.kaldi.tables import ScpEntry
from ddnn.parallel.exchange import connect
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
        )
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
        )


def count_headers() -> list[str]:
    """Notes the utterances of which the header is read from now on."""
    seen: list[str] = []
    shape = tables.MatrixReader.shape

    def noted(self: tables.MatrixReader, entry: ScpEntry) -> tuple[int, int]:
        seen.append(entry.key)
        return shape(self, entry)

    tables.MatrixReader.shape = noted  # type: ignore[method-assign]
    return seen


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
