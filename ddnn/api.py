"""The functions of `import ddnn`: training, trained models and what is done with them, and Kaldi's features and alignments
as numpy arrays. docs/tutorials/python.md shows them. Needs torch only where something is computed."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddnn.kaldi import alignments as kaldi_alignments
from ddnn.kaldi.archive import MatrixReader, ScpEntry, check_finite, iterate_matrices, read_scp
from ddnn.kaldi.data_dir import add_deltas, apply_cmvn, compute_cmvn_stats, read_data_dir
from ddnn.kaldi.data_dir import read_cmvn_stats as read_cmvn_scp
from ddnn.util.errors import DataError, DivergedError, UserError
from ddnn.util.text import TERMINAL_LEVEL

if TYPE_CHECKING:
    import torch

    from ddnn.nn.acoustic_model import AcousticModel
    from ddnn.runs.rows import MetricsRow

StrPath = str | os.PathLike[str]
Device = Literal["auto", "cpu", "cuda"]
Kind = Literal["log-likelihoods", "posteriors", "log-posteriors"]

_COMMAND_LINE = re.compile(
    r"`[^`]*`|ddnn train (?P<run>'[^']*'|\S+) --resume(?: --allow-pipes)?|--(?P<option>resume=auto|resume|allow-pipes|set|as|"
    r"run-dir|workers|device|data|alignments|by|transforms|out|layer|prior-scale|priors|jobs|compress|acoustic-scale-from|"
    r"acoustic-scale|word-insertion-penalty|frame-shift)(?![-\w])"
)
_ARGUMENTS = {
    "resume=auto": 'resume="auto"',
    "resume": "resume=True",
    "allow-pipes": "allow_pipes=True",
    "set": "settings",
    "as": "kind",
}


def _for_python(text: str) -> str:
    """A message that speaks of arguments of the functions here where it spoke of the options of a command."""

    def as_argument(match: re.Match[str]) -> str:
        if match["run"]:
            return f"ddnn.train({shlex.split(match['run'])[0]!r}, resume=True)"
        option = match["option"]
        return match[0] if option is None else _ARGUMENTS.get(option, option.replace("-", "_"))

    return _COMMAND_LINE.sub(as_argument, text)


@contextmanager
def _errors_rewritten(rewrite: Callable[[str], str] = _for_python) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        error.message = rewrite(error.message)
        error.location, error.hint = error.location and rewrite(error.location), error.hint and rewrite(error.hint)
        raise


@contextmanager
def _threads_kept() -> Iterator[None]:
    """torch has as many threads in this process after the block as before: commands of ddnn take one."""
    import torch

    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_errors_rewritten()
def train(
    recipe: StrPath | Mapping[str, Any],
    run_dir: StrPath | None = None,
    *,
    settings: Mapping[str, Any] | Iterable[str] = (),
    workers: int | None = None,
    device: Device = "auto",
    resume: bool | Literal["auto"] = False,
    allow_pipes: bool = False,
    on_epoch: Callable[[dict[str, Any]], object] | None = None,
) -> Model:
    """Trains a network, as `ddnn train` does, and returns it.

    Args:
        recipe: path of a recipe, or a mapping of recipe keys (docs/reference/recipe.md) with mappings for sections. Relative paths
            of a mapping are taken from the working directory.
        run_dir: where the training leaves everything; a new or empty directory unless `resume`. Default: exp/NAME OF
            THE RECIPE; a mapping has no name and needs one.
        settings: keys that replace those of the recipe: a mapping as {"schedule.epochs": 3}, or texts as for `--set`.
        workers: how many train; the same as the key parallel.workers.
        device: where to compute.
        resume: True: continue from the newest checkpoint of `run_dir`; "auto": or start where there is none. A training
            that has finished is only loaded.
        allow_pipes: run the shell commands of an scp. Only for files that you wrote yourself.
        on_epoch: called after each epoch with its rows of metrics.jsonl, a dict each: that of the training, then that of
            the cross-validation. What it raises ends the training, which can be resumed. Not for `workers` > 1.

    Returns:
        The trained model (see `load`), on the CPU.

    Raises:
        UserError: something for the user to fix: recipe, data, device, disk.
        DivergedError: the training diverged, or its model has learned nothing; a UserError.
        SystemExit: a signal (Ctrl-C, SIGTERM) has ended it, with the exit codes of docs/reference/run-dir.md.
    """
    from ddnn.report import write_run_page
    from ddnn.runs.rows import EpochRow
    from ddnn.slurm.recovery import SlurmNodes
    from ddnn.training.command import TrainingCommand
    from ddnn.training.start import start_training

    def on_row(row: MetricsRow) -> None:
        if on_epoch is not None and isinstance(row, EpochRow):
            on_epoch(row.model_dump())

    with _recipe_file(recipe) as path:
        if run_dir is None and isinstance(recipe, Mapping):
            raise UserError("a recipe that is a mapping needs a run_dir", hint="give run_dir='exp/NAME'")
        folder = None if run_dir is None else Path(run_dir)
        how: Literal["no", "yes", "auto"] = "auto" if resume == "auto" else "yes" if resume else "no"
        words = tuple(_as_settings(settings, allow_pipes))
        command = TrainingCommand("training", path, folder, words, workers, device, how)
        with _threads_kept(), _shows_what_logging_shows(), _exits_as_errors(command.location):
            start_training(command, SlurmNodes(), write_run_page, on_epoch and on_row)
    return load(command.location)


@_errors_rewritten()
@_threads_kept()
def load(run_dir: StrPath, *, device: Device = "cpu") -> Model:
    """The trained model of a run dir: of `ddnn train`, or of `ddnn import-nnet1`. Or that of a file in it, such as
    best.safetensors of a training that has not finished. `device`: where it computes.

    Raises:
        UserError: there is no such run dir, it has no trained model (yet), or a damaged one; there is no GPU.
    """
    from ddnn.runs.run_dir import load_run
    from ddnn.runs.run_status import run_dir_of
    from ddnn.util.system import choose_device

    return Model(load_run(Path(run_dir)).to(choose_device(device)), run_dir_of(Path(run_dir)))


@_errors_rewritten()
@_threads_kept()
def evaluate(
    run_dir: StrPath,
    data: StrPath,
    alignments: StrPath,
    *,
    by: Literal["speaker", "utterance"] | None = None,
    transforms: StrPath | None = None,
    device: Device = "auto",
    allow_pipes: bool = False,
) -> dict[str, Any]:
    """Loss and frame accuracy of a run's model, as `ddnn evaluate` computes them.

    Args:
        run_dir: whose model; see `load`.
        data, alignments: a Kaldi data dir, and its alignment dir or an archive of pdf-ids.
        by: also the figures of each speaker or utterance, under "parts".
        transforms: the Kaldi dir of this data's transforms, where the model was trained with such.

    Returns:
        What `ddnn evaluate --json` prints: "loss" per frame, in nats, "frame_accuracy" from 0 to 1, "frames", ...

    Raises:
        UserError: damaged data, or data that do not fit the model.
    """
    from ddnn.training.model_evaluation import evaluate_run

    result = evaluate_run(
        Path(run_dir), Path(data), Path(alignments), device, allow_pipes, by, _optional_path(transforms)
    )
    return result.as_dict()


@_errors_rewritten()
@_threads_kept()
def decode_prep(
    run_dir: StrPath,
    data: StrPath,
    out: StrPath,
    *,
    kind: Kind | Literal["activations"] = "log-likelihoods",
    layer: int | None = None,
    prior_scale: float | None = None,
    priors: Literal["class-counts", "posterior-mean"] | None = None,
    jobs: int = 1,
    compress: int = 0,
    transforms: StrPath | None = None,
    device: Device = "auto",
    allow_pipes: bool = False,
) -> None:
    """Writes what Kaldi's decoders and `score` read to the folder `out`, as `ddnn decode-prep` does, whose options these
    are. `kind`: of --as; `compress`: 0, or the method of Kaldi's copy-feats.

    Raises:
        UserError: damaged data, or data that do not fit the model; the output is there already.
    """
    from ddnn.decoding.prepare import prepare_decoding

    prepare_decoding(
        Path(run_dir), Path(data), Path(out), device, prior_scale, allow_pipes, _optional_path(transforms), kind=kind, layer=layer, jobs=jobs,
        compress=compress, prior_kind=priors,
    )  # fmt: skip


@_errors_rewritten()
def score(
    loglikes: StrPath,
    *,
    graph: StrPath,
    model: StrPath,
    text: StrPath,
    acoustic_scale: Iterable[float] | None = None,
    acoustic_scale_from: StrPath | None = None,
    word_insertion_penalty: Iterable[float] | None = None,
    beam: float | None = None,
    out: StrPath | None = None,
    frame_shift: float = 0.01,
    jobs: int = 1,
) -> dict[str, Any]:
    """Word error rates of log-likelihoods, as `ddnn score` computes them; needs ddnn[decode].

    Args:
        loglikes: the `out` of `decode_prep`, or an scp or archive.
        graph, model: Kaldi graph dir, and the final.mdl that it was made with.
        text: the reference, a Kaldi text of the same utterances.
        acoustic_scale, word_insertion_penalty: numbers to try.
        acoustic_scale_from: the `out` of another scoring, of a development set: take what was best there.
        out: new folder for the hypotheses at the best scale.
        jobs: processes that decode.

    Returns:
        What `ddnn score --json` prints: "wer" in percent at the "best" acoustic scale, all "scales", ...

    Raises:
        UserError: packages are missing; an input is missing, damaged, or does not fit the others.
    """
    from ddnn.decoding import score as scoring

    options = scoring.decode_options(
        _optional_path(acoustic_scale_from),
        acoustic_scales=None if acoustic_scale is None else tuple(map(float, acoustic_scale)),
        word_insertion_penalties=None if word_insertion_penalty is None else tuple(map(float, word_insertion_penalty)),
        beam=beam,
    )
    result = scoring.score(
        Path(loglikes), graph_dir=Path(graph), model=Path(model), text=Path(text), options=options,
        out=_optional_path(out), frame_shift=frame_shift, jobs=jobs,
    )  # fmt: skip
    figures = scoring.as_json(result)
    return {**figures, "notes": list(map(_for_python, figures["notes"]))}


@_errors_rewritten()
def read_metrics(run_dir: StrPath) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl (docs/reference/metrics.md), each a dict, in the order of the file; also while the training runs.

    Raises:
        UserError: there is none, or it is damaged.
    """
    from ddnn.runs import metrics
    from ddnn.runs.run_status import METRICS

    path = Path(run_dir, METRICS)
    metrics.read_metrics(path)  # refuses what is passed over below
    return [row.model_dump() for row in metrics.iterate_rows(path)]


class Model:
    """A trained network, with what it does to features: CMVN, deltas, splice, normalization. Made by `load`, `train`.

    Attributes:
        run_dir: where it was loaded from.
        num_pdfs: number of its outputs.
        layer_sizes: of the network's input, and of what each layer gives that has a matrix product or changes the size.
        dim: dimension of the features in a data dir; None where Kaldi's final.mat has made others of them: the model does
            not keep how many they were.
        cmvn: "none", "mean" or "mean-variance": whether features are normalized per speaker.
        acoustic_model: what ddnn uses itself; may change with any version.
    """

    def __init__(self, acoustic_model: AcousticModel, run_dir: Path) -> None:
        from ddnn.nn.layers import layer_sizes

        self.acoustic_model, self.run_dir, self.cmvn = acoustic_model, run_dir, acoustic_model.features.cmvn
        self.num_pdfs = acoustic_model.network.output_dim
        self.layer_sizes = layer_sizes(acoustic_model.network.layers)
        self.dim = acoustic_model.features.dim_of_width(acoustic_model.transform.dim)

    def __repr__(self) -> str:
        return f"<ddnn.Model of {self.run_dir}: {'-'.join(map(str, self.layer_sizes))}, {self.acoustic_model.features}>"

    def log_likelihoods(
        self, features: ArrayLike, *, cmvn_stats: ArrayLike | None = None, prior_scale: float = 1.0
    ) -> NDArray[np.float32]:
        """Pseudo-log-likelihoods, as `ddnn decode-prep` writes them for Kaldi's decoders: the network's output before
        the softmax, minus `prior_scale` times the log-priors.

        Args:
            features: (frames, dim) of one utterance, any real dtype, as they are in the data dir: no CMVN, deltas,
                splice or normalization, which the model applies itself.
            cmvn_stats: CMVN statistics of the utterance's speaker, (2, dim + 1), as Kaldi's compute-cmvn-stats and
                `read_cmvn_stats` give them. To be given if, and only if, the model's `cmvn` is not "none".
            prior_scale: 0: the network's output before the softmax.

        Returns:
            (frames, num_pdfs) float32.

        Raises:
            UserError: features or statistics of another shape, or not finite; no statistics where the model needs them;
                no ali_train_pdf.counts in the run dir; a model that applies Kaldi's transforms (use `compute`).
        """
        return self._scores("log-likelihoods", features, cmvn_stats, prior_scale)

    def posteriors(self, features: ArrayLike, *, cmvn_stats: ArrayLike | None = None) -> NDArray[np.float32]:
        """Probabilities of the pdfs, (frames, num_pdfs) float32; each row sums to 1. Arguments and errors are those of
        `log_likelihoods`; no counts are needed."""
        return self._scores("posteriors", features, cmvn_stats)

    def log_posteriors(self, features: ArrayLike, *, cmvn_stats: ArrayLike | None = None) -> NDArray[np.float32]:
        """Logarithms of the posteriors, (frames, num_pdfs) float32; finite where a posterior is too small for a float.
        Arguments and errors are those of `posteriors`."""
        return self._scores("log-posteriors", features, cmvn_stats)

    def compute(
        self,
        data_dir: StrPath,
        kind: Kind = "log-likelihoods",
        *,
        transforms: StrPath | None = None,
        prior_scale: float = 1.0,
        allow_pipes: bool = False,
    ) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """A whole data dir, as `ddnn decode-prep` does it: its CMVN statistics, and the transforms of the Kaldi dir
        `transforms` where the model was trained with such. All features are read first.

        Yields:
            utterance id and (frames, num_pdfs) float32, in the order of feats.scp.

        Raises:
            UserError: damaged data, or features that are not of the kind that the model was trained on.
        """
        from ddnn.decoding.prepare import compute_scores
        from ddnn.training.model_evaluation import load_for_model

        if kind not in get_args(Kind):
            raise UserError(f"{kind!r} found, expected one of {', '.join(get_args(Kind))}")
        model, device = self.acoustic_model, self.acoustic_model.network.parameters.device
        with _errors_rewritten():
            priors = self._priors(prior_scale) if kind == "log-likelihoods" else None
            dataset = load_for_model(
                model, Path(data_dir), None, allow_pipes=allow_pipes, transforms=_optional_path(transforms)
            )
        yield from compute_scores(model, dataset.to(device), kind, priors)

    def torch_module(self) -> torch.nn.Module:
        """A copy of the network for PyTorch, to train it further or to export it. It takes the features of one utterance
        as `prepare` gives them, a float32 tensor (frames, dim), splices and normalizes them, and gives the network's
        output before the softmax, (frames, num_pdfs).

        Raises:
            UserError: the network has other layers than affine ones, activations and dropout.
        """
        from ddnn.nn.acoustic_model import TorchModel

        return TorchModel(self.acoustic_model)

    def _priors(self, scale: float) -> Any:
        import torch

        from ddnn.nn.scorer import log_priors, read_counts
        from ddnn.runs.run_status import PDF_COUNTS

        counts = read_counts(self.run_dir / PDF_COUNTS, self.num_pdfs)
        return torch.from_numpy(log_priors(counts, scale)).to(self.acoustic_model.network.parameters)

    def _scores(
        self, kind: Kind, features: ArrayLike, cmvn_stats: ArrayLike | None, prior_scale: float = 1.0
    ) -> NDArray[np.float32]:
        from ddnn.nn.scorer import Scorer, one_utterance

        model = self.acoustic_model
        priors = self._priors(prior_scale) if kind == "log-likelihoods" else None
        rows, context = self.prepare(features, cmvn_stats=cmvn_stats), model.transform.context
        rows = np.pad(rows, ((context, context), (0, 0)), mode="edge")
        scorer = Scorer(model, kind, priors, len(rows))
        return scorer(one_utterance("of the argument", rows, context).to(model.network.parameters.device))

    def prepare(self, features: ArrayLike, *, cmvn_stats: ArrayLike | None = None) -> NDArray[np.float32]:
        """The features of one utterance after CMVN and deltas, (frames, dim * (deltas + 1)) float32. Arguments and errors
        are those of `posteriors`."""
        config = self.acoustic_model.features
        if config.transforms is not None:
            message = "the model applies Kaldi's transforms, which are of a speaker"
            raise UserError(message, hint="compute a whole data dir: model.compute(data_dir, transforms=...)")
        assert self.dim is not None  # it is known without transforms
        matrix = _float_matrix(features, "features")
        if matrix.ndim != 2 or matrix.shape[1] != self.dim or len(matrix) == 0:
            raise DataError(f"features of shape {matrix.shape} found, expected (frames, {self.dim})")
        check_finite("of the argument", matrix, "features")
        if (cmvn_stats is None) != (config.cmvn == "none"):
            message = f"cmvn_stats {'not given' if cmvn_stats is None else 'given'}, the model's cmvn is {config.cmvn}"
            hint = "give those of the utterance's speaker, as of ddnn.read_cmvn_stats" if cmvn_stats is None else None
            raise UserError(message, hint=hint or "leave them out: the model takes features as they are")
        if cmvn_stats is not None:
            stats = _float_matrix(cmvn_stats, "cmvn_stats", np.float64)
            if stats.shape != (2, self.dim + 1) or not np.isfinite(stats).all() or stats[0, -1] < 1:
                message = (
                    f"cmvn_stats of shape {stats.shape} found, expected (2, {self.dim + 1}), finite, of a frame or more"
                )
                raise DataError(message, hint="give Kaldi's statistics, sums and not means: docs/tutorials/python.md")
            matrix = apply_cmvn(matrix, stats, variance=config.cmvn == "mean-variance")
        return add_deltas(matrix, config.deltas) if config.deltas else matrix


def read_features(source: StrPath, *, allow_pipes: bool = False) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The features of a Kaldi data dir (its feats.scp), an scp or an archive, as they are stored.

    Args:
        source: a data dir; a file whose name ends in .scp; else an archive, plain or gzip.
        allow_pipes: run the shell commands of an scp. Only for files that you wrote yourself.

    Yields:
        utterance id and features, (frames, dim) float32, in the order of the file; one utterance is in memory at a time.

    Raises:
        UserError: a file is missing or damaged, or features are not finite; names file and utterance.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "feats.scp"
    if path.suffix != ".scp":
        for utterance, matrix in iterate_matrices(path):
            features = _float_matrix(matrix, utterance)
            check_finite(utterance, features, path)
            yield utterance, features
        return
    with _errors_rewritten():
        entries = read_scp(path, allow_pipes=allow_pipes)
    with MatrixReader() as reader:
        for entry in entries:
            features = reader.read(entry)
            check_finite(entry.key, features, entry.location)
            yield entry.key, features


@_errors_rewritten()
def read_cmvn_stats(data_dir: StrPath, *, allow_pipes: bool = False) -> dict[str, NDArray[np.float64]]:
    """Per utterance of a data dir the CMVN statistics of its speaker, (2, dim + 1) float64: sums and the number of
    frames; sums of squares and 0. They are those of cmvn.scp, or else computed from all features of the speaker, as
    training and decoding do it.

    Raises:
        UserError: utt2spk is missing; files are damaged; a speaker has no statistics.
    """
    directory = read_data_dir(Path(data_dir), allow_pipes=allow_pipes)
    speakers = directory.speaker_of("CMVN")
    if directory.cmvn is not None:
        stats = read_cmvn_scp(directory.cmvn, speakers)
    else:
        entries: dict[str, list[ScpEntry]] = {}
        for entry in directory.entries:
            entries.setdefault(speakers[entry.key], []).append(entry)
        with MatrixReader() as reader:
            dim = next((columns for rows, columns in map(reader.shape, directory.entries) if rows), 0)
            stats = compute_cmvn_stats(entries, dim, reader)
    return {utterance: stats[speaker] for utterance, speaker in speakers.items() if speaker in stats}


def read_alignments(source: StrPath) -> dict[str, NDArray[np.int32]]:
    """The pdf-id of each frame: utterance id -> (frames,) int32, from 0 on.

    Args:
        source: a Kaldi alignment dir (ali.*.gz with transition-ids, and final.mdl, by which they become pdf-ids), or an
            archive of pdf-ids.

    Raises:
        UserError: a file is missing or damaged, an utterance comes twice, an id is out of range.
    """
    return kaldi_alignments.read_alignments(Path(source)).pdfs


def _float_matrix(values: ArrayLike, name: str, dtype: Any = np.float32) -> NDArray[Any]:
    array = np.asarray(values)
    if not (np.issubdtype(array.dtype, np.floating) or np.issubdtype(array.dtype, np.integer)):
        raise DataError(f"{name} of dtype {array.dtype} found, expected real numbers")
    with np.errstate(over="ignore", invalid="ignore"):  # too large a double becomes Inf, which is looked for
        return np.require(array, dtype, ["C", "W"])


def _optional_path(path: StrPath | None) -> Path | None:
    return None if path is None else Path(path)


def _as_settings(settings: Mapping[str, Any] | Iterable[str], allow_pipes: bool) -> tuple[str, ...]:
    """The texts of --set."""
    if isinstance(settings, Mapping):
        settings = [f"{key}={_as_yaml(value)}" for key, value in settings.items()]
    return (*settings, *(("data.allow_pipes=true",) if allow_pipes else ()))


def _as_yaml(value: Any, indent: int | None = None) -> str:
    """A value of a recipe as JSON, which is YAML too; paths as text."""

    def plain(other: Any) -> Any:
        if isinstance(other, os.PathLike):
            return os.fspath(other)
        if isinstance(other, np.generic):
            return other.item()
        if isinstance(other, Mapping):
            return dict(other)
        raise UserError(f"a recipe cannot hold {other!r:.200}", hint="use numbers, text, lists and mappings")

    return json.dumps(value, default=plain, ensure_ascii=False, indent=indent)


@contextmanager
def _shows_what_logging_shows() -> Iterator[None]:
    """One worker shows its log as this program has configured `logging`, and workers that are other processes write theirs
    to stderr. Where it has not, both show their warnings alone, and no progress bar."""
    logger, warnings = logging.getLogger("ddnn"), logging.StreamHandler()
    if logger.hasHandlers() or TERMINAL_LEVEL in os.environ:
        yield
        return
    warnings.setLevel(logging.WARNING)
    logger.addHandler(warnings)
    os.environ[TERMINAL_LEVEL] = "WARNING"
    try:
        yield
    finally:
        os.environ.pop(TERMINAL_LEVEL, None)
        logger.removeHandler(warnings)


@contextmanager
def _recipe_file(recipe: StrPath | Mapping[str, Any]) -> Iterator[Path]:
    """The path of a recipe; a mapping is written to a temporary file, and errors name it as what it is."""
    if not isinstance(recipe, Mapping):
        yield Path(recipe)
        return
    with tempfile.TemporaryDirectory(prefix="ddnn-") as name:
        path, folder = Path(name, "recipe.yaml"), re.escape(name)
        path.write_text(_as_yaml(recipe, indent=1), encoding="utf-8")

        def plain_text(text: str) -> str:
            text = re.sub(rf"neither (.*?) nor {folder}/.*?(?=  \[|\n|$)", r"no \1", text)
            return re.sub(rf"{re.escape(str(path))}(, line \d+)?", "the recipe (a mapping)", text)

        with _errors_rewritten(plain_text):
            yield path


@contextmanager
def _exits_as_errors(run_dir: Path) -> Iterator[None]:
    """A failed training of several workers, which ends the command `ddnn train`, is an error; but for signals."""
    from ddnn.distributed.signals import EXIT_DIVERGED, EXIT_RESUMABLE, STOP_SIGNALS
    from ddnn.runs.run_status import read_run_status

    since = time.time()
    try:
        yield
    except SystemExit as ended:
        if ended.code in (EXIT_RESUMABLE, *(128 + number for number in STOP_SIGNALS)):
            raise
        status = read_run_status(run_dir)
        found = None if status is None or status.started < since else status.error
        kind = DivergedError if ended.code == EXIT_DIVERGED else UserError
        message = (
            f"the workers ended with exit code {ended.code}: see their messages" if found is None else found.message
        )
        raise kind(message, location=run_dir, hint=None if found is None else found.hint) from ended
