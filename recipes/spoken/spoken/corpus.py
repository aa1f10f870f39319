"""A whole corpus: one process a speaker, then tree, alignments, graph and tables."""

from __future__ import annotations

import json
import multiprocessing.connection
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from ddnn.kaldi.archive import iterate_matrices, write_int_vectors, write_matrices
from ddnn.kaldi.basic_types import BasicTypeWriter
from ddnn.kaldi.data_dir import FRAMES_PER_HOUR, add_deltas
from ddnn.kaldi.fst import write_fst
from ddnn.kaldi.transition_model import write_left_to_right
from ddnn.util.errors import UserError, exit_code, user_message
from ddnn.util.files import atomic_write, ensure_directory, write_text
from ddnn.util.progress import frame_counter
from spoken.channel import RATE, SHIFT, WINDOW, Channel, Settings, filter_banks, num_frames, play_tape
from spoken.graph import make_graph, pronunciations_of
from spoken.phones import PHONES, phone_of
from spoken.text import choose_clauses, read_verses
from spoken.tree import EDGE, SILENCE, STATES, Statistics, Tree, accumulate, grow, merge
from spoken.voices import ACCENTS, Espeak, Speech, draw_variant, link_data
from spoken.voices import RATE as ESPEAK_RATE

_POOL = 24  # voices of the background
_POOL_SECONDS = 15
_TRAIN, _TEST, _BACKGROUND = range(3)  # of seeds
_ATTEMPTS = 3  # with another voice, after a crash of espeak
_CLAUSES_AN_HOUR = 3000  # of test speech, more than it takes


Task = Callable[[int], None]  # its argument is the number of the attempt, from 0


@dataclass(frozen=True)
class Options:
    """What corpus to make. Test speakers and test clauses are none of the training's."""

    hours: float
    speakers: int
    test_hours: float
    test_speakers: int
    voices: int
    pdfs: int
    snr: float
    reverb: float
    tilt: float
    warp: float
    prosody: float
    vocabulary: int
    seed: int

    def rng(self, kind: int, number: int, attempt: int = 0) -> np.random.Generator:
        return np.random.default_rng(
            np.random.SeedSequence(self.seed, spawn_key=(kind, number, *[attempt] * (attempt > 0)))
        )

    @property
    def channel(self) -> Settings:
        return Settings(self.snr, self.reverb, self.tilt, self.warp)


@dataclass(frozen=True)
class Utterance:
    """What was spoken: words as they were pronounced (`of_the` is one), phones of each, and the frame at which each phone of the
    utterance begins, pauses included."""

    name: str
    words: list[str]
    pronunciations: list[list[int]]
    phones: list[list[int]]  # (phone, first frame, before, after): neighbors within the word
    frames: int


def _mark_up(words: tuple[str, ...], rate: float, spread: float, rng: np.random.Generator) -> tuple[str, list[int]]:
    """SSML in which every 1 to 4 words have their own rate, pitch and volume; where each word begins in it."""
    text, starts, index = "<speak>", list[int](), 0
    while index < len(words):
        group = words[index : index + rng.integers(1, 5)]
        speed, pitch = 100 * rate * np.exp(rng.normal(0, spread)), 100 * spread * rng.normal()
        volume = 100 * np.exp(rng.normal(0, spread))
        text += f'<prosody rate="{speed:.0f}%" pitch="{pitch:+.0f}%" volume="{volume:.0f}">'
        for word in group:
            starts.append(len(text))
            text += word + " "
        text = text[:-1] + "</prosody> "
        index += len(group)
    return text[:-1] + "</speak>", starts


def _tokens(speech: Speech, words: tuple[str, ...], starts: list[int]) -> list[tuple[str, int, int]] | None:
    """Words as they were spoken, with their first phoneme and the end of their phonemes; None where words are lost."""
    marks: list[tuple[int, int]] = []  # of the first phoneme, of the first word
    for number, position in speech.words:
        word = int(np.searchsorted(starts, position, "right")) - 1
        if word > (marks[-1][1] if marks else -1):  # the end of a clause has an event too, at position 0
            marks.append((number, word))
    if not marks or marks[0][1] != 0:
        return None
    ends = [*marks[1:], (len(speech.phonemes), len(words))]
    tokens = [
        ("_".join(words[word:until]), first, end) for (first, word), (end, until) in zip(marks, ends, strict=True)
    ]
    return tokens if all(name.count("_") < 3 and first < end for name, first, end in tokens) else None


def _label(
    name: str,
    speech: Speech,
    tokens: list[tuple[str, int, int]],
    positions: NDArray[np.float64],
    pad: int,
    samples: int,
) -> Utterance | None:
    """Phones in frames, each of three or more, as HMMs of three states require; None where there are too few frames."""
    phones = [[SILENCE, 0, EDGE, EDGE]]
    pronunciations = []
    for _, first, end in tokens:
        spoken = [
            (phone_of(symbol), int(np.searchsorted(positions, begin)) + pad)
            for begin, symbol in speech.phonemes[first:end]
        ]
        word = [phone for phone, _ in spoken if phone != SILENCE]
        pronunciations.append(word)
        padded, index = [EDGE, *word, EDGE], 0
        for phone, sample in spoken:
            frame = max(0, -((WINDOW // 2 - sample) // SHIFT))  # the first whose middle is not before the phone
            index += phone != SILENCE
            if phone != SILENCE:
                phones.append([phone, frame, padded[index - 1], padded[index + 1]])
            elif phones[-1][0] != SILENCE:
                phones.append([SILENCE, frame, EDGE, EDGE])
    frames = num_frames(samples)
    if not all(pronunciations) or frames < STATES * len(phones):
        return None
    for this, following in pairwise(phones):
        following[1] = max(following[1], this[1] + STATES)
    latest = frames
    for this in reversed(phones):
        this[1] = latest = min(this[1], latest - STATES)
    return Utterance(name, [word for word, *_ in tokens], pronunciations, phones, frames)


def _voice(
    options: Options, kind: int, number: int, attempt: int, folder: Path
) -> tuple[Espeak, float, np.random.Generator]:
    """A voice, its rate of speaking, and what else is to be drawn for this speaker."""
    rng = options.rng(kind, number, attempt)
    drawn = options.rng(kind, number % options.voices, attempt) if options.voices else rng
    accent, variant, rate = ACCENTS[drawn.integers(len(ACCENTS))], draw_variant(drawn), drawn.normal(1.0, 0.1)
    link_data(folder)
    (folder / "espeak-ng-data/voices/!v/drawn").write_text(variant)
    return Espeak(folder, accent, "drawn", int(rng.integers(2**31))), rate, rng


def _speak_background(work: Path, options: Options, number: int, clauses: list[tuple[str, ...]], attempt: int) -> None:
    with TemporaryDirectory() as folder:
        espeak, rate, rng = _voice(options, _BACKGROUND, number, attempt, Path(folder))
        parts, length = [], 0
        for clause in clauses[number::_POOL]:
            samples, _ = play_tape(
                espeak.speak(_mark_up(clause, rate, options.prosody, rng)[0]).samples, ESPEAK_RATE, 0, rng
            )
            parts.append(samples.astype(np.float32))
            length += len(samples)
            if length > _POOL_SECONDS * RATE:
                break
    with atomic_write(work / f"background-{number}.npy") as handle:
        np.save(handle, np.concatenate(parts))


def _speak(
    out: Path,
    options: Options,
    kind: int,
    name: str,
    number: int,
    clauses: Iterable[tuple[str, ...]],
    frames: int,
    attempt: int,
) -> None:
    """All speech of one speaker: an archive of features, and in the work folder what was said."""
    work, split = out / "work", ("train", "test")[kind]
    pool = [np.load(work / f"background-{other}.npy", mmap_mode="r") for other in range(_POOL)]
    utterances: list[Utterance] = []

    def speech(espeak: Espeak, rate: float, rng: np.random.Generator) -> Iterator[tuple[str, NDArray[np.float32]]]:
        channel, spoken = Channel(options.channel, pool, rng), 0
        for clause in clauses:
            text, starts = _mark_up(clause, rate, options.prosody, rng)
            said = espeak.speak(text)
            tape, positions = play_tape(said.samples, ESPEAK_RATE, options.warp, rng)
            before, after = rng.integers(RATE // 10, RATE // 3, 2)
            samples = channel.transmit(np.pad(tape, (before, after)), rng)
            tokens = _tokens(said, clause, starts)
            key = f"{name}-{len(utterances) + 1:05d}"
            utterance = tokens and _label(key, said, tokens, positions, int(before), len(samples))
            if utterance:
                utterances.append(utterance)
                yield key, filter_banks(samples)
                spoken += utterance.frames
                if spoken >= frames:
                    return
        hours, expected = spoken / FRAMES_PER_HOUR, frames / FRAMES_PER_HOUR
        raise UserError(
            f"{hours:.2f} hours found in all its clauses, expected {expected:.2f}",
            location=name,
            hint="take more speakers, fewer hours, or a larger --vocabulary",
        )

    with TemporaryDirectory() as folder:
        voice = _voice(options, kind, number, attempt, Path(folder))
        ark = out / split / f"feats.{number + 1}.ark"
        write_matrices(ark, ark.with_suffix(".scp"), speech(*voice), compress=1, relative=True)
    write_text(work / f"{name}.json", json.dumps([vars(utterance) for utterance in utterances]))


def _read(work: Path, name: str) -> list[Utterance]:
    return [Utterance(**utterance) for utterance in json.loads((work / f"{name}.json").read_text())]


def _frames(utterance: Utterance) -> NDArray[np.int64]:
    """int64 [frames, 4]: phone, HMM state, phone before, phone after. States are thirds of a phone."""
    starts = [phone[1] for phone in utterance.phones]
    rows = []
    for (phone, start, before, after), end in zip(utterance.phones, [*starts[1:], utterance.frames], strict=True):
        states = np.arange(end - start) * STATES // (end - start)
        rows.append(np.column_stack([np.full(len(states), phone), states, np.tile([before, after], (len(states), 1))]))
    return np.concatenate(rows).astype(np.int64)


def _collect(out: Path, name: str, number: int, _: int) -> None:
    """Statistics of one training speaker, after mean and variance normalization, into the work folder."""
    work, statistics = out / "work", dict[Any, Any]()
    utterances = {utterance.name: utterance for utterance in _read(work, name)}
    matrices = dict(iterate_matrices(out / "train" / f"feats.{number + 1}.ark"))
    stacked = np.concatenate(list(matrices.values()))
    mean, deviation = stacked.mean(axis=0), stacked.std(axis=0)
    for key, matrix in matrices.items():
        features = add_deltas((matrix - mean) / deviation, 1).astype(np.float64)
        accumulate(statistics, _frames(utterances[key]), features)
    keys = sorted(statistics)
    with atomic_write(work / f"{name}.npz") as handle:
        np.savez(handle, keys=np.array(keys), values=np.array([statistics[key] for key in keys]))


def _load_statistics(work: Path, name: str) -> Statistics:
    with np.load(work / f"{name}.npz") as arrays:
        return dict(zip(map(tuple, arrays["keys"].tolist()), arrays["values"], strict=True))


def _run(tasks: list[Task], jobs: int, progress: Callable[[], None]) -> None:
    """Each task in a new process of its own, `jobs` at a time. One whose process crashes, as espeak may, is tried again with
    another voice; an error ends all."""
    context = multiprocessing.get_context("fork")
    running, waiting = dict[Any, tuple[Task, int]](), [(task, 0) for task in reversed(tasks)]
    try:
        while waiting or running:
            if waiting and len(running) < jobs:
                process = context.Process(target=_in_process, args=waiting[-1], daemon=True)
                try:
                    process.start()
                except BlockingIOError:  # no process to be had just now
                    if not running:
                        raise
                    time.sleep(1)
                else:
                    running[process] = waiting.pop()
                continue
            multiprocessing.connection.wait([process.sentinel for process in running])
            for process in [process for process in running if not process.is_alive()]:
                task, attempt = running.pop(process)
                if process.exitcode == -signal.SIGSEGV and attempt < _ATTEMPTS:
                    waiting.append((task, attempt + 1))
                elif process.exitcode:
                    if process.exitcode < 0:
                        click.echo(f"a process was killed by {signal.Signals(-process.exitcode).name}", err=True)
                    sys.exit(max(1, process.exitcode))
                else:
                    progress()
    finally:
        for process in running:
            process.terminate()


def _in_process(task: Task, attempt: int) -> None:
    try:
        task(attempt)
    except UserError as error:
        click.echo(user_message(error), err=True)
        sys.exit(exit_code(error))


def _write_alignments(
    out: Path, folder: str, utterances: Iterator[Utterance], tree: Tree
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`ali.1.gz` of transition-ids; returns int64 [pdfs] twice: frames of each pdf, and how often it is entered."""
    frames, entered = np.zeros(tree.num_pdfs, np.int64), np.zeros(tree.num_pdfs, np.int64)

    def transition_ids() -> Iterator[tuple[str, NDArray[np.int32]]]:
        for utterance in utterances:
            contexts = _frames(utterance)
            pdfs = tree.table[tuple(contexts.T)]
            first = np.ones(len(pdfs), bool)
            first[1:] = (
                contexts[1:, 1] != contexts[:-1, 1]
            )  # a phone begins with another state than the last one ended with
            np.add.at(frames, pdfs, 1)
            np.add.at(entered, pdfs[first], 1)
            yield utterance.name, (2 * pdfs + 1 + first).astype(np.int32)

    ensure_directory(out / folder)
    write_int_vectors(out / folder / "ali.1.gz", transition_ids())
    write_text(out / folder / "num_jobs", "1\n")
    _write_symbols(out / folder / "phones.txt", PHONES)
    return frames, entered


def _write_symbols(path: Path, symbols: list[str]) -> None:
    write_text(path, "".join(f"{symbol} {index}\n" for index, symbol in enumerate(["<eps>", *symbols])))


def _write_tables(out: Path, split: str, names: list[str]) -> None:
    scps = [(out / split / f"feats.{number + 1}.scp").read_text() for number in range(len(names))]
    tables: dict[str, list[str]] = {"text": [], "utt2spk": [], "spk2utt": []}
    for name in names:
        utterances = _read(out / "work", name)
        tables["text"] += [f"{said.name} {' '.join(said.words)}" for said in utterances]
        tables["utt2spk"] += [f"{said.name} {name}" for said in utterances]
        tables["spk2utt"].append(" ".join([name, *(said.name for said in utterances)]))
    for table, lines in tables.items():
        write_text(out / split / table, "".join(f"{line}\n" for line in lines))
    write_text(out / split / "feats.scp", "".join(scps))


def _finish(out: Path, options: Options, train: list[str], test: list[str]) -> str:
    """Tree, alignments, graph and tables, of what was spoken; returns what there is, as a text."""
    work = out / "work"

    def utterances(names: list[str]) -> Iterator[Utterance]:
        return (utterance for name in names for utterance in _read(work, name))

    tree = grow(merge(_load_statistics(work, name) for name in train), len(PHONES), options.pdfs)
    frames, entered = _write_alignments(out, "ali", utterances(train), tree)
    test_frames, _ = _write_alignments(out, "ali_test", utterances(test), tree)
    self_loop = np.clip(1 - entered / np.maximum(frames, 1), 0.1, 0.95)
    triples = np.column_stack([tree.pdf_phone, tree.pdf_state, np.arange(tree.num_pdfs)]).astype(np.int32)
    for folder in ("ali", "ali_test"):
        with atomic_write(out / folder / "final.mdl") as handle:
            write_left_to_right(BasicTypeWriter(handle), len(PHONES), STATES, triples, self_loop)
    lexicon = pronunciations_of(
        (word, tuple(phones))
        for utterance in utterances(train)
        for word, phones in zip(utterance.words, utterance.pronunciations, strict=True)
    )
    graph, words = make_graph((utterance.words for utterance in utterances(train)), lexicon, tree, self_loop)
    ensure_directory(out / "graph")
    write_fst(out / "graph" / "HCLG.fst", graph)
    unknown = {word for utterance in utterances(test) for word in utterance.words} - set(words)
    _write_symbols(out / "graph" / "words.txt", [*words, "#0", "<s>", "</s>", *sorted(unknown)])
    _write_symbols(out / "graph" / "phones.txt", PHONES)
    write_text(out / "graph" / "num_pdfs", f"{tree.num_pdfs}\n")
    held_out = train[:: max(1, len(train) // max(1, len(train) // 15))]
    write_text(out / "cv_speakers.txt", "".join(f"{name}\n" for name in held_out))
    for split, names in (("train", train), ("test", test)):
        _write_tables(out, split, names)
    total = f"{frames.sum():,} training frames, {test_frames.sum():,} test frames, {tree.num_pdfs} pdfs, {len(words):,} words"
    return f"{total}, a graph of {graph.num_states:,} states and {graph.num_arcs:,} arcs"


def _begin(out: Path, options: Options) -> None:
    """Makes `out`, or finds there what the same options have begun. UserError: it holds something else."""
    settings = out / "work" / "options.json"
    if settings.exists():
        if json.loads(settings.read_text()) != asdict(options):
            raise UserError(
                "was begun with other options", location=settings, hint="repeat these, or name another folder"
            )
    elif out.exists() and any(out.iterdir()):
        raise UserError("is not empty", location=out, hint="name a new folder")
    for folder in ("work", "train", "test"):
        ensure_directory(out / folder)
    write_text(settings, json.dumps(asdict(options)))


def synthesize(out: Path, options: Options, jobs: int) -> str:
    """Makes the corpus, or the rest of one that was begun; returns what there is, as a text."""
    _begin(out, options)
    work = out / "work"
    clauses = choose_clauses(read_verses(), options.vocabulary, options.rng(_TRAIN, 2**31))
    reserved = min(len(clauses) // 2, round(_CLAUSES_AN_HOUR * options.test_hours) + 200)
    of_test, of_train = clauses[:reserved], clauses[reserved:]
    background: list[Task] = [
        partial(_speak_background, work, options, number, of_train)
        for number in range(_POOL)
        if not (work / f"background-{number}.npy").exists()
    ]
    sets = (
        (_TRAIN, "train", options.hours, options.speakers, of_train),
        (_TEST, "test", options.test_hours, options.test_speakers, of_test),
    )
    speaking, names = list[Task](), dict[str, list[str]]()
    for kind, split, hours, speakers, texts in sets:
        names[split] = [f"{split}{number + 1:04d}" for number in range(speakers)]
        frames = round(hours * FRAMES_PER_HOUR / speakers)
        for number, name in enumerate(names[split]):
            turns = [texts[(number + offset) % len(texts) :: speakers] for offset in range(speakers)]
            read = chain.from_iterable(turns)
            if not (work / f"{name}.json").exists():
                speaking.append(partial(_speak, out, options, kind, name, number, read, frames))
    with frame_counter("speakers", len(background) + len(speaking) + options.speakers, unit="speakers") as advance:
        _run(background, jobs, lambda: advance(1))
        _run(speaking, jobs, lambda: advance(1))
        counting: list[Task] = [
            partial(_collect, out, name, number)
            for number, name in enumerate(names["train"])
            if not (work / f"{name}.npz").exists()
        ]
        _run(counting, jobs, lambda: advance(1))
    summary = _finish(out, options, names["train"], names["test"])
    finished = work.rename(out / "work.finished")  # from here on nothing is to be made, however long it takes to remove
    for split, speakers in names.items():
        for number in range(len(speakers)):
            (out / split / f"feats.{number + 1}.scp").unlink()
    rmtree(finished)
    return summary
