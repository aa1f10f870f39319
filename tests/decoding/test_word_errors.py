"""Intervals of word error rates by speakers, and the comparison of two systems."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from jobs import RunCli, assert_refused

from ddnn.decoding.word_errors import compare_hypotheses, units_drawn, wer_interval

pytest.importorskip("kaldialign", reason="the package kaldialign is not installed")


@pytest.fixture
def test_set(tmp_path: Path) -> Path:
    """Twenty speakers of five utterances of four words. `same` says what was said. `bad` has a word wrong in every
    utterance; `one` has all words wrong of the first speaker, and none of the others."""
    said, names = "a b c d", [f"s{speaker:02}-u{n}" for speaker in range(20) for n in range(5)]
    systems = {"text": said, "same": said, "bad": "a b c x", "one": ""}
    for file, words in systems.items():
        lines = [f"{name} {said if file == 'one' and not name.startswith('s00') else words}" for name in names]
        (tmp_path / file).write_text("\n".join(lines) + "\n")
    (tmp_path / "utt2spk").write_text("".join(f"{name} {name[:3]}\n" for name in names))
    return tmp_path


def test_a_difference_in_every_utterance_is_significant(test_set: Path, run_cli: RunCli) -> None:
    found = compare_hypotheses(test_set / "text", (test_set / "bad", test_set / "same"))
    assert (found.wers, found.drawn, found.units, found.words) == ((25.0, 0.0), "speakers", 20, 400)
    assert (found.estimate.difference, found.estimate.low, found.estimate.high) == (25.0, 25.0, 25.0)
    assert found.estimate.prob_improvement == 1.0
    shown = run_cli("compare-wer", test_set / "text", test_set / "bad", test_set / "same")
    assert shown.exit_code == 0
    better, worse = test_set / "same", test_set / "bad"
    assert shown.stdout.splitlines()[-1] == f"significant: {better} is better than {worse}"
    shown = run_cli("compare-wer", test_set / "text", test_set / "same", test_set / "bad", "--json")
    assert (json.loads(shown.stdout)["significant"], json.loads(shown.stdout)["wers"]) == (True, [0.0, 25.0])
    shown = run_cli("compare-wer", test_set / "text", test_set / "same", test_set / "bad")
    assert shown.stdout.splitlines()[-1] == f"significant: {better} is better than {worse}"


def test_one_speaker_makes_no_difference_significant(test_set: Path) -> None:
    """All errors are of one speaker in twenty: by utterances they seem significant, by speakers they are not."""
    found = compare_hypotheses(test_set / "text", (test_set / "one", test_set / "same"))
    assert found.wers == (5.0, 0.0) and found.estimate.low == 0.0 and not found.estimate.significant
    assert found.as_text().splitlines()[-1] == "not significant: the interval contains 0"
    (test_set / "utt2spk").unlink()
    found = compare_hypotheses(test_set / "text", (test_set / "one", test_set / "same"))
    assert (found.drawn, found.units) == ("utterances", 100) and found.estimate.significant


def test_a_folder_of_score_and_other_speakers(test_set: Path) -> None:
    (test_set / "scored").mkdir()
    (test_set / "scored" / "text").write_text((test_set / "bad").read_text())
    few = test_set / "few"
    few.write_text("".join(f"{line.split()[0]} one\n" for line in (test_set / "utt2spk").read_text().splitlines()))
    texts = test_set / "scored", test_set / "bad"
    found = compare_hypotheses(test_set / "text", texts, few)
    assert (found.wers, found.drawn, found.estimate.difference) == ((25.0, 25.0), "utterances", 0.0)


def test_the_interval_of_a_system_draws_whole_speakers(test_set: Path) -> None:
    """Of twenty speakers one has all the errors, five of a hundred words each: how often it is drawn is binomial."""
    errors, words = [4] * 5 + [0] * 95, [4] * 100
    low, high = wer_interval(errors, words, [n // 5 for n in range(100)])
    assert (low, high) == (0.0, 15.0), "0 to 3 times among 20 draws"
    drawn = np.random.default_rng(1).binomial(20, 1 / 20, 100_000) * 5.0
    assert tuple(np.quantile(drawn, (0.025, 0.975), method="inverted_cdf")) == (low, high)


def test_what_is_wrong_with_utt2spk_is_a_warning(test_set: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert units_drawn(test_set / "gone", ["u1", "u2"])[1] == "utterances" and not caplog.records
    assert units_drawn(test_set / "utt2spk", ["s00-u0", "u2"])[1] == "utterances"
    assert "utterance u2 has no speaker; the interval is over utterances" in caplog.text


def test_other_utterances_are_refused(test_set: Path, run_cli: RunCli) -> None:
    (test_set / "part").write_text("s00-u0 a\nother b\n")
    words = ("compare-wer", test_set / "text", test_set / "same")
    assert_refused(run_cli(*words, test_set / "part"), "99 utterances of the reference missing, 1 not in it, as s00-u1")
    assert_refused(run_cli(*words, test_set / "gone"), "gone")
    (test_set / "part").write_text("s00-u0 a\n")
    assert_refused(run_cli(*words, test_set / "part"), "99 utterances of the reference missing, 0 not in it, as s00-u1")
    assert_refused(run_cli(*words, test_set / "bad", "--utt2spk", test_set / "gone"), "no such file", "gone")
    (test_set / "text").write_text("u1\n")
    assert_refused(run_cli(*words, test_set / "bad"), "the reference has no words")
