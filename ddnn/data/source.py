"""A data dir with its alignment, planned, and where its frames come from: archives, or a cache file (`data.cache`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ddnn.data.cache_file import CacheDamaged, CacheFile
from ddnn.data.cached import Options, from_cache, open_cached
from ddnn.data.corpus import Corpus, load_planned
from ddnn.data.plan import CorpusPlan, shared_plan
from ddnn.errors import DataError
from ddnn.kaldi.alignments import Alignments, pdf_counts, read_alignments
from ddnn.parallel.exchange import Exchange


@dataclass(frozen=True)
class Source:
    """A planned data dir, of which shards can be loaded.

    Attributes:
        plan: the utterances of all workers.
        num_pdfs: of the alignment's model.
    """

    plan: CorpusPlan
    num_pdfs: int
    options: Options
    alignments: Alignments | None
    cached: CacheFile | None

    def pdf_counts(self) -> NDArray[np.int64]:
        """How many frames each pdf has in the alignments of all planned utterances, (num_pdfs,) int64."""
        if self.cached is not None:
            return np.array(self.cached.index.pdf_counts)
        assert self.alignments is not None
        return pdf_counts(self.alignments, self.plan.utterances)

    def load(self, shard: Sequence[int], exchange: Exchange) -> Corpus:
        """The frames of these utterances of the plan, ascending. All workers call it together, after a barrier.

        Raises:
            DataError: damaged or unfit input, not enough memory. UserError: a loading process died.
        """
        options = self.options
        if self.cached is not None:
            try:
                return from_cache(self.cached, self.plan, shard, exchange)
            except (CacheDamaged, OSError) as error:
                raise DataError(
                    f"the cache file failed while it was read: {error}",
                    where=self.cached.path,
                    mend="start again; leave the cache alone while it is read",
                ) from error
        return load_planned(
            self.plan,
            self.alignments,
            utterances=shard,
            context=options.context,
            pipeline=options.pipeline,
            store_dtype=getattr(torch, options.store),
            progress=options.progress,
            workers_on_host=exchange.local_size,
            processes=options.processes,
            exchange=exchange,
        )


def open_source(data: Path, alignments: Path, options: Options, exchange: Exchange) -> Source:
    """Plans a data dir, from its cache file where there is a whole one, else from its tables and headers. Collective.

    Where there is none yet, the first worker of each host that lacks it makes it. What is wrong with a cache file or
    its directory is a warning; the archives are read then.

    Raises:
        DataError: damaged or unfit input.
    """
    if options.cache is not None:
        found = open_cached(data, alignments, options, exchange)
        if found is not None:
            plan, cached = found
            return Source(plan, cached.footer.pdfs, options, None, cached)
    aligned = read_alignments(alignments, num_pdfs=options.pdfs)
    plan = shared_plan(exchange, data, aligned, allow_pipes=options.allow_pipes, max_missing=options.max_missing)
    return Source(plan, aligned.num_pdfs, options, aligned, None)
