"""CheckpointStore: whole or not at all, whatever fails in between; damaged ones are seen, the one before is taken."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import random
import shutil
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.mpi_worlds import launch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddnn.distributed.communicator import SingleProcess
from ddnn.runs import checkpoint_manifest
from ddnn.runs.checkpoint import DTYPES, CheckpointHandle, CheckpointStore
from ddnn.runs.checkpoint_manifest import canonical_json, manifest_digest, peek_checkpoint
from ddnn.util.errors import DataError

FILES = ("manifest.json", "global.safetensors", "rank0000.safetensors")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def alone(directory: Path, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(directory, keep, SingleProcess())


def write(store: CheckpointStore, n: int) -> bool:
    """A checkpoint that says everywhere that it is the n-th, with tensors of fixed sizes."""
    shared, own = {"mean": torch.full((40,), float(n))}, {"momentum": torch.full((9,), -float(n))}
    return store.save({"n": n}, shared, own)


def assert_is(found: CheckpointHandle | None, n: int) -> None:
    """All that it holds is of the n-th."""
    assert found is not None
    assert found.metadata == {"n": n}
    assert torch.equal(found.global_state["mean"], torch.full((40,), float(n)))
    assert torch.equal(found.rank_state(0)["momentum"], torch.full((9,), -float(n)))


def two(directory: Path) -> tuple[CheckpointStore, Path]:
    """CheckpointStore 1 and 2, and the folder of the newer one."""
    store = alone(directory)
    assert write(store, 1) and write(store, 2)
    return store, directory / "00000002"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def forge(folder: Path, **changes: Any) -> None:
    """A stranger's manifest, its checksum right."""
    value = json.loads((folder / "manifest.json").read_bytes()) | changes
    del value["sha256"]
    value["sha256"] = manifest_digest(value)
    (folder / "manifest.json").write_bytes(canonical_json(value))


def same_bits(a: Tensor, b: Tensor) -> bool:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


# What is written is read


def test_none_at_first(directory: Path) -> None:
    assert alone(directory).latest() is None
    directory.mkdir()
    (directory / "notes").touch()
    assert alone(directory).latest() is None


def test_the_newest_are_kept(directory: Path) -> None:
    store = alone(directory, keep=2)
    for n in range(1, 5):
        assert write(store, n)
        assert_is(store.latest(), n)
    assert names(directory) == ["00000003", "00000004"]
    assert names(directory / "00000004") == sorted(FILES)
    assert_is(alone(directory).latest(), 4)
    found = alone(directory).latest()
    assert found is not None
    assert (found.path, found.number, found.world_size) == (directory / "00000004", 4, 1)
    with pytest.raises(IndexError):
        found.rank_state(1)


SCALARS = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(max_size=5)
KEYS = st.text(max_size=4)
VALUES = st.recursive(
    SCALARS, lambda of: st.lists(of, max_size=3) | st.dictionaries(KEYS, of, max_size=3), max_leaves=9
)
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def bits(value: Any) -> Any:
    """The same, floats as their bits: NaN equals itself, -0.0 does not equal 0.0, 1 does not equal 1.0 or True."""
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [bits(part) for part in value]
    return (type(value).__name__, value.hex() if isinstance(value, float) else value)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits, NaNs among them, in any order of strides."""
    dtype, shape = draw(st.sampled_from(list(DTYPES))), draw(SHAPES)
    count = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    data = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
    tensor = data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    metadata=st.dictionaries(KEYS, VALUES, max_size=4),
    shared=st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=4), tensors(), max_size=4),
)
def test_any_metadata_and_tensors_come_back_to_the_bit(metadata: dict[str, Any], shared: dict[str, Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = alone(Path(folder) / "checkpoints")
        assert store.save(metadata, shared, {})
        found = store.latest()
        assert found is not None
        assert bits(found.metadata) == bits(metadata)
        back = found.global_state
        assert back.keys() == shared.keys()
        assert all(same_bits(back[name], tensor) for name, tensor in shared.items())
        assert found.rank_state(0) == {}


def test_floats_that_are_not_finite_and_tuples_come_back(directory: Path) -> None:
    store, values = alone(directory), {"rates": (math.nan, math.inf, -math.inf, -0.0)}
    assert store.save(values, {}, {})
    found = store.latest()
    assert found is not None and bits(found.metadata) == bits(values)
    summary = peek_checkpoint(directory, pytest.fail)
    assert summary is not None and bits(summary.metadata) == bits(values)


def test_any_reader_of_safetensors_reads_the_files(directory: Path) -> None:
    """Views of one memory, a generator's state: none must be cloned first."""
    flat, state = torch.randn(30), torch.Generator().get_state()
    own = {"all": flat, "part": flat[3:9].view(2, 3), "state": state, "half": flat.bfloat16(), "steps": torch.tensor(7)}
    assert alone(directory).save({}, {}, own)
    back = load_file(directory / "00000001" / "rank0000.safetensors")
    assert back.keys() == own.keys()
    assert all(same_bits(back[name], own[name]) for name in own)


def test_what_cannot_be_held_is_a_mistake_of_the_program(directory: Path) -> None:
    store = alone(directory)
    with pytest.raises(TypeError, match=r"z is torch\.complex64"):
        store.save({}, {"z": torch.zeros(1, dtype=torch.complex64)}, {})
    with pytest.raises(TypeError):
        store.save({"path": directory}, {}, {})


# Damage


def damages(folder: Path, places: int) -> Iterator[str]:
    """Damages a checkpoint at seeded random places, one at a time: the file; it is mended again afterwards."""
    random_ = random.Random(6)
    for place in range(places):
        path = folder / FILES[place % len(FILES)]
        whole = path.read_bytes()
        position = random_.randrange(len(whole))
        if random_.random() < 0.3:
            path.write_bytes(whole[:position])
        else:
            flipped = whole[position] ^ random_.randrange(1, 256)
            path.write_bytes(whole[:position] + bytes([flipped]) + whole[position + 1 :])
        yield path.name
        path.write_bytes(whole)


def test_the_one_before_is_taken_wherever_a_byte_is_wrong(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, newest = two(directory)
    count = 0
    for name in damages(newest, 120):
        caplog.clear()
        assert_is(store.latest(), 1)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert str(newest) in record.message and name in record.message
        count += 1
    assert count == 120
    caplog.clear()
    assert_is(store.latest(), 2)
    assert caplog.records == []


def test_each_file_is_read_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was verified is in memory: damage to the files later does not matter."""
    store, newest = two(directory)
    opened: list[str] = []
    whole = checkpoint_manifest.open_regular
    monkeypatch.setattr(
        checkpoint_manifest, "open_regular", lambda path, **how: (opened.append(path.name), whole(path, **how))[1]
    )
    found = store.latest()
    shutil.rmtree(newest)
    assert_is(found, 2)
    assert sorted(opened) == sorted(FILES)


def test_fewer_ranks_verify_all_files(together: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """One rank resumes from what three wrote: it holds its own, and the others are verified before and when read."""
    shutil.copytree(together[0], tmp_path / "checkpoints")
    store = alone(tmp_path / "checkpoints")
    found = store.latest()
    assert found is not None and (found.number, found.world_size) == (1, WORKERS)
    other = found.path / "rank0002.safetensors"
    data = bytearray(other.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    assert float(found.rank_state(0)["own"]) == 10.0 and float(found.rank_state(1)["own"]) == 11.0
    with pytest.raises(DataError, match=r"rank0002\.safetensors"):
        found.rank_state(2)
    with pytest.raises(DataError, match=r"rank000.\.safetensors is not what was written"):
        store.latest()


def copy_over(folder: Path, name: str) -> Callable[[], object]:
    return lambda: shutil.copy(folder.parent / "00000001" / name, folder / name)


def link(path: Path, to: Path) -> None:
    """What it was, but behind a symbolic link."""
    path.rename(to)
    path.symlink_to(to)


def damage_by_name(kind: str, newest: Path) -> None:
    """One way to damage a checkpoint that no random byte finds."""
    older, outside = newest.parent / "00000001", newest.parent.parent / "outside"
    shared = newest / "global.safetensors"
    ways: dict[str, Callable[[], object]] = {
        "no manifest": (newest / "manifest.json").unlink,
        "no shared": shared.unlink,
        "no worker": (newest / "rank0000.safetensors").unlink,
        "empty folder": lambda: [path.unlink() for path in newest.iterdir()],
        "shared of another": copy_over(newest, "global.safetensors"),
        "worker of another": copy_over(newest, "rank0000.safetensors"),
        "manifest of another": copy_over(newest, "manifest.json"),
        "all of another": lambda: (shutil.rmtree(newest), shutil.copytree(older, newest)),
        "files swapped": lambda: (
            shared.rename(outside),
            (newest / "rank0000.safetensors").rename(shared),
            outside.rename(newest / "rank0000.safetensors"),
        ),
        "linked folder": lambda: link(newest, outside),
        "linked manifest": lambda: link(newest / "manifest.json", outside),
        "linked shared": lambda: link(shared, outside),
        "pipe": lambda: (shared.unlink(), os.mkfifo(shared)),
        "folder for a file": lambda: (shared.unlink(), shared.mkdir()),
        "file for the folder": lambda: (shutil.rmtree(newest), newest.touch()),
        "no JSON": lambda: (newest / "manifest.json").write_bytes(b"{"),
        "a space more": lambda: (newest / "manifest.json").write_bytes((newest / "manifest.json").read_bytes() + b" "),
        "its last byte": lambda: os.truncate(newest / "manifest.json", (newest / "manifest.json").stat().st_size - 1),
        "a list": lambda: (newest / "manifest.json").write_bytes(b"[1]"),
        "no ASCII": lambda: (newest / "manifest.json").write_bytes(b"\xff" * 9),
        "deep": lambda: (newest / "manifest.json").write_bytes(b"[" * 500_000),
        "long": lambda: os.truncate(newest / "manifest.json", 1 << 40),
        "long shared": lambda: os.truncate(shared, 1 << 40),
        "claims sizes": lambda: forge(newest, files={name: [1 << 60, "0" * 64] for name in FILES[1:]}),
        "claims workers": lambda: forge(newest, world_size=10**9),
        "negative workers": lambda: forge(newest, world_size=-1),
        "true workers": lambda: forge(newest, world_size=True),
        "another number": lambda: forge(newest, number=3),
        "path in a name": lambda: forge(newest, files={"../00000001/" + n: [1, "0"] for n in FILES[1:]}),
        "no files": lambda: forge(newest, files=None, world_size=0),
        "no sizes": lambda: forge(newest, files=dict.fromkeys(FILES[1:], "ab")),
        "header": lambda: forge(newest, metadata=[1]),
    }
    ways[kind]()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("no manifest", "manifest.json: No such file"),
        ("no shared", "global.safetensors: No such file"),
        ("no worker", "rank0000.safetensors: No such file"),
        ("empty folder", "manifest.json: No such file"),
        ("shared of another", "global.safetensors is not what was written"),
        ("worker of another", "rank0000.safetensors is not what was written"),
        ("manifest of another", "manifest.json belongs to another checkpoint"),
        ("all of another", "manifest.json belongs to another checkpoint"),
        ("files swapped", "global.safetensors has"),
        ("linked folder", "00000002: not a real folder"),
        ("linked manifest", "manifest.json: is a symbolic link"),
        ("linked shared", "global.safetensors: is a symbolic link"),
        ("pipe", "global.safetensors: not a regular file"),
        ("folder for a file", "global.safetensors: Is a directory"),
        ("file for the folder", "00000002: not a real folder"),
        ("no JSON", "manifest.json is not what was written"),
        ("a space more", "manifest.json is not what was written: its SHA-256 differs"),
        ("its last byte", "manifest.json is not what was written: its SHA-256 differs"),
        ("a list", "manifest.json is not what was written"),
        ("no ASCII", "manifest.json is too long, or not JSON"),
        ("deep", "manifest.json is not what was written"),
        ("long", "manifest.json is too long"),
        ("long shared", "global.safetensors has 1099511627776 bytes"),
        ("claims sizes", "1152921504606846976 were written"),
        ("claims workers", "manifest.json describes no checkpoint"),
        ("negative workers", "manifest.json describes no checkpoint"),
        ("true workers", "manifest.json describes no checkpoint"),
        ("another number", "manifest.json belongs to another checkpoint"),
        ("path in a name", "manifest.json describes no checkpoint"),
        ("no files", "manifest.json describes no checkpoint"),
        ("no sizes", "manifest.json describes no checkpoint"),
        ("header", "manifest.json describes no checkpoint"),
    ],
)
def test_the_one_before_is_taken(directory: Path, caplog: pytest.LogCaptureFixture, kind: str, said: str) -> None:
    store, newest = two(directory)
    damage_by_name(kind, newest)
    tracemalloc.start()
    since = time.process_time()
    found = store.latest()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - since < 20 and peak < 64 << 20, "what a file claims costs nothing"
    assert_is(found, 1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and str(newest) in record.message and said in record.message
    before = sorted(path.name for path in directory.parent.iterdir())
    assert write(store, 3)  # the damaged one makes room, not the whole one; what a link points to is left alone
    real = kind not in ("linked folder", "file for the folder", "folder for a file")
    assert (directory / "00000001").is_dir()
    assert real != newest.exists() or kind == "folder for a file"
    assert sorted(path.name for path in directory.parent.iterdir()) == before
    assert_is(store.latest(), 3)
    assert store.latest().number == 3  # type: ignore[union-attr]


def test_none_is_whole(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, newest = two(directory)
    (newest / "global.safetensors").unlink()
    (directory / "00000001" / "manifest.json").write_bytes(b"")
    with pytest.raises(DataError, match=r"manifest\.json is not what was written") as caught:
        store.latest()
    assert caught.value.location == str(directory) and "remove this folder" in str(caught.value.hint)
    assert len(caplog.records) == 2
    assert write(store, 3)
    assert_is(store.latest(), 3)


def test_checkpoints_behind_a_link_are_refused(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, _ = two(directory)
    link(directory, directory.parent / "outside")
    with pytest.raises(DataError, match="checkpoints: not a real folder"):
        store.latest()
    assert not write(store, 3)
    assert "not a real folder" in caplog.text
    assert names(directory.parent / "outside") == ["00000001", "00000002"]


def test_a_run_dir_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to("scratch")
    store = alone(tmp_path / "run" / "checkpoints")
    assert write(store, 1)
    assert_is(store.latest(), 1)


@pytest.mark.parametrize("format_", [0, 1, 3, "2", None, True, [1] * 1000])
def test_another_version_of_ddnn(directory: Path, format_: object) -> None:
    """Nobody goes on from an older checkpoint unasked, only since another ddnn wrote the newest."""
    store, newest = two(directory)
    forge(newest, format=format_, ddnn="9.8.7", files="something else")
    with pytest.raises(DataError, match=r"format .* found, 2 expected: it was written by ddnn '9\.8\.7', this is 0\."):
        store.latest()


def test_a_checkpoint_of_format_1_is_refused(directory: Path) -> None:
    """That of ddnn 0.1.0: checkpoint.json, shared.safetensors, worker0000.safetensors."""
    folder = directory / "00000007"
    folder.mkdir(parents=True)
    old = {"ddnn": "0.1.0", "files": {}, "format": 1, "header": {"epoch": 3}, "number": 7, "workers": 1}
    (folder / "checkpoint.json").write_bytes(canonical_json({**old, "sha256": manifest_digest(old)}))
    with pytest.raises(DataError, match=r"format '1' found, 2 expected: it was written by ddnn '0\.1\.0'") as caught:
        alone(directory).latest()
    assert caught.value.location == str(folder) and "version of ddnn that started this training" in caught.value.hint
    reports: list[str] = []
    assert peek_checkpoint(directory, reports.append) is None
    assert len(reports) == 1 and "'0.1.0'" in reports[0]


def test_what_a_stranger_put_into_the_tensors(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Checksums are right, yet the file is none of ours: the one before is taken."""
    store, newest = two(directory)
    path = newest / "global.safetensors"
    save_file({"z": torch.zeros(2, dtype=torch.complex64)}, path)
    huge = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    for data in (path.read_bytes(), b"", b"\xff" * 8, len(huge).to_bytes(8, "little") + huge):
        path.write_bytes(data)
        files = json.loads((newest / "manifest.json").read_bytes())["files"]
        forge(newest, files=files | {path.name: [len(data), hashlib.sha256(data).hexdigest()]})
        caplog.clear()
        assert_is(store.latest(), 1)
        assert "global.safetensors" in caplog.text


# Failures and deaths while it is written

CALLS = ("write", "fsync", "open", "mkdir", "rename", "unlink", "rmdir")


class Death(BaseException):
    """Stands for a kill: nothing of the program runs afterwards."""


def at_call(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> Callable[[], int]:
    """The number-th system call of those that matter fails; how many there have been."""
    count = 0

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == number or (count > number and isinstance(error, Death)):
                raise error
            return call(*arguments, **named)

        return fail

    for name in CALLS:
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    return lambda: count


def test_every_call_that_can_fail(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """False, nothing left behind, the older ones as they were; or True, where only a removal failed."""
    store = alone(directory, keep=1)
    assert write(store, 1)
    (directory / ".tmp-00000009").mkdir()
    failed, removals, number, n = 0, 0, 0, 1
    while True:
        number, before = number + 1, names(directory)
        caplog.clear()
        with monkeypatch.context() as patch:
            calls = at_call(patch, number, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            written = write(store, n + 1)
            done = calls() < number
        if done:
            break
        if written:
            n, removals = n + 1, removals + ("an older checkpoint could not be removed" in caplog.text)
        else:
            assert (
                "the checkpoint could not be written, training continues" in caplog.text
                and "No space left" in caplog.text
            )
            failed += 1
            assert [name for name in names(directory) if not name.startswith(".")] == [
                name for name in before if not name.startswith(".")
            ]
        assert_is(store.latest(), n)
    assert failed >= 12 and removals >= 3
    assert names(directory) == [store.latest().path.name]  # type: ignore[union-attr]


def test_death_at_every_call(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards there is the one before or the new one, and the next one clears up."""
    store, n, number, olds = alone(directory, keep=1), 1, 0, 0
    assert write(store, 1)
    while True:
        number += 1
        with monkeypatch.context() as patch:
            at_call(patch, number, Death())
            try:
                write(store, n + 1)
                break
            except Death:
                pass
        found = store.latest()
        assert found is not None and found.metadata["n"] in (n, n + 1)
        assert_is(found, found.metadata["n"])
        olds += found.metadata["n"] == n
        n += 2
        assert write(store, n)
        assert names(directory) == [store.latest().path.name]  # type: ignore[union-attr]
    assert olds >= 12


def test_all_is_on_the_disk_before_it_gets_its_name(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test survives a power cut: the order of the calls stands for it."""
    calls: list[tuple[str, str]] = []

    def noted(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def note(file: int | Path, *rest: Any, **named: Any) -> Any:
            path = Path(f"/proc/self/fd/{file}").readlink() if isinstance(file, int) else file
            calls.append((name, path.name))
            return call(file, *rest, **named)

        return note

    for name in ("write", "fsync", "rename"):
        monkeypatch.setattr(os, name, noted(name))
    assert write(alone(directory), 1)
    monkeypatch.undo()
    order = [call for n, call in enumerate(calls) if call != calls[n - 1]]
    files = [(name, file) for file in (FILES[2], FILES[1], FILES[0]) for name in ("write", "fsync")]
    begun, parent = ".tmp-00000001", directory.parent.name
    assert order == [
        ("fsync", parent), *files, ("fsync", begun), ("rename", begun), ("fsync", "checkpoints"),
    ]  # fmt: skip


def test_what_is_not_ours_is_not_removed(directory: Path, tmp_path: Path) -> None:
    store, newest = two(directory)
    kept = tmp_path / "outside"
    kept.mkdir()
    (kept / "global.safetensors").touch()
    (directory / ".tmp-00000003").symlink_to(kept)
    (directory / ".tmp-notes").mkdir()
    (directory / ".tmp-00000004").mkdir()
    (directory / ".tmp-00000004" / "notes").touch()
    (directory / ".tmp-00000005").mkdir()
    (directory / ".tmp-00000005" / "rank0000.safetensors").symlink_to(kept / "global.safetensors")
    (directory / "00000001" / "notes").touch()
    assert write(store, 3)
    assert (kept / "global.safetensors").exists() and (directory / ".tmp-00000004" / "notes").exists()
    expected = [".tmp-00000001", ".tmp-00000003", ".tmp-00000004", ".tmp-notes", newest.name, "00000005"]
    assert names(directory) == expected
    assert names(directory / ".tmp-00000001") == ["notes"]


def test_numbers_go_on_from_the_newest_of_all(directory: Path) -> None:
    store, _ = two(directory)
    (directory / "00000041").touch()
    (directory / "0000000042").mkdir()  # not a name that is given
    assert write(store, 3)
    assert "00000042" in names(directory)
    (directory / ("9" * 249)).mkdir()
    assert write(store, 4)
    assert_is(store.latest(), 4)
    (directory / ("9" * 255)).mkdir()
    assert not write(store, 5)
    assert_is(store.latest(), 4)


def test_a_manifest_too_long_to_be_read_is_not_written(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, _ = two(directory)
    assert not store.save({"text": "x" * (1 << 20)}, {}, {})
    assert "manifest.json: 104" in caplog.text and "at most 1048576" in caplog.text
    assert_is(store.latest(), 2)


def test_a_disk_that_changes_what_is_written(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = two(directory)
    whole = os.write

    def flip(descriptor: int, data: memoryview) -> int:
        return whole(descriptor, bytes([data[0] ^ 1]) + bytes(data[1:]))

    monkeypatch.setattr(os, "write", flip)
    assert not write(store, 3)
    monkeypatch.undo()
    assert names(directory) == ["00000001", "00000002"]


def test_short_writes_are_gone_on_with(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: whole(descriptor, data[:7]))
    store = alone(directory)
    assert write(store, 1)
    assert_is(store.latest(), 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 30 pages."""
    place = tmp_path / "small disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={30 * 4096}", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_full(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Room for one checkpoint of 10 pages, and for a second, but not beside what fills the disk later."""
    store, mean = alone(small_disk / "checkpoints", keep=1), torch.arange(10_000.0)
    assert store.save({"n": 1}, {"mean": mean}, {})
    (small_disk / "other").write_bytes(b"x" * 12 * 4096)
    assert not store.save({"n": 2}, {"mean": mean + 1}, {})
    assert "No space left on device" in caplog.text
    assert names(small_disk / "checkpoints") == ["00000001"]
    found = store.latest()
    assert found is not None and torch.equal(found.global_state["mean"], mean)
    (small_disk / "other").unlink()
    assert store.save({"n": 3}, {"mean": mean + 2}, {})
    assert names(small_disk / "checkpoints") == ["00000002"]


# Several workers

WORKERS = 3


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What mpi_checkpoint.py left, and what each worker saw."""
    folder = tmp_path_factory.mktemp("together")
    process = launch(WORKERS, str(Path(__file__).with_name("mpi_checkpoint.py")), folder)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    return folder / "checkpoints", json.loads((folder / "seen.json").read_text())


def test_each_worker_gets_its_own(together: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, seen = together
    for rank, one in enumerate(seen):
        assert one["written"] == [True, True]
        assert one["newest"] == {"number": 2, "header": {"n": 2}, "workers": WORKERS, "shared": 2.0, "own": 20.0 + rank}
    found = alone(directory).latest()
    assert found is not None and found.world_size == WORKERS
    assert [float(found.rank_state(rank)["own"]) for rank in range(WORKERS)] == [10.0, 11.0, 12.0]


def test_all_workers_see_a_failure_of_any(together: tuple[Path, list[dict[str, Any]]]) -> None:
    _, seen = together
    for one in seen:
        assert one["failures"] == {"disk of 0": False, "disk of 1": False, "disk of 2": False, "unseen by 1": False}
        assert one["left"] == ["00000001", "00000002"]
    assert [len(one["warnings"]) for one in seen] == [5, 0, 0]
    for rank in range(WORKERS):
        assert f"worker {rank} on " in seen[0]["warnings"][rank] and "No space left" in seen[0]["warnings"][rank]


def test_all_workers_take_the_one_before(together: tuple[Path, list[dict[str, Any]]]) -> None:
    """The files of two workers have been swapped."""
    _, seen = together
    for rank, one in enumerate(seen):
        assert one["fallback"] == {
            "number": 1, "header": {"n": 1}, "workers": WORKERS, "shared": 1.0, "own": 10.0 + rank,
        }  # fmt: skip
        assert "is not what was written" in one["none whole"]
        assert one["none whole"] == seen[0]["none whole"]
    assert "rank0001.safetensors is not what was written" in seen[0]["warnings"][4]
