"""A finished training is judged in a process of its own, which may be stopped or killed without harm to the others."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from ddnn.errors import DataError, UserError
from ddnn.files import make_directory, read_regular, write_text
from ddnn.reproduce.children import Children
from ddnn.reproduce.corpus import Part, TestSet
from ddnn.reproduce.records import Record, read_record, write_record

MODULE = "ddnn.reproduce.judge"
FOLDER = "judging"
"""In a run dir while it is judged: the task, log-likelihoods, the record. What was left there goes at the beginning."""
TASK = "task.json"
MOST_BYTES = 1 << 20
"""Of a task: thousands of paths."""


class Task(Part):
    """What a judge is told: the record to fill, what to test on, and where to compute."""

    record: Record
    tests: tuple[TestSet, ...]
    device: str


def judge_run(children: Children, run_dir: Path, task: Task, output: Path) -> Record:
    """The record of a finished training, filled by a process among `children`, which says what it says to `output`.

    Raises:
        UserError: the process failed, was killed or was told to stop; its folder cannot be made.
    """
    folder = run_dir / FOLDER
    _remove(folder)
    make_directory(folder)
    try:
        write_text(folder / TASK, task.model_dump_json())
        children.call([str(folder)], output, MODULE)
        return read_record(folder / f"{task.record.name}.json")
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        raise UserError(f"cannot remove: {error.strerror or error}", where=folder, mend="remove it by hand") from error


def main(arguments: Sequence[str]) -> int:
    """The process: reads the task in the folder that it is given, leaves the record there. Returns the exit code."""
    from ddnn.reproduce.measure import measure_run

    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    folder = Path(arguments[0])
    try:
        task = _read_task(folder / TASK)
        write_record(folder, measure_run(folder.parent, task.record, task.tests, task.device, folder))
    except UserError as error:
        print(f"ddnn: error: {error}", file=sys.stderr)
        return 2
    return 0


def _read_task(path: Path) -> Task:
    try:
        return Task.model_validate_json(read_regular(path, MOST_BYTES))
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", where=path) from error
    except ValidationError as error:
        raise DataError("no task of a judge", where=path, mend="`ddnn reproduce` writes it") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
