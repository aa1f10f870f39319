"""recipes/swbd/sclite.py: what sclite's summaries are read as; damaged ones are refused."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddnn.report.runs import read_results

SPEC = importlib.util.spec_from_file_location("sclite", Path(__file__).parents[2] / "recipes" / "swbd" / "sclite.py")
assert SPEC is not None and SPEC.loader is not None
sclite = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sclite)
best_scores, read_summary = sclite.best_scores, sclite.read_summary

SYS = """


                     SYSTEM SUMMARY PERCENTAGES by SPEAKER

       ,----------------------------------------------------------------.
       |                    eval2000.ctm.swbd.filt                      |
       |----------------------------------------------------------------|
       | SPKR   | # Snt # Wrd | Corr    Sub    Del    Ins    Err  S.Err |
       |--------+-------------+-----------------------------------------|
       | sw_4390|   30   1000 |100.0    0.0    0.0    0.0    0.0    0.0 |
       |================================================================|
       | Sum/Avg| 1831  21395 | 87.0    8.9    4.2    1.6   {err}   52.3 |
       |================================================================|
       |  Mean  | 45.8  534.9 | 86.9    8.9    4.2    1.6   99.0   52.5 |
       |  S.D.  | 13.7  199.7 |  4.6    3.4    1.7    0.9    5.0   10.3 |
       | Median | 45.0  526.5 | 87.9    8.4    3.9    1.4   13.9   53.1 |
       `----------------------------------------------------------------'
"""
RAW = """
        | SPKR | # Snt # Wrd | Corr    Sub    Del    Ins    Err  S.Err |
        |------+-------------+-----------------------------------------|
        | Sum  | 1831  21395 |18613   1904    898    342    {err}    957 |
        |==============================================================|
        | Mean |  1.0   12.0 |  4.0    8.0    0.0    0.0    8.0    1.0 |
"""


def put(decode: Path, folder: str, name: str, text: str) -> Path:
    path = decode / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_best_weight_of_each_subset(tmp_path: Path) -> None:
    decode = tmp_path / "my décode #1"
    for folder, whole, swbd, callhm in (
        ("score_9_0.0", 20.9, 15.0, 26.8),
        ("score_12_0.5", 20.8, 14.6, 27.0),
        ("score_12_0.0", 20.8, 14.6, 27.1),
        ("score_14_0.0", 21.0, 14.6, 27.3),
    ):
        for subset, wer in (("", whole), (".swbd", swbd), (".callhm", callhm)):
            put(decode, folder, f"eval2000.ctm{subset}.filt.sys", SYS.format(err=wer))
    put(decode, "score_12_0.0", "eval2000.ctm.swbd.filt.dtl", "")
    put(decode, "scoring", "log", "")
    put(decode, "score_12_0.0.bak", "eval2000.ctm.filt.sys", SYS.format(err=1.0))
    assert best_scores(decode) == {"eval2000": 20.8, "SWB": 14.6, "CH": 26.8}


def test_rates_become_results_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decode = tmp_path / "decode-eval2000"
    put(decode, "score_9_0.0", "eval2000.ctm.swbd.filt.sys", SYS.format(err=14.6))
    put(decode, "score_9_0.0", "eval2000.ctm.filt.sys", SYS.format(err=20.8))
    (tmp_path / "empty").mkdir()
    assert sclite.main([str(decode), str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == f"{decode}: SWB 14.60 %, eval2000 20.80 %\n{tmp_path}/empty: not scored\n"
    assert read_results(tmp_path)[0] == {
        "decode-eval2000/SWB: WER (%)": 14.6, "decode-eval2000/eval2000: WER (%)": 20.8,
    }  # fmt: skip
    put(decode, "score_9_0.0", "rt03.ctm.filt.sys", SYS.format(err=20.8))
    assert sclite.main([str(decode)]) == 2 and "two data dirs" in capsys.readouterr().err


def test_s5b_has_no_penalty_and_another_test_set_its_own_name(tmp_path: Path) -> None:
    put(tmp_path, "score_15", "SWB01.ctm.filt.sys", SYS.format(err=16.1))
    assert best_scores(tmp_path) == {"SWB01": 16.1}


def test_counts_are_preferred_to_a_rounded_percentage(tmp_path: Path) -> None:
    put(tmp_path, "score_10", "eval2000.ctm.filt.sys", SYS.format(err=14.6))
    put(tmp_path, "score_10", "eval2000.ctm.filt.raw", RAW.format(err=3124))
    assert best_scores(tmp_path) == {"eval2000": pytest.approx(100 * 3124 / 21395)}


def test_confidences_add_a_column_and_errors_may_be_more_than_words(tmp_path: Path) -> None:
    line = "| Sum/Avg|    1     12 | 33.3   66.7    0.0   80.0  146.7  100.0 | -0.123 |\n"
    assert read_summary(put(tmp_path, "score_1", "a.ctm.filt.sys", line)) == 146.7


def test_nothing_where_nothing_was_scored(tmp_path: Path) -> None:
    assert best_scores(tmp_path / "none") == {}
    (tmp_path / "score_10").mkdir()
    (tmp_path / "score_11").write_text("no folder")
    assert best_scores(tmp_path) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "0 lines of totals"),
        (SYS.format(err=14.6) * 2, "2 lines of totals"),
        (SYS.format(err="nan"), "0 lines of totals"),
        (SYS.format(err="1e9"), "0 lines of totals"),
        (SYS.format(err="-14.6"), "0 lines of totals"),
        (SYS.format(err="14.6 1.0"), "0 lines of totals"),
        (SYS.format(err="１4.6"), "0 lines of totals"),
        ("| Sum/Avg|", "0 lines of totals"),
        ("| Sum | 0 0 | 0 0 0 0 0 0 |", "no words"),
        ("x" * (sclite.MAX_BYTES + 1), "at most"),
    ],
)
def test_damaged_summaries_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = put(tmp_path, "score_10", "eval2000.ctm.filt.sys", text)
    with pytest.raises(ValueError, match=said) as caught:
        best_scores(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["rt03", "eval2000_hires"])
def test_subsets_of_others_are_not_the_paper_s(tmp_path: Path, name: str) -> None:
    for subset, wer in (("", 20.5), (".swbd", 23.4), (".fsh", 17.4)):
        put(tmp_path, "score_10", f"{name}.ctm{subset}.filt.sys", SYS.format(err=wer))
    assert best_scores(tmp_path) == {name: 20.5, f"{name} swbd": 23.4, f"{name} fsh": 17.4}


@pytest.mark.parametrize("name", ["eval2000_hires", "rt03", "SWB"])
@pytest.mark.parametrize("folder", ["score_10", "score_11"])
def test_two_data_dirs_in_one_directory_are_refused(tmp_path: Path, name: str, folder: str) -> None:
    put(tmp_path, "score_10", "eval2000.ctm.swbd.filt.sys", SYS.format(err=14.6))
    put(tmp_path, folder, f"{name}.ctm.filt.sys", SYS.format(err=23.4))
    with pytest.raises(ValueError, match="two data dirs") as caught:
        best_scores(tmp_path)
    assert "eval2000" in str(caught.value) and name in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "score_10").mkdir()
    os.mkfifo(tmp_path / "score_10" / "eval2000.ctm.filt.sys")
    with pytest.raises(ValueError, match="not a regular file"):
        best_scores(tmp_path)


TABLE = st.text("| Sum/Avg0123456789.-\n\0é", max_size=200)


@settings(max_examples=200, deadline=None)
@given(content=st.one_of(st.binary(max_size=300), TABLE.map(str.encode), TABLE.map(lambda t: f"| Sum{t}".encode())))
def test_any_bytes_are_a_rate_or_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.ctm.filt.sys"
    path.write_bytes(content)
    try:
        assert 0.0 <= read_summary(path) <= 1e11
    except ValueError as error:
        assert str(path) in str(error)
