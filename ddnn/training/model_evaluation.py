"""A trained model on a data dir and its alignment, as `ddnn evaluate` measures it, with warnings of what makes its figures
doubtful."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ddnn.data.dataset import AcousticDataset, labels_of
from ddnn.data.index import MAX_SKIPPED_FRACTION
from ddnn.data.loading import Corpus, DataConfig
from ddnn.data.pipeline import open_data_dir
from ddnn.data.source import check_not_swapped
from ddnn.distributed.communicator import SingleProcess
from ddnn.kaldi.alignments import Alignments, check_same_tree, read_alignments, read_pdf_counts, transition_digest
from ddnn.nn.acoustic_model import AcousticModel
from ddnn.nn.figures import FRAME_ACCURACY
from ddnn.runs.metrics import iterate_rows
from ddnn.runs.rows import StartRow, no_better_than_baseline
from ddnn.runs.run_dir import load_run
from ddnn.runs.run_status import CV_UTTERANCES, METRICS, PDF_COUNTS, model_digest, run_dir_of
from ddnn.training.data_identity import utterance_digest
from ddnn.training.evaluation import EvalResult, evaluate, of_frequencies
from ddnn.training.memory import frames_memory, require_host_memory
from ddnn.util.errors import DataError, UserError
from ddnn.util.progress import progress_bar
from ddnn.util.system import choose_device

log = logging.getLogger(__name__)

FEWEST_FRAMES, MOST_FRAMES = 1_000, 100_000
"""Fewer say nothing about the kind of features, more say no more."""


def evaluate_parts(
    model: AcousticModel, corpus: AcousticDataset, by: Literal["speaker", "utterance"]
) -> dict[str, EvalResult]:
    """Results by the name of the speaker or utterance. DataError: the data dir has no utt2spk."""
    names = corpus.utterances if by == "utterance" else corpus.speakers
    if names is None:
        raise DataError("utt2spk does not exist; it is needed for results by speaker", hint="use --by utterance")
    members: dict[str, list[int]] = {}
    for u, name in enumerate(names):
        members.setdefault(name, []).append(u)
    parts = ((name, evaluate(model, corpus.subset(utterances))) for name, utterances in members.items())
    return {name: replace(result, precision=None) for name, result in parts}


def evaluate_run(
    run_dir: Path, data: Path, alignments: Path, device: str = "auto", allow_pipes: bool = False,
    by: Literal["speaker", "utterance"] | None = None, transforms: Path | None = None,
) -> EvalResult:  # fmt: skip
    """Loss and frame accuracy of a run's final model, or of a model file, on a data dir and its alignment, also `by` speaker or utterance.
    `transforms`: the Kaldi dir of the data's, if the model was trained with such. DataError for damaged input, another
    feature dimension or number of pdfs than the model's."""
    on = choose_device(device)
    model, digest = load_run(run_dir), model_digest(run_dir)
    check_not_swapped(Corpus(data, alignments, ("--data", "--alignments")))
    labels = read_alignments(alignments)
    most = model.network.output_dim
    # The pdfs of a final.mdl are all that its tree has; an archive of pdf-ids may lack the last ones.
    if labels.num_pdfs > most or (alignments.is_dir() and labels.num_pdfs != most):
        beyond = next((f"; utterance {u} has more" for u, ids in labels.pdfs.items() if (ids >= most).any()), "")
        message = f"the alignment has {labels.num_pdfs} pdfs, the model {most}{beyond}"
        hint = "use an alignment made with the same final.mdl as the training alignment"
        raise DataError(message, location=alignments, hint=hint)
    check_same_tree(transition_digest(alignments), model.transition_digest, alignments, f"the model of {run_dir}")
    corpus = load_for_model(model, data, labels, allow_pipes=allow_pipes, transforms=transforms)
    model, corpus = model.to(on), corpus.to(on)
    parts = {} if by is None else evaluate_parts(model, corpus, by)
    everything = corpus.subset(range(len(corpus.utterances)))
    result = replace(
        evaluate(model, everything), utterances=corpus.counts, parts=parts, model=digest, data=str(data),
        alignments=str(alignments),
    )  # fmt: skip
    _warn_of_training_data(corpus, run_dir_of(run_dir), data)
    found = torch.bincount(labels_of(corpus, everything.indices, torch.device("cpu")), minlength=most)
    _warn_of_doubtful(result, found.double(), run_dir_of(run_dir), data, alignments)
    return result


def _warn_of_training_data(corpus: AcousticDataset, run_dir: Path, data: Path) -> None:
    """By ids and lengths of the utterances, wherever they are stored: all of them, or those that were not held out."""
    digests = {row.train_digest for row in iterate_rows(run_dir / METRICS) if isinstance(row, StartRow)}
    held_out = set[str]()
    with suppress(OSError, UnicodeDecodeError):
        held_out = {*(run_dir / CV_UTTERANCES).read_text().split("\n")}
    utterances = [(name, int(frames)) for name, frames in zip(corpus.utterances, corpus.num_frames, strict=True)]
    trained = [pair for pair in utterances if pair[0] not in held_out]
    if digests & {utterance_digest(utterances), utterance_digest(trained)}:
        message = "%s: the network was trained on %d of these %d utterances: its figures on other data will be worse"
        log.warning(message, data, len(trained), len(utterances))


def _warn_of_other_features(model: AcousticModel, corpus: AcousticDataset, data: Path) -> None:
    """Where the normalized input is not normalized: measured on two corpora of filter banks, 3 of 40 dims are so of the
    other corpus, none of one's own test set. Of a frame itself, without its neighbors."""
    transform = model.transform
    rows = corpus.subset(range(len(corpus.utterances))).indices
    if transform.shift is None or transform.scale is None or len(rows) < FEWEST_FRAMES:
        return
    frames = corpus.features[rows[:: -(-len(rows) // MOST_FRAMES)]].float()
    center = min(range(len(transform.offsets)), key=lambda i: abs(transform.offsets[i]))
    shift, scale = (v.view(len(transform.offsets), -1)[center].cpu() for v in (transform.shift, transform.scale))
    mean, std = (frames.mean(dim=0).cpu() + shift) * scale, frames.std(dim=0).cpu() * scale.abs()
    # A constant dim may have been constant in training.
    unlike = (std > 0) & ((std < 0.5) | (std > 2.0) | (mean.abs() > 1.0))
    if (count := int(unlike.sum())) >= max(2.0, len(unlike) / 20):
        message = (
            "%s: the features seem to be of another kind than those that the network was trained on: %d of %d dims "
            "of the normalized input have a mean beyond 1 or a standard deviation outside 0.5 to 2 (dim %d: %.2f, %.2f)"
        )
        worst = int(unlike.nonzero()[0])
        log.warning(message, data, count, len(unlike), worst, mean[worst], std[worst])


def _warn_of_doubtful(result: EvalResult, counts: Tensor, run_dir: Path, data: Path, alignments: Path) -> None:
    """Where so many utterances are missing that a training would refuse them, and where equal probabilities for all
    pdfs, or the relative frequencies that they have in the run's training alignment, would do as well. `counts`: of the
    evaluated labels, float64 (pdfs,)."""
    total = sum(count for reason, count in result.utterances.items() if reason != "trimmed")
    missing = total - result.utterances["used"]
    if missing > MAX_SKIPPED_FRACTION * total:
        message = (
            "%s: the figures lack %d of %d utterances (%.1f %%): check that features and alignments belong together"
        )
        log.warning(message, data, missing, total, 100 * missing / total)
    if (num_pdfs := len(counts)) > 1 and not result.loss < math.log(num_pdfs):
        message = "%s: the loss of %.4f is not below that of equal probabilities for all %d pdfs, %.4f: the alignments "
        message += "seem to be of another model, or the features of another kind"
        log.warning(message, alignments, result.loss, num_pdfs, math.log(num_pdfs))
    elif num_pdfs > 1 and result.figures[FRAME_ACCURACY.name] < 1:
        trained = counts
        with suppress(DataError):  # a model without its counts, such as an imported one: those of the evaluated labels
            trained = torch.from_numpy(read_pdf_counts(run_dir / PDF_COUNTS))
        best = of_frequencies(trained if len(trained) == num_pdfs else counts, counts)
        if problem := no_better_than_baseline(result.figures, best.figures, where=""):
            log.warning("%s: %s: the alignments or features seem to be of another kind", alignments, problem)


def load_for_model(
    model: AcousticModel,
    data: Path,
    alignments: Alignments | None,
    *,
    allow_pipes: bool,
    transforms: Path | None = None,
    most: int | None = None,
) -> AcousticDataset:
    """A data dir as `model` reads it: its CMVN, deltas, transforms (of this data, a Kaldi dir) and context. Utterances that cannot be used are skipped.
    `most`: as of `load_data_dir`.
    DataError for damaged input, features of other dims than the model's, or no utterance that can be used. UserError:
    `transforms` given to a model without, or not to one that needs them."""
    trained_with = model.features.transforms
    if (transforms is None) != (trained_with is None):
        needs = "no transforms" if trained_with is None else f"Kaldi's transforms ({trained_with.as_text()})"
        hint = "leave out --transforms, or take the model that was trained with them"
        if trained_with is not None:
            hint = "give those of this data by --transforms, such as exp/tri4/decode_test"
        raise UserError(f"the model was trained with {needs}", location="--transforms", hint=hint)
    features, progress = replace(model.features, splice=model.transform.context), progress_bar("loading")
    config = DataConfig(features, allow_pipes=allow_pipes, max_skipped_fraction=None, progress=progress)
    corpus = load_data_dir(data, alignments, config, transforms, most)
    model.check_features(corpus.dim, location=data)
    _warn_of_other_features(model, corpus, data)
    return corpus


def load_data_dir(
    data: Path,
    alignments: Alignments | None,
    config: DataConfig,
    transforms: Path | None = None,
    most: int | None = None,
) -> AcousticDataset:
    """A whole data dir in host memory, or `most` of its utterances, evenly spread. DataError: as `open_data_dir`; not enough memory."""
    source, comm = open_data_dir(data, alignments, config, transforms), SingleProcess()
    total = len(source.index.entries)
    utterances = range(0, total, 1 if most is None else -(-total // most))
    require_host_memory(frames_memory(source, utterances), data, comm, level=logging.DEBUG)  # a process takes much more
    return source.load(utterances, comm)
