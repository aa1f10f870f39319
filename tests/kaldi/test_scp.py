"""Script files: what each line means, and what no line may do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddnn.kaldi.archive import ScpEntry, read_scp
from ddnn.util.errors import DataError


def test_paths_offsets_and_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "données été"
    folder.mkdir()
    (folder / "größe 1.ark").touch()
    (folder / "a:b[c].ark").touch()
    scp = folder / "f.scp"
    scp.write_text(
        "α größe 1.ark:12\n"
        "b\tgröße 1.ark:3[0:4,:]\r\n"
        "c\u00a0d   größe 1.ark[2:2,1:3]  \n"
        f"e {folder}/a:b[c].ark:0\n"
        "f données été/größe 1.ark"
    )
    ark = folder / "größe 1.ark"
    # The last line is found from the working directory, the others beside the scp; a no-break space is no separator.
    assert read_scp(scp) == [
        ScpEntry("α", ark, 12, None, None, None, scp),
        ScpEntry("b", ark, 3, (0, 4), None, None, scp),
        ScpEntry("c\u00a0d", ark, None, (2, 2), (1, 3), None, scp),
        ScpEntry("e", folder / "a:b[c].ark", 0, None, None, None, scp),
        ScpEntry("f", Path("données été/größe 1.ark"), None, None, None, None, scp),
    ]


def test_the_working_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.ark").touch()
    (tmp_path / "sub" / "x.scp").write_text("a x.ark:0\n")
    assert read_scp(Path("sub/x.scp"))[0].path == Path("sub/x.ark")
    (tmp_path / "x.ark").touch()
    assert read_scp(Path("sub/x.scp"))[0].path == Path("x.ark")


BAD = [
    (b"", "empty"),
    (b"a here.ark:1\n\nb here.ark:2\n", "line 2 of the scp is blank"),
    (b"a\n", "line 1 has no path after 'a'"),
    (b"a here.ark:1\nb here.ark:2\na here.ark:3\n", "utterance a occurs twice, in lines 1 and 3"),
    (b"a here.ark:1\nb \xff.ark\n", "line 2 is not UTF-8"),
    (b"\xfe here.ark:1\n", "line 1 is not UTF-8"),
    (b"a missing.ark:1\n", "utterance a: the file 'missing.ark' does not exist"),
    (b"a /dev/zero\n", "no regular file"),
    (b"a .\n", "no regular file"),
    (b"a -\n", "expected a file, found '-'"),
    (b"a here.ark:-5\n", "utterance a: -5 is not an offset"),
    (b"a here.ark:" + b"9" * 5000 + b"\n", "is not an offset"),
    (b"a here.ark:1[0:4\n", "does not exist"),
    (b"a here.ark:1[4:0]\n", "ends before it begins"),
    (b"a here.ark:1[-1:4]\n", "expected a range"),
    (b"a here.ark:1[3]\n", "expected a range"),
    (b"a here.ark:1[1:2:3]\n", "expected a range"),
    (b"a here.ark:1[]\n", "expected a range"),
    (b"a |cat here.ark\n", "writes to a command"),
    (b"a cat here.ark |\n", "is a shell command, which is not run"),
    (b"a cat here.ark |[0:1]\n", "is a shell command, which is not run"),
    (b"a here\0.ark\n", "NUL"),
    (b"a " + b"x" * 100000 + b"\n", "does not exist"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_bad_lines(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "here.ark").touch()
    scp = tmp_path / "bad.scp"
    scp.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_scp(scp)
    assert message in error.value.message and str(scp) in str(error.value.location)


def test_missing_or_a_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "none.scp", tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(DataError, match=r"the scp") as error:
            read_scp(path)
        assert error.value.location == str(path)
        assert ("a directory found, the scp expected" in error.value.message) == (path == tmp_path)


@settings(max_examples=150, deadline=None)
@given(
    data=st.binary(max_size=60)
    | st.lists(st.sampled_from([b"a", b" ", b"\n", b"|", b"[", b"0:1", b"]", b":", b"x"])).map(b"".join)
)
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    scp = tmp_path_factory.mktemp("any") / "x.scp"
    (scp.parent / "x").touch()
    scp.write_bytes(data)
    try:
        entries = read_scp(scp)
    except DataError:
        return
    assert len(entries) == len(data.removesuffix(b"\n").split(b"\n"))
    assert all(entry.pipe is None and entry.path is not None and entry.path.is_file() for entry in entries)
