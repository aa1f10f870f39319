"""Tables, durations and other text of commands."""

from __future__ import annotations

import io
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ddnn.distributed import launcher
from ddnn.util import progress
from ddnn.util.text import binary_output, definitions, duration, plural, printable, table


def test_columns_are_aligned_without_trailing_blanks() -> None:
    rows = [("one", "2", ""), ("longer", "100", "x")]
    assert table(rows, ("name", "count", "note"), "lrl") == ("name    count  note\none         2\nlonger    100  x")
    assert table([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"
    assert table([]) == ""
    assert table([("1", "2"), ("10", "20")], align="r") == " 1   2\n10  20"


def test_wide_characters_take_two_columns() -> None:
    assert table([("\u65e5\u672c", "x"), ("abcd", "y")]) == "\u65e5\u672c  x\nabcd  y"


def test_definitions_are_aligned() -> None:
    assert definitions([("a", "1"), ("long name", "2\n3")], "  ") == "  a          1\n  long name  2\n             3"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.9, "59 s"), (61, "1 min 1 s"), (3 * 3600 + 20 * 60 + 5, "3 h 20 min"), (90000, "1 d 1 h")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_words() -> None:
    assert (plural(1, "worker"), plural(0, "worker")) == ("1 worker", "0 workers")
    assert printable("a\x1b[31m\nb\t") == "a\\x1b[31m\nb\\t"


def test_bars_show_where_asked_for_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first of several workers on the launcher's terminal, if it is on the same host."""
    monkeypatch.setattr(progress, "_shown", True)
    monkeypatch.setattr(progress, "_terminal", None)
    assert list(progress.progress_bar("loading")([1, 2])) == [1, 2]
    terminal = tmp_path / "terminal"
    terminal.touch()
    for host, rank in ((platform.node(), 1), ("elsewhere", 0), (platform.node(), 0)):
        assert terminal.read_text() == ""
        monkeypatch.setenv(progress.LAUNCHER_TERMINAL, f"{host} {terminal}")
        progress.only_first_worker_shows(rank)
        with progress.frame_counter("epoch 1", 100, done=50) as advance:
            advance(25)
    assert "epoch 1" in terminal.read_text() and "75/100" in terminal.read_text()
    assert capfd.readouterr() == ("", "")


def test_first_worker_draws_on_the_terminal_of_its_launcher(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not when mpirun has a whole line."""
    monkeypatch.setattr(progress, "_terminal", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    environments = []
    monkeypatch.setattr(launcher, "launch_workers", lambda n, argv, env, **options: environments.append(env) or 0)
    launcher.run_distributed(2, [], lambda comm: None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    monkeypatch.setenv(progress.LAUNCHER_TERMINAL, environments[0][progress.LAUNCHER_TERMINAL])
    progress.only_first_worker_shows(0)
    with progress.frame_counter("epoch 1", 100, done=50):
        assert "50/100" in capfd.readouterr().err


def test_a_bar_has_further_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for once a second, since they may wait for the device; where no bar is shown never."""
    asked: list[int] = []

    def figures() -> str:
        asked.append(len(asked))
        return f"loss \x1b{len(asked)}"

    for shown, seconds, calls in ((False, 0.0, 0), (True, 1000.0, 0), (True, 0.0, 3)):
        monkeypatch.setattr(progress, "_shown", shown)
        monkeypatch.setattr(progress, "FIGURES_SECONDS", seconds)
        with (tmp_path / "terminal").open("w") as terminal:
            monkeypatch.setattr(progress, "_terminal", terminal)
            with progress.frame_counter("epoch 1", 100, figures=figures) as advance:
                for _ in range(3):
                    advance(25)
        assert len(asked) == calls
    assert "75/100" in (tmp_path / "terminal").read_text() and "loss \\x1b3" in (tmp_path / "terminal").read_text()


def test_rich_is_imported_for_a_bar_only() -> None:
    code = (
        "import sys, ddnn.util.text, ddnn.util.progress as p; p.frame_counter('x', 1); sys.exit('rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


def test_bytes_that_nobody_reads_end_the_program_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoReader(io.BytesIO):
        def write(self, data: object) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(NoReader()))
    with pytest.raises(SystemExit) as ended, binary_output() as stream:
        stream.write(b"x")
    assert ended.value.code == 141
