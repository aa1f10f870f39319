"""Names and manifests of checkpoints, for all who look at them: `ddnn.runs.checkpoint` has the layout. Needs no
torch. Files are not trusted: nothing in them can run code, symbolic links are not followed, and no more is read than the
file system and the manifest both say."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import StrictInt, StrictStr, TypeAdapter, ValidationError

import ddnn
from ddnn.util.errors import DataError
from ddnn.util.files import open_regular

log = logging.getLogger(__name__)

FORMAT = 2
MANIFEST, GLOBAL = "manifest.json", "global.safetensors"
TEMPORARY = ".tmp-"  # before the name of a folder that is not complete
MAX_MANIFEST_BYTES = 1 << 20

_OLD_MANIFEST = "checkpoint.json"  # of format 1
_FOLDER = re.compile(rf"(?P<prefix>({re.escape(TEMPORARY)})?)(?P<number>[0-9]{{8}}|[1-9][0-9]{{8,254}})")
_FILES = re.compile(r"manifest\.json|global\.safetensors|rank[0-9]{4,}\.safetensors")
_MAX_NAMES = 10_000  # that `peek_checkpoint` looks at
_MAX_CORRUPT = 10  # checkpoints that it skips


class CheckpointError(Exception):
    """A file of a checkpoint is not what was written, or could not be read or written on some rank."""


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint by its manifest."""

    number: StrictInt
    world_size: StrictInt  # how many ranks wrote it
    files: dict[str, tuple[StrictInt, StrictStr]]  # name -> size in bytes, SHA-256
    metadata: dict[str, Any]  # as it was saved, but tuples have become lists, and keys are sorted
    written: float = 0.0  # seconds since 1970; 0 before it is written

    def to_dict(self) -> dict[str, Any]:
        """As JSON, without files and metadata; `where` says where the training was."""
        counts = (self.metadata.get(key) for key in ("epoch", "minibatch"))
        epoch, minibatch = (count if type(count) is int and 0 <= count <= 2**53 else None for count in counts)
        where = "" if epoch is None else f": after epoch {epoch}"
        where += f", {minibatch} minibatches into the next" if where and minibatch else ""
        fields = {"number": self.number, "world_size": self.world_size, "epoch": epoch, "minibatch": minibatch}
        return {**fields, "written": self.written, "where": f"number {self.number}{where}"}


_SUMMARY = TypeAdapter(CheckpointSummary)


def peek_checkpoint(directory: Path, report: Callable[[str], None]) -> CheckpointSummary | None:
    """The newest checkpoint whose manifest is intact and whose files have the right sizes; None if there is none.
    `directory`: the folders of all checkpoints of a training. `report`: called with a sentence for each checkpoint that
    cannot be used."""
    try:
        numbers = checkpoint_numbers(directory, max_names=_MAX_NAMES)
    except OSError as error:
        report(f"checkpoints: {error.strerror}")
        return None
    for number in numbers[: -_MAX_CORRUPT - 1 : -1]:
        path = directory / folder_name(number)
        try:
            summary = parse_manifest(*read_manifest(path), number, path)
            for name in summary.files:
                open_checked(path, name, summary).close()
            return summary
        except (CheckpointError, DataError, OSError) as error:
            report(f"checkpoint {number} is corrupt or of another version: {describe(error)}")
    return None


def encode_manifest(summary: CheckpointSummary) -> bytes:
    """The manifest as JSON, with the SHA-256 of itself; floats that are not finite as NaN, Infinity and -Infinity.
    TypeError: the metadata is no JSON. OSError: it would be longer than may be read again."""
    value = {
        "format": FORMAT,
        "ddnn": ddnn.__version__,
        "number": summary.number,
        "world_size": summary.world_size,
        "files": {name: list(entry) for name, entry in summary.files.items()},
        "metadata": summary.metadata,
    }
    text = canonical_json({**value, "sha256": manifest_digest(value)})
    if len(text) > MAX_MANIFEST_BYTES:
        raise OSError(errno.EFBIG, f"{len(text)} bytes, at most {MAX_MANIFEST_BYTES} are allowed", MANIFEST)
    return text


def canonical_json(value: dict[str, Any]) -> bytes:
    """The only form in which a manifest is accepted."""
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def manifest_digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def read_manifest(path: Path) -> tuple[str, float]:
    """The text of a manifest, of this format or the first, and when it was written."""
    names = [entry.name for entry in real_folder(path).iterdir()]
    name = _OLD_MANIFEST if _OLD_MANIFEST in names and MANIFEST not in names else MANIFEST
    with open_regular(path / name, follow_symlinks=False) as file:
        text, written = file.read(MAX_MANIFEST_BYTES + 1), os.fstat(file.fileno()).st_mtime
    if len(text) > MAX_MANIFEST_BYTES or not text.isascii():
        raise CheckpointError(f"{name} is too long, or not JSON of ddnn")
    return text.decode("ascii"), written


def parse_manifest(text: str, written: float, number: int, path: Path) -> CheckpointSummary:
    """What a manifest says, byte for byte as it was written, in the folder `path` of checkpoint `number`. DataError if
    another version of ddnn wrote it; CheckpointError."""
    try:
        value = json.loads(text)
        sha256 = value.pop("sha256")
        valid = sha256 == manifest_digest(value) and text.encode() == canonical_json({**value, "sha256": sha256})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is not what was written") from error
    if not valid:
        raise CheckpointError(f"{MANIFEST} is not what was written: its SHA-256 differs")
    if type(value.get("format")) is not int or value["format"] != FORMAT:
        form, version = (str(value.get(key))[:20] for key in ("format", "ddnn"))
        formats = f"a checkpoint of format {form!r} found, {FORMAT} expected"
        message = f"{formats}: it was written by ddnn {version!r}, this is {ddnn.__version__}"
        hint = "resume with the version of ddnn that started this training, or train in another run dir"
        raise DataError(message, location=path, hint=hint)
    try:
        summary = replace(_SUMMARY.validate_python(value), written=written)
    except ValidationError as error:
        raise CheckpointError(f"{MANIFEST} describes no checkpoint") from error
    complete = summary.world_size == len(summary.files) - 1  # before so many names are made
    if not complete or summary.files.keys() != {GLOBAL, *map(rank_file, range(summary.world_size))}:
        raise CheckpointError(f"{MANIFEST} describes no checkpoint")
    if summary.number != number:
        raise CheckpointError(f"{MANIFEST} belongs to another checkpoint")
    return summary


def open_checked(path: Path, name: str, summary: CheckpointSummary) -> BinaryIO:
    """A file of a checkpoint, opened if it has the size that the manifest says; CheckpointError, OSError."""
    file = open_regular(real_folder(path) / name, follow_symlinks=False)
    actual, expected = os.fstat(file.fileno()).st_size, summary.files[name][0]
    if actual != expected:
        file.close()
        raise CheckpointError(f"{name} has {actual} bytes, {expected} were written")
    return file


def rank_file(rank: int) -> str:
    return f"rank{rank:04d}.safetensors"


def folder_name(number: int) -> str:
    return f"{number:08d}"


def checkpoint_numbers(directory: Path, prefix: str = "", max_names: int | None = None) -> list[int]:
    """Of everything in `directory` that has the name of a checkpoint behind `prefix`, ascending; none if it does not
    exist."""
    try:
        with os.scandir(real_folder(directory)) as entries:
            matches = (_FOLDER.fullmatch(entry.name) for entry in islice(entries, max_names))
            numbers = [int(match["number"]) for match in matches if match and match["prefix"] == prefix]
    except FileNotFoundError:
        return []
    return sorted(filter(None, numbers))


def real_folder(path: Path) -> Path:
    """The same path; OSError if it is no folder, or a symbolic link to one."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a real folder", path.name)
    return path


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint. Files that are not of a checkpoint stay, and so does the folder then: OSError."""
    for file in list(real_folder(path).iterdir()):
        if _FILES.fullmatch(file.name):
            file.unlink()
    path.rmdir()


def remove_checkpoints(directory: Path, keep: int | None = None) -> None:
    """Removes all checkpoints, and the directory if nothing else is in it, or all but the one of number `keep`; what
    cannot be removed is logged."""
    try:
        for prefix in ("", TEMPORARY):
            for number in set(checkpoint_numbers(directory, prefix)) - {None if prefix else keep}:
                with suppress(OSError):  # other files are in it: then the directory is not empty below
                    remove_checkpoint(directory / (prefix + folder_name(number)))
        if keep is None:
            directory.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("not everything in %s could be removed: %s", directory, error.strerror)


def describe(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
