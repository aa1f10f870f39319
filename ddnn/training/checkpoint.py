"""Checkpoints of a training: written completely or not at all, and verified while they are read.

DIRECTORY/00000042/
    manifest.json          world size, size and SHA-256 of each file, metadata, and the SHA-256 of itself
    global.safetensors     the state that is identical on all ranks, written by rank 0
    rank0000.safetensors   the state of one rank, written by that rank: all ranks must see the directory

A checkpoint is written as .tmp-00000042. Each file is flushed, read back from the disk and compared with what was to be
written; then come the manifest, the flush of the folder and its renaming, and last the removal of older checkpoints.
Tensors are in safetensors files and everything else is JSON: nothing that is read can run code. Symbolic links are not
followed, and no more is read than the file system and the manifest both say.

Importing this module does not import torch: `CheckpointStore.peek` reads manifests for commands that must start fast.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ddnn.training.checkpoint_files import (
    GLOBAL,
    MANIFEST,
    CheckpointSummary,
    CorruptCheckpointError,
    check_size,
    encode_manifest,
    encode_tensors,
    folder_name,
    folder_number,
    listdir,
    parse_manifest,
    rank_file,
    read_manifest,
    read_tensors,
    real_folder,
    remove_checkpoint,
)
from ddnn.util.errors import DataError
from ddnn.util.files import fsync_directory, open_regular, write_verified

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

_TEMPORARY = ".tmp-"
_MAX_NAMES = 10_000  # that `peek` looks at
_MAX_CORRUPT = 10  # checkpoints that `peek` skips


class _Communicator(Protocol):
    """What is used of `ddnn.distributed.communicator.Communicator`, whose module imports torch."""

    rank: int
    world_size: int
    host: str

    def all_gather_object(self, value: Any, /) -> list[Any]: ...

    def barrier(self) -> None: ...


@dataclass(frozen=True)
class TrainerState:
    """The tensors of a checkpoint by name: dtypes as in DTYPES, any shape, any device.

    Attributes:
        global_: identical on all ranks; only rank 0's is written.
        rank: of this rank alone.
    """

    global_: dict[str, Tensor]
    rank: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class CheckpointHandle(CheckpointSummary):
    """A checkpoint of which this rank has verified what it needs, and the ranks together everything.

    Attributes:
        path: its folder.
        global_state: the tensors that are identical on all ranks, on the CPU.
        own: this process's rank, modulo `world_size`, and that rank's tensors.
    """

    path: Path
    global_state: dict[str, Tensor]
    own: tuple[int, dict[str, Tensor]]

    def rank_state(self, rank: int) -> dict[str, Tensor]:
        """The tensors of one of the ranks that wrote it, on the CPU.

        Those of this process's own rank (modulo `world_size`) are in memory; others are read and verified.

        Raises:
            DataError: the file has been damaged since `CheckpointStore.latest` returned.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of {self.world_size}")
        if rank == self.own[0]:
            return self.own[1]
        try:
            return read_tensors(self.path, rank_file(rank), self)
        except (OSError, CorruptCheckpointError) as error:
            raise DataError(
                f"the checkpoint is corrupt: {_describe(error)}",
                location=self.path,
                hint="run again with --resume: the checkpoint before it is used",
            ) from error


class CheckpointStore:
    """The checkpoints of one training, on every rank."""

    def __init__(self, directory: Path, keep_last: int, comm: _Communicator) -> None:
        """`directory` holds the folders of all checkpoints and is created with the first; `keep_last` of them stay."""
        self.directory, self.keep_last, self.comm = directory, keep_last, comm
        self._corrupt: set[int] = set()

    def save(self, metadata: dict[str, Any], state: TrainerState) -> bool:
        """Collective: writes a checkpoint, completely or not at all; then removes the oldest, corrupt ones first.

        Args:
            metadata: JSON, but for tuples (read as lists) and floats that are not finite. Matters on rank 0 only.
            state: the tensors.

        Returns:
            Whether it was written; the same on all ranks. If not (the disk is full), rank 0 has logged a warning,
            nothing is left of it, and the older checkpoints are as they were.
        """
        is_rank0 = self.comm.rank == 0
        number, failure = self._on_rank0(self._begin)
        if failure is None:
            tensors = {rank_file(self.comm.rank): state.rank, **({GLOBAL: state.global_} if is_rank0 else {})}
            files, failure = self._on_all_ranks(lambda: self._write_tensors(number, tensors))
        if failure is None:
            all_files = {name: (size, sha256) for of_rank in files for name, (size, sha256) in of_rank.items()}
            summary = CheckpointSummary(number, self.comm.world_size, all_files, metadata)
            _, failure = self._on_rank0(lambda: self._commit(summary))
        if is_rank0 and failure is None:
            self._remove_old()
        elif is_rank0:
            if number is not None:
                self._discard(number)
            log.warning("%s: the checkpoint could not be written, training continues: %s", self.directory, failure)
        self.comm.barrier()  # no rank returns while rank 0 still renames or removes
        return failure is None

    def latest(self) -> CheckpointHandle | None:
        """Collective: the newest checkpoint that is not corrupt; None if there is none.

        Each rank reads the global state and that of its own rank, once, and verifies them as it reads. Files that this
        leaves over, where more ranks wrote it, are verified by the ranks in turn. A corrupt checkpoint is skipped with
        a warning.

        Raises:
            DataError: all checkpoints are corrupt, or another version of ddnn wrote the newest.
        """
        numbers, failure = self._on_rank0(lambda: _numbers(self.directory)[::-1])
        for number in numbers or ():
            handle, failure = self._load(number)
            if handle is not None:
                return handle
            self._corrupt.add(number)
            if self.comm.rank == 0:
                log.warning("checkpoint %s is corrupt, skipping it: %s", self.directory / folder_name(number), failure)
        if failure is not None:
            raise DataError(
                f"there is no checkpoint to resume from: {failure}",
                location=self.directory,
                hint="restore one, or remove this folder to start from the beginning with --resume",
            )
        return None

    @staticmethod
    def peek(directory: Path, report: Callable[[str], None] = log.warning) -> CheckpointSummary | None:
        """The newest checkpoint whose manifest is intact and whose files have the right sizes; None if there is none.

        Not collective; reads no tensors.

        Args:
            report: called with a sentence for each checkpoint that cannot be used.
        """
        try:
            numbers = _numbers(directory, _MAX_NAMES)
        except OSError as error:
            report(f"checkpoints: {error.strerror}")
            return None
        for number in numbers[: -_MAX_CORRUPT - 1 : -1]:
            path = directory / folder_name(number)
            try:
                summary = parse_manifest(*read_manifest(path), number, path)
                for name in summary.files:
                    with open_regular(path / name, follow_symlinks=False) as file:
                        check_size(file, name, summary)
                return summary
            except (CorruptCheckpointError, DataError, OSError) as error:
                report(f"checkpoint {number} is corrupt or of another version: {_describe(error)}")
        return None

    @staticmethod
    def remove_all(directory: Path) -> None:
        """Removes all checkpoints, and the directory if nothing else is in it; what cannot be removed is logged."""
        try:
            for name in listdir(directory):
                if folder_number(name.removeprefix(_TEMPORARY)):
                    with suppress(OSError):  # other files are in it: then the directory is not empty below
                        remove_checkpoint(directory / name)
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("not everything in %s could be removed: %s", directory, error.strerror)

    def _on_all_ranks(self, act: Callable[[], Any]) -> tuple[list[Any], str | None]:
        """Collective: what `act` returned (JSON) on each rank, and the first failure of any rank."""
        try:
            outcome = {"result": act()}
        except (OSError, MemoryError, CorruptCheckpointError) as error:
            outcome = {"failure": f"worker {self.comm.rank} on {self.comm.host}: {_describe(error)}"}
        outcomes = self.comm.all_gather_object(outcome)
        failure = next((item["failure"] for item in outcomes if "failure" in item), None)
        return [item.get("result") for item in outcomes], failure

    def _on_rank0(self, act: Callable[[], Any]) -> tuple[Any, str | None]:
        """Collective: what `act` returned (JSON) on rank 0, which alone calls it, and its failure."""
        results, failure = self._on_all_ranks(act if self.comm.rank == 0 else lambda: None)
        return results[0], failure

    def _load(self, number: int) -> tuple[CheckpointHandle | None, str | None]:
        """Collective: the checkpoint, or why it is corrupt."""
        path, comm = self.directory / folder_name(number), self.comm
        manifest, failure = self._on_rank0(lambda: read_manifest(path))
        if failure is not None:
            return None, failure
        try:
            text, written = manifest
            summary = parse_manifest(text, written, number, path)
        except CorruptCheckpointError as error:  # on all ranks alike
            return None, str(error)
        own = comm.rank % summary.world_size
        unclaimed = range(comm.world_size + comm.rank, summary.world_size, comm.world_size)
        tensors: dict[str, dict[str, Tensor]] = {}

        def read() -> None:
            for rank in unclaimed:
                read_tensors(path, rank_file(rank), summary)
            tensors.update({name: read_tensors(path, name, summary) for name in (GLOBAL, rank_file(own))})

        _, failure = self._on_all_ranks(read)
        if failure is not None:
            return None, failure
        states: dict[str, Any] = {"global_state": tensors[GLOBAL], "own": (own, tensors[rank_file(own)])}
        return CheckpointHandle(**vars(summary), path=path, **states), None

    def _begin(self) -> int:
        """Removes what killed trainings left, and makes the folder of the next checkpoint; returns its number."""
        if not os.path.lexists(self.directory):
            self.directory.mkdir()
            fsync_directory(self.directory.parent, strict=True)
        for name in listdir(self.directory):
            if name.startswith(_TEMPORARY) and folder_number(name.removeprefix(_TEMPORARY)):
                with suppress(OSError):  # not a real folder, or it holds other files: it stays
                    remove_checkpoint(self.directory / name)
        names = listdir(self.directory)
        number = max((folder_number(name.removeprefix(_TEMPORARY)) for name in names), default=0) + 1
        (self.directory / (_TEMPORARY + folder_name(number))).mkdir()
        return number

    def _write_tensors(self, number: int, tensors: dict[str, dict[str, Tensor]]) -> dict[str, tuple[int, str]]:
        """Writes files of tensors; their sizes and SHA-256."""
        folder = real_folder(real_folder(self.directory) / (_TEMPORARY + folder_name(number)))
        return {name: write_verified(folder / name, partial(encode_tensors, of)) for name, of in tensors.items()}

    def _commit(self, summary: CheckpointSummary) -> None:
        """All files were read back: the manifest makes them a checkpoint, the renaming makes it the newest."""
        name, text = folder_name(summary.number), encode_manifest(summary)
        temporary = self.directory / (_TEMPORARY + name)
        write_verified(temporary / MANIFEST, lambda: [text])
        fsync_directory(temporary, strict=True)
        temporary.rename(self.directory / name)
        fsync_directory(self.directory, strict=True)

    def _discard(self, number: int) -> None:
        """Removes what there is of a checkpoint that failed."""
        for name in (_TEMPORARY + folder_name(number), folder_name(number)):
            with suppress(OSError):
                remove_checkpoint(real_folder(self.directory) / name)

    def _remove_old(self) -> None:
        """All but the newest `keep_last`; those seen corrupt go before those that may be intact."""
        try:
            paths = {number: self.directory / folder_name(number) for number in _numbers(self.directory)}
            real = [number for number, path in paths.items() if stat.S_ISDIR(path.lstat().st_mode)]
            for number in sorted(real, key=lambda n: (n in self._corrupt, -n))[self.keep_last :]:
                temporary = self.directory / (_TEMPORARY + folder_name(number))
                paths[number].rename(temporary)  # so that a kill in between leaves no half of a checkpoint
                remove_checkpoint(temporary)
        except OSError as error:
            log.warning("%s: an older checkpoint could not be removed: %s", self.directory, _describe(error))


def _numbers(directory: Path, max_names: int | None = None) -> list[int]:
    """Of everything in `directory` that has the name of a checkpoint, ascending; none if it does not exist."""
    try:
        with os.scandir(real_folder(directory)) as entries:
            return sorted(filter(None, (folder_number(entry.name) for entry in islice(entries, max_names))))
    except FileNotFoundError:
        return []


def _describe(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
