"""`ddnn decode-prep`: what a Kaldi decoder reads, after nnet1's nnet-forward and steps/nnet/decode.sh. `ddnn export`
and `ddnn import-nnet1`: run dirs to and from Kaldi's nnet1 files."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.data.batches import EVAL_BATCH
from ddnn.data.dataset import AcousticDataset
from ddnn.kaldi.alignments import TRANSITION_DIGEST, read_pdf_counts, write_pdf_counts
from ddnn.kaldi.archive import write_matrices, write_records
from ddnn.kaldi.nnet1_file import read_nnet1, write_nnet1
from ddnn.kaldi.transforms import NNET_OPTIONS
from ddnn.nn.acoustic_model import (
    NNET1_FEATURES,
    NNET1_FRONTS,
    AcousticModel,
    features_config,
    find_nnet1,
    from_nnet1,
    model_config,
    model_from_config,
    read_nnet1_dir,
    save_model,
    to_nnet1,
    transform_tensors,
)
from ddnn.nn.layers import num_parameters
from ddnn.nn.network import Network, Workspace
from ddnn.runs.run_dir import load_run
from ddnn.runs.run_status import FINAL, MODEL_DIGEST, PDF_COUNTS, check_run_dir, model_digest, run_dir_of
from ddnn.training.evaluation import forward_batches, load_for_model
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import atomic_write, ensure_directory, read_bytes_limited, write_text
from ddnn.util.pool import worker_pool
from ddnn.util.process import closed_at_start
from ddnn.util.progress import progress_bar
from ddnn.util.system import choose_device
from ddnn.util.text import binary_output, environment, plural

log = logging.getLogger(__name__)

PRIOR_CUTOFF = 1e-10  # pdfs of a smaller relative frequency are disabled (nnet1's --prior-cutoff)

DISABLED_LOG_PRIOR = math.sqrt(float(np.finfo(np.float32).max))
"""What nnet1 takes for their log prior: their log-likelihood becomes about -1.8e19 and they never win."""


def log_priors(counts: np.ndarray, prior_scale: float = 1.0) -> np.ndarray:
    """What is subtracted from pre-softmax activations: prior_scale * log(count / total), float64 (pdfs,). Pdfs with
    relative frequency under 1e-10 have sqrt(FLT_MAX) for log(count / total) (nnet1's PdfPrior)."""
    relative = counts / counts.sum()
    seen = relative > PRIOR_CUTOFF
    priors = np.full(len(counts), DISABLED_LOG_PRIOR)
    priors[seen] = np.log(relative[seen])
    return prior_scale * priors


Kind = Literal["log-likelihoods", "posteriors", "log-posteriors", "activations"]

FILES = {
    "log-likelihoods": "loglikes", "posteriors": "posteriors", "log-posteriors": "posteriors",
    "activations": "activations",
}  # fmt: skip
"""Names of the archive and its scp, by kind, without their endings."""

_MAKE: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "log-likelihoods": lambda outputs, priors: outputs if priors is None else outputs - priors,
    "posteriors": lambda outputs, _: outputs.softmax(1),
    "log-posteriors": lambda outputs, _: outputs.log_softmax(1),
    "activations": lambda outputs, _: outputs.clone(),
}
"""From the network's outputs (n, pdfs), pre-softmax, to what is written of them, in other memory."""


class Scorer:
    """What decoders read of an utterance. `priors`: of log-likelihoods, as of `log_priors`, float32 (pdfs,), on the
    model's device. `frames`: of the longest utterance; blocks of 1024 frames at most are computed at once."""

    def __init__(self, model: AcousticModel, kind: Kind, priors: Tensor | None, frames: int) -> None:
        self.model, self.kind, self.priors = model, kind, priors
        self.workspace = Workspace(model.network, max(1, min(EVAL_BATCH, frames)))

    def __call__(self, dataset: AcousticDataset, u: int = 0) -> NDArray[np.float32]:
        """(frames, pdfs) float32 of the utterance with this index. DataError: they are not finite."""
        blocks = forward_batches(self.model, dataset.subset([u]), self.workspace)
        parts = [_MAKE[self.kind](outputs, self.priors).cpu().numpy() for _, outputs in blocks]
        scores: NDArray[np.float32] = np.concatenate(parts)
        if not np.isfinite(scores).all():
            message = f"utterance {dataset.utterances[u]}: the network's output is not finite"
            raise DataError(message, hint="retrain: the model has diverged")
        return scores


def compute_scores(
    model: AcousticModel, dataset: AcousticDataset, kind: Kind, priors: Tensor | None = None, jobs: int = 1
) -> Generator[tuple[str, NDArray[np.float32]], None, None]:
    """Per utterance, in order, its id and what `Scorer` makes of it; by several processes the same bits."""
    longest, names = int(dataset.num_frames.max()), progress_bar(kind)(dataset.utterances)
    if jobs == 1:
        scorer = Scorer(model, kind, priors, longest)
        yield from ((name, scorer(dataset, u)) for u, name in enumerate(names))
        return
    tensors = {"parameters": model.network.parameters, **transform_tensors(model)}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    log_prior = None if priors is None else priors.numpy()
    processes = min(jobs, len(dataset.utterances))
    with worker_pool(processes, "a process of --jobs", "--jobs 1") as pool:
        pool.initialize(_start_scoring, model_config(model), arrays, kind, log_prior, longest)
        tasks = ((_score, name, _rows(dataset, u)) for u, name in enumerate(dataset.utterances))
        yield from zip(names, pool.run(tasks), strict=True)


_scorer: list[Scorer] = []  # of a process of --jobs


def _start_scoring(
    config: Any, arrays: dict[str, NDArray[np.float32]], kind: Kind, priors: NDArray[np.float32] | None, longest: int,
) -> None:  # fmt: skip
    choose_device("cpu")
    model = model_from_config(config, {name: torch.from_numpy(array) for name, array in arrays.items()}, Path("model"))
    _scorer[:] = [Scorer(model, kind, None if priors is None else torch.from_numpy(priors), longest)]


def _score(name: str, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    scorer = _scorer[0]
    return scorer(one_utterance(name, rows, scorer.model.transform.context))


def _rows(dataset: AcousticDataset, u: int) -> NDArray[np.float32]:
    """The features of an utterance with the repeated edges."""
    first, frames, context = int(dataset.offsets[u]), int(dataset.num_frames[u]), dataset.context
    rows: NDArray[np.float32] = dataset.features[first - context : first + frames + context].numpy()
    return rows


def one_utterance(name: str, rows: NDArray[np.float32], context: int) -> AcousticDataset:
    """A dataset of one utterance; `rows`: its features with `context` repeated edge frames on each side."""
    labels = torch.full((len(rows),), -1, dtype=torch.int32)
    lengths = np.array([context]), np.array([len(rows) - 2 * context])
    return AcousticDataset(torch.from_numpy(rows), labels, (name,), None, *lengths, context)


def _holds(path: Path, data: bytes) -> bool:
    """Whether a file holds these bytes and no more."""
    try:
        return read_bytes_limited(path, len(data)) == data
    except OSError:
        return False


def read_counts(run_dir: Path, num_pdfs: int) -> tuple[np.ndarray, bytes]:
    """The pdf counts of a run, and their file byte for byte: it may be text or binary."""
    path = run_dir / PDF_COUNTS
    if not path.exists():
        hint = "import the network again with --pdf-counts, or copy the counts of its training alignment there"
        raise DataError(f"there is no {PDF_COUNTS}, of which the priors are made", location=run_dir, hint=hint)
    counts = read_pdf_counts(path)
    if len(counts) != num_pdfs:
        hint = "use the counts of the alignment that the model was trained on"
        raise DataError(f"{PDF_COUNTS} has {len(counts)} pdfs, the model {num_pdfs}", location=run_dir, hint=hint)
    if not counts.sum() > 0.0:
        raise DataError("no pdf has any frame", location=path, hint="use the counts of the training alignment")
    return counts, path.read_bytes()


def prepare_decoding(
    run_dir: Path, data: Path, out: Path, device: str = "auto", prior_scale: float | None = None,
    allow_pipes: bool = False, transforms: Path | None = None, *, kind: Kind = "log-likelihoods", layer: int | None = None, jobs: int = 1,
    compress: int = 0,
) -> None:  # fmt: skip
    """Writes what a network computes of each frame of a data dir to `out`, which must not hold any yet: of kind
    log-likelihoods `loglikes.ark`, `loglikes.scp`, the counts, the model's digest and a `decode.sh`, else archive and scp alone. Of `-` the
    archive goes to standard output. `compress`: 0, or the method of Kaldi's copy-feats. UserError: damaged input;
    another number of pdfs in the counts, or of dims in the features, than in the model; options that do not fit."""
    _check_options(prior_scale, kind, layer)
    target = choose_device(device)
    if jobs > 1 and target.type != "cpu":
        raise UserError("only one process computes on a GPU", location="--jobs", hint="add --device cpu, or remove it")
    model, digest, run_dir = load_run(run_dir), model_digest(run_dir), run_dir_of(run_dir)
    priors, beside = None, dict[str, bytes]()
    if kind == "log-likelihoods":
        counts, beside[PDF_COUNTS] = read_counts(run_dir, model.network.output_dim)
        _check_unseen(counts, run_dir, compress)
        priors = torch.from_numpy(log_priors(counts, 1.0 if prior_scale is None else prior_scale)).float().to(target)
        of_model = f"{digest or ''} {os.path.relpath(run_dir.resolve(), out.resolve())}\n"
        beside |= {**_scripts(model), MODEL_DIGEST: os.fsencode(of_model)}
    if layer is not None:
        model = _lower_layers(model, layer)
    to_stdout, name = str(out) == "-", FILES[kind]
    _check_free_output(out, f"{name}.scp", kind, beside)
    dataset = load_for_model(model, data, None, allow_pipes=allow_pipes, transforms=transforms)
    with closing(compute_scores(model.to(target), dataset.to(target), kind, priors, jobs)) as scores:
        if to_stdout:
            with binary_output() as handle:
                for _ in write_records(handle, scores, "standard output", compress):
                    pass
        else:
            ensure_directory(out)
            written = _with_files(scores, out, beside)
            write_matrices(out / f"{name}.ark", out / f"{name}.scp", written, compress=compress)
    where, what = "standard output" if to_stdout else out / f"{name}.scp", "pdfs" if layer is None else "dims"
    log.info("%s: %s of %d utterances, %d %s", where, kind, len(dataset.utterances), model.network.output_dim, what)


def _check_options(prior_scale: float | None, kind: Kind, layer: int | None) -> None:
    if prior_scale is not None and kind != "log-likelihoods":
        message, hint = f"nothing is subtracted from {kind}", "remove it, or write log-likelihoods"
        raise UserError(message, location="--prior-scale", hint=hint)
    if prior_scale is not None and not (math.isfinite(prior_scale) and prior_scale >= 0.0):
        raise UserError(f"{prior_scale:g} found, expected a number >= 0", location="--prior-scale")
    if (layer is None) != (kind != "activations"):
        found = "not given" if layer is None else f"given with --as {kind}"
        hint = "give both --as activations and --layer N, or neither"
        raise UserError(f"{found}; it says whose activations to write", location="--layer", hint=hint)


def _check_unseen(counts: NDArray[np.float64], run_dir: Path, compress: int) -> None:
    unseen = int((counts / counts.sum() <= PRIOR_CUTOFF).sum())
    if unseen and compress:
        message = f"{plural(unseen, 'pdf')} without frames have log-likelihoods of -1.8e19, beside which compression "
        hint = "remove --compress, or use counts with half a frame added to each pdf, as Kaldi's scripts make them"
        raise UserError(f"{message}would keep nothing of the others", location=run_dir / PDF_COUNTS, hint=hint)
    if unseen:
        log.warning("%d pdfs have no frames in %s: every path through them is disabled", unseen, run_dir / PDF_COUNTS)


def _scripts(model: AcousticModel) -> dict[str, bytes]:
    tree, pdfs = model.transition_digest or "", str(model.network.output_dim)
    script = environment().get_template("decode.sh.j2").render(num_pdfs=pdfs, digest=tree)
    return {TRANSITION_DIGEST: f"{tree}\n".encode(), "decode.sh": script.encode()}


def _lower_layers(model: AcousticModel, layer: int) -> AcousticModel:
    """The model up to this layer, from 0. UserError: it has fewer."""
    layers = model.network.layers
    if layer >= len(layers):
        last = len(layers) - 1
        raise UserError(f"{layer} found, the network has the layers 0 to {last}", location="--layer")
    kept = layers[: layer + 1]
    return replace(model, network=Network(kept, model.network.parameters[: num_parameters(kept)]))


def _check_free_output(out: Path, scp: str, kind: Kind, beside: Mapping[str, bytes]) -> None:
    """UserError where the output is there already, in part or from another model, or would fill a terminal."""
    if str(out) == "-":
        if "stdout" in closed_at_start:
            raise UserError("standard output is closed", location="--out -", hint="redirect it, or name a folder")
        if sys.stdout.isatty():
            hint = "pipe it into a program or redirect it into a file, or name a folder"
            raise UserError("standard output is a terminal, which shows no archives", location="--out -", hint=hint)
        return
    if PDF_COUNTS in beside and (out / PDF_COUNTS).exists() and not _holds(out / PDF_COUNTS, beside[PDF_COUNTS]):
        raise UserError(f"the {PDF_COUNTS} of another model is there", location=out, hint="name another --out")
    if (out / scp).exists():
        found = kind if kind in ("log-likelihoods", "activations") else "posteriors"
        raise UserError(f"{found} are there already", location=out, hint="name another --out, or remove them")


def _with_files(
    scores: Iterable[tuple[str, NDArray[np.float32]]], out: Path, beside: Mapping[str, bytes]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The scores; once all are computed, the files of these names and contents are written. All of them have their
    names before the archive has its own, and none where one cannot be written."""
    yield from scores
    with ExitStack() as stack:
        for name, content in beside.items():
            handle = stack.enter_context(atomic_write(out / name))
            handle.write(content)
            handle.flush()
            if name.endswith(".sh"):
                os.fchmod(handle.fileno(), 0o755)


def export_nnet1(run_dir: Path, out: Path, *, text: bool = False) -> list[Path]:
    """Writes a run to `out` as Kaldi's nnet-forward and steps/nnet/decode.sh read it: `final.nnet`, the feature
    transform as `feature_transform.nnet` and `final.feature_transform`, all binary or `text`, and `ali_train_pdf.counts`
    where the run has it. What these files cannot hold, CMVN, deltas and transforms, is in `ddnn_features.json` for
    `import_nnet1`, and the log names it: Kaldi's tools are to go first."""
    model, run_dir = load_run(run_dir), run_dir_of(run_dir)
    network, front = to_nnet1(model)
    ensure_directory(out)
    paths = [out / "final.nnet", *(out / name for name in NNET1_FRONTS)]
    for path in paths:
        if path.exists():
            raise UserError("the file exists already", location=path, hint="name another --out, or remove it")
    if (run_dir / PDF_COUNTS).exists() and not (out / PDF_COUNTS).exists():
        write_pdf_counts(out / PDF_COUNTS, read_pdf_counts(run_dir / PDF_COUNTS))
    for n, path in enumerate(paths):
        try:
            write_nnet1(path, front if n else network, text=text)
        except UserError:
            for written in paths[:n]:
                written.unlink(missing_ok=True)
            raise
    log.info("%s", ", ".join(str(path) for path in paths))
    options = {"cmvn_opts": NNET_OPTIONS.get(model.features.cmvn, "")}
    options["delta_opts"] = f"--delta-order={model.features.deltas}" if model.features.deltas else ""
    for name, setting in options.items():
        if setting and model.features.transforms is None:  # Kaldi's steps/nnet/decode.sh applies these, to any features
            write_text(out / name, f"{setting}\n")
    described = {"about": f"final.nnet reads features with {model.features}", **features_config(model.features)}
    write_text(out / NNET1_FEATURES, json.dumps(described, indent=1) + "\n")
    first = [f"CMVN ({model.features.cmvn})"] * (model.features.cmvn != "none")
    if model.features.transforms is not None:
        first.append(f"transforms ({model.features.transforms.as_text()})")
    elif model.features.deltas:
        first.append(f"deltas (order {model.features.deltas})")
    if first:
        log.warning("before nnet-forward run Kaldi's %s", " and ".join(first))
    return paths


def import_nnet1(
    nnet: Path, feature_transform: Path | None, out: Path, pdf_counts: Path | None = None
) -> AcousticModel:
    """Makes a run dir from nnet1 files (text or binary), for `ddnn evaluate`, `ddnn decode-prep` and `init.model`.
    `nnet`: a network, or a directory of `ddnn export` or Kaldi, which also has the rest. `pdf_counts`: nnet1's
    `ali_train_pdf.counts`, which decode-prep needs. UserError: damaged files, components that do not fit, or `out` has
    something in it."""
    if nnet.is_dir():
        if feature_transform is not None:
            hint = "leave it out, or name the network's file instead of its directory"
            raise UserError("the directory has its own feature transform", location="--feature-transform", hint=hint)
        model, (network, feature_transform) = read_nnet1_dir(nnet), find_nnet1(nnet)
        unknown = "" if (nnet / NNET1_FEATURES).exists() else " (whether it had transforms is not known: taken as none)"
        tree = "" if model.transition_digest else "; there is no final.mdl: its tree is not known"
        pdf_counts = pdf_counts or (nnet / PDF_COUNTS if (nnet / PDF_COUNTS).exists() else None)
    else:
        front = read_nnet1(feature_transform) if feature_transform is not None else ()
        model, network, tree = from_nnet1(read_nnet1(nnet), front, location=nnet), nnet, ""
        unknown = " (a network alone does not say it: name its directory)"
    counts = None if pdf_counts is None else read_pdf_counts(pdf_counts)
    if counts is not None and len(counts) != model.network.output_dim:
        found = f"{len(counts)} pdf counts found, the network has {model.network.output_dim} pdfs"
        raise DataError(found, location=pdf_counts)
    last = model.network.layers[-1]
    if not last.must_be_last:
        log.warning(
            "%s does not end in a softmax: its %d outputs are taken for pdfs all the same", nnet, last.output_dim
        )
    check_run_dir(out)
    ensure_directory(out)
    if counts is not None:
        write_pdf_counts(out / PDF_COUNTS, counts)
    try:
        save_model(out / FINAL, model)
    except UserError:
        (out / PDF_COUNTS).unlink(missing_ok=True)
        raise
    none = "no feature transform" if feature_transform is None else feature_transform.name
    counts_of = "no pdf counts" if pdf_counts is None else pdf_counts.name
    log.info("network %s, %s, %s; features: %s%s%s", network, none, counts_of, model.features, unknown, tree)
    log.info("finished: %s", out / FINAL)
    return model
