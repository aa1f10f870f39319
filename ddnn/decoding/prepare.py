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
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.data.batches import EVAL_BATCH
from ddnn.data.dataset import AcousticDataset
from ddnn.kaldi.alignments import TRANSITION_DIGEST, pdf_counts_text, read_pdf_counts, write_pdf_counts
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
from ddnn.nn.arithmetic import Float32
from ddnn.nn.layers import num_parameters
from ddnn.nn.network import Network, evaluation_workspace
from ddnn.nn.scorer import (
    PRIOR_CUTOFF,
    ScoreKind,
    Scorer,
    forward_batches,
    log_priors,
    one_utterance,
    read_counts,
)
from ddnn.recipe.load import load_recipe
from ddnn.runs.run_dir import load_run
from ddnn.runs.run_status import FINAL, MODEL_DIGEST, PDF_COUNTS, RECIPE, check_run_dir, digest_line, run_dir_of
from ddnn.training.model_evaluation import load_for_model
from ddnn.training.options import corpora
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import atomic_write, ensure_directory, has_content, write_text
from ddnn.util.pool import worker_pool
from ddnn.util.process import closed_at_start
from ddnn.util.progress import progress_bar
from ddnn.util.system import choose_device
from ddnn.util.text import binary_output, environment, plural

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

PriorKind = Literal["class-counts", "posterior-mean"]
PRIOR_UTTERANCES = 10_000  # of a data dir, from whose posteriors priors are made


def compute_scores(
    model: AcousticModel, dataset: AcousticDataset, kind: ScoreKind, priors: Tensor | None = None, jobs: int = 1
) -> Generator[tuple[str, NDArray[np.float32]], None, None]:
    """The id and the scores of each utterance, in order; several processes compute the same bits."""
    return scores_then(_scores_alone, model, dataset, kind, priors, jobs)


def _scores_alone(_: str, scores: NDArray[np.float32]) -> NDArray[np.float32]:
    return scores


def scores_then(
    then: Callable[[str, NDArray[np.float32]], Answer], model: AcousticModel, dataset: AcousticDataset, kind: ScoreKind,
    priors: Tensor | None = None, jobs: int = 1,
) -> Generator[tuple[str, Answer], None, None]:  # fmt: skip
    """The id of each utterance and what `then` makes of its id and scores, in order. With several processes `then` is
    pickled, and called where the scores are computed."""
    longest, names = int(dataset.num_frames.max()), progress_bar(kind)(dataset.utterances)
    if jobs == 1:
        scorer = Scorer(model, kind, priors, longest)
        yield from ((name, then(name, scorer(dataset, u))) for u, name in enumerate(names))
        return
    tensors = {"parameters": model.network.parameters, **transform_tensors(model)}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    log_prior = None if priors is None else priors.numpy()
    processes = min(jobs, len(dataset.utterances))
    with worker_pool(processes, "a process of --jobs", "--jobs 1") as pool:
        pool.initialize(_start_scoring, model_config(model), arrays, kind, log_prior, longest, then)
        tasks = ((_score, name, _rows(dataset, u)) for u, name in enumerate(dataset.utterances))
        yield from zip(names, pool.run(tasks), strict=True)


_scorer: list[tuple[Scorer, Callable[[str, NDArray[np.float32]], Any]]] = []  # of a process of --jobs


def _start_scoring(
    config: Any, arrays: dict[str, NDArray[np.float32]], kind: ScoreKind, priors: NDArray[np.float32] | None, longest: int,
    then: Callable[[str, NDArray[np.float32]], Any],
) -> None:  # fmt: skip
    choose_device("cpu")
    model = model_from_config(config, {name: torch.from_numpy(array) for name, array in arrays.items()}, Path("model"))
    _scorer[:] = [(Scorer(model, kind, None if priors is None else torch.from_numpy(priors), longest), then)]


def _score(name: str, rows: NDArray[np.float32]) -> Any:
    scorer, then = _scorer[0]
    return then(name, scorer(one_utterance(name, rows, scorer.model.transform.context)))


def _rows(dataset: AcousticDataset, u: int) -> NDArray[np.float32]:
    """The features of an utterance with the repeated edges."""
    first, frames, context = int(dataset.offsets[u]), int(dataset.num_frames[u]), dataset.context
    rows: NDArray[np.float32] = dataset.features[first - context : first + frames + context].numpy()
    return rows


def prepare_decoding(
    run_dir: Path, data: Path, out: Path, device: str = "auto", prior_scale: float | None = None,
    allow_pipes: bool = False, transforms: Path | None = None, *, kind: ScoreKind = "log-likelihoods", layer: int | None = None, jobs: int = 1,
    compress: int = 0, prior_kind: PriorKind | None = None,
) -> None:  # fmt: skip
    """Writes the network's scores of each frame of a data dir to `out`, which must not hold any yet: for kind
    log-likelihoods `loglikes.ark`, `loglikes.scp`, the counts, the model's digest and a `decode.sh`, else archive and scp alone. If `out`
    is `-`, the archive goes to standard output. `prior_kind`: what priors are made of; None: class-counts. `compress`: 0, or the method of Kaldi's copy-feats. UserError: damaged input;
    another number of pdfs in the counts, or of dims in the features, than in the model; options that do not fit."""
    _check_options({"--prior-scale": prior_scale, "--priors": prior_kind}, kind, layer)
    target = choose_with_jobs(device, jobs)
    model, of_model, run_dir = load_run(run_dir), digest_line(run_dir, out), run_dir_of(run_dir)
    priors, files = None, dict[str, bytes]()
    if kind == "log-likelihoods":
        if prior_kind == "posterior-mean":
            counts = posterior_counts(model, run_dir, target, allow_pipes=allow_pipes)
        else:
            counts = read_counts(run_dir / PDF_COUNTS, model.network.output_dim)
        scale = 1.0 if prior_scale is None else prior_scale
        priors = scaled_log_priors(counts, scale, run_dir, compress).to(target)
        files = {
            PDF_COUNTS: pdf_counts_text(counts).encode(),
            **_scripts(model),
            MODEL_DIGEST: of_model,
        }
    if layer is not None:
        model = _lower_layers(model, layer)
    scores_name = "posteriors" if kind == "log-posteriors" else kind
    scp = out / ("loglikes.scp" if kind == "log-likelihoods" else f"{scores_name}.scp")
    to_stdout = str(out) == "-"
    if to_stdout:
        _check_stdout()
    else:
        _check_free_output(scp, scores_name, files)
    dataset = load_for_model(model, data, None, allow_pipes=allow_pipes, transforms=transforms)
    with closing(compute_scores(model.to(target), dataset.to(target), kind, priors, jobs)) as scores:
        if to_stdout:
            with binary_output() as handle:
                for _ in write_records(handle, scores, "standard output", compress):
                    pass
        else:
            ensure_directory(out)
            write_matrices(scp.with_suffix(".ark"), scp, _then_write(scores, out, files), compress=compress)
    where, unit = "standard output" if to_stdout else scp, "pdfs" if layer is None else "dims"
    log.info("%s: %s of %d utterances, %d %s", where, kind, len(dataset.utterances), model.network.output_dim, unit)


def choose_with_jobs(device: str, jobs: int) -> torch.device:
    """The device for `jobs` processes. UserError: several on a GPU."""
    target = choose_device(device)
    if jobs > 1 and target.type != "cpu":
        raise UserError("only one process computes on a GPU", location="--jobs", hint="add --device cpu, or remove it")
    return target


def scaled_log_priors(counts: NDArray[np.float64], prior_scale: float, run_dir: Path, compress: int = 0) -> Tensor:
    """Of the pdf counts of a run, float32 (pdfs,); warns of pdfs without frames, beside which nothing can be compressed."""
    _check_unseen(counts, run_dir, compress)
    return torch.from_numpy(log_priors(counts, prior_scale)).float()


def posterior_counts(
    model: AcousticModel, run_dir: Path, device: torch.device, *, allow_pipes: bool = False
) -> NDArray[np.float64]:
    """The model's posteriors summed over the frames of up to 10,000 utterances of each data dir that the run was trained on,
    float64 (pdfs,), as steps/nnet/make_priors.sh. DataError: the run dir has no recipe, or these data are gone."""
    data, total = (
        load_recipe(run_dir / RECIPE, user_supplied=False).data,
        torch.zeros(model.network.output_dim).double(),
    )
    model = model.to(device)
    for corpus in corpora(("data.train", "data.alignments"), data.train, data.alignments, data.transforms):
        dataset = load_for_model(
            *(model, corpus.data, None),
            allow_pipes=allow_pipes, transforms=corpus.transforms, most=PRIOR_UTTERANCES,
        ).to(device)  # fmt: skip
        frames, workspace = (
            dataset.subset(range(len(dataset.utterances))),
            evaluation_workspace(*(model.network, EVAL_BATCH, Float32())),
        )
        for _, outputs in forward_batches(model, frames, workspace):
            total += outputs.softmax(1).sum(0, dtype=torch.float64).cpu()
    return total.numpy()


def _check_options(of_priors: Mapping[str, float | str | None], kind: ScoreKind, layer: int | None) -> None:
    for option in [name for name, value in of_priors.items() if value is not None and kind != "log-likelihoods"]:
        message, hint = f"nothing is subtracted from {kind}", "remove it, or write log-likelihoods"
        raise UserError(message, location=option, hint=hint)
    prior_scale = of_priors["--prior-scale"]
    if isinstance(prior_scale, float) and not (math.isfinite(prior_scale) and prior_scale >= 0.0):
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
    lower = layers[: layer + 1]
    return replace(model, network=Network(lower, model.network.parameters[: num_parameters(lower)]))


def _check_stdout() -> None:
    if "stdout" in closed_at_start:
        raise UserError("standard output is closed", location="--out -", hint="redirect it, or name a folder")
    if sys.stdout.isatty():
        hint = "pipe it into a program or redirect it into a file, or name a folder"
        raise UserError("standard output is a terminal, which shows no archives", location="--out -", hint=hint)


def _check_free_output(scp: Path, scores_name: str, files: Mapping[str, bytes]) -> None:
    """UserError if the output exists already, or a part of another model's."""
    out, counts = scp.parent, scp.with_name(PDF_COUNTS)
    if PDF_COUNTS in files and counts.exists() and not has_content(counts, files[PDF_COUNTS]):
        raise UserError(f"the {PDF_COUNTS} of another model is there", location=out, hint="name another --out")
    if scp.exists():
        message, hint = f"{scores_name} are there already", "name another --out, or remove them"
        raise UserError(message, location=out, hint=hint)


def _then_write(
    scores: Iterable[tuple[str, NDArray[np.float32]]], out: Path, files: Mapping[str, bytes]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The scores; once all are computed, the `files` (name, content) are written: all of them before the archive gets its
    name, or none if one cannot be written."""
    yield from scores
    with ExitStack() as stack:
        for name, content in files.items():
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
