"""The manifest of a checkpoint: what it holds, as JSON that is checked byte for byte."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ddnn
from ddnn.errors import DataError
from ddnn.train.checkpoint_files import SHARED, Damaged, opened_file, worker_file

FORMAT = 1
MANIFEST = "checkpoint.json"
LONGEST = 1 << 20

_BITS = "$float"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds; `files`: name -> bytes, sha256."""

    number: int
    workers: int
    files: dict[str, tuple[int, str]]
    header: dict[str, Any]


def manifest_bytes(manifest: Manifest) -> bytes:
    """The manifest as JSON, with the sha256 of itself.

    Raises:
        TypeError: the header holds what is not JSON. OSError: it would be longer than may be read again.
    """
    value = {
        "format": FORMAT,
        "ddnn": ddnn.__version__,
        "number": manifest.number,
        "workers": manifest.workers,
        "files": {name: list(of) for name, of in manifest.files.items()},
        "header": _to_json(manifest.header),
    }
    text = _text({**value, "sha256": _own_sha256(value)})
    if len(text) > LONGEST:
        raise OSError(errno.EFBIG, f"{len(text)} bytes, at most {LONGEST} are allowed", MANIFEST)
    return text


def _text(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def _own_sha256(value: dict[str, Any]) -> str:
    return hashlib.sha256(_text(value)).hexdigest()


def read_manifest_text(folder: int) -> str:
    """The text of a manifest, no longer than one may be; raises Damaged."""
    with opened_file(folder, MANIFEST) as file:
        text = file.read(LONGEST + 1)
    if len(text) > LONGEST or not text.isascii():
        raise Damaged(f"{MANIFEST} is too long, or no JSON of ddnn")
    return text.decode("ascii")


def parse_manifest(text: str, number: int, where: Path) -> Manifest:
    """What a manifest says, byte for byte as it was written, in a folder that bears `number`.

    Raises:
        Damaged: it is not what was written, or says something that cannot be.
        DataError: another version of ddnn wrote it.
    """
    try:
        value = json.loads(text)
        sha256 = value.pop("sha256")
        sound = sha256 == _own_sha256(value) and text.encode() == _text({**value, "sha256": sha256})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is not what was written") from error
    if not sound:
        raise Damaged(f"{MANIFEST} is not what was written: its sha256 is another one")
    if type(value.get("format")) is not int or value["format"] != FORMAT:
        raise DataError(
            f"a checkpoint of format {str(value.get('format'))[:20]!r} found, {FORMAT} expected: it was written by "
            f"ddnn {str(value.get('ddnn'))[:20]!r}, this is {ddnn.__version__}",
            where=where,
            mend="go on with the version of ddnn that began this training, or train in another run dir",
        )
    try:
        files = {name: (size, sha256) for name, (size, sha256) in value["files"].items()}
        workers, header = value["workers"], _from_json(value["header"])
        sound = type(workers) is int and 1 <= workers == len(files) - 1 and value["number"] == number
        sound = sound and files.keys() == {SHARED, *map(worker_file, range(workers))} and type(header) is dict
        sound = sound and all(type(size) is int and type(sha256) is str for size, sha256 in files.values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
        raise Damaged(f"{MANIFEST} says something that cannot be") from error
    if not sound:
        raise Damaged(f"{MANIFEST} is that of another checkpoint, or says something that cannot be")
    return Manifest(number, workers, files, header)


def _to_json(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become {"$float": their IEEE 754 bits in hex}. Keys with $ get another."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_BITS: struct.pack(">d", value).hex()}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("the keys of a header must be strings")
        return {"$" + key if key.startswith("$") else key: _to_json(part) for key, part in value.items()}
    return [_to_json(part) for part in value] if isinstance(value, list | tuple) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_BITS}:
            return struct.unpack(">d", bytes.fromhex(value[_BITS]))[0]
        return {key[1:] if key.startswith("$") else key: _from_json(part) for key, part in value.items()}
    return [_from_json(part) for part in value] if isinstance(value, list) else value
