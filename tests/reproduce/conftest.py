"""Two runs that several tests continue from: a training takes seconds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from forked_python import forked_python
from reproduce.small import Toy, local_executor, one_seed, write_corpus


@pytest.fixture(autouse=True)
def as_forked_children(forked_children: None) -> None:
    """Trainings and evaluations start in no time."""


@pytest.fixture(scope="session")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("executed")
    folder = one_seed(write_corpus(root, graphs=False, init="random"))
    executor, runs = local_executor(folder, root / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.executable", forked_python())
        assert executor.execute([run for run in runs if run.workers == 1]) == {}
    return root


@pytest.fixture
def toy(executed: Path, tmp_path: Path) -> Toy:
    folder, out = executed / "recipes" / "toy", tmp_path / "out"
    shutil.copytree(executed / "out", out)
    executor, runs = local_executor(folder, out)
    return Toy(folder, out, [run for run in runs if run.workers == 1], executor)
