"""Alignments: the pdf-id of every frame, from a Kaldi alignment dir or from an archive of pdf-ids."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddnn.kaldi.archive import iterate_int_vectors
from ddnn.kaldi.basic_types import open_kaldi_file
from ddnn.kaldi.transition_model import MAX_PDF, read_transition_model
from ddnn.util.arrays import AnyArray, Float64Array, Int32Array, Int64Array
from ddnn.util.errors import DataError
from ddnn.util.files import read_bytes_limited, write_text

MAX_FRAMES = 1e18  # of a pdf: more than all speech ever recorded; sums of counts do not overflow
TRANSITION_DIGEST = "transition_model.sha256"
"""In a directory of log-likelihoods: `transition_digest` of the training alignment; empty if it is not known."""


@dataclass(frozen=True, eq=False)
class Alignments:
    """The pdf-ids of each utterance, int32 (frames,), each from 0 to `num_pdfs` - 1; `path`: of the dir or archive."""

    pdfs: dict[str, Int32Array]
    num_pdfs: int
    path: Path


def read_alignments(path: Path, *, num_pdfs: int | None = None) -> Alignments:
    """Reads an alignment dir (`ali.*.gz` of transition-ids, `final.mdl`) or an archive of pdf-ids. `num_pdfs`: what the
    model must have; with an archive None means the largest pdf-id + 1. DataError: a file is missing or damaged, a job
    is missing, an utterance occurs twice, an id is out of range or a transition-id, or the number of pdfs is not
    `num_pdfs`."""
    if path.is_dir():
        return _read_dir(path, num_pdfs)
    if not path.exists():
        raise DataError("the alignment dir or archive does not exist", location=path, hint="check the path")
    model, valid = path.with_name("final.mdl"), range(MAX_PDF if num_pdfs is None else num_pdfs)
    convert = f"name the directory: {path.parent}; or make pdf-ids of it: ali-to-pdf {model} 'ark:...' ark:pdf.ark"
    if re.fullmatch(r"ali\.[^.]+\.gz", path.name) and path.is_file():
        raise DataError(
            f"{path.name} of an alignment dir holds transition-ids, not pdf-ids", location=path, hint=convert
        )
    hint = "the model has fewer pdfs than the alignment: correct `data.num_pdfs`, or give the alignment of this model"
    if num_pdfs is None and model.is_file():
        with suppress(DataError):  # of another kind: the archive need not have to do with it
            valid = range(read_transition_model(model).num_pdfs)
            hint = f"final.mdl beside it has {len(valid)} pdfs; if these are transition-ids, {convert}"
    pdfs = _read_records([path], "pdf-id", valid, hint)
    if not pdfs:
        raise DataError("there is no alignment in the archive", location=path)
    if num_pdfs is None:
        num_pdfs = 1 + max((int(ids.max()) for ids in pdfs.values() if ids.size), default=0)
    return Alignments(pdfs, num_pdfs, path)


def _read_dir(path: Path, num_pdfs: int | None) -> Alignments:
    model_path = path / "final.mdl"
    model = read_transition_model(model_path)
    if num_pdfs is not None and model.num_pdfs != num_pdfs:
        message = f"expected a model of {num_pdfs} pdfs, found {model.num_pdfs}"
        raise DataError(message, location=model_path, hint="set `data.num_pdfs` to this number, or remove it")
    ids = range(1, model.num_transition_ids + 1)
    hint = f"final.mdl has the transition-ids 1 to {ids[-1]}; the alignment and final.mdl must come from one alignment "
    hint += "run; run the alignment again"
    pdfs = _read_records(job_files(path, "ali.{}.gz"), "transition-id", ids, hint, model.transition_to_pdf)
    if not pdfs:
        raise DataError("there is no alignment in any of ali.*.gz", location=path, hint="run the alignment again")
    return Alignments(pdfs, model.num_pdfs, path)


def read_transition_ids(path: Path, utterances: Container[str]) -> dict[str, Int32Array]:
    """The transition-ids of an alignment dir, int32 (frames,) of each of these utterances that it has. DataError: as
    `read_alignments`; it is an archive of pdf-ids."""
    if not path.is_dir():
        hint = "give the alignment dir that ddnn align or steps/nnet/align.sh has made with the network"
        raise DataError("an alignment dir with transition-ids expected", location=path, hint=hint)
    ids = range(1, read_transition_model(path / "final.mdl").num_transition_ids + 1)
    records = _read_records(job_files(path, "ali.{}.gz"), "transition-id", ids, "align again with this final.mdl")
    return {key: record for key, record in records.items() if key in utterances}


def job_files(path: Path, name: str) -> list[Path]:
    """The files of a dir that jobs have written (`name`: "ali.{}.gz"), in the order of their numbers: exactly those that
    `num_jobs` promises. DataError: there is none, one is missing, or there are more."""
    job = re.compile(re.escape(name).replace(r"\{\}", "([1-9][0-9]{0,8})"))
    try:
        names = [file.name for file in path.iterdir()]
        num_jobs = path / "num_jobs"
        promised = read_bytes_limited(num_jobs, 100).strip() if num_jobs.exists() else None
    except OSError as error:
        raise DataError(f"cannot read the dir: {error.strerror}", location=path) from error
    numbers = sorted(int(match[1]) for entry in names if (match := job.fullmatch(entry)))
    if not numbers:
        hint = (
            "give a dir that Kaldi's script or ddnn has written to its end; alignments may be an archive of pdf-ids too"
        )
        raise DataError(f"there is no {name.format('*')}", location=path, hint=hint)
    expected = numbers[-1]
    if promised is not None:
        if not re.fullmatch(rb"[1-9][0-9]{0,8}", promised):
            raise DataError(f"expected the number of jobs, found {promised!r}", location=num_jobs)
        expected = int(promised)
    gap = min(set(range(1, len(numbers) + 2)).difference(numbers))
    if gap <= expected:
        message = f"{name.format(gap)} is missing: expected {expected} jobs, found {len(numbers)}"
        raise DataError(message, location=path, hint="copy the missing jobs, or run Kaldi's script again")
    if numbers[-1] > expected:
        hint = "remove what an older run left there, or correct num_jobs"
        message = f"num_jobs says {expected}, but there is {name.format(numbers[-1])}"
        raise DataError(message, location=path, hint=hint)
    return [path / name.format(number) for number in numbers]


def _read_records(
    paths: list[Path], kind: str, valid: range, hint: str, id_map: Int32Array | None = None
) -> dict[str, Int32Array]:
    """The vectors of archives, through `id_map`; DataError where an utterance comes twice, or an id is not in
    `valid`."""
    vectors: dict[str, Int32Array] = {}
    for path in paths:
        for key, ids in iterate_int_vectors(path):
            if key in vectors:
                message = f"utterance {key} occurs twice in the alignments"
                raise DataError(message, location=path, hint="utterance ids must be unique; remove one of the two")
            if ids.size and (ids.min() < valid.start or ids.max() >= valid.stop):
                frame = int(np.argmax((ids < valid.start) | (ids >= valid.stop)))
                expected = f"expected a {kind} from {valid.start} to {valid.stop - 1}, found {ids[frame]}"
                raise DataError(f"utterance {key}, frame {frame}: {expected}", location=path, hint=hint)
            vectors[key] = ids if id_map is None else id_map[ids]
    return vectors


def transition_digest(path: Path) -> str | None:
    """`TransitionModel.digest` of the `final.mdl` of an alignment dir; None for an archive of pdf-ids."""
    return read_transition_model(path / "final.mdl").digest if path.is_dir() else None


def check_same_tree(digest: str | None, expected: str | None, location: Path, name: str) -> None:
    """DataError where both digests of transition models are known and differ. `name`: whose pdf-ids are expected."""
    if digest and expected and digest != expected:
        message = f"its final.mdl is of another tree than that of {name}: the same pdf-id means another senone"
        hint = "use alignments, graph and final.mdl of one system: that of the training alignment"
        raise DataError(message, location=location, hint=hint)


def pdf_counts(alignments: Alignments, utterances: Iterable[str] | None = None) -> Int64Array:
    """How many frames each pdf has, int64 (num_pdfs,), over `utterances` (which must be there) or over all."""
    counts, keys = np.zeros(alignments.num_pdfs, np.int64), iter(alignments.pdfs if utterances is None else utterances)
    # Many at once: a bincount of num_pdfs for each utterance would cost more than the counting.
    while chunk := [alignments.pdfs[key] for key in islice(keys, 1024)]:
        counts += np.bincount(np.concatenate(chunk), minlength=alignments.num_pdfs)
    return counts


def kaldi_counts(counts: NDArray[np.integer[Any]]) -> Float64Array:
    """Frame counts of a whole training alignment as those of which Kaldi's recipes make priors: half a frame is added
    to each pdf, so that a pdf that was never seen has a prior too and no path through it is disabled."""
    return counts.astype(np.float64) + 0.5


def pdf_counts_text(counts: AnyArray) -> str:
    """` [ 5 9 0 ]`, as Kaldi's analyze-counts writes counts (nnet1's `ali_train_pdf.counts`)."""
    words = [str(int(value)) if float(value).is_integer() else repr(value) for value in counts.tolist()]
    return f" [ {' '.join(words)} ]\n"


def write_pdf_counts(path: Path, counts: AnyArray) -> None:
    """Writes `pdf_counts_text`, complete or not at all."""
    write_text(path, pdf_counts_text(counts))


def read_pdf_counts(path: Path) -> Float64Array:
    """Reads ` [ 5 9 0 ]`, or a binary Kaldi vector: float64 (num_pdfs,), as a count may be a fraction. DataError: the
    file is missing or no such vector, or a count is negative, NaN or Inf."""
    with open_kaldi_file(path, "a vector of pdf counts") as reader, np.errstate(invalid="ignore"):  # a signaling NaN
        # Text is read in double precision: counts of silence exceed a float's 24 bits.
        counts: Float64Array = reader.float_vector("pdf counts").astype(np.float64)
        if not reader.binary and reader.peek():
            raise reader.error("the end of the file behind the pdf counts")
    invalid = np.flatnonzero(~(np.isfinite(counts) & (counts >= 0)))
    if invalid.size:
        message = f"pdf-id {invalid[0]}: expected a count of frames, found {counts[invalid[0]]}"
        raise DataError(message, location=path, hint="count the pdfs of the training alignment again")
    if not counts.size:
        raise DataError("expected pdf counts, found an empty vector", location=path)
    if counts.max() > MAX_FRAMES:
        raise DataError(f"expected counts of at most {MAX_FRAMES:g} frames, found {counts.max():g}", location=path)
    return counts
