"""The functions of `import ddnn`: training, trained models, and Kaldi's features and alignments as numpy arrays.
docs/python.md shows them. Needs torch only where something is computed."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddnn.kaldi import alignments as kaldi_alignments
from ddnn.kaldi.archive import MatrixReader, ScpEntry, check_finite, iterate_matrices, read_scp
from ddnn.kaldi.data_dir import add_deltas, apply_cmvn, compute_cmvn_stats, read_data_dir
from ddnn.kaldi.data_dir import read_cmvn_stats as read_cmvn_scp
from ddnn.util.errors import DataError, DivergedError, UserError

if TYPE_CHECKING:
    from ddnn.nn.acoustic_model import AcousticModel

StrPath = str | os.PathLike[str]
Kind = Literal["log-likelihoods", "posteriors", "log-posteriors"]


def train(
    recipe: StrPath | Mapping[str, Any],
    run_dir: StrPath | None = None,
    *,
    settings: Mapping[str, Any] | Iterable[str] = (),
    workers: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    resume: bool | Literal["auto"] = False,
) -> Model:
    """Trains a network, as `ddnn train` does, and returns it.

    Args:
        recipe: path of a recipe, or a mapping of recipe keys (docs/recipe.md) with mappings for sections. Relative paths
            of a mapping are taken from the working directory.
        run_dir: where the training leaves everything; a new or empty directory unless `resume`. Default: exp/NAME OF
            THE RECIPE; a mapping has no name and needs one.
        settings: keys that replace those of the recipe: a mapping as {"schedule.epochs": 3}, or texts as of `--set`.
        workers: how many train; the same as the key parallel.workers.
        device: where to compute.
        resume: True: continue from the newest checkpoint of `run_dir`; "auto": or start where there is none. A training
            that has finished is only loaded.

    Returns:
        The trained model, as of `load`, on the CPU.

    Raises:
        UserError: something for the user to fix: recipe, data, device, disk.
        DivergedError: the training diverged; a UserError.
        SystemExit: a signal (Ctrl-C, SIGTERM) has ended it, with the exit codes of README.md.
    """
    from ddnn.training.start import start_training

    if isinstance(settings, Mapping):
        settings = [f"{key}={_as_yaml(value)}" for key, value in settings.items()]
    modes: dict[bool | str, Literal["no", "yes", "auto"]] = {False: "no", True: "yes", "auto": "auto"}
    with ExitStack() as stack:
        if isinstance(recipe, Mapping):
            if run_dir is None:
                raise UserError("a recipe that is a mapping needs a run_dir", hint="give run_dir='exp/NAME'")
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ddnn-"))
            path = Path(folder, "recipe.yaml")
            path.write_text(_as_yaml(recipe, indent=1), encoding="utf-8")
            stack.enter_context(_errors_of_mapping(path))
        else:
            path = Path(recipe)
        location = Path("exp", path.stem) if run_dir is None else Path(run_dir)
        if run_dir is None and resume and path.is_dir():
            location = path
        stack.enter_context(_threads_kept())
        stack.enter_context(_exits_as_errors(location))
        start_training(path, location, tuple(settings), workers, device, modes[resume])
    return load(location)


def load(run_dir: StrPath, *, device: Literal["auto", "cpu", "cuda"] = "cpu") -> Model:
    """The trained model of a run dir: of `ddnn train`, or of `ddnn import-nnet1`. `device`: where it computes.

    Raises:
        UserError: there is no such run dir, it has no trained model (yet), or a damaged one; there is no GPU.
    """
    from ddnn.training.run_dir import load_run
    from ddnn.util.system import choose_device

    with _threads_kept():
        return Model(load_run(Path(run_dir)).to(choose_device(device)), Path(run_dir))


class Model:
    """A trained network, with what it does to features: CMVN, deltas, splice, normalization. Made by `load`, `train`.

    Attributes:
        run_dir: where it was loaded from.
        num_pdfs: number of its outputs.
        dim: dimension of the features that it takes, as they are in a data dir.
        cmvn: "none", "mean" or "mean-variance": whether features are normalized per speaker.
        acoustic_model: what ddnn uses itself; may change with any version.
    """

    def __init__(self, acoustic_model: AcousticModel, run_dir: Path) -> None:
        features = acoustic_model.features
        self.acoustic_model, self.run_dir, self.cmvn = acoustic_model, run_dir, features.cmvn
        self.num_pdfs = acoustic_model.network.output_dim
        self.dim = acoustic_model.transform.dim // (features.deltas + 1)

    def __repr__(self) -> str:
        return f"<ddnn.Model of {self.run_dir}: {self.dim} dims, cmvn {self.cmvn}, {self.num_pdfs} pdfs>"

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
        from ddnn.training.evaluation import load_for_model

        if kind not in get_args(Kind):
            raise UserError(f"{kind!r} found, expected one of {', '.join(get_args(Kind))}")
        model, device = self.acoustic_model, self.acoustic_model.network.parameters.device
        priors = self._priors(prior_scale) if kind == "log-likelihoods" else None
        where = None if transforms is None else Path(transforms)
        dataset = load_for_model(model, Path(data_dir), None, allow_pipes=allow_pipes, transforms=where)
        yield from compute_scores(model, dataset.to(device), kind, priors)

    def _priors(self, scale: float) -> Any:
        import torch

        from ddnn.decoding.prepare import log_priors, read_counts

        counts, _ = read_counts(self.run_dir, self.num_pdfs)
        return torch.from_numpy(log_priors(counts, scale)).to(self.acoustic_model.network.parameters)

    def _scores(
        self, kind: Kind, features: ArrayLike, cmvn_stats: ArrayLike | None, prior_scale: float = 1.0
    ) -> NDArray[np.float32]:
        from ddnn.decoding.prepare import Scorer, one_utterance

        model = self.acoustic_model
        priors = self._priors(prior_scale) if kind == "log-likelihoods" else None
        rows, context = self._prepared(features, cmvn_stats), model.transform.context
        rows = np.pad(rows, ((context, context), (0, 0)), mode="edge")
        scorer = Scorer(model, kind, priors, len(rows))
        return scorer(one_utterance("of the argument", rows, context).to(model.network.parameters.device))

    def _prepared(self, features: ArrayLike, cmvn_stats: ArrayLike | None) -> NDArray[np.float32]:
        """Features (frames, dim) after CMVN and deltas."""
        config = self.acoustic_model.features
        if config.transforms is not None:
            message = "the model applies Kaldi's transforms, which are of a speaker"
            raise UserError(message, hint="compute a whole data dir: model.compute(data_dir, transforms=...)")
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
                raise DataError(message, hint="give Kaldi's statistics, sums and not means: see docs/python.md")
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
    entries = read_scp(path, allow_pipes=allow_pipes)
    with MatrixReader() as reader:
        for entry in entries:
            features = reader.read(entry)
            check_finite(entry.key, features, entry.location)
            yield entry.key, features


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
def _threads_kept() -> Iterator[None]:
    """torch has as many threads in this process after the block as before: commands of ddnn take one."""
    import torch

    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _errors_of_mapping(path: Path) -> Iterator[None]:
    """Errors of the recipe at `path`, a file that the user has not written, name it as what it is."""
    folder = re.escape(str(path.parent))

    def plain_text(text: str) -> str:
        text = re.sub(rf"neither (.*?) nor {folder}/.*?(?=  \[|\n|$)", r"no \1", text)
        return re.sub(rf"{re.escape(str(path))}(, line \d+)?", "the recipe (a mapping)", text)

    try:
        yield
    except UserError as error:
        error.message, error.location, error.hint = (
            plain_text(error.message), error.location and plain_text(error.location), error.hint and plain_text(error.hint),
        )  # fmt: skip
        raise


@contextmanager
def _exits_as_errors(run_dir: Path) -> Iterator[None]:
    """A failed training of several workers, which ends the command `ddnn train`, is an error; but for signals."""
    from ddnn.distributed.signals import EXIT_DIVERGED, EXIT_RESUMABLE, STOP_SIGNALS
    from ddnn.training.run_status import read_run_status

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
