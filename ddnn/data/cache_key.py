"""The name of a cache file: a digest of everything that its content depends on."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from ddnn.kaldi.datadir import DataDir
from ddnn.kaldi.scp import ScpEntry

VERSION = 1
"""Of the file's format, and of what loading makes of the same input."""

_ALIGNMENT_FILE = re.compile(r"ali\.[0-9]+\.gz|final\.mdl|num_jobs")


def cache_key(directory: DataDir, alignments: Path, options: Mapping[str, str | int | None]) -> str | None:
    """SHA-256, in hexadecimal, over: the utterances of `feats.scp` with path, offset and range of each; speakers;
    `cmvn.scp`; size and modification time of each archive that they name; the alignment's files, byte for byte; and
    `options`.

    None where there is nothing to go by: an entry is a shell command, or a file cannot be read (who reads it next says
    why).

    Args:
        options: pipeline, context, dtype, number of pdfs.
    """
    digest = hashlib.sha256(json.dumps([VERSION, options], sort_keys=True).encode())
    entries = [*directory.entries, *(directory.cmvn or {}).values()]
    absolute: dict[Path, str] = {}
    try:
        for entry in entries:
            if entry.path is None:
                return None
            if entry.path not in absolute:
                absolute[entry.path] = _described(entry.path)
            digest.update(_line(entry, absolute[entry.path]))
        digest.update(f"cmvn.scp {directory.cmvn is not None}, utt2spk {directory.speakers is not None}\n".encode())
        for utterance, speaker in (directory.speakers or {}).items():
            digest.update(f"{utterance} {speaker}\n".encode())
        for path in _alignment_files(alignments):
            content = hashlib.sha256()
            with path.open("rb") as stream:
                while block := stream.read(1 << 20):
                    content.update(block)
            digest.update(f"{path.name} {content.hexdigest()}\n".encode(errors="surrogateescape"))
    except OSError:
        return None
    return digest.hexdigest()


def _described(path: Path) -> str:
    found = path.stat()
    return f"{path.absolute()} {found.st_size} {found.st_mtime_ns}"


def _line(entry: ScpEntry, archive: str) -> bytes:
    return f"{entry.key} {entry.offset} {entry.rows} {entry.columns} {archive}\n".encode(errors="surrogateescape")


def _alignment_files(path: Path) -> list[Path]:
    """Regular files only: a pipe in their place would be waited for."""
    if not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(path)
        return [path]
    return sorted(p for p in path.iterdir() if _ALIGNMENT_FILE.fullmatch(p.name) and p.is_file())
