"""What a dataset takes from a data dir, and what it refuses; what is held out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from corpora import labelled_utterances, load_all, unlike_utterances, write_data_dir, write_pdfs
from hypothesis import given, settings
from hypothesis import strategies as st

from ddnn.data import feature_reader
from ddnn.data.dataset import AcousticDataset
from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.index import hold_out_fraction, hold_out_listed
from ddnn.kaldi.alignments import read_alignments
from ddnn.kaldi.data_dir import accumulate_cmvn_stats, add_deltas, apply_cmvn
from ddnn.util.errors import DataError


def load(
    tmp_path: Path, utterances: dict[str, np.ndarray], labels: dict[str, np.ndarray], **options: object
) -> AcousticDataset:
    data = write_data_dir(tmp_path / "train größe 1", utterances)
    alignments = read_alignments(write_pdfs(tmp_path / "pdfs.txt", labels))
    return load_all(data, alignments, **options)  # type: ignore[arg-type]


def test_frames_lie_once_with_repeated_edges(tmp_path: Path) -> None:
    features, labels = labelled_utterances()
    corpus = load(tmp_path, features, labels)
    assert corpus.utterances == tuple(sorted(features))
    for u, name in enumerate(corpus.utterances):
        first, frames = int(corpus.offsets[u]), int(corpus.num_frames[u])
        np.testing.assert_array_equal(corpus.features[first : first + frames].numpy(), features[name])
        np.testing.assert_array_equal(corpus.labels[first : first + frames].numpy(), labels[name])
        for edge in (first - 2, first - 1):
            np.testing.assert_array_equal(corpus.features[edge].numpy(), features[name][0])
            assert corpus.labels[edge] == -1
        for edge in (first + frames, first + frames + 1):
            np.testing.assert_array_equal(corpus.features[edge].numpy(), features[name][-1])
            assert corpus.labels[edge] == -1
    assert len(corpus.features) == sum(len(m) + 4 for m in features.values())


def test_half_precision_store_has_two_bytes_a_value(tmp_path: Path) -> None:
    features, labels = labelled_utterances()
    corpus = load(tmp_path, features, labels, features=FeatureConfig(dtype="float16"))
    assert corpus.features.element_size() == 2
    name = corpus.utterances[0]
    found = corpus.features[corpus.rows_of([0])].numpy()
    np.testing.assert_array_equal(found, features[name].astype(np.float16))


def test_small_differences_are_trimmed_and_larger_ones_skipped(tmp_path: Path) -> None:
    features, labels = labelled_utterances()
    names = sorted(features)
    labels[names[0]] = labels[names[0]][:-4]
    labels[names[1]] = np.append(labels[names[1]], [0, 1, 2]).astype(np.int32)
    labels[names[2]] = labels[names[2]][:-5]
    del labels[names[3]]
    corpus = load(tmp_path, features, labels, max_skipped_fraction=0.2)
    longer = corpus.utterances.index(names[1])
    np.testing.assert_array_equal(corpus.labels[corpus.rows_of([longer])].numpy(), labels[names[1]][:40])
    assert corpus.counts == {"used": 10, "no_alignment": 1, "length_differs": 1, "trimmed": 2, "empty": 0}
    assert corpus.utterances == tuple(n for n in names if n not in (names[2], names[3]))
    assert list(corpus.num_frames[:2]) == [36, 40]


@pytest.mark.parametrize("difference", [-6, -5, -4, -3, 0, 3, 4, 5, 6])
def test_lengths_may_differ_by_less_than_kaldis_tolerance(tmp_path: Path, difference: int) -> None:
    """Kaldi's nnet-train-frmshuff takes an utterance if max - min < 5, and cuts both to min at their end; the feature
    transform comes after it, so that a splice repeats the last frame that is left."""
    features, labels = unlike_utterances()
    shorter = labels if difference < 0 else features
    for name in list(features)[1::3]:
        frames = min(len(features[name]) - abs(difference), 60)
        features[name], labels[name] = features[name][: frames + 6], labels[name][: frames + 6]
        shorter[name], longer = shorter[name][:frames], labels if shorter is features else features
        longer[name] = longer[name][: frames + abs(difference)]
    corpus = load(tmp_path, features, labels, max_skipped_fraction=0.5)
    taken = [name for name in sorted(features) if abs(len(features[name]) - len(labels[name])) < 5]
    assert corpus.utterances == tuple(taken) and len(taken) == (20 if abs(difference) >= 5 else 30)
    assert corpus.counts["trimmed"] == (10 if abs(difference) in (3, 4) else 0)
    assert corpus.counts["length_differs"] == 30 - len(taken)
    for u, name in enumerate(taken):
        rows, frames = corpus.rows_of([u]), min(len(features[name]), len(labels[name]))
        np.testing.assert_array_equal(corpus.labels[rows], labels[name][:frames])
        np.testing.assert_array_equal(corpus.features[rows], features[name][:frames])
        np.testing.assert_array_equal(corpus.features[rows[-1] + 1], features[name][frames - 1])


@pytest.mark.parametrize(
    ("difference", "trimmed", "warning"),
    [
        (3, 30, "30 of 30 utterances are 3 frames longer than the features; the first is spk0-utt000 with 5 frames of"),
        (-1, 16, "16 of 30 utterances are 1 frame shorter than the features; the first is spk0-utt000 with 5 frames of"),
        (3, 15, None),
        (0, 30, None),
    ],
)  # fmt: skip
def test_a_difference_that_most_utterances_have_is_a_warning(
    tmp_path: Path, difference: int, trimmed: int, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    features, labels = unlike_utterances()
    for name in sorted(labels)[:trimmed]:
        labels[name] = np.resize(labels[name], len(labels[name]) + difference)
    for name in sorted(labels)[trimmed:]:
        labels[name] = np.resize(labels[name], len(labels[name]) + 2 * (int(name[-1]) % 2))
    load(tmp_path, features, labels)
    assert ("This usually means a different frame shift" in caplog.text) == (warning is not None)
    assert warning is None or warning in caplog.text


def test_a_difference_of_most_utterances_is_named_where_all_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    features, labels = unlike_utterances()
    with pytest.raises(DataError, match="30 of 30 utterances cannot be used"):
        load(tmp_path, features, {name: np.resize(pdfs, len(pdfs) + 7) for name, pdfs in labels.items()})
    assert "30 of 30 utterances are 7 frames longer than the features" in caplog.text


def test_too_many_missing_alignments_are_an_error(tmp_path: Path) -> None:
    features, labels = labelled_utterances()
    for name in sorted(features)[:2]:
        del labels[name]
    with pytest.raises(DataError, match=r"2 of 12 utterances cannot be used \(2 without an alignment") as caught:
        load(tmp_path, features, labels)
    assert "data.max_skipped_fraction (now 0.05)" in str(caught.value)
    assert f"pdfs.txt, as of {sorted(labels)[0]}" in str(caught.value)


def test_ids_in_another_case_are_named(tmp_path: Path) -> None:
    features, labels = labelled_utterances()
    with pytest.raises(DataError, match="12 without an alignment") as caught:
        load(tmp_path, features, {name.upper(): pdfs for name, pdfs in labels.items()})
    assert "pdfs.txt and have SPK0-UTT000: upper and lower case differ" in str(caught.value)


def test_no_utterance_left_is_an_error_at_any_share(tmp_path: Path) -> None:
    features, labels = labelled_utterances(count=1)
    with pytest.raises(DataError, match="1 of 1 utterances cannot be used"):
        load(tmp_path, features, {"other": labels["spk0-utt000"]}, max_skipped_fraction=0.999)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_features_that_are_not_finite_name_utterance_and_place(tmp_path: Path, value: float) -> None:
    features, labels = labelled_utterances()
    name = sorted(features)[3]
    features[name][7, 2] = value
    with pytest.raises(DataError) as caught:
        load(tmp_path, features, labels)
    message = str(caught.value)
    assert name in message and "7" in message and "2" in message and "feats.ark" in message


def test_a_frame_that_is_trimmed_has_to_be_finite_too(tmp_path: Path) -> None:
    features, labels = labelled_utterances()
    name = sorted(features)[3]
    labels[name] = labels[name][:-2]
    features[name][-1, 2] = np.inf
    with pytest.raises(DataError, match=f"{name}: inf in row {len(features[name]) - 1}, column 2"):
        load(tmp_path, features, labels)


def test_a_chunk_is_read_once_unless_it_has_to_name_what_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, labels = labelled_utterances()
    read: list[str] = []
    real = feature_reader._read
    monkeypatch.setattr(
        feature_reader, "_read", lambda u, *of, **check: (read.append(u.entry.key), real(u, *of, **check))
    )
    load(tmp_path, features, labels)
    assert read == sorted(features)
    features[name := sorted(features)[3]][7, 2] = np.nan
    read.clear()
    with pytest.raises(DataError, match=f"{name}: nan in row 7, column 2"):
        load(tmp_path, features, labels)
    assert read == [*sorted(features), *sorted(features)[:4]]


def test_different_dims_name_the_utterance(tmp_path: Path) -> None:
    features, labels = labelled_utterances()
    name = sorted(features)[5]
    features[name] = features[name][:, :3].copy()
    with pytest.raises(DataError, match=f"{name}: 3 dims found, 4 expected"):
        load(tmp_path, features, labels)


def test_utterances_without_frames_are_skipped_and_counted(tmp_path: Path) -> None:
    features, labels = labelled_utterances(count=30)
    name = sorted(features)[4]
    features[name], labels[name] = np.zeros((0, 0), np.float32), np.zeros(0, np.int32)
    corpus = load(tmp_path, features, labels)
    assert name not in corpus.utterances
    assert corpus.counts["empty"] == 1


def test_cmvn_then_deltas(tmp_path: Path) -> None:
    features, labels = labelled_utterances()
    corpus = load(tmp_path, features, labels, features=FeatureConfig("mean-variance", 2))
    assert corpus.dim == 12
    speaker = "spk1"
    own = [m for n, m in features.items() if n.startswith(speaker)]
    stats = sum(accumulate_cmvn_stats(m) for m in own)
    name = f"{speaker}-utt001"
    expected = add_deltas(apply_cmvn(features[name], stats, variance=True), 2)
    found = corpus.features[corpus.rows_of([corpus.utterances.index(name)])].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_deltas_are_taken_before_trimming(tmp_path: Path) -> None:
    """Those of the last frames see what is trimmed."""
    features, labels = unlike_utterances()
    kept = {name: len(matrix) - u % 5 for u, (name, matrix) in enumerate(features.items())}
    shorter = {name: pdfs[: kept[name]] for name, pdfs in labels.items()}
    corpus = load(tmp_path, features, shorter, features=FeatureConfig(deltas=1))
    for u, name in enumerate(corpus.utterances):
        found, frames = corpus.features[corpus.rows_of([u])].numpy(), kept[name]
        np.testing.assert_array_equal(found, add_deltas(features[name], 1)[:frames])
        cut = frames < len(features[name])
        assert np.array_equal(found, add_deltas(features[name][:frames], 1)) != cut


def test_too_little_memory_is_said_before_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddnn.training.memory.available_memory", lambda: 1000)
    with pytest.raises(
        DataError, match=r"needs about 1 MiB of memory \(frames in float32 1 MiB\), and 1 MiB are available"
    ) as caught:
        load(tmp_path, *labelled_utterances())
    assert "data.feature_dtype: float16" in str(caught.value)


def test_300_hours_stay_under_24_gigabytes() -> None:
    frames, utterances, context, dim = 300 * 3600 * 100, 190_000, 5, 40
    rows = frames + 2 * context * utterances
    store_and_labels = rows * (dim * 4 + 4)
    order = frames * 8 * 2  # frame rows and the permutation of an epoch
    assert store_and_labels + order < 24e9


def test_speakers_file_holds_out_whole_speakers(tmp_path: Path) -> None:
    corpus = load(tmp_path, *labelled_utterances())
    listed = tmp_path / "cv speakers"
    listed.write_text("spk2\nspk0\n")
    train, cv = hold_out_listed(corpus, listed, "speaker")
    assert sorted(train + cv) == list(range(12))
    assert {corpus.speakers[u] for u in cv} == {"spk0", "spk2"}
    assert {corpus.speakers[u] for u in train} == {"spk1", "spk3"}


def test_speakers_file_must_name_speakers_of_the_corpus(tmp_path: Path) -> None:
    corpus = load(tmp_path, *labelled_utterances())
    listed = tmp_path / "cv"
    listed.write_text("spk2\nnobody\n")
    with pytest.raises(DataError, match="1 of 2 listed speakers are not in the data: nobody"):
        hold_out_listed(corpus, listed, "speaker")
    listed.write_text("spk0\nspk1\nspk2\nspk3\n")
    with pytest.raises(DataError, match="no utterance remains for training"):
        hold_out_listed(corpus, listed, "speaker")
    with pytest.raises(DataError, match="cannot read the list"):
        hold_out_listed(corpus, tmp_path / "missing", "speaker")


def test_fraction_holds_out_whole_speakers_by_seed(tmp_path: Path) -> None:
    corpus = load(tmp_path, *unlike_utterances(count=45))
    train, cv = hold_out_fraction(corpus, 0.3, seed=7)
    assert sorted(train + cv) == list(range(45))
    assert not {corpus.speakers[u] for u in cv} & {corpus.speakers[u] for u in train}
    assert not {corpus.utterances[u] for u in cv} & {corpus.utterances[u] for u in train}
    assert hold_out_fraction(corpus, 0.3, seed=7) == (train, cv)
    alike = load(tmp_path, *labelled_utterances(count=40))
    assert len({tuple(hold_out_fraction(alike, 0.3, seed)[1]) for seed in range(8)}) > 1


def speakers_of(sizes: list[int]) -> SimpleNamespace:
    """A speaker for each number, with so many frames in utterances of unlike length."""
    parts = [(f"{n:03d}", part) for n, size in enumerate(sizes) for part in (size // 3, size - size // 3) if part]
    return SimpleNamespace(speakers=tuple(name for name, _ in parts), num_frames=np.array([part for _, part in parts]))


def held_out(sizes: list[int], fraction: float, seed: int = 1) -> tuple[set[int], float]:
    """Which speakers, by their place, and their fraction of the frames."""
    data = speakers_of(sizes)
    train, cv = hold_out_fraction(data, fraction, seed)
    chosen = {int(data.speakers[u]) for u in cv}
    assert sorted(train + cv) == list(range(len(data.speakers)))
    assert chosen.isdisjoint(int(data.speakers[u]) for u in train)
    return chosen, sum(sizes[n] for n in chosen) / sum(sizes)


@pytest.mark.parametrize("seed", range(5))
def test_the_fraction_is_of_frames_not_of_utterances(seed: int) -> None:
    """As close as whole speakers come to it: from many in any order, from a few the ones that fit."""
    assert held_out([10, 10, 10, 970, 500, 500], 0.25, seed)[0] in ({4}, {5})
    assert held_out([400, 100, 300, 200], 0.1, seed) == ({1}, 0.1)
    assert held_out([400, 100, 300, 200], 0.7, seed)[1] == 0.7
    unlike = [int(n) for n in np.random.default_rng(seed).integers(5, 2000, 200)]
    for fraction in (0.01, 0.05, 0.1, 0.3, 0.9):
        assert held_out(unlike, fraction, seed)[1] == pytest.approx(fraction, rel=0.01)


def test_at_least_one_speaker_is_held_out_and_one_is_left() -> None:
    assert held_out([500, 400, 600], 0.001)[0] == {1}, "the smallest"
    assert held_out([500, 400, 600], 0.999)[0] == {0, 2}
    assert held_out([1, 1], 0.999)[1] == 0.5


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=2, max_size=40), st.floats(0.01, 0.99), st.integers(0, 100))
def test_no_other_speaker_would_bring_the_fraction_closer(sizes: list[int], fraction: float, seed: int) -> None:
    chosen, found = held_out(sizes, fraction, seed)
    assert 1 <= len(chosen) < len(sizes)
    if len(chosen) < len(sizes) - 1:
        more = [found + size / sum(sizes) for n, size in enumerate(sizes) if n not in chosen]
        assert min(abs(one - fraction) for one in more) >= abs(found - fraction) - 1e-9


def test_one_speaker_cannot_be_split(tmp_path: Path) -> None:
    features, labels = labelled_utterances(count=1)
    corpus = load(tmp_path, features, labels)
    with pytest.raises(DataError, match="no utterance remains for training"):
        hold_out_fraction(corpus, 0.1, seed=1)


def test_speakers_are_needed_to_hold_some_out(tmp_path: Path) -> None:
    features, labels = labelled_utterances()
    data = write_data_dir(tmp_path / "data", features)
    (data / "utt2spk").unlink()
    corpus = load_all(data, read_alignments(write_pdfs(tmp_path / "p", labels)))
    with pytest.raises(DataError, match="no utt2spk") as caught:
        hold_out_fraction(corpus, 0.1, seed=1)
    assert "data.cv.by: utterance" in str(caught.value)
    (tmp_path / "speakers").write_text("spk0\n")
    with pytest.raises(DataError, match=r"in place of data\.cv\.speakers") as caught:
        hold_out_listed(corpus, tmp_path / "speakers", "speaker")
    assert "data.cv.by" not in str(caught.value), "which is for a fraction"
