"""One loading process: reads tasks, a JSON line each, from its standard input, and answers each with a line.

    parent: {"store": descriptor, "start": byte, "preparation": {...}}     once
    parent: {"fill": chunk, "stats": {speaker: rows}}                      child: {"crc": 123}
    parent: {"stats_of": {speaker: [entry, ...]}}                          child: {"stats": {speaker: rows}}
    child, where a task fails:                                             {"error": {"what", "where", "mend"}}

Frames go straight into the open file that it inherits. It imports no torch and ends when its input does, so that no
parent leaves it behind. Ctrl-C is the parent's to deal with.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ddnn.data.fill import Chunk, Preparation, Stats, write_chunk
from ddnn.errors import DataError, UserError
from ddnn.kaldi.datadir import compute_cmvn_stats
from ddnn.kaldi.tables import MatrixReader, ScpEntry

_LONGEST = 20_000
"""Characters of one part of an error: an answer fits into a pipe, so that nobody waits to write it."""


def setup_line(descriptor: int | None, start: int, preparation: Preparation) -> bytes:
    """What a loading process is told first."""
    of = {**asdict(preparation), "data": str(preparation.data)}
    return _line({"store": descriptor, "start": start, "preparation": of})


def fill_line(chunk: Chunk, stats: Stats) -> bytes:
    """The task to write a chunk into the store, with the statistics of its speakers."""
    own = {speaker: stats[speaker].tolist() for speaker in set(chunk.speakers or ())}
    told = [chunk.row, chunk.rows, [_told(e) for e in chunk.entries], chunk.num_frames, chunk.speakers]
    return _line({"fill": told, "stats": own})


def stats_line(speakers: Mapping[str, list[ScpEntry]]) -> bytes:
    """The task to take the CMVN statistics of these speakers."""
    return _line({"stats_of": {speaker: [_told(e) for e in entries] for speaker, entries in speakers.items()}})


def stats_of_answer(answer: Mapping[str, Any]) -> Stats:
    """Speaker -> statistics, as a loading process answers them."""
    return {speaker: np.array(rows, np.float64) for speaker, rows in answer["stats"].items()}


def error_of_answer(answer: Mapping[str, Any]) -> Exception | None:
    """What went wrong in a loading process; None where nothing did."""
    error = answer.get("error")
    if error is None:
        return None
    if error["kind"] == "memory":
        return MemoryError(error["what"])
    if error["kind"] == "disk":
        return OSError(error["errno"], error["what"])
    kind = DataError if error["kind"] == "data" else UserError
    return kind(error["what"], where=error["where"], mend=error["mend"])


def serve(tasks: BinaryIO, answers: BinaryIO) -> None:
    """Does all tasks, one after another."""
    told = json.loads(tasks.readline())
    of = told["preparation"]
    preparation = replace(Preparation(**of), data=Path(of["data"]))
    with MatrixReader() as reader:
        for line in tasks:
            answers.write(_line(_answer(json.loads(line), told, preparation, reader)))
            answers.flush()


def _answer(
    task: Mapping[str, Any], told: Mapping[str, Any], preparation: Preparation, reader: MatrixReader
) -> dict[str, Any]:
    try:
        if "stats_of" in task:
            speakers = {speaker: [_entry(e) for e in entries] for speaker, entries in task["stats_of"].items()}
            speaker_of = {entry.key: speaker for speaker, entries in speakers.items() for entry in entries}
            found = compute_cmvn_stats([e for entries in speakers.values() for e in entries], speaker_of)
            return {"stats": {speaker: rows.tolist() for speaker, rows in found.items()}}
        row, rows, entries, num_frames, of_each = task["fill"]
        chunk = Chunk(
            row, rows, tuple(map(_entry, entries)), tuple(num_frames), None if of_each is None else tuple(of_each)
        )
        return {"crc": write_chunk(told["store"], told["start"], chunk, stats_of_answer(task), preparation, reader)}
    except UserError as error:
        kind = "data" if isinstance(error, DataError) else "user"
        parts = {"what": error.what, "where": error.where, "mend": error.mend}
        return {"error": {"kind": kind, **{k: v and v[:_LONGEST] for k, v in parts.items()}}}
    except MemoryError as error:
        return {"error": {"kind": "memory", "what": str(error)[:_LONGEST]}}
    except OSError as error:  # of the store: those of the archives are DataErrors
        return {"error": {"kind": "disk", "errno": error.errno or errno.EIO, "what": (error.strerror or "")[:_LONGEST]}}


def _told(entry: ScpEntry) -> list[Any]:
    path = None if entry.path is None else str(entry.path)
    return [entry.key, path, entry.offset, entry.rows, entry.columns, entry.pipe, str(entry.scp)]


def _entry(told: list[Any]) -> ScpEntry:
    key, path, offset, rows, columns, pipe, scp = told
    found = None if path is None else Path(path)
    return ScpEntry(key, found, offset, rows and tuple(rows), columns and tuple(columns), pipe, Path(scp))


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def main() -> None:
    """Serves standard input and output; what else would be printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        serve(sys.stdin.buffer, answers)
    except BrokenPipeError:  # the parent is gone
        os._exit(1)


if __name__ == "__main__":
    main()
