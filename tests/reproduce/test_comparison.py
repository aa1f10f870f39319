"""Verdicts in words, as the records make them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from reproduce.synthetic import SPEAKERS, TABLES, WORDS, by_name, collapsed, diverged, plan, record, table_records

from ddnn.decoding.word_errors import MIN_SPEAKERS
from ddnn.reproduce.comparison import HypothesisResult, MetricResult, compare, degradations
from ddnn.reproduce.entries import find_entry, main_accuracy, metrics_of, table_entries
from ddnn.reproduce.runs import RunRecord, TestMetrics, WordErrors
from ddnn.reproduce.tables import Condition, Hypothesis, Table

GOOD, BAD = Condition(name="good", label="the good"), Condition(name="bad", label="the bad")
ASKED = Hypothesis(statement="good is better", expected_better=("good", "max"), expected_worse=("bad", "max"))
TOY = Table(name="toy", title="A toy", workers=("max",), conditions=(GOOD, BAD), hypotheses=(ASKED,))


def compared(*records: RunRecord, asked: Hypothesis = ASKED, **changes: object) -> HypothesisResult:
    return compare(plan(**changes), TOY, asked, by_name(records))


def pairs(gains: list[float], errors: list[int] | None = None) -> list[RunRecord]:
    """Runs of both on 16 workers: frame accuracy differs by these percentages, each utterance by these errors."""
    found = []
    for seed, gain in enumerate(gains, 1):
        for name, worse in (("good", 0), ("bad", 1)):
            made = tuple(3 + w // 2 + worse * (errors or [0])[i % len(errors or [0])] for i, w in enumerate(WORDS))
            words = WordErrors(wer=100.0 * sum(made) / sum(WORDS), words=WORDS, errors=made, speakers=SPEAKERS)
            value = 0.5 - worse * gain / 100.0
            found.append(record(name, 16, seed, value, wers={"test trigram": words}))
    return found


@pytest.mark.parametrize(
    ("gains", "errors", "verdict"),
    [
        ([1.0, 2.0, 0.5], [1, 0, 1], "confirmed (by test frame accuracy, test trigram WER)"),
        ([1.0, 2.0, 0.5], [0], "confirmed (by test frame accuracy)"),
        ([1.0, 2.0, -0.5], [2, 2, 2, 2, -1, -1, -1, -1], "expected direction, interval contains 0"),
        ([-1.0, 0.5, -1.0], [-2, -2, -2, -2, 1, 1, 1, 1], "opposite direction, interval contains 0"),
        ([-1.0, -2.0, -0.5], [-1], "contradicted (by test frame accuracy, test trigram WER)"),
        ([0.0, 0.0, 0.0], [0], "no difference"),
        ([1.0, 2.0, 0.5], [-1], "inconclusive (metrics contradict each other)"),
        ([1.0, 1.0], [1], "not tested (2 common seeds, expected 3 or more)"),
    ],
)
def test_verdicts(gains: list[float], errors: list[int], verdict: str) -> None:
    assert compared(*pairs(gains, errors)).text == verdict


def test_figures_of_a_contrast() -> None:
    found = compared(*pairs([1.0, 2.0, 0.6], [1]))
    cv, frames, words = found.metrics
    assert (cv.metric, frames.metric, words.metric) == (
        "CV frame accuracy",
        "test frame accuracy",
        "test trigram WER",
    )
    assert frames.better == pytest.approx(50.0) and frames.worse == pytest.approx(48.8)
    assert frames.difference == pytest.approx(1.2)
    assert frames.interval == pytest.approx((0.6, 2.0))
    assert words.difference == pytest.approx(100.0 * len(WORDS) / sum(WORDS))
    assert (frames.resampled, words.resampled, words.seeds) == ("seeds", "speakers", 3)


def test_frame_accuracies_are_compared_over_speakers_where_their_frames_are_known() -> None:
    """One seed in three disagrees, but every speaker agrees; of too few speakers the seeds decide."""

    def with_speakers(run: RunRecord, errors: tuple[int, ...]) -> RunRecord:
        frames = (100,) * len(errors)
        test = TestMetrics(loss=1.0, frame_accuracy=1.0 - sum(errors) / sum(frames), frames=frames, errors=errors)
        return run.model_copy(update={"tests": {"test": test}, "wers": {}})

    def verdict(speakers: int) -> MetricResult:
        runs = []
        for seed, gain in enumerate((20, 10, -1), 1):
            runs.append(with_speakers(record("good", 16, seed, 0.5), (30,) * speakers))
            runs.append(with_speakers(record("bad", 16, seed, 0.5), (30 + gain,) * speakers))
        return compared(*runs).metrics[1]

    many = verdict(MIN_SPEAKERS)
    assert (many.metric, many.resampled) == ("test frame accuracy", "speakers")
    assert many.difference == pytest.approx(29 / 3) and many.interval is not None
    assert many.interval == pytest.approx((-1.0, 20.0))  # all speakers are alike: what remains is the draw of the seeds
    few = verdict(MIN_SPEAKERS - 1)
    assert few.resampled == "seeds" and few.difference == pytest.approx(29 / 3)


def test_a_few_speakers_alone_do_not_confirm() -> None:
    """All seeds agree, by one speaker of five; the draw of the speakers decides."""
    runs = []
    for seed in (1, 2, 3):
        for name, errors in (("good", (30, 30, 30, 30, 30)), ("bad", (29, 29, 29, 29, 90))):
            test = TestMetrics(loss=1.0, frame_accuracy=1.0 - sum(errors) / 500, frames=(100,) * 5, errors=errors)
            runs.append(record(name, 16, seed, 0.5).model_copy(update={"tests": {"test": test}, "wers": {}}))
    result = compared(*runs).metrics[1]
    assert result.difference == pytest.approx(11.2) and result.verdict == "expected direction, interval contains 0"


def test_only_common_seeds_are_compared() -> None:
    odd = record("bad", 16, 9, 0.1)
    assert compared(*pairs([1.0, 2.0], [1]), odd).metrics[:3] == compared(*pairs([1.0, 2.0], [1])).metrics


def test_runs_of_one_seed_from_different_rbms_are_named() -> None:
    made = pairs([1.0, 2.0, 0.5, 0.5, 1.0])
    dbns = ["a", "a", "a", "b", "a", "", "", "", "c", "d"]  # of good and bad, seed by seed
    runs = [run.model_copy(update={"dbn": f"parameters {s}" if s else ""}) for run, s in zip(made, dbns, strict=True)]
    found = compared(*runs)
    assert found.differing_dbn_seeds == [2, 5], "who has none, or may have any, is not held against another"
    assert compared(*made).differing_dbn_seeds == []


def test_digests_of_files_do_not_tell_rbms_apart() -> None:
    """As in old records: the form of the file has changed, so equal RBMs may have two of them."""
    made = pairs([1.0, 2.0, 0.5])
    dbns = ["a", "b", "a", "a", "parameters a", "b"]
    found = compared(*(run.model_copy(update={"dbn": s}) for run, s in zip(made, dbns, strict=True)))
    assert found.differing_dbn_seeds == []


def test_a_cross_validation_set_that_says_the_opposite_is_named() -> None:
    made = pairs([1.0, 2.0, 0.5])
    swapped = [
        run.model_copy(update={"cv": run.cv.model_copy(update={"frame_accuracy": 1.0 - run.cv.frame_accuracy})})
        for run in made
        if run.cv is not None
    ]
    assert compared(*swapped).text == "confirmed (by test frame accuracy; not by CV frame accuracy)"


def test_what_was_not_tested_says_why() -> None:
    one = compared(*pairs([1.0], [1]))
    assert one.metrics[1].text == "not tested (1 common seed, expected 3 or more)"
    assert one.text == "not tested (1 common seed, expected 3 or more)"
    assert compared(record("good", 16, 1, 0.5)).text == "not tested (no runs of: the bad, 16 workers)"
    apart = compared(record("good", 16, 1, 0.5), record("bad", 16, 2, 0.4))
    assert apart.text == "not tested (0 common seeds, expected 3 or more)"
    same = compared(*pairs([1.0, 1.0]), aliases={"bad": "good"})
    assert same.text == "not tested (the same runs on this corpus)"
    assert compared().text == "not tested (no runs of: the good, 16 workers)"


@pytest.mark.parametrize("failing", [diverged, collapsed])
def test_a_failed_run_is_named_and_gives_no_figure(failing: Callable[[str, int, int], RunRecord]) -> None:
    sound = [record("good", 16, 3, 0.5), failing("bad", 16, 3)]
    too_few = compared(*pairs([-1.0, -1.0], [-1]), *sound)
    assert too_few.text == (
        "not tested (2 common seeds, expected 3 or more; 1 of 3 runs of the bad, 16 workers failed: seed 3)"
    )
    assert too_few.metrics[1].difference == pytest.approx(-1.0) and too_few.metrics[1].seeds == 2
    enough = [r for r in pairs([-1.0, -2.0, 9.0, -0.5], [-1]) if r.seed != 3]
    figures = compared(*enough, *sound)
    assert figures.text == (
        "contradicted (by test frame accuracy, test trigram WER; 1 of 4 runs of the bad, 16 workers failed: seed 3)"
    )
    assert figures.worse.values("test frame accuracy").keys() == {1, 2, 4}


def test_a_setting_that_did_not_train_is_compared_with_nothing() -> None:
    good = [record("good", 16, seed, 0.5) for seed in (1, 2, 3)]
    why = "CV frame accuracy 8.3 %, 11.0 % by always choosing the most frequent pdf"
    bad = [collapsed("bad", 16, seed) for seed in (1, 2, 3)]
    swapped = Hypothesis(statement="bad is better", expected_better=("bad", "max"), expected_worse=("good", "max"))
    for asked in (ASKED, swapped):
        found = compared(*good, *bad, asked=asked)
        assert found.text == (f"not comparable: the bad on 16 workers did not train (3 of 3 runs; seed 1: {why})")
        assert found.metrics == []
    both = compared(*(diverged("good", 16, seed) for seed in (1, 2)), *bad)
    assert both.text == (
        "not comparable: the good on 16 workers did not train (2 of 2 runs; seed 1: the training diverged); "
        f"the bad on 16 workers did not train (3 of 3 runs; seed 1: {why})"
    )


def test_what_was_tested_instead_is_named() -> None:
    corpus, table = plan(), TABLES["table6"]
    records = table_records(corpus, [table], {"sgd": 0.03, "sgd-half": 0.02})
    records |= by_name(collapsed("sgd", 16, seed) for seed in (1, 2, 3))
    one, many, half = (compare(corpus, table, asked, records) for asked in table.hypotheses)
    assert (one.verdict, half.verdict) == ("confirmed", "confirmed")
    instead = "tested instead: NG-SGD is better than SGD at half the learning rate, on many (confirmed)"
    assert many.verdict == "not comparable" and many.text.endswith(f"; {instead}")
    records |= by_name(collapsed("sgd-half", 16, seed) for seed in (1, 2, 3))
    assert "instead" not in compare(corpus, table, table.hypotheses[1], records).text, "neither trained"
    records |= by_name(collapsed("base", 16, seed) for seed in (1, 2, 3))
    assert "instead" not in compare(corpus, table, table.hypotheses[1], records).text


def test_other_machines_and_precisions_are_named() -> None:
    made = pairs([1.0, 2.0, 0.5])
    kinds = ["a CPU, 2 cores", "a CPU, 4 cores", "a GPU", "a CPU, 2 cores", "", ""]
    precisions = ["float32", "bf16", "float32", "", "", ""]
    runs = [
        run.model_copy(update={"machine": m, "precision": p}) for run, m, p in zip(made, kinds, precisions, strict=True)
    ]
    expected = ["on different kinds of machine: a CPU, a GPU", "in different precisions: bf16, float32"]
    assert compared(*runs).mixed == expected
    assert compared(*made).mixed == []


def test_words_without_utterances_are_tested_over_seeds() -> None:
    bare = [
        r.model_copy(update={"wers": {"SWB": WordErrors(wer=20.0 + (r.condition == "bad"))}}) for r in pairs([1, 1, 1])
    ]
    words = compared(*bare).metrics[-1]
    assert (words.resampled, words.difference, words.verdict) == ("seeds", pytest.approx(1.0), "confirmed")


@pytest.mark.parametrize(
    "words",
    [
        WordErrors(wer=1.0, words=WORDS, errors=WORDS),
        WordErrors(wer=1.0, words=WORDS, errors=WORDS, speakers=SPEAKERS[::-1]),
        WordErrors(wer=1.0, words=WORDS[1:], errors=WORDS[1:]),
        WordErrors(wer=1.0, words=WORDS, errors=WORDS[1:]),
        WordErrors(wer=1.0, words=(0,) * len(WORDS), errors=WORDS),
    ],
)
def test_words_that_do_not_fit_are_not_tested(words: WordErrors) -> None:
    odd = pairs([1.0, 1.0, 1.0], [1])
    odd[-1] = odd[-1].model_copy(update={"wers": {"test trigram": words}})
    found = compared(*odd)
    assert found.metrics[-1].verdict == "not tested"
    assert found.text == "confirmed (by test frame accuracy)"


def test_what_is_not_published_is_tested_alike() -> None:
    own = ASKED.model_copy(update={"published": False})
    assert compared(*pairs([1.0, 1.0, 1.0]), asked=own).text == "confirmed (by test frame accuracy)"


def test_shared_runs_and_rows_without_a_recipe() -> None:
    corpus = plan(aliases={"minibatch-256": "base"})
    records = table_records(corpus, [TABLES["table4"]])
    assert "minibatch-256-1-1" not in records
    assert len(find_entry(corpus, records, Condition(name="minibatch-256", label="256"), 16).runs) == 3
    rows = {cell.condition.name for cell in table_entries(corpus, TABLES["table1"], records)}
    assert rows == {"base"}
    assert "closing" in {
        cell.condition.name for cell in table_entries(corpus, TABLES["table1"], records, ["closing-16-1"])
    }


def test_losses_against_one_worker() -> None:
    corpus = plan()
    records = by_name(
        [record("base", 1, seed, 0.60) for seed in (1, 2, 3)]
        + [record("base", 16, seed, 0.60 - 0.001 * seed) for seed in (1, 2, 3)]
        + [record("other", 16, 1, 0.59), diverged("other", 16, 2)]
    )
    cells = [
        find_entry(corpus, records, Condition(name=name, label=name), size)
        for name, size in (("base", 1), ("base", 16), ("other", 16), ("absent", 16))
    ]
    found = degradations(corpus, cells, records)
    assert {loss.metric for _, loss in found} == {"test frame accuracy"}
    assert [(entry.condition.name, loss.seeds) for entry, loss in found] == [("base", 3), ("other", 1)]
    assert [loss.difference for _, loss in found] == pytest.approx([0.2, 1.0])
    assert found[0][1].interval is not None and found[1][1].interval is None
    assert degradations(corpus, cells, {}) == []


def test_measures_are_in_the_order_of_the_tests() -> None:
    found = metrics_of(plan(), [record("a", 1, 1, 0.5), diverged("a", 1, 2)])
    assert found == ["CV frame accuracy", "test frame accuracy", "test trigram WER", "test unigram WER"]
    assert (
        main_accuracy(found) == found[1] and main_accuracy(found[:1]) == found[0] and main_accuracy(found[2:]) is None
    )


def test_the_speakers_decide_what_is_resampled() -> None:
    """An interval over speakers where they are known, of enough of them; else over utterances."""
    made = pairs([1.0, 1.0, 1.0], [1])

    def with_speakers(speakers: tuple[int, ...]) -> HypothesisResult:
        wers = [{"test trigram": r.wers["test trigram"].model_copy(update={"speakers": speakers})} for r in made]
        return compared(*(r.model_copy(update={"wers": w}) for r, w in zip(made, wers, strict=True)))

    assert with_speakers(SPEAKERS).metrics[-1].resampled == "speakers"
    assert with_speakers(()).metrics[-1].resampled == "utterances"
    few = with_speakers(tuple(n % 4 for n in range(len(WORDS)))).metrics[-1]
    assert few.text == "not tested (4 speakers, expected 5 or more)" and few.resampled == ""
