"""`ddnn synth`: writes a whole synthetic corpus as Kaldi would have left it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ddnn.kaldi.archive import write_int_vectors, write_matrices
from ddnn.kaldi.data_dir import FRAMES_PER_HOUR
from ddnn.kaldi.fst import write_fst
from ddnn.synth.acoustics import Acoustics, draw_batch, draw_speaker, make_acoustics, write_model
from ddnn.synth.lexicon import PHONES, Lexicon, make_graph, make_lexicon
from ddnn.util.errors import UserError
from ddnn.util.files import atomic_directory, ensure_directory, write_text

_BATCH = 64  # utterances drawn at once: some 18,000 frames
_ARCHIVE_BYTES = 500_000_000  # of an archive of features, at one byte per value


@dataclass(frozen=True)
class SynthOptions:
    """How large a corpus to make.

    Attributes:
        hours: training speech, at 100 frames a second; reached to within an utterance per speaker.
        test_hours: test speech; None: a tenth of `hours`, but at most 5.
        speakers: training speakers; a tenth of them, one or more, are named in `cv_speakers.txt`. An eighth as many others,
            two or more, speak the test set.
        dim: feature dims.
        pdfs: senones.
        seed: of everything. Same options, same numpy: the same bytes.
    """

    hours: float = 0.5
    test_hours: float | None = None
    speakers: int = 20
    dim: int = 40
    pdfs: int = 160
    seed: int = 1

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


@dataclass(frozen=True, eq=False)
class SyntheticModel:
    lexicon: Lexicon
    acoustics: Acoustics


@dataclass(frozen=True)
class _Split:
    """One of the two sets: its name, its number for the seeds, speakers' names, frames each of them speaks."""

    name: str
    number: int
    speakers: tuple[str, ...]
    frames_each: int


def _speakers(name: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}{index:05d}" for index in range(1, count + 1))


def _check(options: SynthOptions) -> tuple[float, int]:
    """The hours and speakers of the test set; UserError where an option is out of range."""
    test_hours = min(5.0, options.hours / 10) if options.test_hours is None else options.test_hours
    test_speakers = max(2, options.speakers // 8)
    errors = []
    if not 0 < options.hours <= 100_000 or not 0 < test_hours <= 100_000:
        errors.append(f"hours {options.hours} and test hours {test_hours}: expected more than 0, and 100000 at most")
    if not 2 <= options.speakers <= 99_999:
        errors.append(f"speakers {options.speakers}: expected 2 (one is held out for cross-validation) to 99999")
    if not 1 <= options.dim <= 10_000:
        errors.append(f"dim {options.dim}: expected 1 to 10000")
    if not 0 <= options.seed < 2**63:
        errors.append(f"seed {options.seed}: expected 0 to 2^63 - 1")
    if errors:
        raise UserError("; ".join(errors), hint="ddnn synth --help has the defaults")
    return test_hours, test_speakers


def _write_graph(folder: Path, model: SyntheticModel) -> None:
    ensure_directory(folder)
    write_fst(folder / "HCLG.fst", make_graph(model.lexicon, model.acoustics.self_loop))
    words = ["<eps>", *model.lexicon.words, "#0", "<s>", "</s>"]
    write_text(folder / "words.txt", "".join(f"{word} {index}\n" for index, word in enumerate(words)))
    write_text(folder / "num_pdfs", f"{len(model.lexicon.pdf_phone)}\n")
    _write_phones(folder / "phones.txt")


def _write_phones(path: Path) -> None:
    phones = ["<eps>", *PHONES, "#0"]
    write_text(path, "".join(f"{phone} {index}\n" for index, phone in enumerate(phones)))


class _Written:
    """The lists that grow while the archives are written."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.utt2spk: list[str] = []
        self.spk2utt: list[str] = []
        self.alignments: list[tuple[str, npt.NDArray[np.int32]]] = []
        self.frames = 0


def generate_speaker(
    model: SyntheticModel, seed: int, split: _Split, speaker: int, written: _Written
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """The utterances of one speaker, features one by one; the rest goes to `written`. Each speaker has an own seed."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1 + split.number, speaker)))
    shift, scale = draw_speaker(rng, model.acoustics.dim)
    name, spoken, utterances = split.speakers[speaker], 0, list[str]()
    while spoken < split.frames_each:
        batch = draw_batch(rng, model.lexicon, model.acoustics, _BATCH, shift, scale)
        for index, words in enumerate(batch.words):
            rows = slice(int(batch.frames[index]), int(batch.frames[index + 1]))
            utterance = f"{name}-{len(utterances) + 1:07d}"
            written.text.append(" ".join([utterance, *(model.lexicon.words[word] for word in words)]) + "\n")
            written.utt2spk.append(f"{utterance} {name}\n")
            written.alignments.append((utterance, batch.transition_ids[rows]))
            utterances.append(utterance)
            spoken += rows.stop - rows.start
            yield utterance, batch.features[rows]
            if spoken >= split.frames_each:
                break
    written.frames += spoken
    written.spk2utt.append(" ".join([name, *utterances]) + "\n")


def _write_split(
    out: Path, alignments: str, model: SyntheticModel, seed: int, split: _Split, progress: Callable[[int], None] | None
) -> tuple[int, int]:
    """A data dir and its alignment dir, an archive at a time; returns the numbers of frames and of utterances."""
    data, ali = out / split.name, out / alignments
    ensure_directory(data)
    ensure_directory(ali)
    bytes_in_all = split.frames_each * len(split.speakers) * model.acoustics.dim
    jobs = min(len(split.speakers), max(2, -(-bytes_in_all // _ARCHIVE_BYTES)))
    written = _Written()

    def features(speakers: npt.NDArray[np.int64]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        for speaker in speakers.tolist():
            before = written.frames
            yield from generate_speaker(model, seed, split, speaker, written)
            if progress is not None:
                progress(written.frames - before)

    scp = b""
    for job, speakers in enumerate(np.array_split(np.arange(len(split.speakers)), jobs), 1):
        part = data / f"feats.{job}.scp"
        write_matrices(data / f"feats.{job}.ark", part, features(speakers), compress=True, relative=True)
        write_int_vectors(ali / f"ali.{job}.gz", written.alignments)
        written.alignments.clear()
        scp += part.read_bytes()
        part.unlink()
    write_text(data / "feats.scp", scp.decode())
    for name in ("text", "utt2spk", "spk2utt"):
        write_text(data / name, "".join(getattr(written, name)))
    write_text(ali / "num_jobs", f"{jobs}\n")
    write_model(ali / "final.mdl", model.lexicon, model.acoustics)
    _write_phones(ali / "phones.txt")
    return written.frames, len(written.utt2spk)


def synthesize(out: Path, options: SynthOptions, progress: Callable[[int], None] | None = None) -> SynthSummary:
    """Writes a corpus in Kaldi's formats.

    `train/` and `test/` are data dirs of different speakers: compressed features in `feats.N.ark`, their paths in
    `feats.scp` relative to it. `ali/` and `ali_test/` hold the true alignments and a `final.mdl`, the true model.
    `graph/` is a word loop. `cv_speakers.txt` names speakers to hold out. There is no `tree`: the contexts of these
    senones end with the word. All appears at the end, or nothing does.

    Args:
        out: must not exist, or be an empty directory.
        options: sizes and seed.
        progress: called with the number of frames written since the last call.

    Raises:
        UserError: `out` is not empty or cannot be written, an option is out of range (the smallest possible is named).
    """
    test_hours, test_speakers = _check(options)
    root = np.random.default_rng(np.random.SeedSequence(options.seed, spawn_key=(0,)))
    lexicon = make_lexicon(root, options.pdfs)
    model = SyntheticModel(lexicon, make_acoustics(root, lexicon, options.dim))
    sizes = (("train", options.speakers, options.hours), ("test", test_speakers, test_hours))
    train, test = (
        _Split(name, number, _speakers(name, count), max(1, round(hours * FRAMES_PER_HOUR / count)))
        for number, (name, count, hours) in enumerate(sizes)
    )
    held_out = np.sort(root.choice(options.speakers, max(1, options.speakers // 10), replace=False)).tolist()
    with atomic_directory(out) as folder:
        _write_graph(folder / "graph", model)
        write_text(folder / "cv_speakers.txt", "".join(f"{train.speakers[index]}\n" for index in held_out))
        frames, utterances = _write_split(folder, "ali", model, options.seed, train, progress)
        test_frames, test_utterances = _write_split(folder, "ali_test", model, options.seed, test, progress)
    return SynthSummary(frames, utterances, test_frames, test_utterances, len(lexicon.words))
