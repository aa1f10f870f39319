"""`ddnn synth`: writes a whole synthetic corpus as Kaldi would have left it."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ddnn.errors import UserError
from ddnn.files import make_directory, write_text, written_whole
from ddnn.kaldi.features import FRAMES_PER_HOUR
from ddnn.kaldi.fst import write_fst
from ddnn.kaldi.tables import write_int_vectors, write_matrices
from ddnn.kaldi.topology import left_to_right
from ddnn.kaldi.transitions import build_transition_model, write_diag_gmms, write_transition_model
from ddnn.synth.acoustics import COMPONENTS, Acoustics, draw_block, draw_speaker, make_acoustics
from ddnn.synth.graph import make_graph
from ddnn.synth.lexicon import PHONES, STATES, Lexicon, make_lexicon

_BLOCK = 64  # utterances drawn at once: some 18,000 frames
_ARCHIVE_BYTES = 500_000_000  # of an archive of features, at one byte per value


@dataclass(frozen=True)
class SynthOptions:
    """How large a corpus to make.

    Attributes:
        hours: training speech, at 100 frames a second; reached to within an utterance per speaker.
        test_hours: test speech; None: a tenth of `hours`, but at most 5.
        speakers: training speakers; a tenth of them, one or more, stand in `cv_speakers.txt`. An eighth as many others,
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
class _Language:
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


def _check(out: Path, options: SynthOptions) -> tuple[float, int]:
    """The hours and speakers of the test set; UserError where an option cannot be."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"{out.name} exists already and is not empty", where=out, mend="name another OUT_DIR, or remove it"
        )
    test_hours = min(5.0, options.hours / 10) if options.test_hours is None else options.test_hours
    test_speakers = max(2, options.speakers // 8)
    wrong = []
    if not 0 < options.hours <= 100_000 or not 0 < test_hours <= 100_000:
        wrong.append(f"hours {options.hours} and test hours {test_hours}: expected more than 0, and 100000 at most")
    if not 2 <= options.speakers <= 99_999:
        wrong.append(f"speakers {options.speakers}: expected 2 (one is held out for cross-validation) to 99999")
    if not 1 <= options.dim <= 10_000:
        wrong.append(f"dim {options.dim}: expected 1 to 10000")
    if not 0 <= options.seed < 2**63:
        wrong.append(f"seed {options.seed}: expected 0 to 2^63 - 1")
    if wrong:
        raise UserError("; ".join(wrong), mend="ddnn synth --help has the defaults")
    return test_hours, test_speakers


def _write_model(path: Path, language: _Language) -> None:
    lexicon, acoustics = language.lexicon, language.acoustics
    tuples = [
        (phone + 1, state, pdf, pdf)
        for pdf, (phone, state) in enumerate(zip(lexicon.pdf_phone.tolist(), lexicon.pdf_state.tolist(), strict=True))
    ]
    model = build_transition_model(left_to_right(range(1, len(PHONES) + 1), STATES), tuples)
    # Trained probabilities: those that the durations are drawn from. Transition-ids: self-loop, then forward, by pdf.
    model.log_probs[1::2] = np.log(acoustics.self_loop)
    model.log_probs[2::2] = np.log(1 - acoustics.self_loop)
    means = acoustics.means.astype(np.float64).reshape(len(tuples), COMPONENTS, -1)
    variances = acoustics.deviations.astype(np.float64).reshape(means.shape) ** 2
    weights = np.full((len(tuples), COMPONENTS), 1 / COMPONENTS)
    with written_whole(path) as handle:
        write_transition_model(handle, model)
        write_diag_gmms(handle, list(means), list(variances), list(weights))


def _write_graph(folder: Path, language: _Language) -> None:
    make_directory(folder)
    write_fst(folder / "HCLG.fst", make_graph(language.lexicon, language.acoustics))
    words = ["<eps>", *language.lexicon.words, "#0", "<s>", "</s>"]
    write_text(folder / "words.txt", "".join(f"{word} {index}\n" for index, word in enumerate(words)))
    write_text(folder / "num_pdfs", f"{len(language.lexicon.pdf_phone)}\n")
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


def _speak(
    language: _Language, seed: int, split: _Split, speaker: int, written: _Written
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """The utterances of one speaker, features one by one; the rest goes to `written`. Each speaker has an own seed."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1 + split.number, speaker)))
    shift, scale = draw_speaker(rng, language.acoustics.dim)
    name, spoken, utterances = split.speakers[speaker], 0, list[str]()
    while spoken < split.frames_each:
        block = draw_block(rng, language.lexicon, language.acoustics, _BLOCK, shift, scale)
        for index, words in enumerate(block.words):
            rows = slice(int(block.frames[index]), int(block.frames[index + 1]))
            utterance = f"{name}-{len(utterances) + 1:07d}"
            written.text.append(" ".join([utterance, *(language.lexicon.words[word] for word in words)]) + "\n")
            written.utt2spk.append(f"{utterance} {name}\n")
            written.alignments.append((utterance, block.transition_ids[rows]))
            utterances.append(utterance)
            spoken += rows.stop - rows.start
            yield utterance, block.features[rows]
            if spoken >= split.frames_each:
                break
    written.frames += spoken
    written.spk2utt.append(" ".join([name, *utterances]) + "\n")


def _write_split(
    out: Path, alignments: str, language: _Language, seed: int, split: _Split, progress: Callable[[int], None] | None
) -> tuple[int, int]:
    """A data dir and its alignment dir, an archive at a time; returns the numbers of frames and of utterances."""
    data, ali = out / split.name, out / alignments
    make_directory(data)
    make_directory(ali)
    bytes_in_all = split.frames_each * len(split.speakers) * language.acoustics.dim
    jobs = min(len(split.speakers), max(2, -(-bytes_in_all // _ARCHIVE_BYTES)))
    written = _Written()

    def features(speakers: npt.NDArray[np.int64]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        for speaker in speakers.tolist():
            before = written.frames
            yield from _speak(language, seed, split, speaker, written)
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
    _write_model(ali / "final.mdl", language)
    _write_phones(ali / "phones.txt")
    return written.frames, len(written.utt2spk)


def synthesise(out: Path, options: SynthOptions, progress: Callable[[int], None] | None = None) -> SynthSummary:
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
        UserError: `out` is not empty or cannot be written, an option cannot be (the smallest possible is named).
    """
    test_hours, test_speakers = _check(out, options)
    root = np.random.default_rng(np.random.SeedSequence(options.seed, spawn_key=(0,)))
    lexicon = make_lexicon(root, options.pdfs)
    language = _Language(lexicon, make_acoustics(root, lexicon, options.dim))
    sizes = (("train", options.speakers, options.hours), ("test", test_speakers, test_hours))
    train, test = (
        _Split(name, number, _speakers(name, count), max(1, round(hours * FRAMES_PER_HOUR / count)))
        for number, (name, count, hours) in enumerate(sizes)
    )
    held_out = np.sort(root.choice(options.speakers, max(1, options.speakers // 10), replace=False)).tolist()
    temporary = out / f".tmp{os.getpid()}"
    make_directory(temporary)
    try:
        _write_graph(temporary / "graph", language)
        write_text(temporary / "cv_speakers.txt", "".join(f"{train.speakers[index]}\n" for index in held_out))
        frames, utterances = _write_split(temporary, "ali", language, options.seed, train, progress)
        test_frames, test_utterances = _write_split(temporary, "ali_test", language, options.seed, test, progress)
        for made in sorted(temporary.iterdir()):  # the same file system: each appears whole
            made.replace(out / made.name)
    except OSError as error:
        raise UserError(f"cannot write {out.name}: {error.strerror}", where=out, mend="name another OUT_DIR") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return SynthSummary(frames, utterances, test_frames, test_utterances, len(lexicon.words))
