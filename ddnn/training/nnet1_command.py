"""`ddnn export` and `ddnn import-nnet1`: run dirs to and from Kaldi's nnet1 files."""

from __future__ import annotations

import logging
from pathlib import Path

from ddnn.data.feature_reader import FeatureConfig
from ddnn.kaldi.alignments import read_pdf_counts, write_pdf_counts
from ddnn.kaldi.nnet1 import read_nnet1, write_nnet1
from ddnn.nn.acoustic_model import AcousticModel, from_nnet1, save_model, to_nnet1
from ddnn.training.run_dir import load_run
from ddnn.training.run_status import FINAL, PDF_COUNTS, check_run_dir
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import ensure_directory

log = logging.getLogger(__name__)


def export_nnet1(run_dir: Path, out: Path) -> list[Path]:
    """Writes a run as Kaldi's nnet-forward reads it to `out`: `final.nnet` and `feature_transform.nnet` (binary), and
    `ali_train_pdf.counts` where the run has it.

    Where the model has CMVN and deltas, which these files cannot hold, the log says so: Kaldi's tools are to go first.
    """
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
        log.warning("before nnet-forward run Kaldi's CMVN (%s) and deltas (order %d)", cmvn, deltas)
    return paths


def import_nnet1(
    nnet: Path, feature_transform: Path | None, out: Path, pdf_counts: Path | None = None
) -> AcousticModel:
    """Makes a run dir from nnet1 files (text or binary), for `ddnn evaluate` and `ddnn decode-prep`.

    Args:
        pdf_counts: nnet1's `ali_train_pdf.counts`, which decode-prep needs.

    Raises:
        UserError: damaged files, components that do not fit, or `out` has something in it.
    """
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
