"""What a dataset takes from a data dir, and what it refuses; what is held out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from corpora import labelled_utterances, load_all, write_data_dir, write_pdfs

from ddnn.data import pipeline
from ddnn.data.dataset import AcousticDataset
from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.index import hold_out_fraction, hold_out_speakers
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
    labels[names[0]] = labels[names[0]][:-5]
    labels[names[1]] = np.append(labels[names[1]], [0, 1, 2]).astype(np.int32)
    labels[names[2]] = labels[names[2]][:-6]
    del labels[names[3]]
    corpus = load(tmp_path, features, labels, max_skipped_fraction=0.2)
    longer = corpus.utterances.index(names[1])
    np.testing.assert_array_equal(corpus.labels[corpus.rows_of([longer])].numpy(), labels[names[1]][:40])
    assert corpus.counts == {"used": 10, "no_alignment": 1, "length_differs": 1, "trimmed": 2, "empty": 0}
    assert corpus.utterances == tuple(n for n in names if n not in (names[2], names[3]))
    assert list(corpus.num_frames[:2]) == [35, 40]


def test_too_many_missing_alignments_are_an_error(tmp_path: Path) -> None:
    features, labels = labelled_utterances()
    for name in sorted(features)[:2]:
        del labels[name]
    with pytest.raises(DataError, match=r"2 of 12 utterances cannot be used \(2 without an alignment") as caught:
        load(tmp_path, features, labels)
    assert "data.max_skipped_fraction (now 0.05)" in str(caught.value)
    assert "pdfs.txt" in str(caught.value)


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
    features, labels = labelled_utterances()
    name = min(features)
    labels[name] = labels[name][:-3]
    corpus = load_all(
        write_data_dir(tmp_path / "train", features),
        read_alignments(write_pdfs(tmp_path / "pdfs.txt", labels)),
        features=FeatureConfig(deltas=1),
    )
    found = corpus.features[corpus.rows_of([corpus.utterances.index(name)])].numpy()
    np.testing.assert_array_equal(found, add_deltas(features[name], 1)[:-3])
    assert not np.array_equal(found, add_deltas(features[name][:-3], 1))


def test_too_little_memory_is_said_before_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "available_memory", lambda: 1000)
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
    train, cv = hold_out_speakers(corpus, listed)
    assert sorted(train + cv) == list(range(12))
    assert {corpus.speakers[u] for u in cv} == {"spk0", "spk2"}
    assert {corpus.speakers[u] for u in train} == {"spk1", "spk3"}


def test_speakers_file_must_name_speakers_of_the_corpus(tmp_path: Path) -> None:
    corpus = load(tmp_path, *labelled_utterances())
    listed = tmp_path / "cv"
    listed.write_text("spk2\nnobody\n")
    with pytest.raises(DataError, match="1 of 2 listed speakers are not in the data: nobody"):
        hold_out_speakers(corpus, listed)
    listed.write_text("spk0\nspk1\nspk2\nspk3\n")
    with pytest.raises(DataError, match="no utterance remains for training"):
        hold_out_speakers(corpus, listed)
    with pytest.raises(DataError, match="cannot read the list"):
        hold_out_speakers(corpus, tmp_path / "missing")


def test_fraction_holds_out_whole_speakers_by_seed(tmp_path: Path) -> None:
    corpus = load(tmp_path, *labelled_utterances(count=40))
    train, cv = hold_out_fraction(corpus, 0.3, seed=7)
    assert not {corpus.speakers[u] for u in cv} & {corpus.speakers[u] for u in train}
    held_out = corpus.num_frames[cv].sum() / corpus.num_frames.sum()
    assert 0.3 <= held_out <= 0.55
    assert hold_out_fraction(corpus, 0.3, seed=7) == (train, cv)
    assert any(hold_out_fraction(corpus, 0.3, seed=s) != (train, cv) for s in range(8, 12))


def test_the_fraction_is_of_frames_not_of_utterances() -> None:
    """Speakers are held out until they have enough frames: never one too few, and never one more than needed."""
    frames = np.array([10, 10, 10, 970, 500, 500], dtype=np.int64)
    data = SimpleNamespace(speakers=("a", "a", "a", "b", "c", "d"), num_frames=frames)
    chosen = set()
    for seed in range(30):
        train, cv = hold_out_fraction(data, 0.25, seed)
        assert frames[cv].sum() >= 0.25 * 2000 and sorted(train + cv) == list(range(6))
        held_out = {data.speakers[u] for u in cv}
        assert any(sum(frames[u] for u in cv if data.speakers[u] != one) < 0.25 * 2000 for one in held_out)
        chosen.add(frozenset(held_out))
    assert {"a"} not in chosen, "half of the utterances, but 1.5 % of the frames"
    assert frozenset("c") in chosen


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
    with pytest.raises(DataError, match="no utt2spk"):
        hold_out_fraction(corpus, 0.1, seed=1)
