"""`ddnn decode-prep`: what a Kaldi decoder reads, after nnet1's nnet-forward and steps/nnet/decode.sh."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddnn.data.corpus import Corpus
from ddnn.data.minibatches import frame_set
from ddnn.device import choose_device
from ddnn.errors import DataError, UserError
from ddnn.files import make_directory, read_regular, write_text, written_whole
from ddnn.kaldi.alignments import read_pdf_counts
from ddnn.kaldi.tables import write_matrices
from ddnn.model.acoustic import AcousticModel
from ddnn.model.network import Buffers
from ddnn.progress import progress_bar
from ddnn.train.evaluate import BLOCK, load_for_model, outputs
from ddnn.train.run_dir import load_run
from ddnn.train.run_dir_files import COUNTS

log = logging.getLogger(__name__)

PRIOR_CUTOFF = 1e-10
"""Pdfs of a smaller relative frequency are disabled (nnet1's --prior-cutoff)."""

DISABLED_LOG_PRIOR = math.sqrt(float(np.finfo(np.float32).max))
"""What nnet1 takes for their log prior: their log-likelihood becomes about -1.8e19 and they never win."""

DECODE_SH = """\
#!/usr/bin/env bash
# Decodes the log-likelihoods beside this script. Usage: decode.sh GRAPH_DIR FINAL_MDL OUT_DIR [ACOUSTIC_SCALE]
set -euo pipefail
[ $# -ge 3 ] || {{ echo "usage: $0 GRAPH_DIR FINAL_MDL OUT_DIR [ACOUSTIC_SCALE]" >&2; exit 2; }}
graph=$(realpath "$1") model=$(realpath "$2") out=$3 scale=${{4:-0.1}}
command -v latgen-faster-mapped hmm-info >/dev/null || \\
  {{ echo "Kaldi is not on PATH: source its path.sh" >&2; exit 2; }}
for file in "$graph/HCLG.fst" "$graph/words.txt" "$model"; do
  [ -f "$file" ] || {{ echo "there is no $file" >&2; exit 2; }}
done
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
pdfs=$(hmm-info --print-args=false "$model" | awk '/number of pdfs/ {{ print $NF }}')
[ "$pdfs" = {pdfs} ] || {{ echo "$model has $pdfs pdfs, the log-likelihoods have {pdfs}" >&2; exit 2; }}
mkdir -p "$out"
cd "$out"
latgen-faster-mapped --min-active=200 --max-active=7000 --max-mem=50000000 --beam=13.0 --lattice-beam=8.0 \\
  --acoustic-scale="$scale" --allow-partial=true --word-symbol-table="$graph/words.txt" \\
  "$model" "$graph/HCLG.fst" "ark:$here/loglikes.ark" "ark:|gzip -c > lat.1.gz"
echo 1 > num_jobs
"""


def log_priors(counts: np.ndarray, prior_scale: float = 1.0) -> np.ndarray:
    """What is subtracted from pre-softmax activations: prior_scale * log(count / total), float64 (pdfs,).

    Pdfs with relative frequency under 1e-10 have sqrt(FLT_MAX) for log(count / total) (nnet1's PdfPrior).
    """
    relative = counts / counts.sum()
    seen = relative > PRIOR_CUTOFF
    priors = np.full(len(counts), DISABLED_LOG_PRIOR)
    priors[seen] = np.log(relative[seen])
    return prior_scale * priors


def log_likelihoods(model: AcousticModel, corpus: Corpus, priors: Tensor) -> Iterator[tuple[str, np.ndarray]]:
    """Per utterance, its id and (frames, pdfs) float32: pre-softmax activation minus prior."""
    buffers = Buffers(model.network, min(BLOCK, int(corpus.num_frames.max())))
    for u, utterance in enumerate(progress_bar("log-likelihoods")(corpus.utterances)):
        blocks = outputs(model, frame_set(corpus, [u]), buffers)
        scores = np.concatenate([(activations - priors).cpu().numpy() for _, activations in blocks])
        if not np.isfinite(scores).all():
            raise DataError(
                f"utterance {utterance}: the network's output is not finite", mend="retrain: the model has diverged"
            )
        yield utterance, scores


def _holds(path: Path, data: bytes) -> bool:
    """Whether a file holds these bytes and no more."""
    try:
        return read_regular(path, len(data)) == data
    except OSError:
        return False


def prepare_decoding(
    run_dir: Path, data: Path, out: Path, device: str = "auto", prior_scale: float = 1.0, allow_pipes: bool = False
) -> None:
    """Writes `loglikes.ark`, `loglikes.scp`, the counts and a `decode.sh` to `out`, which must not hold any yet.

    Raises:
        UserError: damaged input; another number of pdfs in the counts, or of dims in the features, than in the model.
    """
    if not (math.isfinite(prior_scale) and prior_scale >= 0.0):
        raise UserError(f"{prior_scale:g} found, expected a number >= 0", where="--prior-scale")
    on = choose_device(device)
    model = load_run(run_dir)
    if not (run_dir / COUNTS).exists():
        raise DataError(
            f"there is no {COUNTS}, of which the priors are made",
            where=run_dir,
            mend="import the network again with --pdf-counts, or copy the counts of its training alignment there",
        )
    counts = read_pdf_counts(run_dir / COUNTS)
    read_counts = (run_dir / COUNTS).read_bytes()
    if len(counts) != model.network.output_dim:
        raise DataError(
            f"{COUNTS} has {len(counts)} pdfs, the model {model.network.output_dim}",
            where=run_dir,
            mend="use the counts of the alignment that the model was trained on",
        )
    if not counts.sum() > 0.0:
        raise DataError("no pdf has any frame", where=run_dir / COUNTS, mend="use the counts of the training alignment")
    if (out / COUNTS).exists() and not _holds(out / COUNTS, read_counts):
        raise UserError(f"the {COUNTS} of another model is there", where=out, mend="name another --out")
    if (out / "loglikes.scp").exists():
        raise UserError("log-likelihoods are there already", where=out, mend="name another --out, or remove them")
    corpus = load_for_model(model, data, None, allow_pipes=allow_pipes)
    make_directory(out)
    priors = torch.from_numpy(log_priors(counts, prior_scale)).float().to(on)
    with written_whole(out / COUNTS) as handle:  # byte for byte: they may be text or binary
        handle.write(read_counts)
    write_text(out / "decode.sh", DECODE_SH.format(pdfs=model.network.output_dim))
    (out / "decode.sh").chmod(0o755)
    # Last: where loglikes.scp is, all is there.
    scores = log_likelihoods(model.to(on), corpus.to(on), priors)
    write_matrices(out / "loglikes.ark", out / "loglikes.scp", scores)
    log.info("%s: %d utterances, %d pdfs", out / "loglikes.scp", len(corpus.utterances), model.network.output_dim)
