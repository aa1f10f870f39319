"""The one door to data: what is held out, shards, identity and normalization; a training from a cache file ends in the
same bits as one from the archives."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import labelled_utterances, unlike_utterances, write_ali_dir, write_data_dir, write_pdfs, write_recipe
from distributed.threads import run_workers

from ddnn.data import feature_reader, loading
from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.loading import Corpus, DataConfig
from ddnn.data.pipeline import CvSelection, TrainingData, TrainingDataConfig, training_data
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.groups import Groups
from ddnn.inspection.path import describe_path
from ddnn.kaldi.archive import MatrixReader
from ddnn.recipe.load import load_recipe
from ddnn.training.data_identity import DataIdentity, data_identity
from ddnn.training.job import run_training
from ddnn.training.normalization import input_transform
from ddnn.training.options import require_minibatch
from ddnn.util.errors import DataError, RecipeError
from ddnn.util.text import plural


@pytest.mark.parametrize("cv", ["held out", "a data dir"])
def test_the_cache_changes_no_bit(tmp_path: Path, cv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = labelled_utterances()
    data, ali = write_data_dir(tmp_path / "train", features), write_ali_dir(tmp_path / "ali", labels)
    recipe = write_recipe(tmp_path / "recipe.yaml", data, ali)
    settings = ["data.cmvn=mean", "data.loader_processes=2"]
    if cv == "a data dir":
        features, labels = labelled_utterances(frames=30, speaker="cv")  # of the same classes
        other, other_ali = write_data_dir(tmp_path / "cv", features), write_ali_dir(tmp_path / "cv ali", labels)
        settings += [f"data.cv.data={other}", f"data.cv.alignments={other_ali}", "data.cv.speakers=null"]
        settings += ["data.cv.fraction=null"]
    cached = [*settings, f"data.cache_dir={tmp_path / 'made' / 'cache'}"]

    def trained(name: str, given: list[str]) -> list[bytes]:
        run_training(load_recipe(recipe, given), tmp_path / name, "cpu")
        return [(tmp_path / name / file).read_bytes() for file in ("final.safetensors", "ali_train_pdf.counts")]

    plain = trained("plain", settings)
    assert not (tmp_path / "made").exists()
    with monkeypatch.context() as patched:  # two processes write the file
        patched.setattr(loading, "BYTES_PER_PROCESS", 1)
        patched.setattr(feature_reader, "CHUNK_BYTES", 1000)
        assert trained("writes", cached) == plain
    monkeypatch.setattr(MatrixReader, "read", None)
    assert trained("maps", cached) == plain
    assert len(list((tmp_path / "made/cache").iterdir())) == (2 if cv == "a data dir" else 1)
    log = (tmp_path / "maps/train.log").read_text()
    assert "cache: mapped" in log and "cache: wrote" not in log
    assert "processes: 2" in (tmp_path / "writes/train.log").read_text()
    assert load_recipe(tmp_path / "maps/recipe.yaml").data.cache_dir == tmp_path / "made/cache"


Utterances = dict[str, np.ndarray]


def prepare(folder: Path, features: Utterances, labels: Utterances) -> Path:
    """A data dir, pdf-ids, and lists of speakers to hold out."""
    write_data_dir(folder / "train", features)
    write_pdfs(folder / "pdfs.txt", labels)
    for n in range(4):
        (folder / f"cv{n}").write_text(f"spk{n}\n")
    return folder


def load(
    folder: Path, held_out: CvSelection | None = None, comm: Communicator | None = None, splice: int = 1,
    cache_dir: Path | None = None, **config: Any,
) -> TrainingData:  # fmt: skip
    reading = DataConfig(FeatureConfig(splice=splice), max_skipped_fraction=0.5, cache_dir=cache_dir)
    held_out, alignments = (
        held_out or CvSelection(speakers=folder / "cv1"),
        config.pop("alignments", folder / "pdfs.txt"),
    )
    seed = config.pop("seed", 1)
    given = TrainingDataConfig((Corpus(folder / "train", alignments),), reading, held_out, seed, **config)
    return training_data(given, torch.device("cpu"), Groups.data_parallel(comm or SingleProcess()))


def own_cv(data: Path, alignments: Path) -> CvSelection:
    """A corpus of its own for cross-validation."""
    return CvSelection((Corpus(data, alignments, ("data.cv.data", "data.cv.alignments")),))


def other_name(features: Utterances, labels: Utterances) -> None:
    """One utterance has another name, of the same length and labels."""
    for named in (features, labels):
        named["spk0-utt999"] = named.pop("spk0-utt008")


def other_length(features: Utterances, labels: Utterances) -> None:
    features["spk1-utt001"] = features["spk1-utt001"][:-1]


def reversed_labels(features: Utterances, labels: Utterances) -> None:
    """The same utterances, lengths and numbers of frames of each pdf."""
    labels.update({name: pdfs[::-1] for name, pdfs in labels.items()})


def exchanged_labels(features: Utterances, labels: Utterances) -> None:
    """Two utterances have each other's."""
    first, second = sorted(labels)[:2]
    labels[first], labels[second] = labels[second], labels[first]


def scaled_features(features: Utterances, labels: Utterances) -> None:
    features.update({name: 2 * matrix + 1 for name, matrix in features.items()})


def features_of_other_scale(features: Utterances, labels: Utterances) -> None:
    """All means stay."""
    mean = np.concatenate(list(features.values())).mean(axis=0, dtype=np.float64)
    features.update({n: (1.001 * (m - mean) + mean).astype(np.float32) for n, m in features.items()})


def reversed_features(features: Utterances, labels: Utterances) -> None:
    """Of one utterance, in time: mean and variance stay."""
    features["spk1-utt001"] = features["spk1-utt001"][::-1].copy()


def rounded_features(features: Utterances, labels: Utterances) -> None:
    """As another machine may compute them."""
    features.update({name: np.nextafter(matrix, np.float32(9)) for name, matrix in features.items()})


@pytest.mark.parametrize("splice", [0, 1])
@pytest.mark.parametrize(
    ("change", "keys"),
    [
        (other_name, ["data.alignments", "data.train"]),
        (other_length, ["data.alignments", "data.train"]),
        (reversed_labels, ["data.alignments"]),
        (exchanged_labels, ["data.alignments"]),
        (scaled_features, ["data.train"]),
        (features_of_other_scale, ["data.train"]),
        (reversed_features, ["data.train"]),
        (rounded_features, []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_identity_tells_data_apart(
    tmp_path: Path, change: Callable[[Utterances, Utterances], None], keys: list[str], splice: int
) -> None:
    comm, config = SingleProcess(), {"normalize": splice == 0, "splice": splice}
    before = data_identity(load(prepare(tmp_path / "a", *labelled_utterances()), **config), comm)
    features, labels = labelled_utterances()
    change(features, labels)
    found = data_identity(load(prepare(tmp_path / "b", features, labels), **config), comm).differences(before)
    assert sorted(found) == keys
    if change in (other_name, other_length):
        assert re.fullmatch(r"12 utterances, (480|479) frames, digest \w+ found, 12 .* expected", found["data.train"])
    if change is scaled_features:
        figures = r"mean \S+, standard deviation \S+, weighted sum \S+"
        assert re.fullmatch(rf"other features: dimension \d: {figures} found, {figures} expected", found["data.train"])
    assert before.differences(DataIdentity.model_validate_json(before.model_dump_json())) == {}


def test_what_is_skipped_is_in_no_shard(tmp_path: Path) -> None:
    """Here everything in a corpus for cross-validation, and of the training data two speakers."""
    folder, (features, labels) = prepare(tmp_path / "a", *labelled_utterances()), labelled_utterances()
    rows, pdfs = ({f"x{name}": array for name, array in each.items()} for each in (features, labels))
    held_out = own_cv(write_data_dir(tmp_path / "cv", rows), write_pdfs(tmp_path / "cv.txt", pdfs))

    def skips(utterance: str, frames: int) -> str | None:
        assert frames == len(features[utterance.removeprefix("x")])
        return "of another speaker" if not utterance.startswith(("spk0", "spk1")) else None

    def work(comm: Communicator) -> tuple[list[str], int, DataIdentity]:
        data = load(folder, held_out, comm, skips=skips)
        return list(data.dataset.utterances), len(data.cv.dataset.utterances), data_identity(data, comm)

    (first, *held, identity), (second, *also_held, other) = run_workers(2, work)
    assert sorted(first + second) == [name for name in sorted(features) if name < "spk2"]
    assert len(first) == len(second)
    assert held == also_held == [0]
    assert identity.differences(other) == {}
    assert identity.differences(DataIdentity.model_validate_json(identity.model_dump_json())) == {}


def test_the_identity_of_features_of_other_dimensions(tmp_path: Path) -> None:
    features, labels = labelled_utterances()
    found = data_identity(load(prepare(tmp_path / "a", features, labels)), SingleProcess())
    narrow = {name: matrix[:, :3] for name, matrix in features.items()}
    before = data_identity(load(prepare(tmp_path / "b", narrow, labels)), SingleProcess())
    assert found.differences(before) == {"data.train": "features of 4 dimensions found, of 3 expected"}


@pytest.mark.parametrize("workers", [2, 3])
def test_the_identity_is_that_of_any_number_of_workers(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the statistics are taken from some of the utterances, and with a data dir for cross-validation."""
    monkeypatch.setattr("ddnn.training.data_identity.STATISTICS_UTTERANCES", 5)
    features, labels = labelled_utterances()
    features["spk0-utt000"] = features["spk0-utt000"][:17]
    labels["spk0-utt000"] = labels["spk0-utt000"][:17]
    folder = prepare(tmp_path, features, labels)
    write_data_dir(folder / "cv", labelled_utterances(seed=3, speaker="cv")[0])
    cv = own_cv(folder / "cv", write_pdfs(folder / "cv.txt", labelled_utterances(seed=3, speaker="cv")[1]))
    for held_out in (None, cv):
        before = data_identity(load(folder, held_out), SingleProcess())
        for found in run_workers(workers, lambda comm: data_identity(load(folder, held_out, comm), comm)):  # noqa: B023
            assert found.differences(before) == {} and found.contents == before.contents


def test_the_identity_tells_what_is_held_out_apart(tmp_path: Path) -> None:
    """Speakers of as many utterances and frames; another data dir, other alignments and features of it."""
    comm, folder = SingleProcess(), prepare(tmp_path, *labelled_utterances())
    features, labels = labelled_utterances(seed=3, speaker="cv")
    write_data_dir(folder / "cv", features)
    cv = own_cv(folder / "cv", write_pdfs(folder / "cv.txt", labels))
    one, two, a_dir = (data_identity(load(folder, h), comm) for h in (None, CvSelection(speakers=folder / "cv2"), cv))
    assert list(two.differences(one)) == ["data.cv"]
    assert list(a_dir.differences(one)) == ["data.cv", "data.cv.alignments", "data.cv.data"]
    write_pdfs(folder / "cv.txt", {name: pdfs[::-1] for name, pdfs in labels.items()})
    assert list(data_identity(load(folder, cv), comm).differences(a_dir)) == ["data.cv.alignments"]
    write_pdfs(folder / "cv.txt", labels)
    write_data_dir(folder / "cv", {name: matrix + 1 for name, matrix in features.items()})
    assert list(data_identity(load(folder, cv), comm).differences(a_dir)) == ["data.cv.data"]


def test_the_cache_hides_no_change(tmp_path: Path) -> None:
    """Features that were written again in the same place, with as many bytes; other alignments."""
    features, labels = labelled_utterances()
    folder, cache = prepare(tmp_path, features, labels), tmp_path / "cache"
    before = data_identity(load(folder, cache_dir=cache), SingleProcess())
    assert before.differences(data_identity(load(folder), SingleProcess())) == {}
    prepare(tmp_path, {name: 2 * matrix + 1 for name, matrix in features.items()}, labels)
    assert list(data_identity(load(folder, cache_dir=cache), SingleProcess()).differences(before)) == ["data.train"]
    prepare(tmp_path, features, {name: pdfs[::-1] for name, pdfs in labels.items()})
    assert list(data_identity(load(folder, cache_dir=cache), SingleProcess()).differences(before)) == [
        "data.alignments"
    ]
    assert len(list(cache.iterdir())) == 3


def test_the_normalization_is_that_of_the_frames_to_train_on(tmp_path: Path) -> None:
    """A speaker who is far off changes it only where nothing is held out, as for RBMs."""
    features, labels = labelled_utterances()
    for name in features:
        if name.startswith("spk1"):
            features[name] += 1000.0
    data, comm = load(prepare(tmp_path, features, labels)), SingleProcess()
    kept = np.concatenate([matrix for name, matrix in features.items() if not name.startswith("spk1")])
    for found, expected in (
        (input_transform(data, comm), kept.mean(axis=0)),
        (input_transform(data, comm, all_utterances=True), np.concatenate(list(features.values())).mean(axis=0)),
    ):
        assert found.shift is not None
        np.testing.assert_allclose(found.shift[4:8], -expected, rtol=1e-4, atol=1e-3)
    assert input_transform(load(tmp_path, normalize=False), comm).shift is None


def test_the_normalization_is_over_the_first_utterances_of_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is one for all workers together, not for each."""
    features, labels = labelled_utterances()
    folder = prepare(tmp_path, features, labels)
    monkeypatch.setattr("ddnn.training.normalization.STATISTICS_UTTERANCES", 3)
    kept = [features[name] for name in sorted(features) if not name.startswith("spk1")]
    for shift in run_workers(2, lambda comm: input_transform(load(folder, comm=comm), comm).shift):
        assert shift is not None
        np.testing.assert_allclose(shift[4:8], -np.concatenate(kept[:3]).mean(axis=0), rtol=1e-4, atol=1e-5)


def test_each_part_is_shared_out_by_itself(tmp_path: Path) -> None:
    """Every worker has frames to train on and for cross-validation, each utterance once."""
    rng = np.random.default_rng(2)
    features, labels = labelled_utterances(count=40)
    for name in features:
        length = int(rng.integers(5, 41))
        features[name], labels[name] = features[name][:length], labels[name][:length]
    folder, shards = prepare(tmp_path, features, labels), []
    whole = load(folder)

    class One(SingleProcess):
        """One of three, who needs no answer of the others."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank, self.world_size = rank, 3

        def all_gather_object(self, value: Any) -> list[Any]:
            if value is None:
                return [{"dim": 4, "counts": whole.index.counts, "mismatch": ""}]
            return [value] * 3

        def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
            tensor[0] = torch.arange(len(whole.index.entries))
            tensor[1] = torch.from_numpy(whole.index.num_frames)

        def barrier(self) -> None:
            pass

    for rank in range(3):
        data = load(folder, comm=One(rank))
        assert data.shards == load(folder, comm=One(0)).shards
        names = [whole.index.utterances[u] for u in data.shards[rank]]
        assert data.dataset.utterances == tuple(names)
        frames = [len(features[name]) for name in names if not name.startswith("spk1")]
        assert len(data.train) == sum(frames) == whole.index.num_frames[data.train_shards[rank]].sum()
        assert len(data.cv) == sum(len(features[name]) for name in names if name.startswith("spk1")) > 0
        for subset in (data.train, data.cv):
            assert bool((data.dataset.labels[subset.indices] >= 0).all())
        shards += data.shards[rank]
    assert sorted(shards) == list(range(len(whole.index.entries)))


def test_a_minibatch_must_fit_into_the_smallest_shard(tmp_path: Path) -> None:
    data = load(prepare(tmp_path, *labelled_utterances()))
    require_minibatch(data.index, "minibatch_size", 9 * 40, data.train_shards)
    with pytest.raises(RecipeError, match="360 frames do not fill one minibatch of 361") as caught:
        require_minibatch(data.index, "minibatch_size", 9 * 40 + 1, data.train_shards)
    assert caught.value.location == "minibatch_size"
    with pytest.raises(RecipeError, match="80 frames of the smallest of 2 shards"):
        require_minibatch(data.index, "minibatch_size", 81, [[0, 1, 2], [4, 5]])


def test_data_for_cross_validation_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = prepare(tmp_path, *labelled_utterances())
    features, labels = labelled_utterances(seed=3, speaker="cv")
    write_data_dir(folder / "cv", {name: matrix[:, :3].copy() for name, matrix in features.items()})
    with pytest.raises(DataError, match="3 dims found, 4 expected as in"):
        load(folder, own_cv(folder / "cv", write_pdfs(folder / "cv.txt", labels)))


@pytest.mark.parametrize(
    ("train", "cv", "refused"),
    [
        ("model of 3", "model of 3", None),
        ("model of 3", "ids below 2", None),
        ("ids below 3", "ids below 2", None),
        ("ids below 3", "model of 3", None),
        ("model of 3", "model of 4", "of another tree than that of .*train pdfs"),
        ("model of 4", "model of 3", "of another tree than that of .*train pdfs"),
        ("ids below 4", "model of 3", r"3 pdfs .*\(final.mdl\), 4 expected .*\(largest pdf-id \+ 1\)"),
        ("ids below 3", "model of 4", r"4 pdfs .*\(final.mdl\), 3 expected .*\(largest [^!]*set data.num_pdfs to"),
        ("ids below 3", "ids below 8", r"8 pdfs .*\(largest pdf-id \+ 1\), 3 expected .*\(largest [^!]*data.num_pdfs"),
        ("model of 3", "ids below 4", r"4 pdfs .*\(largest pdf-id \+ 1\), 3 expected .*\(final.mdl\)"),
    ],
)  # fmt: skip
def test_training_and_cross_validation_have_the_pdfs_of_one_model(
    tmp_path: Path, train: str, cv: str, refused: str | None
) -> None:
    paths = []
    for name, kind, speaker in (("train", train, "spk"), ("cv", cv, "cv")):
        features, labels = labelled_utterances(seed=3, speaker=speaker)
        pdfs = int(kind[-1])
        for ids in labels.values():
            np.minimum(ids, pdfs - 1, out=ids)
        labels[max(labels)][-1] = pdfs - 1
        write_data_dir(tmp_path / name, features)
        write = write_pdfs if kind.startswith("ids") else partial(write_ali_dir, pdfs=pdfs)
        paths.append(write(tmp_path / f"{name} pdfs", labels))
    own = own_cv(tmp_path / "cv", paths[1])
    if refused is None:
        assert len(load(tmp_path, own, alignments=paths[0]).cv) == 12 * 40
        return
    with pytest.raises(DataError, match=refused) as caught:
        load(tmp_path, own, alignments=paths[0])
    assert str(paths[0]) in str(caught.value) and caught.value.location == str(paths[1])


def with_cv(folder: Path, names: dict[str, str]) -> CvSelection:
    """Another data dir for cross-validation: these utterances of another corpus, under other names."""
    features, labels = labelled_utterances(seed=3, speaker="cv")
    own = [{names.get(name, name): one[name] for name in sorted(one)[:4]} for one in (features, labels)]
    return own_cv(write_data_dir(folder / "elsewhere", own[0]), write_pdfs(folder / "cv.txt", own[1]))


def test_utterances_of_the_training_data_are_refused_for_cross_validation(tmp_path: Path) -> None:
    """Their ids are compared, over all workers: no two of them have the same utterance in memory."""
    folder = prepare(tmp_path, *labelled_utterances())
    everything = own_cv(folder / "train", folder / "pdfs.txt")
    with pytest.raises(DataError, match=r"12 of 12 utterances for .* the first is spk0-utt000"):
        load(folder, everything)
    names = {"cv0-utt004": "spk1-utt005", "cv1-utt001": "spk2-utt002"}
    own = with_cv(folder, names)
    for attempt in (load, lambda *one: run_workers(2, lambda comm: load(*one, comm=comm))):
        with pytest.raises(
            DataError, match=r"2 of 4 utterances for .* data.train, .*; the first is spk1-utt005"
        ) as caught:
            attempt(folder, own)
        assert caught.value.location == str(folder / "elsewhere")
    _, labels = labelled_utterances()
    for name in names.values():  # without an alignment they are not trained on
        del labels[name]
    write_pdfs(folder / "pdfs.txt", labels)
    assert len(load(folder, own).cv) == 4 * 40


def test_speakers_and_pdfs_unlike_those_of_the_training_data_are_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    features, labels = labelled_utterances()
    folder = prepare(tmp_path, features, labels)
    assert len(load(folder, with_cv(folder, {})).cv) == 4 * 40
    assert "WARNING" not in caplog.text
    own = with_cv(folder, {"cv0-utt000": "spk2-new", "cv0-utt004": "spk0-new"})
    load(folder, own)
    assert "elsewhere: 2 of 4 speakers are also in the training data (spk0, spk2)" in caplog.text
    for ids in labels.values():
        np.maximum(ids, 1, out=ids)
    write_pdfs(folder / "pdfs.txt", labels)
    caplog.clear()
    counted = load(folder, with_cv(folder, {})).cv_source
    assert counted is not None
    assert f"{counted.index.pdf_counts[0]} of 160 frames are of 1 pdf that no frame of the training data" in caplog.text


@pytest.mark.parametrize(
    "own", [CvSelection(fraction=0.3), CvSelection(by="speaker"), CvSelection(speakers=Path("cv1"))], ids=str
)
def test_what_is_held_out_is_disjoint_and_logged(
    tmp_path: Path, own: CvSelection, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "ddnn")
    folder = prepare(tmp_path, *unlike_utterances())
    monkeypatch.chdir(folder)
    data = load(folder, own)
    index, train = data.index, set(data.train_utterances)
    assert index.speakers is not None
    cv = [u for u in range(len(index.entries)) if u not in train]
    speakers = {index.speakers[u] for u in cv}
    assert speakers.isdisjoint(index.speakers[u] for u in train)
    assert not set(data.train.indices.tolist()) & set(data.cv.indices.tolist())
    share = 100 * len(data.cv) / (len(data.cv) + len(data.train))
    asked = "" if own.speakers else f" (asked for: {30 if own.fraction else 10} %)"
    of = f"CV: {plural(len(speakers), 'speaker')}, {len(cv)} utterances, {len(data.cv):,} frames, {share:.1f} % of the frames"
    assert caplog.text.count("CV: ") == 1 and f"{of}{asked}\n" in caplog.text


@pytest.mark.parametrize(("fraction", "warned"), [(0.01, True), (0.2, True), (0.22, False), (0.29, False), (0.9, True)])
def test_a_fraction_far_from_what_was_asked_for_is_a_warning(
    tmp_path: Path, fraction: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Four speakers of a quarter each."""
    folder = prepare(tmp_path, *labelled_utterances())
    load(folder, CvSelection(fraction=fraction, by="speaker"))
    found = 75.0 if fraction == 0.9 else 25.0
    message = f"asks for {100 * fraction:g} % of the frames, but {found} % are held out"
    assert (message in caplog.text) == warned == ("asks for" in caplog.text)


def cv_of(data: TrainingData) -> set[str]:
    """Its utterances for cross-validation, which are in memory with labels."""
    assert sorted(data.cv_index().utterances) == sorted(
        set(data.index.utterances) - {data.index.utterances[u] for u in data.train_utterances}
    )
    assert len(data.cv) + len(data.train) == data.index.num_frames.sum()
    return set(data.cv_index().utterances)


@pytest.mark.parametrize(
    ("speakers", "fraction", "reason"),
    [
        (None, 0.25, "has no utt2spk"),
        ("one", 0.25, "has a single speaker"),
        ("four", 0.125, "has too few speakers, 4: whole ones would be 25.0 % of the frames"),
        ("four", 0.25, ""),
        ("each its own", 0.125, ""),
        ("each its own", 0.01, ""),
    ],
)
def test_too_few_speakers_hold_out_utterances_with_a_warning(
    tmp_path: Path, speakers: str | None, fraction: float, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """24 utterances of as many frames. Speakers who come as close to the fraction are held out, as they always were."""
    folder = prepare(tmp_path, *labelled_utterances(count=24, frames=20))
    table = folder / "train/utt2spk"
    names = [line.split()[0] for line in table.read_text().splitlines()]
    if speakers is None:
        table.unlink()
    elif speakers != "four":
        table.write_text("".join(f"{name} {'spk' if speakers == 'one' else name}\n" for name in names))
    data = load(folder, CvSelection(fraction=fraction))
    assert len(cv_of(data)) == max(1, 24 * fraction)
    assert (f"CV: the training data {reason}. Utterances are held out instead" in caplog.text) == bool(reason)
    if reason:
        assert (
            data.cv_index().utterances
            == load(folder, CvSelection(fraction=fraction, by="utterance")).cv_index().utterances
        )
        with pytest.raises(DataError) if speakers != "four" else nullcontext():
            load(folder, CvSelection(fraction=fraction, by="speaker"))
    else:
        assert caplog.text.count("WARNING") == (fraction == 0.01), "one utterance is more than that"
        assert (
            data.cv_index().utterances
            == load(folder, CvSelection(fraction=fraction, by="speaker")).cv_index().utterances
        )


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5, 0.9])
def test_utterances_come_close_to_the_fraction_on_any_number_of_workers(
    tmp_path: Path, fraction: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ddnn")
    folder, own = prepare(tmp_path, *unlike_utterances(60)), CvSelection(fraction=fraction, by="utterance")
    data = load(folder, own)
    assert "speakers are also in the training data" in caplog.text and caplog.records[-1].levelname == "INFO"
    assert len(data.cv) / data.index.num_frames.sum() == pytest.approx(fraction, rel=0.01)
    assert "WARNING" not in caplog.text, "it was asked for"
    chosen = cv_of(data)
    for found in run_workers(2, lambda comm: load(folder, own, comm)):
        assert found.cv_index().utterances == data.cv_index().utterances
    scp = folder / "train/feats.scp"
    scp.write_text("".join(f"{line}\n" for line in reversed(scp.read_text().splitlines())))
    assert cv_of(load(folder, own)) == chosen, "the order of the data dir does not matter"
    assert any(cv_of(load(folder, own, seed=seed)) != chosen for seed in (2, 3))


def test_pdf_ids_without_0_are_doubted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Transition-ids begin at 1; a single utterance without the first pdf says nothing."""
    features, labels = labelled_utterances(count=24)
    folder = prepare(tmp_path, features, labels)
    doubt = "pdfs.txt: no frame has pdf-id 0: are these transition-ids, which begin at 1?"
    load(folder, CvSelection())
    assert doubt not in caplog.text
    write_pdfs(folder / "pdfs.txt", {name: 2 * ids + 1 for name, ids in labels.items()})
    load(folder, CvSelection())
    assert doubt in caplog.text
    caplog.clear()
    write_pdfs(folder / "pdfs.txt", {name: ids + 100 for name, ids in labels.items()})
    load(folder, CvSelection())
    assert doubt not in caplog.text, "fewer than ten frames for each pdf"


def test_a_list_of_utterances_is_held_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also a Kaldi table, an utterance twice, and one that cannot be used."""
    features, labels = labelled_utterances()
    folder, listed = prepare(tmp_path, features, labels), tmp_path / "cv list"
    listed.write_text("spk1-utt005 two words\nspk0-utt000\r\nspk1-utt005\n")
    caplog.set_level(logging.INFO, "ddnn")
    assert cv_of(load(folder, CvSelection(utterances=listed))) == {"spk0-utt000", "spk1-utt005"}
    assert "CV: its 2 speakers are also in the training data: the cross-validation will look too good" in caplog.text
    del labels["spk0-utt000"]
    write_pdfs(folder / "pdfs.txt", labels)
    caplog.clear()
    assert cv_of(load(folder, CvSelection(utterances=listed))) == {"spk1-utt005"}
    assert "1 of 2 listed utterances are among the skipped ones" in caplog.text
    assert "CV: its 1 speaker is also in the training data" in caplog.text
    for text, message in (
        ("spk1-utt005\nnobody-1\n", r"1 of 2 listed utterances are not in the data: nobody-1"),
        ("spk1\nspk2\n", r"2 of 2 listed utterances are not in the data: spk1, spk2[^!]*data.cv.speakers"),
        ("".join(f"{name}\n" for name in features), "11 of 11 utterances held out: no utterance remains for training"),
        ("spk0-utt000\n", "no utterance remains for cross-validation"),
        ("", "the list of cross-validation utterances is empty"),
        ("\n", "line 1 of the list of cross-validation utterances is blank"),
    ):
        listed.write_text(text)
        with pytest.raises(DataError, match=message):
            load(folder, CvSelection(utterances=listed))
    with pytest.raises(DataError, match="does not exist"):
        load(folder, CvSelection(utterances=tmp_path / "missing"))


def test_the_held_out_utterances_are_written_down_and_can_be_held_out_again(tmp_path: Path) -> None:
    """The same split and the same bits, with another seed for the choice."""
    folder = prepare(tmp_path, *labelled_utterances())
    recipe = write_recipe(tmp_path / "recipe.yaml", folder / "train", folder / "pdfs.txt")
    run_training(load_recipe(recipe, ["data.cv.by=utterance"]), tmp_path / "first", "cpu")
    listed = tmp_path / "first/cv_utterances"
    assert len(listed.read_text().splitlines()) == 3
    again = load_recipe(recipe, ["data.cv.fraction=null", f"data.cv.utterances={listed}"])
    run_training(again, tmp_path / "again", "cpu")
    for name in ("final.safetensors", "cv_utterances"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    assert load_recipe(tmp_path / "again/recipe.yaml").data.cv.utterances == listed
    fields = describe_path(tmp_path / "again").as_dict()
    assert fields["cv_utterances"] == 3
