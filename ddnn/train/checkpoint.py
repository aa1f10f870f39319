"""Checkpoints of a training: made whole or not at all, proven before an older one goes, checked before one is used.

RUN_DIR/checkpoints/00000042/
    checkpoint.json           the manifest: workers, bytes and sha256 of the files, header, its own sha256
    shared.safetensors        what all workers have alike, written by the first
    worker0000.safetensors    what each worker has of its own, written by itself: the folder must be one that all see

A checkpoint is made as .tmp-00000042 and renamed when all of it is on the disk. See `ddnn.train.checkpoint_files`.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ddnn.errors import DataError
from ddnn.parallel.exchange import Exchange
from ddnn.train.checkpoint_files import (
    SHARED,
    Damaged,
    check_file,
    folder_name,
    folder_number,
    make_folder,
    names_in,
    opened_folder,
    read_tensors,
    remove_folder,
    safetensors_bytes,
    sync_folder,
    worker_file,
    write_file,
)
from ddnn.train.checkpoint_manifest import MANIFEST, Manifest, manifest_bytes, parse_manifest, read_manifest_text

log = logging.getLogger(__name__)

_BEGUN = ".tmp-"


@dataclass(frozen=True)
class Found:
    """A checkpoint that was whole when it was looked at. What is read of it is checked once more. Not collective.

    Attributes:
        path: its folder.
        number: its running number.
        workers: how many wrote it.
        header: as it was written, but tuples have become lists, and keys are sorted.
    """

    path: Path
    number: int
    workers: int
    header: dict[str, Any]
    files: dict[str, tuple[int, str]]

    def shared(self) -> dict[str, Tensor]:
        """What all workers had alike, on the CPU; DataError where it has been damaged meanwhile."""
        return self._tensors(SHARED)

    def part(self, rank: int) -> dict[str, Tensor]:
        """What worker `rank` of those that wrote it had of its own, on the CPU; DataError as of `shared`."""
        if not 0 <= rank < self.workers:
            raise IndexError(f"worker {rank} of {self.workers}")
        return self._tensors(worker_file(rank))

    def _tensors(self, name: str) -> dict[str, Tensor]:
        try:
            with opened_folder(self.path.parent) as all_of_them, opened_folder(self.path.name, all_of_them) as folder:
                return read_tensors(folder, name, *self.files[name])
        except (OSError, Damaged) as error:
            raise DataError(
                f"the checkpoint is damaged: {_explain(error)}",
                where=self.path,
                mend="run again with --resume: the one before is taken",
            ) from error


class Checkpoints:
    """The checkpoints of one training, on every worker."""

    def __init__(self, directory: Path, keep: int, exchange: Exchange) -> None:
        """`directory` is the folder of all checkpoints, made with the first; at most `keep` of them stay."""
        self.directory, self.keep, self.exchange = directory, keep, exchange
        self._damaged: set[int] = set()

    def write(self, header: dict[str, Any], shared: dict[str, Tensor], own: dict[str, Tensor]) -> bool:
        """Collective: writes a checkpoint, whole or not at all; then removes the oldest, those seen damaged first.

        Args:
            header: JSON, but for tuples (read as lists) and floats that are not finite: all come back to the same
                bits. Matters on the first worker only.
            shared: what all workers have alike. Matters on the first worker only.
            own: what this worker has of its own. Dtypes: `ddnn.train.checkpoint_files.DTYPES`; any shape, any device.

        Returns:
            Whether it has been written; the same on all workers. If not (the disk is full), that was warned about,
            nothing is left of it, and the older checkpoints are as they were.
        """
        first = self.exchange.rank == 0
        number, wrong = self._first(self._begin)
        if wrong is None:
            files, wrong = self._all(lambda: self._write_part(number, own, shared if first else None))
        if wrong is None:
            manifest = Manifest(number, self.exchange.size, {k: v for of in files for k, v in of.items()}, header)
            _, wrong = self._first(lambda: self._commit(manifest))
        if first and wrong is None:
            self._remove_old()
        elif first:
            if number is not None:
                self._discard(number)
            log.warning("%s: no checkpoint could be written, training goes on: %s", self.directory, wrong)
        self.exchange.barrier()  # nothing of it goes on behind anybody's back
        return wrong is None

    def newest(self) -> Found | None:
        """Collective: the newest checkpoint that is whole, all its files read and compared; None where there is none.

        A damaged one is warned about, and the one before is taken.

        Raises:
            DataError: there are checkpoints, but none is whole; or another version of ddnn wrote them.
        """
        numbers, wrong = self._first(self._numbers)
        for number in numbers or ():
            found, wrong = self._look_at(number)
            if found is not None:
                return found
            self._damaged.add(number)
            if self.exchange.rank == 0:
                log.warning("checkpoint %s is damaged and left out: %s", self.directory / folder_name(number), wrong)
        if wrong is not None:
            raise DataError(
                f"there is no checkpoint that can be gone on from: {wrong}",
                where=self.directory,
                mend="restore one, or remove this folder to begin anew with --resume",
            )
        return None

    def _all(self, act: Callable[[], Any]) -> tuple[list[Any], str | None]:
        """Collective: what `act` returned (JSON) on each worker, and the first thing that went wrong on any."""
        try:
            said = {"gave": act()}
        except (OSError, MemoryError, Damaged) as error:
            said = {"wrong": f"worker {self.exchange.rank} on {self.exchange.host}: {_explain(error)}"}
        everyone = self.exchange.gather(said)
        wrong = next((one["wrong"] for one in everyone if "wrong" in one), None)
        return [one.get("gave") for one in everyone], wrong

    def _first(self, act: Callable[[], Any]) -> tuple[Any, str | None]:
        """Collective: what `act` returned (JSON) on the first worker, which alone calls it, and what went wrong."""
        everyone, wrong = self._all(act if self.exchange.rank == 0 else lambda: None)
        return everyone[0], wrong

    def _numbers(self) -> list[int]:
        """Of whatever bears the name of a checkpoint, the newest first."""
        try:
            with opened_folder(self.directory) as here:
                return sorted(filter(None, map(folder_number, names_in(here))), reverse=True)
        except FileNotFoundError:
            return []

    def _look_at(self, number: int) -> tuple[Found | None, str | None]:
        """Collective: the checkpoint if it is whole, else what is wrong."""
        path = self.directory / folder_name(number)
        text, wrong = self._first(lambda: self._manifest_text(path))
        if wrong is not None:
            return None, wrong
        try:
            manifest = parse_manifest(text, number, path)
        except Damaged as error:  # on all workers alike
            return None, str(error)
        _, wrong = self._all(lambda: self._check_share(path, manifest))
        if wrong is not None:
            return None, wrong
        return Found(path, number, manifest.workers, manifest.header, manifest.files), None

    def _manifest_text(self, path: Path) -> str:
        with opened_folder(self.directory) as here, opened_folder(path.name, here) as folder:
            return read_manifest_text(folder)

    def _check_share(self, path: Path, manifest: Manifest) -> None:
        """Reads the files that fall to this worker against their checksums."""
        with opened_folder(self.directory) as here, opened_folder(path.name, here) as folder:
            for name in sorted(manifest.files)[self.exchange.rank :: self.exchange.size]:
                check_file(folder, name, *manifest.files[name])

    def _begin(self) -> int:
        """Removes what killed trainings left, and makes the folder of the next checkpoint; its number."""
        make_folder(self.directory)
        with opened_folder(self.directory) as here:
            for name in names_in(here):
                if name.startswith(_BEGUN) and folder_number(name.removeprefix(_BEGUN)):
                    with suppress(OSError):  # not a real folder, or a stranger's files in it: it stays
                        remove_folder(name, here)
            numbers = [folder_number(name.removeprefix(_BEGUN)) for name in names_in(here)]
            number = max(numbers, default=0) + 1
            os.mkdir(_BEGUN + folder_name(number), dir_fd=here)
        return number

    def _write_part(
        self, number: int, own: dict[str, Tensor], shared: dict[str, Tensor] | None
    ) -> dict[str, tuple[int, str]]:
        """Writes this worker's file, and the shared one where it is given; their bytes and sha256."""
        with opened_folder(self.directory) as here, opened_folder(_BEGUN + folder_name(number), here) as folder:
            name = worker_file(self.exchange.rank)
            files = {name: write_file(folder, name, safetensors_bytes(own))}
            if shared is not None:
                files[SHARED] = write_file(folder, SHARED, safetensors_bytes(shared))
        return files

    def _commit(self, manifest: Manifest) -> None:
        """Every file has been read back: the manifest makes it a checkpoint, the rename makes it the newest."""
        with opened_folder(self.directory) as here:
            begun, name = _BEGUN + folder_name(manifest.number), folder_name(manifest.number)
            with opened_folder(begun, here) as folder:
                write_file(folder, MANIFEST, [manifest_bytes(manifest)])
                sync_folder(folder)
            os.rename(begun, name, src_dir_fd=here, dst_dir_fd=here)
            sync_folder(here)

    def _discard(self, number: int) -> None:
        """Removes what there is of a checkpoint that failed."""
        with suppress(OSError), opened_folder(self.directory) as here:
            for name in (_BEGUN + folder_name(number), folder_name(number)):
                with suppress(OSError):
                    remove_folder(name, here)

    def _remove_old(self) -> None:
        """All but the newest `keep`; those seen damaged go before those that may be whole."""
        try:
            with opened_folder(self.directory) as here:
                names = {number: folder_name(number) for number in self._numbers()}
                real = [n for n, name in names.items() if stat.S_ISDIR(os.lstat(name, dir_fd=here).st_mode)]
                for number in sorted(real, key=lambda n: (n in self._damaged, -n))[self.keep :]:
                    begun = _BEGUN + names[number]  # so that a kill in between leaves no half of a checkpoint
                    os.rename(names[number], begun, src_dir_fd=here, dst_dir_fd=here)
                    remove_folder(begun, here)
        except OSError as error:
            log.warning("%s: an older checkpoint could not be removed: %s", self.directory, _explain(error))


def _explain(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
