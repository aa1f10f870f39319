"""The lattices of a training on the disk, and what of them is in memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np

from ddnn.distributed.communicator import SingleProcess
from ddnn.kaldi.lattice import Lattice, write_lattices
from ddnn.lattices.store import open_lattices

NUMBER = 1000
BYTES = 450
"""Of an entry in memory, whose utterance id is as long as here."""


def chain(arcs: int) -> Lattice:
    """One path, a transition-id an arc."""
    states, costs = np.arange(arcs + 1), np.ones(arcs, np.float32)
    tids = np.ones(arcs, np.int32)
    return Lattice(np.arange(arcs + 2), states, states[:-1], states[1:], tids, costs, costs, tids, states)


def test_lattices_are_not_kept(tmp_path: Path) -> None:
    """Whatever their number, all but where each is stays on the disk."""
    lattice = chain(100)
    write_lattices(tmp_path / "l.ark", tmp_path / "lat.scp", ((f"speaker-{n:06d}", lattice) for n in range(NUMBER)))
    open_lattices([tmp_path], tmp_path / "copy", SingleProcess())["speaker-000000"]  # what is imported on the first use
    tracemalloc.start()
    try:
        store = open_lattices([tmp_path], tmp_path / "copy", SingleProcess())
        for name in list(store.entries)[::5]:
            assert store[name].num_frames == 100
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        assert store["speaker-000500"].num_frames == 100
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < BYTES * NUMBER
    assert peak - held < 1 << 20
