"""One or several corpora as one source of utterances: indexed, from cache files where there are, checked against each
other, and loaded shard by shard. Utterances are those of the first corpus, then those of the second, and so on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch

from ddnn.data.cache import CacheFile, open_or_create_cache
from ddnn.data.dataset import AcousticDataset, frame_labels, make_dataset
from ddnn.data.index import UtteranceIndex, concatenate
from ddnn.data.loading import (
    Corpus,
    DataConfig,
    allocate,
    effective_processes,
    index_corpus,
    load_features,
    warn_of_contradictions,
)
from ddnn.distributed.communicator import Communicator
from ddnn.kaldi.alignments import check_same_tree, read_alignments, transition_digest
from ddnn.kaldi.data_dir import DataDir, read_data_dir
from ddnn.util.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class IndexedCorpus:
    """A corpus whose utterances are known, of which some can be loaded."""

    corpus: Corpus
    index: UtteranceIndex
    cache: CacheFile | None = None


@dataclass(frozen=True, eq=False)
class DataSource:
    """All utterances of one or several corpora, of which shards can be loaded."""

    parts: tuple[IndexedCorpus, ...]
    config: DataConfig

    @cached_property
    def index(self) -> UtteranceIndex:
        """Of all of them."""
        return concatenate([part.index for part in self.parts])

    @property
    def width(self) -> int:
        return self.config.features.width(self.index.dim)

    @property
    def data(self) -> str:
        """The data dirs, for messages."""
        return ", ".join(str(part.corpus.data) for part in self.parts)

    @property
    def alignments(self) -> str:
        """The alignments, for messages."""
        return ", ".join(str(part.corpus.alignments) for part in self.parts)

    @property
    def has_model(self) -> bool:
        """Whether a `final.mdl` says how many pdfs there are; else it is the largest pdf-id + 1."""
        return any(part.corpus.alignments.is_dir() for part in self.parts)

    def transition_digest(self) -> str | None:
        """Of the tree that all its pdf-ids are of; None where only archives of pdf-ids are given."""
        digests = (transition_digest(part.corpus.alignments) for part in self.parts)
        return next((digest for digest in digests if digest is not None), None)

    def check_fits(self, other: IndexedCorpus, name: str, *, for_cv: bool = False) -> None:
        """DataError if another corpus shares utterance ids with these, or has other dims or other pdfs. An archive of pdf-ids
        may lack the last pdfs; those of the training data may not if the other corpus is `for_cv`."""
        data, alignments, ids = other.corpus.data, other.corpus.alignments, set(other.index.utterances)
        for part in self.parts:
            if common := [utterance for utterance in part.index.utterances if utterance in ids]:
                message = f"{len(common)} of {len(ids)} utterances {name} are also in {part.corpus.keys[0]}, "
                message += f"{part.corpus.data}; the first is {common[0]}"
                hint = (
                    "remove them from one of the two, or, if only their ids are the same, give those of one a prefix "
                )
                hint += "before it is aligned (utils/copy_data_dir.sh --utt-prefix)"
                if for_cv:
                    hint += "; or hold out speakers with data.cv.fraction or data.cv.speakers"
                raise DataError(message, location=data, hint=hint)
            if other.index.dim != part.index.dim:
                message = (
                    f"features of {other.index.dim} dims found, {part.index.dim} expected as in {part.corpus.data}"
                )
                raise DataError(message, location=data, hint="compute all features alike")
        check_same_tree(transition_digest(alignments), self.transition_digest(), alignments, self.alignments)
        found, expected = other.index.num_pdfs, max((part.index.num_pdfs for part in self.parts), default=0)
        too_many = found > expected and bool(self.parts) and (for_cv or self.has_model)
        if too_many or (found < expected and alignments.is_dir()):
            kinds = ["final.mdl" if model else "largest pdf-id + 1" for model in (alignments.is_dir(), self.has_model)]
            message = f"{found} pdfs found ({kinds[0]}), {expected} expected as in {self.alignments} ({kinds[1]})"
            hint = "use alignments made with the same final.mdl"
            if not self.has_model and found > expected:
                hint += "; if the training alignment merely lacks its last pdfs, set data.num_pdfs to their number"
            raise DataError(message, location=alignments, hint=hint)

    def load(self, utterances: Sequence[int], comm: Communicator) -> AcousticDataset:
        """Frames and labels of these utterances of the index, ascending: the same, whoever loads the others. `comm`: the
        workers, who all load shards of this index now, and divide the work on CMVN statistics, which are those of all
        utterances of a speaker in the data dir. Collective. The whole of a single cache file is mapped, not loaded.
        DataError: damaged or unsuitable input, not what the index says (such as on another host). UserError: a loading
        process died."""
        features, shard = self.config.features, self.index.subset(utterances)
        cache = self.parts[0].cache if len(self.parts) == 1 else None
        if cache is not None and len(utterances) == len(self.index.entries):
            return make_dataset(shard, *cache.mapped_rows(), features.splice)
        parts = list(self._by_part(utterances))
        sizes = [features.bytes(index.num_frames, index.dim) for _, _, index in parts]
        from_archives = sum(size for size, (part, _, _) in zip(sizes, parts, strict=True) if part.cache is None)
        processes = effective_processes(self.config.processes(comm), from_archives)
        with allocate(sum(sizes), shared=processes > 1) as (memory, target):
            for (part, chosen, index), size, start in zip(parts, sizes, accumulate(sizes, initial=0), strict=False):
                if part.cache is not None:
                    part.cache.copy_rows(chosen, memory.data[start : start + size])
                else:
                    load_features(index, self.config, target, start, processes, comm, part.index.speakers)
        labels = torch.cat([frame_labels(index, features.splice) for _, _, index in parts])
        rows = torch.from_numpy(memory.view(features.dtype).reshape(-1, self.width))
        return make_dataset(shard, rows, labels, features.splice)

    def _by_part(self, utterances: Sequence[int]) -> Iterator[tuple[IndexedCorpus, list[int], UtteranceIndex]]:
        """Each corpus with its own indices of those of `utterances` that it has, and the index of these alone."""
        ends = list(accumulate(len(part.index.entries) for part in self.parts))
        for part, end in zip(self.parts, ends, strict=True):
            first = end - len(part.index.entries)
            chosen = [u - first for u in utterances if first <= u < end]
            yield part, chosen, part.index.subset(chosen)


def open_source(corpora: Sequence[Corpus], config: DataConfig, comm: Communicator) -> DataSource:
    """Indexes corpora, each from its cache file if there is a valid one, else from its tables and headers. A damaged
    cache file is only a warning. Collective. DataError: damaged or unsuitable input, or corpora that do not fit
    together."""
    source = DataSource((), config)
    for corpus in corpora:
        try:
            part = _open_corpus(corpus, config, comm)
        except DataError as error:
            if len(corpora) == 1 or any(key in error.message for key in corpus.keys):
                raise
            message = f"{' with '.join(corpus.keys)}: {error.message}"
            raise DataError(message, location=error.location, hint=error.hint) from error
        log.info("data: %s: %s of %d dims", corpus.data, part.index.size(), config.features.width(part.index.dim))
        source.check_fits(part, f"of {corpus.keys[0]}")
        source = replace(source, parts=(*source.parts, part))
    return source


def check_not_swapped(corpus: Corpus) -> None:
    """DataError, which names the keys, where the alignments are a data dir, or the data dir an alignment dir."""

    def has(path: Path, *names: str) -> str | None:
        with suppress(OSError):  # a folder without permission
            return next((name for name in names if (path / name).exists()), None)
        return None

    data, alignments, (data_key, alignments_key) = corpus.data, corpus.alignments, corpus.keys
    aligned = None
    if data.is_file():
        aligned = "a file"
    elif not has(data, "feats.scp") and (name := has(data, "final.mdl", "ali.1.gz", "num_jobs")):
        aligned = f"an alignment dir (it has {name})"
    if has(alignments, "feats.scp") and not has(alignments, "final.mdl", "ali.1.gz"):
        message = f"{alignments_key} is a data dir (it has feats.scp)"
        message += f" and {data_key} is {aligned}; did you swap them?" if aligned else ", not an alignment dir"
        hint = f"{data_key} takes a Kaldi data dir, {alignments_key} an alignment dir or an archive of pdf-ids"
        raise DataError(message, location=alignments, hint=hint)
    if aligned and not data.is_file():
        raise DataError(f"{data_key} is {aligned}, not a data dir", location=data, hint="give a dir with feats.scp")


def _open_corpus(corpus: Corpus, config: DataConfig, comm: Communicator) -> IndexedCorpus:
    check_not_swapped(corpus)
    directory = read_tables(corpus.data, config)
    index = cache = None
    if config.cache_dir is not None:
        index, cache = open_or_create_cache(directory, corpus, config, comm)
    if index is None:
        aligned = read_alignments(corpus.alignments, num_pdfs=config.num_pdfs)
        index = index_corpus(corpus, directory, aligned, config, comm)
    if corpus.transforms is not None and (applied := config.features.transforms) is not None:
        figures = corpus.data, applied.as_text(), corpus.transforms, index.dim
        log.info("%s: %s of %s applied to features of %d dims", *figures)
    if comm.rank == 0:
        warn_of_contradictions(corpus, config, index)
    return IndexedCorpus(corpus, index, cache)


def read_tables(data: Path, config: DataConfig) -> DataDir:
    """The tables of a data dir, with a log line that counts the shell commands which are about to be run."""
    directory = read_data_dir(data, allow_pipes=config.allow_pipes)
    for name, entries in (("feats.scp", directory.entries), ("cmvn.scp", (directory.cmvn or {}).values())):
        if commands := sum(entry.pipe is not None for entry in entries):
            figures = commands, len(entries), data / name
            log.info("data.allow_pipes: %d of %d entries of %s are shell commands, which are run", *figures)
    return directory
