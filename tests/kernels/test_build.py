"""What pip compiles the kernels with, and what is loaded of it: never the wrong library, never a training less."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch

from ddnn.nn import kernels
from ddnn.nn.arithmetic import (
    BFloat16,
    BFloat16Kernels,
    Float32,
    Float32Kernels,
    Precision,
    make_arithmetic,
)
from ddnn.nn.kernels import Kernels, load_library

COMPILER = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="nothing is loaded on other processors than x86-64")


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """`build_hook.py`, as hatchling takes it: a file by itself."""
    pytest.importorskip("hatchling", reason="hatchling, of the dev extras, is not installed")
    spec = importlib.util.spec_from_file_location("build_hook", kernels.SOURCE.with_name("build_hook.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """ddnn/kernels of an installation of its own, from which `load_library` loads; there is no library yet."""
    made = tmp_path / "ddnn" / "nn" / "kernels"
    made.mkdir(parents=True)
    source = made / "kernels.c"
    source.write_bytes(kernels.SOURCE.read_bytes())
    monkeypatch.setattr(kernels, "SOURCE", source)
    monkeypatch.setattr(kernels, "LIBRARY", made / "kernels.so")
    monkeypatch.delenv("CC", raising=False)
    load_library.cache_clear()
    yield made
    load_library.cache_clear()


@pytest.fixture
def compile_here(hook: ModuleType, folder: Path) -> Callable[[], str | None]:
    """Compiles what is in `folder`; gives the reason why not."""
    return lambda: hook.compile_library(folder / "kernels.c", folder / "kernels.so")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


@needs_compiler
@pytest.mark.parametrize("cc", [None, "", f"{COMPILER} -O1"])
def test_a_library_is_compiled(
    cc: str | None, compile_here: Callable[[], str | None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cc is not None:
        monkeypatch.setenv("CC", cc)
    (folder / "kernels.so").write_text("an old one")
    assert compile_here() is None
    assert names(folder) == ["kernels.c", "kernels.so"]
    assert Kernels(folder / "kernels.so").source == hashlib.sha256((folder / "kernels.c").read_bytes()).hexdigest()


FAILING: dict[str, tuple[list[str], str]] = {
    "says why": (["echo 'no such thing' >&2", "exit 3"], "no such thing"),
    "says nothing": (["exit 3"], "3"),
    "says it in no language": ([r"printf 'before\377after' >&2", "exit 1"], "before\N{REPLACEMENT CHARACTER}after"),
    "leaves half a library": (
        ['while [ "$1" != -o ]; do shift; done', 'echo half > "$2"', "echo no space >&2", "exit 1"],
        "no space",
    ),
    "takes for ever": (["exec sleep 60"], "timed out"),
}


@pytest.mark.parametrize("how", FAILING)
def test_a_compiler_that_fails_leaves_nothing(
    how: str,
    hook: ModuleType,
    compile_here: Callable[[], str | None],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines, said = FAILING[how]
    compiler = script(tmp_path / "failing", *lines)
    monkeypatch.setenv("CC", f"{compiler} --flag")
    monkeypatch.setattr(hook, "SECONDS", 1.0 if how == "takes for ever" else 60.0)
    (folder / "kernels.so").write_text("an old one, from another source")
    reason = compile_here()
    assert reason is not None and reason.startswith(f"{compiler}: ") and said in reason
    assert names(folder) == ["kernels.c", "kernels.so"]
    assert (folder / "kernels.so").read_text() == "an old one, from another source"
    assert load_library() is None


@pytest.mark.parametrize(("cc", "said"), [("/nowhere/cc -O2", "/nowhere/cc: "), ("'cc", "No closing quotation")])
def test_a_compiler_that_is_none_leaves_nothing(
    cc: str, said: str, compile_here: Callable[[], str | None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", cc)
    reason = compile_here()
    assert reason is not None and said in reason
    assert names(folder) == ["kernels.c"]


def test_without_a_compiler_nothing_is_compiled(
    compile_here: Callable[[], str | None], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compile_here() == "there is no C compiler"
    assert names(folder) == ["kernels.c"]


@needs_compiler
def test_a_source_that_does_not_compile_leaves_nothing(compile_here: Callable[[], str | None], folder: Path) -> None:
    (folder / "kernels.c").write_text("int half(")
    reason = compile_here()
    assert reason is not None and "error" in reason
    assert names(folder) == ["kernels.c"]


def hook_of(hook: ModuleType, root: Path) -> Any:
    config: dict[str, Any] = {}
    return hook.CompileKernels(str(root), config, None, None, str(root / "dist"), "wheel")


@needs_compiler
def test_the_hook_adds_the_library_to_the_wheel_and_leaves_the_tree_as_it_is(
    hook: ModuleType, folder: Path, tmp_path: Path
) -> None:
    build_data: dict[str, Any] = {"force_include": {}, "pure_python": True, "tag": None}
    made = hook_of(hook, tmp_path)
    made.initialize("standard", build_data)
    ((library, place),) = build_data["force_include"].items()
    assert place == "ddnn/nn/kernels/kernels.so" and Kernels(Path(library)).source
    assert not build_data["pure_python"] and build_data["tag"].startswith("py3-none-")
    made.finalize("standard", build_data, "the wheel")
    assert not Path(library).exists()
    assert names(folder) == ["kernels.c"]


@needs_compiler
def test_an_editable_install_has_the_library_beside_its_source(hook: ModuleType, folder: Path, tmp_path: Path) -> None:
    build_data: dict[str, Any] = {"force_include": {}, "pure_python": True, "tag": None}
    made = hook_of(hook, tmp_path)
    made.initialize("editable", build_data)
    made.finalize("editable", build_data, "the wheel")
    assert names(folder) == ["kernels.c", "kernels.so"] and not build_data["force_include"]


@needs_compiler
def test_a_tree_that_cannot_be_written_is_no_failure(
    compile_here: Callable[[], str | None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(Path, "replace", refuse)
    reason = compile_here()
    assert reason is not None and "Read-only file system" in reason


def test_the_hook_lets_an_installation_go_on_without(
    hook: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    build_data: dict[str, Any] = {"force_include": {}, "pure_python": True, "tag": None}
    hook_of(hook, tmp_path).initialize("standard", build_data)
    assert build_data == {"force_include": {}, "pure_python": True, "tag": None}
    assert "its kernels are not compiled, bf16 on a CPU will be slower: /nowhere/cc: " in capsys.readouterr().err


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@on_x86
@needs_compiler
def test_only_a_library_of_this_source_is_loaded(
    compile_here: Callable[[], str | None], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert compile_here() is None
    assert (load_library() is not None) == bool(Kernels(folder / "kernels.so").supported)
    assert not warnings(caplog)
    load_library.cache_clear()
    with (folder / "kernels.c").open("a") as source:
        source.write("/* a later version */\n")
    assert load_library() is None
    (warning,) = warnings(caplog)
    assert warning.startswith(f"{folder / 'kernels.so'} was compiled from another kernels.c and is not used; ")


@on_x86
@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF"])
def test_a_file_that_is_no_library(content: bytes, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "kernels.so").write_bytes(content)
    assert load_library() is None
    (warning,) = warnings(caplog)
    assert "compiled kernels cannot be loaded, bf16 and NG-SGD run in PyTorch alone: " in warning


OURS = """
const char *ddnn_kernels_source(void) { return DDNN_SOURCE; }
int ddnn_kernels_supported(void) { return USABLE; }
"""


@on_x86
@needs_compiler
@pytest.mark.parametrize("source", ["int other;", OURS.replace("USABLE", "1")], ids=["another's", "half of ours"])
def test_a_library_of_something_else(
    source: str, compile_here: Callable[[], str | None], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "kernels.c").write_text(source)
    assert compile_here() is None
    assert load_library() is None
    (warning,) = warnings(caplog)
    assert "cannot be loaded" in warning and "undefined symbol" in warning


@on_x86
@needs_compiler
@pytest.mark.parametrize("source", [None, OURS.replace("USABLE", "0")], ids=["other compiler", "other processor"])
def test_what_cannot_run_here_is_not_used_and_nobody_is_warned(
    source: str | None,
    compile_here: Callable[[], str | None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if source is None:  # the very source, as if by a compiler that it does not know
        monkeypatch.setenv("CC", f"{COMPILER} -U__GNUC__")
    else:
        (folder / "kernels.c").write_text(source)
    assert compile_here() is None
    assert not Kernels(folder / "kernels.so").supported
    assert load_library() is None
    assert not warnings(caplog)


NG_SGD, ALL = (
    "available (used by NG-SGD in float32; bf16 would need AVX512-BF16)",
    "available (used by bf16 and NG-SGD)",
)
NONE = "not used, this processor has no AVX-512: bf16 and NG-SGD run in PyTorch alone"


@on_x86
@needs_compiler
@pytest.mark.parametrize(
    ("lacks", "supported", "said"),
    [
        ((), ("float32", "bf16"), ALL),
        (("avx512bf16",), ("float32",), NG_SGD),
        (("avx512vl",), (), NONE),
        (("avx512f", "avx512bf16"), (), NONE),
    ],
    ids=["Zen 4", "Ice Lake", "Knights Landing", "Zen 3"],
)
def test_each_processor_uses_the_kernels_that_it_can_run(
    lacks: tuple[str, ...],
    supported: tuple[str, ...],
    said: str,
    compile_here: Callable[[], str | None],
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The instructions of made-up processors, in `kernels.c` itself. Nothing of it is run."""
    source = (folder / "kernels.c").read_text()
    asked = re.findall(r'__builtin_cpu_supports\("(\w+)"\)', source)
    assert asked == ["avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16"]
    for name in asked:
        source = source.replace(f'__builtin_cpu_supports("{name}")', str(int(name not in lacks)))
    (folder / "kernels.c").write_text(source)
    assert compile_here() is None
    caplog.set_level(logging.INFO, logger="ddnn.nn.kernels")
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = [type(make_arithmetic(precision, torch.device("cpu"))) for precision in get_args(Precision)]
    torch.set_num_threads(torch_threads)
    assert made[0] is (Float32Kernels if "float32" in supported else Float32)
    assert made[1] is (BFloat16Kernels if "bf16" in supported else BFloat16)
    assert caplog.messages == [f"compiled kernels: {said}"]


@on_x86
def test_without_a_library_the_log_says_what_to_do(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ddnn")
    assert load_library() is None
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert (
        "no compiled kernels: bf16 and NG-SGD run in PyTorch alone, which is slower; pip install" in record.getMessage()
    )


def test_other_processors_load_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "kernels.so").write_bytes(b"no library")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    caplog.set_level(logging.INFO)
    assert load_library() is None
    assert [record.getMessage() for record in caplog.records] == [
        "compiled kernels are for x86-64: bf16 and NG-SGD run in PyTorch alone"
    ]
    assert os.fspath(kernels.LIBRARY).startswith(os.fspath(folder)), "or this saw the library of the installation"
