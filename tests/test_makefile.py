"""Which torch `make setup` installs, and that it says the size before: pip and nvidia-smi are scripts of the test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = """#!/bin/sh
echo "pip $*"
case "$*" in
*+cpu*--extra-index-url*|*--extra-index-url*+cpu*) [ "$OFFERS" = pytorch ] ;;
*+cpu*) [ "$OFFERS" = index ] ;;
esac
"""
pytestmark = [
    pytest.mark.skipif(shutil.which("make") is None, reason="needs make"),
    pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has a GPU"),
]


def installed(folder: Path, offers: str, *variables: str, driver: bool = False) -> list[str]:
    """What make says and asks of pip until torch is there; the index `offers` a CPU build of it, or PyTorch's."""
    programs = folder / "bin"
    (folder / "venv" / "bin").mkdir(parents=True)
    programs.mkdir()
    scripts = {folder / "venv/bin/pip": PIP, folder / "venv/bin/python": "#!/bin/sh\n"}
    if driver:
        scripts[programs / "nvidia-smi"] = "#!/bin/sh\n"
    for path, text in scripts.items():
        path.write_text(text)
        path.chmod(0o755)
    for name in ("sh", "touch", "make"):
        (programs / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": str(programs), "OFFERS": offers, "HOME": os.environ.get("HOME", "/")}
    command = ["make", "-s", "-C", str(ROOT), "setup", f"VENV={folder / 'venv'}", *variables]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *lines, told, asked, last = done.stdout.splitlines()
    assert "some minutes without output" in told and "-e .[mpi,decode,report]" in asked
    assert last.endswith(f". {folder / 'venv'}/bin/activate")
    return lines


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ("index", ["no NVIDIA driver.* 1.3 GB on disk", r"pip install .*torch==[\d.]+\+cpu$"]),
        ("pytorch", ["no NVIDIA driver", r"pip .*\+cpu$", r"pip .*--extra-index-url https://download\.pytorch\.org/whl/cpu"]),
        ("neither", ["no NVIDIA", "pip", "pip", "no index has that build.* 5 GB on disk", r"pip install .*torch==[\d.]+$"]),
    ],
)  # fmt: skip
def test_without_a_driver_the_cpu_build_is_taken_where_there_is_one(
    tmp_path: Path, offers: str, expected: list[str]
) -> None:
    found = installed(tmp_path, offers)
    assert len(found) == len(expected) and all(map(re.search, expected, found)), found


def test_with_a_driver_torch_is_as_the_index_has_it(tmp_path: Path) -> None:
    told, asked = installed(tmp_path, "index", driver=True)
    assert "5 GB on disk" in told and re.search(r"pip install .*torch==[\d.]+$", asked)


def test_the_torch_of_the_command_line_is_taken(tmp_path: Path) -> None:
    told, asked = installed(tmp_path, "index", "TORCH=torch==9.9", "PIP_FLAGS=--no-index")
    assert told == "installing torch==9.9" and re.search(r"pip install .*--no-index torch==9\.9$", asked)


def test_make_demo_deletes_only_what_it_made(tmp_path: Path) -> None:
    """A corpus that somebody has put there stays, and anything beside it."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in (
        "venv/bin/ddnn",
        "demo/corpus/train/feats.scp",
        "demo/corpus/cv_speakers.txt",
        "demo/mine",
        "demo/output/old",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("s1 a.ark:5\n")
    for name in ("text", "utt2spk"):
        (tmp_path / "demo/corpus/train" / name).write_text("s1 a.ark:5\ns2 b\n")
    script = '#!/bin/sh\necho "$*"\nif [ "$1" = train ]; then mkdir -p demo/output/run; fi\n'
    (tmp_path / "venv/bin/ddnn").write_text(script)
    (tmp_path / "venv/bin/ddnn").chmod(0o755)
    (tmp_path / "demo/corpus/cv_speakers.txt").write_text("s1\n")
    command = ["make", "-s", "-C", str(tmp_path), "-o", "setup", "demo", "VENV=venv"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "synth" not in done.stdout and "--acoustic-scale-from demo/output/score_dev/score.json" in done.stdout
    assert (tmp_path / "demo/mine").exists() and not (tmp_path / "demo/output/old").exists()
    assert (tmp_path / "demo/output/dev/feats.scp").read_text() == "s1 ../../corpus/train/a.ark:5\n"
    assert (tmp_path / "demo/output/dev/utt2spk").read_text() == "s1 a.ark:5\n", "of the held-out speakers alone"
    subprocess.run(["make", "-s", "-C", str(tmp_path), "clean", "VENV=other"], check=True)
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["corpus", "mine"]
    shutil.rmtree(tmp_path / "demo")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("synth demo/corpus\n")
