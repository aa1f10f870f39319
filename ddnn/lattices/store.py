"""The lattices of a training, each read when it is its utterance's turn: those of hundreds of hours take gigabytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from ddnn.distributed.communicator import Communicator
from ddnn.kaldi.alignments import job_files
from ddnn.kaldi.archive import RecordReader, ScpEntry, read_scp
from ddnn.kaldi.lattice import Lattice, iterate_lattices, read_lattice, write_lattices
from ddnn.util.errors import DataError
from ddnn.util.progress import progress_bar


class LatticeStore:
    """Lattices by utterance. `entries`: where each is."""

    def __init__(self, entries: Sequence[ScpEntry]) -> None:
        self.entries = {entry.key: entry for entry in entries}
        self._reader = RecordReader()

    def __contains__(self, utterance: str) -> bool:
        return utterance in self.entries

    def __getitem__(self, utterance: str) -> Lattice:
        """DataError: as `read_lattice`."""
        return read_lattice(self._reader, self.entries[utterance])


def open_lattices(paths: Sequence[Path], copy: Path, comm: Communicator, *, keep: bool = False) -> LatticeStore:
    """The lattices of these dirs: where `lat.scp` says, or of `lat.*.gz`, which nobody can read from the middle and which
    worker 0 therefore copies into an archive, `copy` with .ark and .scp. `keep`: one that is there is of these dirs. Collective.
    DataError: damaged input, or an utterance that is in two of the dirs."""
    entries, archives = list[ScpEntry](), list[Path]()
    for path in paths:
        if (scp := path / "lat.scp").exists():
            entries += read_scp(scp)
        else:
            archives += job_files(path, "lat.{}.gz")
    scp = copy.with_suffix(".scp")
    if archives and comm.rank == 0 and not (keep and scp.exists()):
        lattices = chain.from_iterable(map(iterate_lattices, progress_bar("lattices")(archives)))
        write_lattices(copy.with_suffix(".ark"), scp, lattices, relative=True)
    comm.barrier()
    entries += read_scp(scp) if archives else []
    if len({entry.key for entry in entries}) < len(entries):
        raise DataError("an utterance has two lattices", location=", ".join(map(str, paths)), hint="remove one")
    return LatticeStore(entries)
