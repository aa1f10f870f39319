"""`ddnn decode-prep`: what a Kaldi decoder reads, after nnet1's nnet-forward and steps/nnet/decode.sh. `ddnn export`
and `ddnn import-nnet1`: run dirs to and from Kaldi's nnet1 files."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddnn.data.dataset import AcousticDataset
from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.pipeline import EVAL_BATCH
from ddnn.kaldi.alignments import TRANSITION_DIGEST, read_pdf_counts, write_pdf_counts
from ddnn.kaldi.archive import write_matrices
from ddnn.kaldi.nnet1 import read_nnet1, write_nnet1
from ddnn.nn.acoustic_model import AcousticModel, from_nnet1, save_model, to_nnet1
from ddnn.nn.network import Workspace
from ddnn.training.evaluation import forward_batches, load_for_model
from ddnn.training.run_dir import load_run
from ddnn.training.run_status import FINAL, PDF_COUNTS, check_run_dir
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import atomic_write, ensure_directory, read_bytes_limited, write_text
from ddnn.util.progress import progress_bar
from ddnn.util.system import choose_device
from ddnn.util.text import environment

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


def log_likelihoods(model: AcousticModel, dataset: AcousticDataset, priors: Tensor) -> Iterator[tuple[str, np.ndarray]]:
    """Per utterance, its id and (frames, pdfs) float32: pre-softmax activation minus prior."""
    workspace = Workspace(model.network, min(EVAL_BATCH, int(dataset.num_frames.max())))
    for u, utterance in enumerate(progress_bar("log-likelihoods")(dataset.utterances)):
        blocks = forward_batches(model, dataset.subset([u]), workspace)
        scores = np.concatenate([(activations - priors).cpu().numpy() for _, activations in blocks])
        if not np.isfinite(scores).all():
            message = f"utterance {utterance}: the network's output is not finite"
            raise DataError(message, hint="retrain: the model has diverged")
        yield utterance, scores


def _holds(path: Path, data: bytes) -> bool:
    """Whether a file holds these bytes and no more."""
    try:
        return read_bytes_limited(path, len(data)) == data
    except OSError:
        return False


def _read_counts(run_dir: Path, num_pdfs: int) -> tuple[np.ndarray, bytes]:
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
    run_dir: Path,
    data: Path,
    out: Path,
    device: str = "auto",
    prior_scale: float = 1.0,
    allow_pipes: bool = False,
    transforms: Path | None = None,
) -> None:
    """Writes `loglikes.ark`, `loglikes.scp`, the counts and a `decode.sh` to `out`, which must not hold any yet.
    UserError: damaged input; another number of pdfs in the counts, or of dims in the features, than in the model."""
    if not (math.isfinite(prior_scale) and prior_scale >= 0.0):
        raise UserError(f"{prior_scale:g} found, expected a number >= 0", location="--prior-scale")
    target = choose_device(device)
    model = load_run(run_dir)
    counts, counts_bytes = _read_counts(run_dir, model.network.output_dim)
    if unseen := int((counts / counts.sum() <= PRIOR_CUTOFF).sum()):
        log.warning("%d pdfs have no frames in %s: every path through them is disabled", unseen, run_dir / PDF_COUNTS)
    if (out / PDF_COUNTS).exists() and not _holds(out / PDF_COUNTS, counts_bytes):
        raise UserError(f"the {PDF_COUNTS} of another model is there", location=out, hint="name another --out")
    if (out / "loglikes.scp").exists():
        raise UserError("log-likelihoods are there already", location=out, hint="name another --out, or remove them")
    dataset = load_for_model(model, data, None, allow_pipes=allow_pipes, transforms=transforms)
    ensure_directory(out)
    priors = torch.from_numpy(log_priors(counts, prior_scale)).float().to(target)
    with atomic_write(out / PDF_COUNTS) as handle:
        handle.write(counts_bytes)
    tree = model.transition_digest or ""
    write_text(out / TRANSITION_DIGEST, f"{tree}\n")
    script = environment().get_template("decode.sh.j2").render(num_pdfs=str(model.network.output_dim), digest=tree)
    write_text(out / "decode.sh", script)
    (out / "decode.sh").chmod(0o755)
    # Last: a loglikes.scp says that all the rest is there.
    scores = log_likelihoods(model.to(target), dataset.to(target), priors)
    write_matrices(out / "loglikes.ark", out / "loglikes.scp", scores)
    log.info("%s: %d utterances, %d pdfs", out / "loglikes.scp", len(dataset.utterances), model.network.output_dim)


def export_nnet1(run_dir: Path, out: Path) -> list[Path]:
    """Writes a run as Kaldi's nnet-forward reads it to `out`: `final.nnet` and `feature_transform.nnet` (binary), and
    `ali_train_pdf.counts` where the run has it. What these files cannot hold, CMVN, deltas and transforms, the log
    names: Kaldi's tools are to go first."""
    model = load_run(run_dir)
    network, front = to_nnet1(model)
    ensure_directory(out)
    paths = [out / "final.nnet", out / "feature_transform.nnet"]
    for path in paths:
        if path.exists():
            raise UserError("the file exists already", location=path, hint="name another --out, or remove it")
    if (run_dir / PDF_COUNTS).exists() and not (out / PDF_COUNTS).exists():
        write_pdf_counts(out / PDF_COUNTS, read_pdf_counts(run_dir / PDF_COUNTS))
    write_nnet1(paths[0], network)
    try:
        write_nnet1(paths[1], front)
    except UserError:
        paths[0].unlink(missing_ok=True)
        raise
    log.info("%s", ", ".join(str(path) for path in paths))
    if model.features != FeatureConfig():
        cmvn, deltas = model.features.cmvn, model.features.deltas
        after = f"deltas (order {deltas})"
        if model.features.transforms is not None:
            after = f"transforms ({model.features.transforms.as_text()})"
        log.warning("before nnet-forward run Kaldi's CMVN (%s) and %s", cmvn, after)
    return paths


def import_nnet1(
    nnet: Path, feature_transform: Path | None, out: Path, pdf_counts: Path | None = None
) -> AcousticModel:
    """Makes a run dir from nnet1 files (text or binary), for `ddnn evaluate` and `ddnn decode-prep`. `pdf_counts`:
    nnet1's `ali_train_pdf.counts`, which decode-prep needs. UserError: damaged files, components that do not fit, or
    `out` has something in it."""
    front = read_nnet1(feature_transform) if feature_transform is not None else ()
    model = from_nnet1(read_nnet1(nnet), front, location=nnet)
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
    log.info("finished: %s", out / FINAL)
    return model
