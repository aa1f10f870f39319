"""Alignments: the pdf-id of every frame, from a Kaldi alignment dir or from an archive of pdf-ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddnn.errors import DataError
from ddnn.files import read_regular, write_text
from ddnn.kaldi.basic_io import read_whole
from ddnn.kaldi.tables import iterate_int_vectors
from ddnn.kaldi.transitions import MAX_PDF, read_transition_model

MAX_FRAMES = 1e18
"""Of a pdf: more than all speech ever recorded; sums of counts do not overflow."""
_JOB = re.compile(r"ali\.([1-9][0-9]{0,8})\.gz")
_MEND_OTHER_MODEL = "the alignment and final.mdl must come from one alignment run; run the alignment again"


@dataclass(frozen=True, eq=False)
class Alignments:
    """The pdf-ids of each utterance.

    Attributes:
        pdfs: utterance -> int32 (frames,), each from 0 to `num_pdfs` - 1.
        num_pdfs: the number of pdfs of the acoustic model (with an archive: see `read_alignments`).
        path: the alignment dir or archive.
    """

    pdfs: dict[str, NDArray[np.int32]]
    num_pdfs: int
    path: Path


def read_alignments(path: Path, *, num_pdfs: int | None = None) -> Alignments:
    """Reads an alignment dir (`ali.*.gz` of transition-ids, `final.mdl`) or an archive of pdf-ids.

    Args:
        path: a directory, or an archive (binary or text, plain or gzip).
        num_pdfs: what the model must have; with an archive None means the largest pdf-id + 1.

    Raises:
        DataError: a file is missing or damaged, a job is missing, an utterance occurs twice, an id is out of range,
            or the number of pdfs is not `num_pdfs`.
    """
    if path.is_dir():
        return _read_dir(path, num_pdfs)
    return _read_archive(path, num_pdfs)


def _read_dir(path: Path, num_pdfs: int | None) -> Alignments:
    model_path = path / "final.mdl"
    model = read_transition_model(model_path)
    if num_pdfs is not None and model.num_pdfs != num_pdfs:
        what = f"expected a model of {num_pdfs} pdfs, found {model.num_pdfs}"
        raise DataError(what, where=model_path, mend="set `data.pdfs` right, or leave it out")
    to_pdf = model.transition_to_pdf
    largest = len(to_pdf) - 1

    def map_ids(ids: NDArray[np.int32]) -> NDArray[np.int32]:
        return to_pdf[ids]

    pdfs: dict[str, NDArray[np.int32]] = {}
    for job in _find_jobs(path):
        what, mend = "transition-id", f"final.mdl has the transition-ids 1 to {largest}; {_MEND_OTHER_MODEL}"
        _collect(pdfs, iterate_int_vectors(job), job, 1, largest, what, mend, map_ids)
    if not pdfs:
        raise DataError("there is no alignment in any of ali.*.gz", where=path, mend="run the alignment again")
    return Alignments(pdfs, model.num_pdfs, path)


def _find_jobs(path: Path) -> list[Path]:
    """`ali.1.gz`, `ali.2.gz`, ... in the order of their numbers: exactly those that `num_jobs` promises."""
    try:
        names = [entry.name for entry in path.iterdir()]
        num_jobs = path / "num_jobs"
        said = read_regular(num_jobs, 100).strip() if num_jobs.exists() else None
    except OSError as error:
        raise DataError(f"cannot read the alignment dir: {error.strerror}", where=path) from error
    numbers = sorted(int(match[1]) for name in names if (match := _JOB.fullmatch(name)))
    if not numbers:
        mend = "give a Kaldi alignment dir (steps/align_*.sh writes one), or an archive of pdf-ids"
        raise DataError("there is no ali.*.gz in the alignment dir", where=path, mend=mend)
    expected = numbers[-1]
    if said is not None:
        if not re.fullmatch(rb"[1-9][0-9]{0,8}", said):
            raise DataError(f"expected the number of jobs, found {said!r}", where=num_jobs)
        expected = int(said)
    for number in range(1, max(expected, numbers[-1]) + 1):  # ends at the first gap, however large the claim
        if number > expected:
            mend = "remove what an older run left there, or correct num_jobs"
            raise DataError(f"num_jobs says {expected}, but there is ali.{numbers[-1]}.gz", where=path, mend=mend)
        if number > len(numbers) or numbers[number - 1] != number:
            what = f"ali.{number}.gz is missing: expected {expected} jobs, found {len(numbers)}"
            raise DataError(what, where=path, mend="copy the missing jobs, or run the alignment again")
    return [path / f"ali.{number}.gz" for number in numbers]


def _read_archive(path: Path, num_pdfs: int | None) -> Alignments:
    pdfs: dict[str, NDArray[np.int32]] = {}
    largest = (num_pdfs if num_pdfs is not None else MAX_PDF) - 1
    mend = "the model has fewer pdfs than the alignment: set `data.pdfs` right, or give the alignment of this model"
    _collect(pdfs, iterate_int_vectors(path), path, 0, largest, "pdf-id", mend, lambda ids: ids)
    if not pdfs:
        raise DataError("there is no alignment in the archive", where=path)
    if num_pdfs is None:
        num_pdfs = 1 + max((int(ids.max()) for ids in pdfs.values() if ids.size), default=0)
    return Alignments(pdfs, num_pdfs, path)


def _collect(
    pdfs: dict[str, NDArray[np.int32]],
    records: Iterator[tuple[str, NDArray[np.int32]]],
    where: Path,
    smallest: int,
    largest: int,
    kind: str,
    mend: str,
    map_ids: Callable[[NDArray[np.int32]], NDArray[np.int32]],
) -> None:
    """Puts the mapped `records` into `pdfs`; DataError where an utterance is there already or an id out of range."""
    for key, ids in records:
        if key in pdfs:
            what = f"utterance {key} occurs twice in the alignments"
            raise DataError(what, where=where, mend="utterance ids must be unique; remove one of the two")
        if ids.size and (ids.min() < smallest or ids.max() > largest):
            position = int(np.argmax((ids < smallest) | (ids > largest)))
            what = f"utterance {key}, frame {position}: expected a {kind} from {smallest} to {largest}, found "
            what += str(ids[position])
            raise DataError(what, where=where, mend=mend)
        pdfs[key] = map_ids(ids)


def pdf_counts(alignments: Alignments, utterances: Iterable[str] | None = None) -> NDArray[np.int64]:
    """How many frames each pdf has, int64 (num_pdfs,), over `utterances` (which must be there) or over all."""
    counts = np.zeros(alignments.num_pdfs, np.int64)
    keys = alignments.pdfs.keys() if utterances is None else utterances
    # Joined in batches: a bincount of num_pdfs for each utterance would cost more than the counting.
    batch: list[NDArray[np.int32]] = []
    size = 0
    for key in keys:
        batch.append(alignments.pdfs[key])
        size += len(batch[-1])
        if size > 1 << 20:
            counts += np.bincount(np.concatenate(batch), minlength=alignments.num_pdfs)
            batch, size = [], 0
    if batch:
        counts += np.bincount(np.concatenate(batch), minlength=alignments.num_pdfs)
    return counts


def write_pdf_counts(path: Path, counts: NDArray[Any]) -> None:
    """Writes ` [ 5 9 0 ]` as Kaldi's analyze-counts does (nnet1's `ali_train_pdf.counts`), whole or not at all."""
    values = counts.tolist()
    words = [str(int(value)) if float(value).is_integer() else repr(value) for value in values]
    write_text(path, f" [ {' '.join(words)} ]\n")


def read_pdf_counts(path: Path) -> NDArray[np.float64]:
    """Reads ` [ 5 9 0 ]`, or a binary Kaldi vector: float64 (num_pdfs,), as a count may be a fraction.

    Raises:
        DataError: the file is missing or no such vector, or a count is negative, NaN or Inf.
    """
    reader = read_whole(path, "a vector of pdf counts")
    if reader.binary:
        with np.errstate(invalid="ignore"):  # NaN of the kind that signals
            counts = reader.float_vector("pdf counts").astype(np.float64)
    else:  # in double precision: counts of silence exceed a float's 24 bits
        words = reader.data.split()
        if len(words) < 2 or words[0] != b"[" or words[-1] != b"]" or b"_" in reader.data:
            raise reader.error("pdf counts between [ and ]")
        try:
            counts = np.array([float(word) for word in words[1:-1]], np.float64)
        except ValueError as error:
            raise reader.error("pdf counts between [ and ]", str(error)[:100]) from error
    wrong = np.flatnonzero(~(np.isfinite(counts) & (counts >= 0)))
    if wrong.size:
        what = f"pdf-id {wrong[0]}: expected a count of frames, found {counts[wrong[0]]}"
        raise DataError(what, where=path, mend="count the pdfs of the training alignment again")
    if not counts.size:
        raise DataError("expected pdf counts, found an empty vector", where=path)
    if counts.max() > MAX_FRAMES:
        raise DataError(f"expected counts of at most {MAX_FRAMES:g} frames, found {counts.max():g}", where=path)
    return counts
