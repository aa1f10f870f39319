"""`ddnn synth`: writes a whole synthetic corpus as Kaldi would have left it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddnn.kaldi.archive import write_int_vectors, write_matrices
from ddnn.kaldi.data_dir import FRAMES_PER_HOUR
from ddnn.kaldi.fst import write_fst
from ddnn.synth.acoustics import (
    ACOUSTICS,
    PHONES,
    Acoustics,
    Utterance,
    draw_batch,
    make_graph,
    make_lexicon,
    write_model,
)
from ddnn.util.arrays import Float32Array, Int32Array, Int64Array
from ddnn.util.errors import UserError
from ddnn.util.files import atomic_directory, ensure_directory, write_text

_BATCH = 64  # utterances drawn at once: some 18,000 frames
_ARCHIVE_BYTES = 500_000_000  # of an archive of features, at one byte per value


@dataclass(frozen=True)
class SynthOptions:
    """How large a corpus to make."""

    hours: float = 0.5  # training speech, at 100 frames a second; reached to within an utterance per speaker
    test_hours: float | None = None  # test speech; None: a tenth of `hours`, but at most 5
    # training speakers; a tenth of them, one or more, are named in `cv_speakers.txt`. An eighth as many others, two or
    # more, speak the test set.
    speakers: int = 20
    dim: int = 40  # feature dims; of filter banks the bands
    pdfs: int = 160  # senones
    features: str = "gaussian"  # or "fbank": log-mel spectra, whose formants move by speaker
    seed: int = 1  # of everything. Same options, same numpy: the same bytes.

    @property
    def expected_frames(self) -> int:
        """Training frames that `hours` amount to, for a progress bar; 0 where it is no number."""
        return round(self.hours * FRAMES_PER_HOUR) if math.isfinite(self.hours) else 0


@dataclass(frozen=True)
class SynthSummary:
    """What was written: frames and utterances of the training and the test set, and the words of the lexicon."""

    train_frames: int
    train_utterances: int
    test_frames: int
    test_utterances: int
    words: int


@dataclass(frozen=True)
class _Split:
    """One of the two sets: its name, its number for the seeds, speakers' names, frames each of them speaks."""

    name: str
    number: int
    speakers: list[str]
    frames_each: int


def _check(options: SynthOptions) -> tuple[float, int]:
    """The hours and speakers of the test set; UserError where an option is out of range."""
    test_hours = min(5.0, options.hours / 10) if options.test_hours is None else options.test_hours
    test_speakers = max(2, options.speakers // 8)
    hours = (options.hours, test_hours)
    valid = {
        f"hours {hours[0]} and test hours {hours[1]}: expected more than 0, and 100000 at most": all(
            0 < value <= 100_000 for value in hours
        ),
        f"speakers {options.speakers}: expected 2 (one is held out for cross-validation) to 99999": (
            2 <= options.speakers <= 99_999
        ),
        f"dim {options.dim}: expected 1 to 10000": 1 <= options.dim <= 10_000,
        f"features {options.features}: expected {' or '.join(ACOUSTICS)}": options.features in ACOUSTICS,
        f"seed {options.seed}: expected 0 to 2^63 - 1": 0 <= options.seed < 2**63,
    }
    errors = [message for message, is_valid in valid.items() if not is_valid]
    if errors:
        raise UserError("; ".join(errors), hint="ddnn synth --help has the defaults")
    return test_hours, test_speakers


def _write_graph(folder: Path, model: Acoustics) -> None:
    ensure_directory(folder)
    write_fst(folder / "HCLG.fst", make_graph(model.lexicon))
    _write_symbols(folder / "words.txt", ["<eps>", *model.lexicon.words, "#0", "<s>", "</s>"])
    write_text(folder / "num_pdfs", f"{len(model.lexicon.pdf_phone)}\n")
    _write_symbols(folder / "phones.txt", ["<eps>", *PHONES, "#0"])


def _write_symbols(path: Path, symbols: list[str]) -> None:
    write_text(path, "".join(f"{symbol} {index}\n" for index, symbol in enumerate(symbols)))


def _draw_utterances(model: Acoustics, seed: int, split: _Split, speaker: int) -> Iterator[Utterance]:
    """The utterances of one speaker, each of whom has an own seed."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1 + split.number, speaker)))
    voice, spoken = model.draw_speaker(rng), 0
    while True:
        for utterance in draw_batch(rng, model, _BATCH, voice):
            yield utterance
            spoken += len(utterance[1])
            if spoken >= split.frames_each:
                return


def _write_split(
    out: Path, alignments: str, model: Acoustics, seed: int, split: _Split, progress: Callable[[int], None]
) -> tuple[int, int]:
    """A data dir and its alignment dir, an archive at a time; returns the numbers of frames and of utterances."""
    data, ali = out / split.name, out / alignments
    ensure_directory(data)
    ensure_directory(ali)
    bytes_in_all = split.frames_each * len(split.speakers) * model.dim
    jobs = min(len(split.speakers), max(2, -(-bytes_in_all // _ARCHIVE_BYTES)))
    tables: dict[str, list[str]] = {"text": [], "utt2spk": [], "spk2utt": []}
    aligned: list[tuple[str, Int32Array]] = []  # of one archive
    frames = 0

    def features(speakers: Int64Array) -> Iterator[tuple[str, Float32Array]]:
        nonlocal frames
        for speaker in speakers.tolist():
            name, spoken, utterances = split.speakers[speaker], 0, list[str]()
            for words, transition_ids, matrix in _draw_utterances(model, seed, split, speaker):
                utterances.append(f"{name}-{len(utterances) + 1:07d}")
                tables["text"].append(" ".join([utterances[-1], *(model.lexicon.words[word] for word in words)]) + "\n")
                tables["utt2spk"].append(f"{utterances[-1]} {name}\n")
                aligned.append((utterances[-1], transition_ids))
                spoken += len(matrix)
                yield utterances[-1], matrix
            tables["spk2utt"].append(" ".join([name, *utterances]) + "\n")
            frames += spoken
            progress(spoken)

    scp = b""
    for job, speakers in enumerate(np.array_split(np.arange(len(split.speakers)), jobs), 1):
        part = data / f"feats.{job}.scp"
        write_matrices(data / f"feats.{job}.ark", part, features(speakers), compress=True, relative=True)
        write_int_vectors(ali / f"ali.{job}.gz", aligned)
        aligned.clear()
        scp += part.read_bytes()
        part.unlink()
    write_text(data / "feats.scp", scp.decode())
    for name, lines in tables.items():
        write_text(data / name, "".join(lines))
    write_text(ali / "num_jobs", f"{jobs}\n")
    write_model(ali / "final.mdl", model)
    _write_symbols(ali / "phones.txt", ["<eps>", *PHONES, "#0"])
    return frames, len(tables["utt2spk"])


def synthesize(out: Path, options: SynthOptions, progress: Callable[[int], None] = lambda frames: None) -> SynthSummary:
    """Writes a corpus in Kaldi's formats to `out`, which must not exist or be empty; `progress` is called with the
    number of frames since the last call. UserError: `out` cannot be written, an option is out of range (the smallest
    possible is named).

    `train/` and `test/` are data dirs of different speakers: compressed features in `feats.N.ark`, their paths in
    `feats.scp` relative to it. `ali/` and `ali_test/` hold the true alignments and a `final.mdl`, the true model.
    `graph/` is a word loop. `cv_speakers.txt` names speakers to hold out. There is no `tree`: the contexts of these
    senones end with the word. All appears at the end, or nothing does.
    """
    test_hours, test_speakers = _check(options)
    root = np.random.default_rng(np.random.SeedSequence(options.seed, spawn_key=(0,)))
    lexicon = make_lexicon(root, options.pdfs)
    model = ACOUSTICS[options.features](root, lexicon, options.dim)
    sizes = (("train", options.speakers, options.hours), ("test", test_speakers, test_hours))
    train, test = (
        _Split(name, number, [f"{name}{n:05d}" for n in range(1, count + 1)], round(hours * FRAMES_PER_HOUR / count))
        for number, (name, count, hours) in enumerate(sizes)
    )
    held_out = np.sort(root.choice(options.speakers, max(1, options.speakers // 10), replace=False)).tolist()
    with atomic_directory(out) as folder:
        _write_graph(folder / "graph", model)
        write_text(folder / "cv_speakers.txt", "".join(f"{train.speakers[index]}\n" for index in held_out))
        frames, utterances = _write_split(folder, "ali", model, options.seed, train, progress)
        test_frames, test_utterances = _write_split(folder, "ali_test", model, options.seed, test, progress)
    return SynthSummary(frames, utterances, test_frames, test_utterances, len(lexicon.words))
