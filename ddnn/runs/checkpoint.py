"""Checkpoints of a training: written completely or not at all, and verified while they are read.

DIRECTORY/00000042/
    manifest.json          world size, size and SHA-256 of each file, metadata, and the SHA-256 of itself
    global.safetensors     the state that is identical on all ranks, written by rank 0
    rank0000.safetensors   the state of one rank, written by that rank: all ranks must see the directory

A checkpoint is written as .tmp-00000042. Each file is flushed, read back from the disk and compared with what was to be
written; then come the manifest, the flush of the folder and its renaming, and last the removal of older checkpoints.
When one is written: `CheckpointPolicy`. What is in it: `ddnn.training.state.capture`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ddnn.distributed.communicator import Communicator
from ddnn.distributed.groups import Groups
from ddnn.runs import checkpoint_manifest as manifest
from ddnn.runs.checkpoint_manifest import GLOBAL, TEMPORARY, CheckpointError, CheckpointSummary, rank_file
from ddnn.util.errors import DataError
from ddnn.util.files import fsync_directory, write_verified

log = logging.getLogger(__name__)

DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.uint8: "U8"},
}
"""What a checkpoint holds, and its name in safetensors."""


@dataclass(frozen=True, kw_only=True)
class CheckpointHandle(CheckpointSummary):
    """A checkpoint in the folder `path`, of which this rank has verified what it needs, and the ranks together
    everything. Tensors are on the CPU."""

    path: Path
    global_state: dict[str, Tensor]
    own: tuple[int, dict[str, Tensor]]  # this process's rank, modulo `world_size`, and that rank's tensors

    def rank_state(self, rank: int) -> dict[str, Tensor]:
        """The tensors of one of the ranks that wrote it: its own, in memory, or others, which are read and verified.
        DataError if the file has been damaged since `CheckpointStore.latest` returned."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of {self.world_size}")
        if rank == self.own[0]:
            return self.own[1]
        try:
            return _read_tensors(self.path, rank_file(rank), self)
        except (OSError, CheckpointError) as error:
            message = f"the checkpoint is corrupt: {manifest.describe(error)}"
            hint = "run again with --resume: the checkpoint before it is used"
            raise DataError(message, location=self.path, hint=hint) from error


class CheckpointStore:
    """The checkpoints of one training, on every rank."""

    def __init__(self, directory: Path, keep_last: int, comm: Communicator, groups: Groups | None = None) -> None:
        """`directory` holds the folders of all checkpoints and is created with the first; `keep_last` of them stay. Where
        workers of `comm` share models, by `groups`, the ranks are those of `data`, and the first worker of each replica
        writes; without groups each worker is a rank."""
        self.directory, self.keep_last, self.comm = directory, keep_last, comm
        ranks = comm if groups is None else groups.data
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._writes = groups is None or groups.replica.rank == 0
        self._corrupt: set[int] = set()

    def save(self, metadata: dict[str, Any], shared: dict[str, Tensor], own: dict[str, Tensor]) -> bool:
        """Collective: writes a checkpoint, completely or not at all; then removes the oldest, corrupt ones first.
        Returns whether it was written, on all ranks alike. If not (the disk is full), rank 0 has logged a warning,
        nothing is left of it, and the older checkpoints are as they were. `metadata`: JSON, but for tuples (read as
        lists) and floats that are not finite. `shared`: tensors of dtypes as in DTYPES that all ranks have; of these
        two only rank 0's are written. `own`: the tensors of this rank."""
        number, failure, is_rank0 = 0, "", self.comm.rank == 0
        tensors = {rank_file(self.rank): own} if self._writes else {}
        tensors |= {GLOBAL: shared} if is_rank0 else {}
        try:
            number = self._on_rank0(self._begin)
            files = self._on_all_ranks(lambda: self._write_tensors(number, tensors))
            all_files = {name: (size, sha256) for of_rank in files for name, (size, sha256) in of_rank.items()}
            summary = CheckpointSummary(number, self.world_size, all_files, metadata)
            self._on_rank0(lambda: self._commit(summary))
        except CheckpointError as error:  # on all ranks alike
            failure = str(error)
        if is_rank0 and not failure:
            self._remove_old()
        elif is_rank0:
            for path in (self._folder(number, TEMPORARY), self._folder(number)) if number else ():
                with suppress(OSError):
                    manifest.remove_checkpoint(manifest.real_folder(self.directory) / path.name)
            log.warning("%s: the checkpoint could not be written, training continues: %s", self.directory, failure)
        self.comm.barrier()  # no rank returns while rank 0 still renames or removes
        return not failure

    def latest(self) -> CheckpointHandle | None:
        """Collective: the newest checkpoint that is not corrupt; None if there is none.

        Each rank reads the global state and that of its own rank, once, and verifies them as it reads. Files that this
        leaves over, where more ranks wrote it, are verified by the ranks in turn. A corrupt checkpoint is skipped with
        a warning. DataError: all checkpoints are corrupt, or another version of ddnn wrote the newest.
        """
        numbers, failure = [], ""
        try:
            numbers = self._on_rank0(lambda: manifest.checkpoint_numbers(self.directory)[::-1])
        except CheckpointError as error:
            failure = str(error)
        for number in numbers:
            try:
                return self._load(number)
            except CheckpointError as error:  # on all ranks alike
                failure = str(error)
            self._corrupt.add(number)
            if self.comm.rank == 0:
                log.warning("checkpoint %s is corrupt, skipping it: %s", self._folder(number), failure)
        if failure:
            hint = "restore one, or remove this folder to start from the beginning with --resume"
            raise DataError(f"there is no checkpoint to resume from: {failure}", location=self.directory, hint=hint)
        return None

    def _on_all_ranks(self, act: Callable[[], Any]) -> list[Any]:
        """Collective: what `act` returned (JSON) on each rank; CheckpointError on all if it failed on any."""
        try:
            outcome = {"result": act()}
        except (OSError, MemoryError, CheckpointError) as error:
            outcome = {"failure": f"worker {self.comm.rank} on {self.comm.host}: {manifest.describe(error)}"}
        outcomes = self.comm.all_gather_object(outcome)
        for item in outcomes:
            if "failure" in item:
                raise CheckpointError(item["failure"])
        return [item["result"] for item in outcomes]

    def _on_rank0(self, act: Callable[[], Any]) -> Any:
        """Collective: as `_on_all_ranks`, where rank 0 alone calls `act`."""
        return self._on_all_ranks(act if self.comm.rank == 0 else lambda: None)[0]

    def _folder(self, number: int, prefix: str = "") -> Path:
        return self.directory / (prefix + manifest.folder_name(number))

    def _load(self, number: int) -> CheckpointHandle:
        """Collective: the checkpoint; CheckpointError on all ranks."""
        path, world_size = self._folder(number), self.world_size
        text, written = self._on_rank0(lambda: manifest.read_manifest(path))
        summary = manifest.parse_manifest(text, written, number, path)
        own = self.rank % summary.world_size
        unclaimed = range(world_size + self.rank, summary.world_size, world_size)
        tensors: dict[str, Any] = {}

        def read() -> None:
            for rank in unclaimed:
                _read_tensors(path, rank_file(rank), summary)
            tensors["global_state"] = _read_tensors(path, GLOBAL, summary)
            tensors["own"] = own, _read_tensors(path, rank_file(own), summary)

        self._on_all_ranks(read)
        return CheckpointHandle(**vars(summary), path=path, **tensors)

    def _begin(self) -> int:
        """Removes what killed trainings left, and makes the folder of the next checkpoint; returns its number."""
        if not os.path.lexists(self.directory):
            self.directory.mkdir()
            fsync_directory(self.directory.parent, strict=True)
        for number in manifest.checkpoint_numbers(self.directory, TEMPORARY):
            with suppress(OSError):  # not a real folder, or it holds other files: it stays
                manifest.remove_checkpoint(self._folder(number, TEMPORARY))
        taken = [number for prefix in ("", TEMPORARY) for number in manifest.checkpoint_numbers(self.directory, prefix)]
        self._folder(max(taken, default=0) + 1, TEMPORARY).mkdir()
        return max(taken, default=0) + 1

    def _write_tensors(self, number: int, tensors: dict[str, dict[str, Tensor]]) -> dict[str, tuple[int, str]]:
        manifest.real_folder(self.directory)
        folder = manifest.real_folder(self._folder(number, TEMPORARY))
        return {name: write_verified(folder / name, partial(_encode_tensors, of)) for name, of in tensors.items()}

    def _commit(self, summary: CheckpointSummary) -> None:
        """All files were read back: the manifest makes them a checkpoint, the renaming makes it the newest."""
        temporary, text = self._folder(summary.number, TEMPORARY), manifest.encode_manifest(summary)
        write_verified(temporary / manifest.MANIFEST, lambda: [text])
        fsync_directory(temporary, strict=True)
        temporary.rename(self._folder(summary.number))
        fsync_directory(self.directory, strict=True)

    def _remove_old(self) -> None:
        """All but the newest `keep_last`; those seen corrupt go before those that may be intact."""
        try:
            numbers = manifest.checkpoint_numbers(self.directory)
            real = [number for number in numbers if stat.S_ISDIR(self._folder(number).lstat().st_mode)]
            for number in sorted(real, key=lambda n: (n in self._corrupt, -n))[self.keep_last :]:
                # Renamed first, so that a kill in between leaves no half of a checkpoint.
                manifest.remove_checkpoint(self._folder(number).rename(self._folder(number, TEMPORARY)))
        except OSError as error:
            log.warning("%s: an older checkpoint could not be removed: %s", self.directory, manifest.describe(error))


def _read_tensors(path: Path, name: str, summary: CheckpointSummary) -> dict[str, Tensor]:
    """The tensors of a file, from the very bytes whose SHA-256 was compared; CheckpointError, OSError."""
    size, sha256 = summary.files[name]
    with manifest.open_checked(path, name, summary) as file:
        data = file.read(size)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CheckpointError(f"{name} is not what was written: its SHA-256 differs")
    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{name} is not a safetensors file: {error}") from error
    for tensor in tensors.values():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{name} holds {tensor.dtype}")
    return tensors


def _encode_tensors(tensors: dict[str, Tensor]) -> Iterator[Any]:
    """The bytes of a safetensors file, one tensor after the other: only tensors on a GPU are copied."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # each aligned for its dtype
    entries, end = {}, 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} is {tensor.dtype}, which a checkpoint does not hold")
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for name in names:
        yield tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def prefixed(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": value for name, value in state.items()}


def unprefixed(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
