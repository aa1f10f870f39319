"""What is no file, where a reader expects one: a folder, a pipe, a link to itself, to a device, or to nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz.child import Target
from fuzz.harness import fuzz
from fuzz.targets import all_targets

KINDS: dict[bytes, Callable[[Path], object]] = {
    b"folder": Path.mkdir,
    b"pipe": os.mkfifo,
    b"loop": lambda path: path.symlink_to(path),
    b"nothing": lambda path: path.symlink_to(path.with_name("nothing there")),
    b"zeros": lambda path: path.symlink_to("/dev/zero"),
    b"messages": lambda path: path.symlink_to("/proc/kmsg"),
    b"memory": lambda path: path.symlink_to("/proc/self/mem"),
    b"empty": Path.touch,
    b"sparse": lambda path: path.with_name("sparse file").rename(path),
}


def _lay(file: str, folder: Path) -> None:
    """Puts in place of the file what the fuzzer wrote into `kind`."""
    kind, path = (folder / "kind").read_bytes(), folder / file
    if kind == b"sound":
        return
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    KINDS[kind](path)


# One of each reader is enough: what differs between these targets lies within the file. cmvn_opts is only compared: what is
# wrong with it is a warning.
_SKIPPED = ("within its gzip", "resealed", "header", "decoded", "--set", "cmvn_opts")


@pytest.mark.parametrize(
    "target",
    [target for target in all_targets() if not target.name.endswith(_SKIPPED) and not target.name.startswith("status")],
    ids=lambda target: target.name.replace(" ", "-"),
)
def test_what_is_no_file(tmp_path: Path, target: Target) -> None:
    sound = target.pack(target.seeds[0])

    def beside(folder: Path) -> None:
        target.beside(folder)
        (folder / target.file).parent.mkdir(parents=True, exist_ok=True)
        (folder / target.file).write_bytes(sound)
        sparse = (folder / target.file).with_name("sparse file")
        sparse.touch()
        os.truncate(sparse, 1 << 42)

    def read(folder: Path) -> None:
        _lay(target.file, folder)
        target.read(folder)

    kinds = replace(target, file="kind", read=read, seeds=(b"sound",), crafted=tuple(KINDS), beside=beside, pack=bytes)
    outcome = fuzz(kinds, tmp_path, seed=1, inputs=1 + len(KINDS))
    assert not outcome.findings, "\n".join(f"{f.data!r}: {f.message}\n{f.trace}" for f in outcome.findings)
    # A link to nothing is as if there were none, where one may be missing; and no rows yet are no damage.
    lenient = target.name.endswith(("num_jobs", "num_pdfs")) or target.name.startswith("metrics")
    most = 6 if target.name == "job.json" else 4 if lenient else 1  # what is no file is no job
    assert outcome.accepted <= most, "something that is no file was read"
