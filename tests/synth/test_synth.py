"""The synthetic corpus: whole, what it claims to be, the same from the same seed, and within reach of a decoder."""

from __future__ import annotations

import errno
import hashlib
import json
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kaldi_files import transitions_of

from ddnn.kaldi.alignments import read_alignments
from ddnn.kaldi.archive import MatrixReader, iterate_matrices, read_scp, write_matrices
from ddnn.kaldi.fst import read_fst, read_symbols
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.synth import corpus
from ddnn.synth.acoustics import (
    COMPONENTS,
    MIN_PDFS,
    PHONES,
    VOWELS,
    Acoustics,
    make_acoustics,
    make_filter_banks,
    make_lexicon,
)  # fmt: skip
from ddnn.synth.corpus import SynthOptions, SynthSummary, synthesize
from ddnn.util.errors import UserError

TINY = SynthOptions(hours=0.03, test_hours=0.02, speakers=5, dim=13, pdfs=150, seed=3)
BANKS = replace(TINY, hours=0.1, speakers=8, dim=40, features="fbank")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SynthSummary]:
    out = tmp_path_factory.mktemp("synth") / "a corpus é"
    return out, synthesize(out, TINY)


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Filter banks and pdf-ids of all frames of each training speaker."""
    out = tmp_path_factory.mktemp("synth") / "banks"
    synthesize(out, BANKS)
    pdfs, found = read_alignments(out / "ali").pdfs, defaultdict(list)
    with MatrixReader() as reader:
        for entry in read_scp(out / "train/feats.scp"):
            found[entry.key.partition("-")[0]].append((reader.read(entry), pdfs[entry.key]))
    return {speaker: tuple(map(np.concatenate, zip(*parts, strict=True))) for speaker, parts in found.items()}


def lines(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()]


def true_loglikes(acoustics: Acoustics, features: np.ndarray) -> np.ndarray:
    """float32 (frames, pdfs): log-likelihoods of the mixtures, but for a constant."""
    means, precisions = acoustics.means.astype(float), acoustics.stddevs.astype(float) ** -2
    constant = np.log(acoustics.stddevs).sum(1) + 0.5 * (means**2 * precisions).sum(1)
    x = features.astype(float)
    gaussians = x @ (means * precisions).T - 0.5 * x**2 @ precisions.T - constant
    return np.logaddexp.reduce(gaussians.reshape(len(x), -1, COMPONENTS), axis=2).astype(np.float32)


def test_data_dirs_hang_together(made: tuple[Path, SynthSummary]) -> None:
    out, summary = made
    assert sorted(path.name for path in out.iterdir()) == [
        "ali",
        "ali_test",
        "cv_speakers.txt",
        "graph",
        "test",
        "train",
    ]
    speakers = {}
    for name, frames, utterances in (
        ("train", summary.train_frames, summary.train_utterances),
        ("test", summary.test_frames, summary.test_utterances),
    ):
        data = out / name
        keys = [entry.key for entry in read_scp(data / "feats.scp")]
        assert keys == sorted(keys) and len(keys) == utterances
        assert all([row[0] for row in lines(data / file)] == keys for file in ("text", "utt2spk"))
        assert [[u, row[0]] for row in lines(data / "spk2utt") for u in row[1:]] == lines(data / "utt2spk")
        with MatrixReader() as reader:
            shapes = [reader.shape(entry) for entry in read_scp(data / "feats.scp")]
        assert {columns for _, columns in shapes} == {TINY.dim} and sum(rows for rows, _ in shapes) == frames
        assert all(2 <= len(row) - 1 <= 8 for row in lines(data / "text"))
        speakers[name] = {row[1] for row in lines(data / "utt2spk")}
    assert len(speakers["train"]) == TINY.speakers and not speakers["train"] & speakers["test"]
    assert {row[0] for row in lines(out / "cv_speakers.txt")} < speakers["train"]
    assert TINY.hours * 360_000 <= summary.train_frames < TINY.hours * 360_000 * 1.3
    assert all(next(iter(iterate_matrices(path))) for path in (out / "train").glob("feats.*.ark"))
    assert b"\0BCM " in (out / "train" / "feats.1.ark").read_bytes()[:40]


def test_alignments_are_those_of_the_words(made: tuple[Path, SynthSummary]) -> None:
    """Every alignment, its silences taken out, passes through the pdfs of its words, and was read through final.mdl."""
    out, _ = made
    lexicon = make_lexicon(np.random.default_rng(np.random.SeedSequence(TINY.seed, spawn_key=(0,))), TINY.pdfs)
    model = read_transition_model(out / "ali" / "final.mdl")
    assert model.num_pdfs == TINY.pdfs and model.num_transition_ids == 2 * TINY.pdfs
    assert np.array_equal(model.transition_to_pdf[1::2], np.arange(TINY.pdfs))
    is_self_loop = transitions_of(model)["is_self_loop"]
    assert is_self_loop[1::2].all() and not is_self_loop[2::2].any()
    assert np.allclose(np.exp(model.log_probs[[1, 2, 7, 8]]), [0.9, 0.1, 2 / 3, 1 / 3], atol=1e-6)
    with MatrixReader() as reader:
        frames = {entry.key: reader.shape(entry)[0] for entry in read_scp(out / "train" / "feats.scp")}
    alignments = read_alignments(out / "ali").pdfs
    assert {key: len(pdfs) for key, pdfs in alignments.items()} == frames
    number = {word: index for index, word in enumerate(lexicon.words)}
    for key, *words in lines(out / "train" / "text"):
        pdfs = alignments[key]
        runs = pdfs[np.flatnonzero(np.diff(pdfs, prepend=-1))]
        said = runs[runs >= 3]
        expected = np.concatenate(
            [lexicon.pdfs[lexicon.offsets[number[w]] : lexicon.offsets[number[w] + 1]] for w in words]
        )
        assert np.array_equal(said, expected), key


def test_the_true_model_decodes_it(made: tuple[Path, SynthSummary], tmp_path: Path) -> None:
    pytest.importorskip("kaldi_decoder")
    from ddnn.decoding.options import DecodeOptions
    from ddnn.decoding.score import score

    out, summary = made
    graph = read_fst(out / "graph" / "HCLG.fst")
    words = read_symbols(out / "graph" / "words.txt")
    assert set(graph.arcs["ilabel"].tolist()) == set(range(2 * TINY.pdfs + 1))
    assert (
        set(np.unique(graph.arcs["olabel"]).tolist()) == set(range(len(words) - 3)) and len(words) == summary.words + 4
    )
    root = np.random.default_rng(np.random.SeedSequence(TINY.seed, spawn_key=(0,)))
    acoustics = make_acoustics(root, make_lexicon(root, TINY.pdfs), TINY.dim)
    pdfs = read_alignments(out / "ali_test").pdfs
    right: list[bool] = []
    loglikes = {}
    with MatrixReader() as reader:
        for entry in read_scp(out / "test" / "feats.scp"):
            loglikes[entry.key] = true_loglikes(acoustics, reader.read(entry))
            right += (loglikes[entry.key].argmax(1) == pdfs[entry.key]).tolist()
    assert 0.3 < np.mean(right) < 0.8  # learnable, and not trivial
    write_matrices(tmp_path / "loglikes.ark", tmp_path / "loglikes.scp", loglikes.items())
    result = score(
        tmp_path, graph_dir=out / "graph", model=out / "ali_test" / "final.mdl", text=out / "test" / "text",
        options=DecodeOptions((0.1, 0.143)),
    )  # fmt: skip
    assert result.scales[result.best].wer < 10 and result.scales[result.best].not_final == ()


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_same_seed_same_bytes(made: tuple[Path, SynthSummary], tmp_path: Path) -> None:
    out, summary = made
    (tmp_path / "empty and there").mkdir()
    assert synthesize(tmp_path / "empty and there", TINY) == summary
    assert digest(tmp_path / "empty and there") == digest(out)
    for name in ("one", "two"):
        synthesize(tmp_path / name, replace(BANKS, hours=0.01))
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    synthesize(tmp_path / "other", SynthOptions(**{**vars(TINY), "seed": 4}))
    other = digest(tmp_path / "other")
    assert all(other[name] != value for name, value in digest(out).items() if "feats" in name or name.endswith("text"))


def test_features_are_those_of_the_model(made: tuple[Path, SynthSummary]) -> None:
    """Per Gaussian mixture: mean and variance of its frames, speakers pooled, near those of the model in final.mdl."""
    out, _ = made
    root = np.random.default_rng(np.random.SeedSequence(TINY.seed, spawn_key=(0,)))
    acoustics = make_acoustics(root, make_lexicon(root, TINY.pdfs), TINY.dim)
    pdfs = read_alignments(out / "ali").pdfs
    with MatrixReader() as reader:
        entries = read_scp(out / "train" / "feats.scp")
        x = np.concatenate([reader.read(entry) for entry in entries])
    y = np.concatenate([pdfs[entry.key] for entry in entries])
    expected = acoustics.means.reshape(TINY.pdfs, COMPONENTS, -1).mean(1)[y]
    slope = (x * expected).sum() / (expected**2).sum()
    assert slope == pytest.approx(1.0, abs=0.1)
    # Noise 1.02^2 per dim, components 1.2^2 and speakers 1.5^2 over all dims.
    assert ((x - expected) ** 2).sum(1).mean() == pytest.approx(1.05 * TINY.dim + 1.2**2 / 2 + 1.5**2, rel=0.15)


def residuals(banks: dict[str, tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Frames minus the mean of their speaker and pdf."""
    parts = []
    for x, y in banks.values():
        sums, counts = np.zeros((BANKS.pdfs, BANKS.dim)), np.maximum(np.bincount(y, minlength=BANKS.pdfs), 1)
        np.add.at(sums, y, x)
        parts.append(x - (sums / counts[:, None])[y])
    return np.concatenate(parts)


def test_noise_of_neighbouring_bands_is_correlated(banks: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Within a speaker and pdf: 16/19 from one band to the next, nothing five bands away but for the peaks of components."""
    among = np.corrcoef(residuals(banks).T)
    assert np.diagonal(among, 1) == pytest.approx(16 / 19, abs=0.1)
    assert np.abs(np.diagonal(among, 8)).mean() < 0.15


def test_formants_move_by_speaker(banks: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """The mean vowel of each speaker, against that of a vocal tract of average length: it is the same pattern, moved by up
    to some bands up or down, by as much in one half of the vowels as in the other."""
    root = np.random.default_rng(np.random.SeedSequence(BANKS.seed, spawn_key=(0,)))
    model = make_filter_banks(root, make_lexicon(root, BANKS.pdfs), BANKS.dim)
    average = model.means.reshape(BANKS.pdfs, COMPONENTS, -1).mean(1)
    vowels = [PHONES.index(vowel) for vowel in VOWELS]
    moves = []
    for x, y in banks.values():
        best = []
        for half in (vowels[::2], vowels[1::2]):
            frames = np.isin(model.lexicon.pdf_phone[y], half)
            found, expected = x[frames] - x[frames].mean(0), average[y[frames]]
            expected = expected - expected.mean(0)
            fits = [
                np.corrcoef(found[:, 8:32].ravel(), np.roll(expected, k, 1)[:, 8:32].ravel())[0, 1]
                for k in range(-6, 7)
            ]
            best.append(int(np.argmax(fits)) - 6)
            assert max(fits) > 0.5
        assert abs(best[0] - best[1]) <= 1
        moves.append(sum(best) / 2)
    assert max(moves) - min(moves) >= 3 and np.abs(moves).max() <= 5


def test_speech_is_louder_than_silence(banks: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    for x, y in banks.values():
        silent = y < 3
        assert x[~silent].max(1).mean() > x[silent].max(1).mean() + 1
        assert (x[~silent].mean(0) > x[silent].mean(0))[8:].all()  # below them there are no formants


def test_every_pdf_is_in_some_word() -> None:
    for pdfs in (MIN_PDFS, MIN_PDFS + 1, 500, 8806):
        lexicon = make_lexicon(np.random.default_rng(pdfs), pdfs)
        assert np.array_equal(np.unique(lexicon.pdfs), np.arange(pdfs))
        assert len(set(lexicon.words)) == len(lexicon.words) == len(lexicon.offsets) - 2
        assert np.array_equal(np.unique(lexicon.pdf_phone), np.arange(len(PHONES)))
        order = lexicon.pdf_phone * 3 + lexicon.pdf_state  # transition-states in Kaldi's order
        assert (np.diff(order) >= 0).all() and lexicon.offsets[-1] == len(lexicon.pdfs)


def test_sizes_that_cannot_be(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for wrong, message in (
        ({"pdfs": MIN_PDFS - 1}, f"--pdfs {MIN_PDFS} is the smallest"),
        ({"pdfs": 900_000}, "or fewer"),
        ({"hours": 0.0}, "hours 0.0"),
        ({"hours": float("nan")}, "hours nan"),
        ({"test_hours": float("inf")}, "test hours inf"),
        ({"speakers": 1, "dim": 0}, r"speakers 1.*dim 0"),
        ({"seed": -1}, "seed -1"),
        ({"features": "mfcc"}, "features mfcc: expected gaussian or fbank"),
    ):
        with pytest.raises(UserError, match=message):
            synthesize(out, SynthOptions(**wrong))  # type: ignore[arg-type]
        assert not out.exists()


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("1")
    (tmp_path / "file").write_text("2")
    for out in ("out", "file", "file/below"):
        with pytest.raises(UserError):
            synthesize(tmp_path / out, TINY)
    assert digest(tmp_path).keys() == {"out/precious", "file"}


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(corpus, "write_int_vectors", full)
    with pytest.raises(UserError, match="no space left"):
        synthesize(tmp_path / "out", TINY)
    assert digest(tmp_path) == {}


def test_it_can_be_stopped(tmp_path: Path) -> None:
    def interrupt(frames: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(tmp_path / "out", SynthOptions(hours=0.02, speakers=4, dim=3), progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_many_archives_and_fast_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_ARCHIVE_BYTES", 1_000_000)
    options = SynthOptions(hours=0.3, speakers=12, dim=40, pdfs=200)
    seen: list[int] = []
    start = time.process_time()
    summary = synthesize(tmp_path / "out", options, seen.append)
    seconds = time.process_time() - start
    frames = summary.train_frames + summary.test_frames
    assert sum(seen) == frames and frames / seconds > 60_000, json.dumps({"frames": frames, "seconds": seconds})
    jobs = int((tmp_path / "out" / "ali" / "num_jobs").read_text())
    assert jobs == len(list((tmp_path / "out" / "train").glob("feats.*.ark"))) == 5
    assert max(path.stat().st_size for path in (tmp_path / "out" / "train").glob("feats.*.ark")) < 1_500_000
    assert len(read_alignments(tmp_path / "out" / "ali").pdfs) == summary.train_utterances


def test_the_command_writes_filter_banks(run_cli, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    small = ("--hours", 0.01, "--speakers", 2, "--pdfs", 120, "--seed", 5)
    assert run_cli("synth", tmp_path / "banks", "--features", "fbank", *small).exit_code == 0
    synthesize(tmp_path / "expected", SynthOptions(hours=0.01, speakers=2, pdfs=120, seed=5, features="fbank"))
    assert digest(tmp_path / "banks") == digest(tmp_path / "expected")
    said = run_cli("synth", tmp_path / "other", "--features", "mfcc", *small)
    assert said.exit_code == 2 and "'gaussian', 'fbank'" in said.stderr and not (tmp_path / "other").exists()
