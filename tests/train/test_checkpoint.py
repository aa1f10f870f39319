"""Checkpoints: whole or not at all, whatever fails in between; damaged ones are seen, the one before is taken."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import random
import shutil
import struct
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parallel.mpi_worlds import launch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddnn.errors import DataError
from ddnn.parallel.exchange import Exchange
from ddnn.train import checkpoint_manifest
from ddnn.train.checkpoint import Checkpoints, Found
from ddnn.train.checkpoint_files import DTYPES

FILES = ("checkpoint.json", "shared.safetensors", "worker0000.safetensors")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def alone(directory: Path, keep: int = 2) -> Checkpoints:
    return Checkpoints(directory, keep, Exchange())


def write(store: Checkpoints, n: int) -> bool:
    """A checkpoint that says everywhere that it is the n-th, with tensors of fixed sizes."""
    return store.write({"n": n}, {"mean": torch.full((40,), float(n))}, {"momentum": torch.full((9,), -float(n))})


def assert_is(found: Found | None, n: int) -> None:
    """All that it holds is of the n-th."""
    assert found is not None
    assert found.header == {"n": n}
    assert torch.equal(found.shared()["mean"], torch.full((40,), float(n)))
    assert torch.equal(found.part(0)["momentum"], torch.full((9,), -float(n)))


def two(directory: Path) -> tuple[Checkpoints, Path]:
    """Checkpoints 1 and 2, and the folder of the newer one."""
    store = alone(directory)
    assert write(store, 1) and write(store, 2)
    return store, directory / "00000002"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def forge(folder: Path, **changes: Any) -> None:
    """A stranger's manifest, its checksum right."""
    value = json.loads((folder / "checkpoint.json").read_bytes()) | changes
    del value["sha256"]
    value["sha256"] = checkpoint_manifest._own_sha256(value)
    (folder / "checkpoint.json").write_bytes(checkpoint_manifest._text(value))


def same_bits(a: Tensor, b: Tensor) -> bool:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


# What is written is read


def test_none_at_first(directory: Path) -> None:
    assert alone(directory).newest() is None
    directory.mkdir()
    (directory / "notes").touch()
    assert alone(directory).newest() is None


def test_the_newest_are_kept(directory: Path) -> None:
    store = alone(directory, keep=2)
    for n in range(1, 5):
        assert write(store, n)
        assert_is(store.newest(), n)
    assert names(directory) == ["00000003", "00000004"]
    assert names(directory / "00000004") == sorted(FILES)
    assert_is(alone(directory).newest(), 4)
    found = alone(directory).newest()
    assert found is not None
    assert (found.path, found.number, found.workers) == (directory / "00000004", 4, 1)
    with pytest.raises(IndexError):
        found.part(1)


SCALARS = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(max_size=5)
KEYS = st.text(max_size=4) | st.sampled_from(["$float", "$", "$$float"])
VALUES = st.recursive(
    SCALARS, lambda of: st.lists(of, max_size=3) | st.dictionaries(KEYS, of, max_size=3), max_leaves=9
)
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def bits(value: Any) -> Any:
    """The same, floats as their bits: NaN equals itself, -0.0 does not equal 0.0, 1 does not equal 1.0 or True."""
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    if isinstance(value, list):
        return [bits(part) for part in value]
    return (type(value).__name__, struct.pack(">d", value) if isinstance(value, float) else value)


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
    header=st.dictionaries(KEYS, VALUES, max_size=4),
    shared=st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=4), tensors(), max_size=4),
)
def test_any_header_and_tensors_come_back_to_the_bit(header: dict[str, Any], shared: dict[str, Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = alone(Path(folder) / "checkpoints")
        assert store.write(header, shared, {})
        found = store.newest()
        assert found is not None
        assert bits(found.header) == bits(header)
        back = found.shared()
        assert back.keys() == shared.keys()
        assert all(same_bits(back[name], tensor) for name, tensor in shared.items())
        assert found.part(0) == {}


def test_a_nan_keeps_its_payload(directory: Path) -> None:
    (odd,) = struct.unpack(">d", bytes.fromhex("fff8000000abcdef"))
    store = alone(directory)
    assert store.write({"rates": (odd, math.inf)}, {}, {})
    found = store.newest()
    assert found is not None
    assert bits(found.header) == bits({"rates": [odd, math.inf]})


def test_any_reader_of_safetensors_reads_the_files(directory: Path) -> None:
    """Views of one memory, a generator's state: none must be cloned first."""
    flat, state = torch.randn(30), torch.Generator().get_state()
    own = {"all": flat, "part": flat[3:9].view(2, 3), "state": state, "half": flat.bfloat16(), "steps": torch.tensor(7)}
    assert alone(directory).write({}, {}, own)
    back = load_file(directory / "00000001" / "worker0000.safetensors")
    assert back.keys() == own.keys()
    assert all(same_bits(back[name], own[name]) for name in own)


def test_what_cannot_be_held_is_a_mistake_of_the_program(directory: Path) -> None:
    store = alone(directory)
    with pytest.raises(TypeError, match=r"z is torch\.complex64"):
        store.write({}, {"z": torch.zeros(1, dtype=torch.complex64)}, {})
    with pytest.raises(TypeError):
        store.write({"path": directory}, {}, {})
    with pytest.raises(TypeError, match="keys"):
        store.write({"epochs": {1: 2}}, {}, {})


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
        assert_is(store.newest(), 1)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert str(newest) in record.message and name in record.message
        count += 1
    assert count == 120
    caplog.clear()
    assert_is(store.newest(), 2)
    assert caplog.records == []


def test_damage_after_it_was_found(directory: Path) -> None:
    store, newest = two(directory)
    found = store.newest()
    assert found is not None
    for name in damages(newest, 60):
        if name == "shared.safetensors":
            with pytest.raises(DataError, match=name):
                found.shared()
        elif name == "worker0000.safetensors":
            with pytest.raises(DataError, match=name):
                found.part(0)


def copy_over(folder: Path, name: str) -> Callable[[], object]:
    return lambda: shutil.copy(folder.parent / "00000001" / name, folder / name)


def link(path: Path, to: Path) -> None:
    """What it was, but behind a symbolic link."""
    path.rename(to)
    path.symlink_to(to)


def damage_by_name(kind: str, newest: Path) -> None:
    """One way to damage a checkpoint that no random byte finds."""
    older, outside = newest.parent / "00000001", newest.parent.parent / "outside"
    shared = newest / "shared.safetensors"
    ways: dict[str, Callable[[], object]] = {
        "no manifest": (newest / "checkpoint.json").unlink,
        "no shared": shared.unlink,
        "no worker": (newest / "worker0000.safetensors").unlink,
        "empty folder": lambda: [path.unlink() for path in newest.iterdir()],
        "shared of another": copy_over(newest, "shared.safetensors"),
        "worker of another": copy_over(newest, "worker0000.safetensors"),
        "manifest of another": copy_over(newest, "checkpoint.json"),
        "all of another": lambda: (shutil.rmtree(newest), shutil.copytree(older, newest)),
        "files swapped": lambda: (
            shared.rename(outside),
            (newest / "worker0000.safetensors").rename(shared),
            outside.rename(newest / "worker0000.safetensors"),
        ),
        "linked folder": lambda: link(newest, outside),
        "linked manifest": lambda: link(newest / "checkpoint.json", outside),
        "linked shared": lambda: link(shared, outside),
        "pipe": lambda: (shared.unlink(), os.mkfifo(shared)),
        "folder for a file": lambda: (shared.unlink(), shared.mkdir()),
        "file for the folder": lambda: (shutil.rmtree(newest), newest.touch()),
        "no JSON": lambda: (newest / "checkpoint.json").write_bytes(b"{"),
        "a space more": lambda: (newest / "checkpoint.json").write_bytes(
            (newest / "checkpoint.json").read_bytes() + b" "
        ),
        "its last byte": lambda: os.truncate(
            newest / "checkpoint.json", (newest / "checkpoint.json").stat().st_size - 1
        ),
        "a list": lambda: (newest / "checkpoint.json").write_bytes(b"[1]"),
        "no ASCII": lambda: (newest / "checkpoint.json").write_bytes(b"\xff" * 9),
        "deep": lambda: (newest / "checkpoint.json").write_bytes(b"[" * 500_000),
        "long": lambda: os.truncate(newest / "checkpoint.json", 1 << 40),
        "long shared": lambda: os.truncate(shared, 1 << 40),
        "claims sizes": lambda: forge(newest, files={name: [1 << 60, "0" * 64] for name in FILES[1:]}),
        "claims workers": lambda: forge(newest, workers=10**9),
        "negative workers": lambda: forge(newest, workers=-1),
        "true workers": lambda: forge(newest, workers=True),
        "another number": lambda: forge(newest, number=3),
        "path in a name": lambda: forge(newest, files={"../00000001/" + n: [1, "0"] for n in FILES[1:]}),
        "no files": lambda: forge(newest, files=None, workers=0),
        "no sizes": lambda: forge(newest, files=dict.fromkeys(FILES[1:], "ab")),
        "header": lambda: forge(newest, header=[1]),
        "header of a float": lambda: forge(newest, header={"x": {"$float": "00"}}),
    }
    ways[kind]()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("no manifest", "checkpoint.json: No such file"),
        ("no shared", "shared.safetensors: No such file"),
        ("no worker", "worker0000.safetensors: No such file"),
        ("empty folder", "checkpoint.json: No such file"),
        ("shared of another", "shared.safetensors is not what was written"),
        ("worker of another", "worker0000.safetensors is not what was written"),
        ("manifest of another", "checkpoint.json is that of another checkpoint"),
        ("all of another", "checkpoint.json is that of another checkpoint"),
        ("files swapped", "shared.safetensors has"),
        ("linked folder", "00000002: no real folder"),
        ("linked manifest", "checkpoint.json is a symbolic link"),
        ("linked shared", "shared.safetensors is a symbolic link"),
        ("pipe", "shared.safetensors is no regular file"),
        ("folder for a file", "shared.safetensors: Is a directory"),
        ("file for the folder", "00000002: no real folder"),
        ("no JSON", "checkpoint.json is not what was written"),
        ("a space more", "checkpoint.json is not what was written: its sha256 is another one"),
        ("its last byte", "checkpoint.json is not what was written: its sha256 is another one"),
        ("a list", "checkpoint.json is not what was written"),
        ("no ASCII", "checkpoint.json is too long, or no JSON"),
        ("deep", "checkpoint.json is not what was written"),
        ("long", "checkpoint.json is too long"),
        ("long shared", "shared.safetensors has 1099511627776 bytes"),
        ("claims sizes", "1152921504606846976 were written"),
        ("claims workers", "checkpoint.json is that of another checkpoint, or says something that cannot be"),
        ("negative workers", "checkpoint.json is that of another checkpoint, or says something that cannot be"),
        ("true workers", "checkpoint.json is that of another checkpoint, or says something that cannot be"),
        ("another number", "checkpoint.json is that of another checkpoint"),
        ("path in a name", "checkpoint.json is that of another checkpoint, or says something that cannot be"),
        ("no files", "checkpoint.json says something that cannot be"),
        ("no sizes", "checkpoint.json is that of another checkpoint, or says something that cannot be"),
        ("header", "checkpoint.json is that of another checkpoint, or says something that cannot be"),
        ("header of a float", "checkpoint.json says something that cannot be"),
    ],
)
def test_the_one_before_is_taken(directory: Path, caplog: pytest.LogCaptureFixture, kind: str, said: str) -> None:
    store, newest = two(directory)
    damage_by_name(kind, newest)
    tracemalloc.start()
    since = time.perf_counter()
    found = store.newest()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.perf_counter() - since < 20 and peak < 64 << 20, "what a file claims costs nothing"
    assert_is(found, 1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and str(newest) in record.message and said in record.message
    before = sorted(path.name for path in directory.parent.iterdir())
    assert write(store, 3)  # the damaged one makes room, not the whole one; what a link points to is left alone
    real = kind not in ("linked folder", "file for the folder", "folder for a file")
    assert (directory / "00000001").is_dir()
    assert real != newest.exists() or kind == "folder for a file"
    assert sorted(path.name for path in directory.parent.iterdir()) == before
    assert_is(store.newest(), 3)
    assert store.newest().number == 3  # type: ignore[union-attr]


def test_none_is_whole(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, newest = two(directory)
    (newest / "shared.safetensors").unlink()
    (directory / "00000001" / "checkpoint.json").write_bytes(b"")
    with pytest.raises(DataError, match=r"checkpoint\.json is not what was written") as caught:
        store.newest()
    assert caught.value.where == str(directory) and "remove this folder" in str(caught.value.mend)
    assert len(caplog.records) == 2
    assert write(store, 3)
    assert_is(store.newest(), 3)


def test_checkpoints_behind_a_link_are_refused(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, _ = two(directory)
    link(directory, directory.parent / "outside")
    with pytest.raises(DataError, match="checkpoints: no real folder"):
        store.newest()
    assert not write(store, 3)
    assert "no real folder" in caplog.text
    assert names(directory.parent / "outside") == ["00000001", "00000002"]


def test_a_run_dir_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to("scratch")
    store = alone(tmp_path / "run" / "checkpoints")
    assert write(store, 1)
    assert_is(store.newest(), 1)


@pytest.mark.parametrize("format_", [0, 2, "1", None, True, [1] * 1000])
def test_another_version_of_ddnn(directory: Path, format_: object) -> None:
    """Nobody goes on from an older checkpoint unasked, only since another ddnn wrote the newest."""
    store, newest = two(directory)
    forge(newest, format=format_, ddnn="9.8.7", files="something else")
    with pytest.raises(DataError, match=r"format .* found, 1 expected: it was written by ddnn '9\.8\.7', this is 0\."):
        store.newest()


def test_what_a_stranger_put_into_the_tensors(directory: Path) -> None:
    """Checksums are right, yet the file is none of ours."""
    store, newest = two(directory)
    path = newest / "shared.safetensors"
    save_file({"z": torch.zeros(2, dtype=torch.complex64)}, path)
    huge = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    for data in (path.read_bytes(), b"", b"\xff" * 8, len(huge).to_bytes(8, "little") + huge):
        path.write_bytes(data)
        files = json.loads((newest / "checkpoint.json").read_bytes())["files"]
        forge(newest, files=files | {path.name: [len(data), hashlib.sha256(data).hexdigest()]})
        found = store.newest()
        assert found is not None and found.number == 2
        with pytest.raises(DataError, match=r"shared\.safetensors"):
            found.shared()


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
            assert "no checkpoint could be written, training goes on" in caplog.text and "No space left" in caplog.text
            failed += 1
            assert [name for name in names(directory) if not name.startswith(".")] == [
                name for name in before if not name.startswith(".")
            ]
        assert_is(store.newest(), n)
    assert failed >= 15 and removals >= 3
    assert names(directory) == [store.newest().path.name]  # type: ignore[union-attr]


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
        found = store.newest()
        assert found is not None and found.header["n"] in (n, n + 1)
        assert_is(found, found.header["n"])
        olds += found.header["n"] == n
        n += 2
        assert write(store, n)
        assert names(directory) == [store.newest().path.name]  # type: ignore[union-attr]
    assert olds >= 15


def test_all_is_on_the_disk_before_it_gets_its_name(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test survives a power cut: the order of the calls stands for it."""
    calls: list[tuple[str, str]] = []

    def noted(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def note(what: int | str, *rest: Any, **named: Any) -> Any:
            calls.append((name, Path(f"/proc/self/fd/{what}").readlink().name if isinstance(what, int) else what))
            return call(what, *rest, **named)

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
    (kept / "shared.safetensors").touch()
    (directory / ".tmp-00000003").symlink_to(kept)
    (directory / ".tmp-notes").mkdir()
    (directory / ".tmp-00000004").mkdir()
    (directory / ".tmp-00000004" / "notes").touch()
    (directory / ".tmp-00000005").mkdir()
    (directory / ".tmp-00000005" / "worker0000.safetensors").symlink_to(kept / "shared.safetensors")
    (directory / "00000001" / "notes").touch()
    assert write(store, 3)
    assert (kept / "shared.safetensors").exists() and (directory / ".tmp-00000004" / "notes").exists()
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
    assert_is(store.newest(), 4)
    (directory / ("9" * 255)).mkdir()
    assert not write(store, 5)
    assert_is(store.newest(), 4)


def test_a_manifest_too_long_to_be_read_is_not_written(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, _ = two(directory)
    assert not store.write({"text": "x" * (1 << 20)}, {}, {})
    assert "checkpoint.json: 104" in caplog.text and "at most 1048576" in caplog.text
    assert_is(store.newest(), 2)


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
    assert_is(store.newest(), 1)


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
    assert store.write({"n": 1}, {"mean": mean}, {})
    (small_disk / "other").write_bytes(b"x" * 12 * 4096)
    assert not store.write({"n": 2}, {"mean": mean + 1}, {})
    assert "No space left on device" in caplog.text
    assert names(small_disk / "checkpoints") == ["00000001"]
    found = store.newest()
    assert found is not None and torch.equal(found.shared()["mean"], mean)
    (small_disk / "other").unlink()
    assert store.write({"n": 3}, {"mean": mean + 2}, {})
    assert names(small_disk / "checkpoints") == ["00000002"]


# Several workers

WORKERS = 3


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What mpi_checkpoint.py left, and what each worker saw."""
    folder = tmp_path_factory.mktemp("together")
    process = launch(WORKERS, str(Path(__file__).with_name("mpi_checkpoint.py")), folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    return folder / "checkpoints", json.loads((folder / "seen.json").read_text())


def test_each_worker_gets_its_own(together: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, seen = together
    for rank, one in enumerate(seen):
        assert one["written"] == [True, True]
        assert one["newest"] == {"number": 2, "header": {"n": 2}, "workers": WORKERS, "shared": 2.0, "own": 20.0 + rank}
    found = alone(directory).newest()
    assert found is not None and found.workers == WORKERS
    assert [float(found.part(rank)["own"]) for rank in range(WORKERS)] == [10.0, 11.0, 12.0]


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
    assert "worker0002.safetensors is not what was written" in seen[0]["warnings"][4]
