"""What a Kaldi GMM system does to raw features after CMVN, read from its dirs and applied to the features of an
utterance: `final.mat` (LDA+MLLT) over frames spliced by `splice_opts`, or deltas by `delta_opts` where there is no
final.mat, then the fMLLR transforms `trans.*` of speakers or utterances.

Follows kaldi `steps/nnet/make_fmllr_feats.sh`, `steps/decode_fmllr.sh`, `featbin/splice-feats.cc` and
`featbin/transform-feats.cc`. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from ddnn.kaldi.alignments import job_files
from ddnn.kaldi.archive import iterate_matrices
from ddnn.kaldi.basic_types import open_kaldi_file
from ddnn.kaldi.data_dir import add_deltas
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.util.arrays import AnyArray, Float32Array, Float64Array
from ddnn.util.errors import DataError
from ddnn.util.files import read_bytes_limited

MATRIX = "final.mat"
_MODELS = (MATRIX, "final.mdl", "final.alimdl")  # by which a dir is that of a system, not of a decoding
_OPTIONS: dict[str, dict[str, int | bool | str]] = {
    "splice_opts": {"left-context": 4, "right-context": 4},
    "delta_opts": {"delta-order": 2, "delta-window": 2},
    "cmvn_opts": {"norm-means": True, "norm-vars": False, "reverse": False, "skip-dims": ""},
}
"""The options that Kaldi's scripts keep beside a model, and the defaults of its programs."""
_RANGES = {"left-context": (0, 100), "right-context": (0, 100), "delta-order": (0, 4), "delta-window": (1, 100)}
_FMLLR = re.compile(r"trans\.[1-9][0-9]{0,8}")
_BOOLEANS = {"true": True, "t": True, "1": True, "": True, "false": False, "f": False, "0": False}
Matrix = Float32Array


@dataclass(frozen=True)
class TransformConfig:
    """Which transforms features go through; a trained model keeps it."""

    final_mat: str = ""  # SHA-256 of the values of final.mat; empty where there is none: deltas instead
    output_dim: int = 0  # its rows
    # frames on each side that final.mat sees
    left_context: int = 0
    right_context: int = 0
    # of the deltas that a system without final.mat has
    delta_order: int = 0
    delta_window: int = 2
    adapted: bool = False  # whether trans.* follow

    def width(self, dim: int) -> int:
        """Dimension of transformed features that had `dim` dims."""
        return self.output_dim if self.final_mat else dim * (self.delta_order + 1)

    def as_text(self) -> str:
        """In words: "LDA+MLLT over 3+1+3 frames, fMLLR"."""
        frames = f"LDA+MLLT over {self.left_context}+1+{self.right_context} frames"
        deltas = f"deltas of order {self.delta_order}, window {self.delta_window}"
        return (frames if self.final_mat else deltas) + (", fMLLR" if self.adapted else "")

    @staticmethod
    def from_header(values: Any) -> TransformConfig:
        """What a stored model says; ValueError or TypeError where that cannot be."""
        config = TransformConfig(**values)
        valid = all(
            type(value) is type(default)
            for value, default in zip(astuple(config), astuple(TransformConfig()), strict=True)
        )
        valid = valid and all(0 <= value < 1 << 20 for value in vars(config).values() if not isinstance(value, str))
        if not valid or bool(config.final_mat) != (config.output_dim > 0) or config.delta_order > 4:
            raise ValueError(f"transforms {str(values)[:200]!r}")
        return config

    def apply(self, features: AnyArray, final_mat: Matrix | None, fmllr: Matrix | None) -> Float32Array:
        """The features (frames, dim) of an utterance transformed, (frames, width), a new array. `final_mat`: as
        `Transforms`; `fmllr`: the transform of the utterance or its speaker, None without."""
        if final_mat is None:
            result = add_deltas(features, self.delta_order, self.delta_window)
        else:
            result = apply_affine(splice_frames(features, self.left_context, self.right_context), final_mat)
        return result if fmllr is None else apply_affine(result, fmllr)


@dataclass(frozen=True, eq=False)
class Transforms:
    """The matrices of a `TransformConfig`: (output dim, input dim), with one more column where they have an offset."""

    final_mat: Matrix | None = None
    fmllr: Mapping[str, Matrix] | None = None  # of each utterance; those of a speaker are one array. None: no trans.*


def splice_frames(features: AnyArray, left: int, right: int) -> AnyArray:
    """Each frame of (frames, dim) with its neighbors, the earliest first: (frames, dim * (left + 1 + right)). A frame
    before the first or behind the last repeats it (kaldi `feat/feature-functions.cc`, SpliceFrames)."""
    padded = np.pad(features, ((left, right), (0, 0)), mode="edge")
    frames = len(features)
    return np.concatenate([padded[start : start + frames] for start in range(left + 1 + right)], axis=1)


def apply_affine(features: AnyArray, matrix: Matrix) -> Float32Array:
    """Features (frames, dim) times a matrix (rows, dim), or (rows, dim + 1) with the offset last: float32 (frames, rows).
    Products are summed in double precision: the bits hardly depend on the number of threads and the machine."""
    dim = features.shape[1]
    result: Float64Array = features.astype(np.float64) @ matrix[:, :dim].T.astype(np.float64)
    if matrix.shape[1] > dim:
        result += matrix[:, dim]
    with np.errstate(over="ignore"):  # Inf, which the caller looks for
        single: Matrix = result.astype(np.float32)
    return single


def read_transform_config(path: Path) -> TransformConfig:
    """Which transforms the Kaldi dir `path` has: an alignment dir, or a decode dir within the dir of its system, where
    final.mat and the options then are (Kaldi: srcdir=`dirname $transform_dir`). DataError: it has none; damaged files,
    unknown options."""
    matrix, adapted = _read_final_mat(path), bool(fmllr_files(path))
    if matrix is None and not adapted and _system_dir(path) is None:
        if not path.is_dir():
            raise DataError("the dir of transforms does not exist, or is no directory", location=path)
        message = f"not a dir of a Kaldi system: there is no {MATRIX}, final.mdl or trans.* in it, and no {MATRIX} or "
        message += "final.mdl in the folder above"
        raise DataError(message, location=path, hint="give an alignment dir such as exp/tri4_ali, or a decode dir")
    if matrix is None:
        options, _ = _options_of(path, "delta_opts")
        return TransformConfig("", 0, 0, 0, options["delta-order"], options["delta-window"], adapted)
    options, _ = _options_of(path, "splice_opts")
    digest = hashlib.sha256(f"{matrix.shape}".encode() + matrix.astype("<f4").tobytes()).hexdigest()
    left, right = options["left-context"], options["right-context"]
    return TransformConfig(digest, len(matrix), left, right, adapted=adapted)


def read_transforms(
    path: Path,
    expected: TransformConfig,
    dim: int,
    utterances: Sequence[str],
    speakers: Sequence[str] | None,
    data: Path,
) -> Transforms:
    """The transforms of the Kaldi dir `path` for these utterances of the data dir `data`, whose features have `dim` dims;
    `speakers`: of each. DataError: they are not those that are `expected` (of the training, or of the first data dir);
    they do not fit the features; one is damaged, not finite, of other dims, or missing."""
    config = read_transform_config(path)
    if config != expected:
        difference = f"{config.as_text()} found, {expected.as_text()} expected"
        if config.as_text() == expected.as_text():
            digests = f"{config.final_mat[:12]} found, {expected.final_mat[:12]} expected"
            difference = f"another {MATRIX} ({digests}, by digest)"
        hint = "give the transforms that the same system made for this data, such as exp/tri4/decode_test"
        message = f"other transforms than those of the training data: {difference}"
        raise DataError(message, location=path, hint=hint)
    matrix = _read_final_mat(path)
    file, sees, dims = _raw_dims(path, matrix)
    if dims and dim not in dims:
        message = f"features of {dim} dims ({data}) do not fit {sees}, with {config.as_text()}"
        hint = "give the raw features that the system was trained on, and the splice_opts or delta_opts of its dir; "
        hint += "features that were written with these transforms (make_fmllr_feats.sh) need no data.transforms"
        raise DataError(message, location=file, hint=hint)
    if not config.adapted:
        return Transforms(matrix)
    return Transforms(matrix, _read_fmllr(path, matrix is None, config.width(dim), utterances, speakers, data))


def transforms_digest(transforms: Transforms) -> str:
    """By which workers on different hosts check that they have the same."""
    digest = hashlib.sha256(b"" if transforms.final_mat is None else transforms.final_mat.tobytes())
    for name, matrix in (transforms.fmllr or {}).items():
        digest.update(f"{name}\n".encode() + matrix.tobytes())
    return digest.hexdigest()[:16]


NNET_OPTIONS = {"mean": "--norm-means=true --norm-vars=false", "mean-variance": "--norm-means=true --norm-vars=true"}
"""What `cmvn_opts` of an nnet1 dir says, by `data.cmvn`."""


def read_nnet_options(path: Path) -> tuple[str, int]:
    """`data.cmvn` and `data.deltas` by `cmvn_opts` and `delta_opts` of an nnet1 dir, which has them where there are any
    (kaldi `steps/nnet/train.sh`). DataError: unknown options, or such as ddnn does not have."""
    values: dict[str, Any] = {"cmvn_opts": "none", "delta_opts": 0}
    for name in values:
        if (path / name).is_file() and _options_of(path, name)[1]:
            values[name] = _recipe_value(path, name)
    return values["cmvn_opts"], values["delta_opts"]


def _recipe_value(path: Path, name: str) -> str | int:
    """`data.cmvn` by `cmvn_opts`, or `data.deltas` by `delta_opts`. DataError: as `read_nnet_options`."""
    options, _ = _options_of(path, name)
    if options.get("reverse") or options.get("skip-dims") or options.get("delta-window", 2) != 2:
        message = "--reverse, --skip-dims or a --delta-window other than 2 found, which ddnn does not have"
        raise DataError(message, location=_option_file(path, name))
    if name == "delta_opts":
        return int(options["delta-order"])
    mean = "mean-variance" if options["norm-vars"] else "mean"
    return mean if options["norm-means"] else "none"


def mismatched_options(transforms: Path | None, alignments: Path, cmvn: str, deltas: int, dim: int) -> list[str]:
    """How `data.cmvn` and `data.deltas`, with which features of `dim` dims are read, differ from the options of the system
    that made the transforms, or else the alignments. An alignment is often made from other features than the network
    sees: only those of the dims of its system's raw features are compared."""
    path = alignments if transforms is None else transforms
    read = {"cmvn_opts": ("data.cmvn", cmvn)}
    if transforms is None and not (path / MATRIX).is_file():
        read["delta_opts"] = ("data.deltas", str(deltas))
    messages = []
    try:
        if transforms is None and not any((path / name).is_file() for name in read):
            return []
        if transforms is None and dim not in _raw_dims(path, _read_final_mat(path))[2]:
            return []
        for name, (key, value) in read.items():
            file = _option_file(path, name)
            if file.is_file() and (name == "cmvn_opts" or _options_of(path, name)[1]):
                expected = _recipe_value(path, name)
                if str(expected) != value:
                    messages.append(f"{file} says {key}: {expected}, but the features are read with {key}: {value}")
    except DataError as error:
        messages.append(f"{error.location}: {error.message}")
    return messages


def _raw_dims(path: Path, matrix: Matrix | None) -> tuple[Path, str, tuple[float, ...]]:
    """The dims that raw features of a system may have, by `final.mat`, whose last column may be an offset, or by the GMMs;
    none where that cannot be known. Before them the file that says so, and what it has."""
    if matrix is not None:
        options, columns = _options_of(path, "splice_opts")[0], matrix.shape[1]
        frames = options["left-context"] + 1 + options["right-context"]
        return find_final_mat(path) or path, f"the {columns} columns", (columns / frames, (columns - 1) / frames)
    file = (_system_dir(path) or path) / "final.mdl"
    gmm_dim = read_transition_model(file).gmm_dim if file.is_file() else None
    if gmm_dim is None:
        return file, "", ()
    return file, f"the GMMs of {gmm_dim} dims", (gmm_dim / (_options_of(path, "delta_opts")[0]["delta-order"] + 1),)


def _system_dir(path: Path) -> Path | None:
    """The dir itself, or the one above it, whichever has a model first."""
    candidates = (path, path.absolute().parent)
    return next((place for place in candidates if any((place / name).is_file() for name in _MODELS)), None)


def find_final_mat(path: Path) -> Path | None:
    """The final.mat of the dir, or of the system in the folder above."""
    system = _system_dir(path)
    return system / MATRIX if system is not None and (system / MATRIX).is_file() else None


def _read_final_mat(path: Path) -> Matrix | None:
    file = find_final_mat(path)
    return None if file is None else _checked(read_matrix(file), file)


def read_matrix(file: Path) -> AnyArray:
    """The matrix that is the whole file, (rows, columns), without a key: binary or text. DataError: it is not one."""
    with open_kaldi_file(file, "a Kaldi matrix") as reader:
        values = reader.float_matrix("the matrix")
        if (reader.binary and reader.remaining) or (not reader.binary and reader.peek()):
            raise reader.error("the end of the file behind the matrix")
    return values


def _checked(values: AnyArray, file: Path, key: str = "") -> Matrix:
    """The matrix in single precision; `key`: whose it is, if it is not the only one of the file."""
    with np.errstate(over="ignore", invalid="ignore"):
        matrix = values.astype(np.float32)
    problem = "" if matrix.size else "an empty matrix"
    if not np.isfinite(matrix).all():
        row, column = np.argwhere(~np.isfinite(matrix))[0]
        problem = f"{matrix[row, column]} in row {row}, column {column} of the transform"
    if problem:
        hint = "estimate the transform again"
        raise DataError(f"{key}: {problem}" if key else problem, location=file, hint=hint)
    return matrix


def fmllr_files(path: Path) -> list[Path]:
    """trans.1, trans.2, ... of a dir in the order of their numbers, as many as its num_jobs says; empty where there is
    none."""
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    if any(map(_FMLLR.fullmatch, names)):
        return job_files(path, "trans.{}")
    if any(name.startswith("raw_trans.") for name in names):
        message = "raw_trans.* (raw fMLLR) found, expected trans.*"
        raise DataError(message, location=path, hint="write these features with Kaldi, and train on them")
    return []


def _read_fmllr(
    path: Path, after_deltas: bool, dim: int, utterances: Sequence[str], speakers: Sequence[str] | None, data: Path
) -> dict[str, Matrix]:
    """The transform of each utterance. The keys are taken as speakers or as utterances,
    whichever match more of the data."""
    by_speaker = utterances if speakers is None else speakers
    needed = {*utterances, *by_speaker}
    matrices: dict[str, Matrix | None] = {}  # None where it is not needed
    for file in fmllr_files(path):
        for key, values in iterate_matrices(file):
            if key in matrices:
                raise DataError(f"{key} occurs twice in trans.*", location=file, hint="remove one of the two")
            matrix = _checked(values, file, key)
            rows, columns = matrix.shape
            if rows != dim or columns not in (dim, dim + 1):
                message = f"{key}: a transform of {rows} x {columns} found, {dim} x {dim + 1} expected"
                hint = "as there is no final.mat, it follows deltas; " if after_deltas else ""
                hint += "give the transforms and final.mat of one system"
                raise DataError(message, location=file, hint=hint)
            matrices[key] = matrix if key in needed else None
    names = max((by_speaker, utterances), key=lambda names: sum(name in matrices for name in names))
    missing = [index for index, name in enumerate(names) if name not in matrices]
    if len(missing) == len(names):
        message = f"none of the speakers and utterances of {data} has a transform (such as {by_speaker[0]}, "
        message += f"{utterances[0]}); trans.* has {len(matrices)}, of {next(iter(matrices), None)} and others"
        raise DataError(message, location=path, hint="give the transforms that were estimated on this data")
    if missing:
        kind = "speaker" if names is speakers else "utterance"
        count, first = len({names[index] for index in missing}), missing[0]
        message = f"{count} of {len(set(names))} {kind}s of {data} have no transform in trans.*; "
        message += f"the first is {names[first]} (utterance {utterances[first]})"
        hint = "estimate the transforms on all of the data, or remove what lacks one with utils/subset_data_dir.sh"
        raise DataError(message, location=path, hint=hint)
    return {utterance: cast(Matrix, matrices[name]) for utterance, name in zip(utterances, names, strict=True)}


def _option_file(path: Path, name: str) -> Path:
    """The file of options in the dir itself or, where there is none, in that of its system."""
    file = path / name
    return file if file.is_file() else (_system_dir(path) or path) / name


def _options_of(path: Path, name: str) -> tuple[dict[str, Any], str]:
    """The options that the dir's file says, or the defaults; and what the file says. DataError: unknown options, or
    values that cannot be."""
    file, options = _option_file(path, name), dict(_OPTIONS[name])
    if not file.is_file():
        return options, ""
    try:
        text = read_bytes_limited(file, 10_000).decode("utf-8").strip()
        words = shlex.split(text)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"cannot read the options: {error}", location=file) from error
    for word in words:
        option, _, value = word.partition("=")
        key = option.removeprefix("--").lower().replace("_", "-")  # as Kaldi's ParseOptions
        if not option.startswith("--") or key not in options:
            known = ", ".join(f"--{name}" for name in options)
            raise DataError(f"unknown option {word!r}", location=file, hint=f"known are {known}")
        default = options[key]
        parsed: bool | int | str | None = None
        low, high = _RANGES.get(key, (0, 0))
        if isinstance(default, str):
            parsed = value
        elif isinstance(default, bool):
            parsed = _BOOLEANS.get(value)
        elif re.fullmatch("[0-9]{1,6}", value) and low <= int(value) <= high:
            parsed = int(value)
        if parsed is None:
            expected = "true or false" if isinstance(default, bool) else f"a number from {low} to {high}"
            raise DataError(f"{word!r} found, expected {expected}", location=file)
        options[key] = parsed
    return options, text
