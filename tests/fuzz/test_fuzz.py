"""Every reader, fed with some hundred damaged files: a result or a `UserError`, in time, within bounds of memory."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from fuzz.child import Target
from fuzz.harness import Outcome, fuzz
from fuzz.targets import all_targets

from ddnn.util.errors import DataError


@pytest.mark.parametrize("target", all_targets(), ids=lambda target: target.name.replace(" ", "-"))
def test_reader(tmp_path: Path, target: Target) -> None:
    seed = int.from_bytes(hashlib.sha256(target.name.encode()).digest()[:4], "little")
    outcome = fuzz(target, tmp_path, seed=seed, inputs=target.inputs, seconds=30.0)
    assert not outcome.findings, "\n".join(f"{f.message}\n{f.trace}\n{f.data[:2000]!r}" for f in outcome.findings[:3])
    assert outcome.accepted >= len(target.seeds)
    assert outcome.inputs == outcome.accepted + outcome.refused


def of(tmp_path: Path, read: object, **others: object) -> Outcome:
    """What the harness says of a reader that does this."""

    def guarded(folder: Path) -> None:
        if (folder / "x").read_bytes() != b"sound":
            read(folder)  # type: ignore[operator]

    target = Target("x", "x", guarded, (b"sound",), **others)  # type: ignore[arg-type]
    return fuzz(target, tmp_path, seed=1, inputs=4, thorough=True)


def loop(folder: Path) -> None:
    while True:
        pass


def allocate(folder: Path) -> None:
    bytearray(64 << 20)


def allocate_too_much(folder: Path) -> None:
    bytearray(8 << 30)


def write_elsewhere(folder: Path) -> None:
    (folder / "../../../elsewhere").write_text("x")


def remove_elsewhere(folder: Path) -> None:
    (folder / "../../../elsewhere").unlink()


def warn(folder: Path) -> None:
    import numpy as np

    np.float32(1e30) * np.float32(1e30)


def start_a_shell(folder: Path) -> None:
    os.system("true")  # noqa: S605


def crash(folder: Path) -> None:
    os.abort()


def unpickle(folder: Path) -> None:
    import pickle

    pickle.loads(pickle.dumps(Path))  # noqa: S301


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (loop, "TooSlow"),
        (allocate, " MiB for "),  # 64 MiB less the pages that the process had touched before
        (allocate_too_much, "MemoryError"),
        (write_elsewhere, "Forbidden: open outside"),
        (remove_elsewhere, "Forbidden: os.remove outside"),
        (warn, "RuntimeWarning"),
        (start_a_shell, "Forbidden: os.system"),
        (crash, "crashes with SIGABRT"),
        (unpickle, "Forbidden: pickle.find_class"),
        (lambda folder: {}["x"], "KeyError"),
    ],
)
def test_the_harness_sees_it(tmp_path: Path, read: object, said: str) -> None:
    outcome = of(tmp_path, read)
    assert any(said in finding.message for finding in outcome.findings), [f.message for f in outcome.findings]
    assert outcome.findings[0].data != b"sound" and not (tmp_path / "elsewhere").exists()


def test_a_refusal_is_no_finding(tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        raise DataError("no")

    outcome = of(tmp_path, refuse)
    assert (outcome.inputs, outcome.findings) == (4, []) and outcome.refused == 3


def test_the_same_seed_gives_the_same_inputs(tmp_path: Path) -> None:
    target = all_targets()[0]
    first, again, other = (
        fuzz(target, tmp_path / str(n), seed=seed, inputs=100, crafted=False) for n, seed in enumerate((5, 5, 6))
    )
    assert (first.accepted, first.refused) == (again.accepted, again.refused) != (other.accepted, other.refused)
