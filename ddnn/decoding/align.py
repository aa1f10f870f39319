"""`ddnn align`: forced alignment of a data dir with a network, as Kaldi's steps/nnet/align.sh makes it.

Follows kaldi `decoder/decoder-wrappers.cc` (AlignUtteranceWrapper)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddnn.decoding.hmm import HINT_SYSTEM, read_hmms
from ddnn.decoding.lang_dir import read_lexicon, read_transcripts
from ddnn.decoding.prepare import choose_with_jobs, scaled_log_priors, scores_then
from ddnn.decoding.search import import_kaldi
from ddnn.decoding.training_graph import Lexicon, TrainingGraphs
from ddnn.kaldi.alignments import check_same_tree
from ddnn.kaldi.archive import write_int_vectors
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.nn.scorer import read_counts
from ddnn.runs.run_dir import load_run
from ddnn.runs.run_status import MODEL_DIGEST, PDF_COUNTS, digest_line, run_dir_of
from ddnn.training.model_evaluation import load_for_model
from ddnn.util.arrays import Int32Array
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import atomic_directory
from ddnn.util.text import plural

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AlignOptions:
    """Options of a forced alignment, with the defaults of Kaldi's steps/nnet/align.sh. UserError: they contradict."""

    beam: float = 10.0
    retry_beam: float = 40.0  # where no final state was reached; 0: no second search
    acoustic_scale: float = 0.1
    transition_scale: float = 1.0
    self_loop_scale: float = 0.1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < 1e6 or (value == 0 and name in ("beam", "acoustic_scale")):
                location = f"--{name.replace('_', '-')}"
                raise UserError(f"{value:g} found, expected a number above 0", location=location)
        if 0 < self.retry_beam <= self.beam:
            message = f"the retry beam {self.retry_beam:g} is not wider than the beam {self.beam:g}"
            raise UserError(message, location="--retry-beam", hint="10 and 40 are usual; 0: search once")


@dataclass(frozen=True, eq=False)
class Aligned:
    """The transition-id of each frame, int32 (frames,), or why there are none; whether the wider beam was needed."""

    transition_ids: Int32Array | None
    problem: str = ""
    retried: bool = False


@dataclass(frozen=True, eq=False)
class Aligner:
    """Aligns utterances by their log-likelihoods. `transcripts`: word-ids by utterance."""

    make_graph: TrainingGraphs
    transcripts: dict[str, list[int]]
    options: AlignOptions

    def __call__(self, utterance: str, loglikes: NDArray[np.float32]) -> Aligned:
        """`loglikes`: (frames, pdfs), not scaled."""
        if utterance not in self.transcripts:
            return Aligned(None, "no transcript in text")
        graph = self.make_graph(self.transcripts[utterance])
        if graph.start < 0:
            return Aligned(None, "no way through L.fst for the transcript")
        kaldi_decoder, kaldifst = import_kaldi()
        scaled = np.ascontiguousarray(loglikes * np.float32(self.options.acoustic_scale))
        for beam in (self.options.beam, self.options.retry_beam):
            if not beam:
                break
            # The decoder does not keep its graph alive, nor the decodable its matrix.
            decodable = kaldi_decoder.DecodableCtc(scaled)
            decoder = kaldi_decoder.FasterDecoder(graph, kaldi_decoder.FasterDecoderOptions(beam=beam))
            decoder.decode(decodable)
            if decoder.reached_final():
                _, _, transition_ids, _ = kaldifst.get_linear_symbol_sequence(decoder.get_best_path()[1])
                return Aligned(np.array(transition_ids, np.int32), "", beam != self.options.beam)
        return Aligned(None, "no final state reached (a wrong transcript, or fewer frames than HMM states)")


@dataclass(frozen=True)
class AlignResult:
    """What an alignment came to. `failed`: the utterances by the reason; `oov`: how often each word that words.txt lacks
    was replaced."""

    out: str
    utterances: int
    aligned: int
    frames: int  # of the aligned utterances
    retried: tuple[str, ...]
    failed: dict[str, list[str]]
    oov: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return vars(self)

    def as_text(self) -> str:
        parts = [f"{self.aligned} of {plural(self.utterances, 'utterance')} aligned, {self.frames} frames"]
        parts += [f"{len(self.retried)} of them with the retry beam"] * bool(self.retried)
        parts += [f"{sum(self.oov.values())} words outside words.txt"] * bool(self.oov)
        return f"{self.out}: {'; '.join(parts)}"


def align(
    run_dir: Path, data: Path, lang: Path, model_path: Path, tree_path: Path, out: Path, options: AlignOptions,
    device: str = "auto", jobs: int = 1, allow_pipes: bool = False, transforms: Path | None = None,
) -> AlignResult:  # fmt: skip
    """Writes the alignment of the transcripts of a data dir, by a run's network, to the new directory `out` as Kaldi has it:
    `ali.N.gz` of each of `jobs` processes, `num_jobs`, `final.mdl`, `tree`, and the model's digest; all or nothing. `lang`: with `L.fst`, `words.txt`
    and `oov.int`. UserError: damaged input, or files that are not of one system; no utterance could be aligned."""
    import_kaldi()
    target, acoustic = choose_with_jobs(device, jobs), load_run(run_dir)
    transitions = read_transition_model(model_path)
    if transitions.num_pdfs != acoustic.network.output_dim:
        message = f"{model_path.name} has {transitions.num_pdfs} pdfs, the network {acoustic.network.output_dim}"
        raise DataError(message, location=model_path, hint=HINT_SYSTEM)
    check_same_tree(transitions.digest, acoustic.transition_digest, model_path, f"the model of {run_dir}")
    transcripts, oov = read_transcripts(data / "text", lang)
    hmms = read_hmms(tree_path, transitions, options.transition_scale, options.self_loop_scale)
    lexicon = Lexicon(read_lexicon(lang / "L.fst", transitions))
    aligner = Aligner(TrainingGraphs(lexicon, hmms, transitions.transition_to_pdf), transcripts, options)
    of_network, run_dir = digest_line(run_dir, out), run_dir_of(run_dir)
    counts = read_counts(run_dir / PDF_COUNTS, acoustic.network.output_dim)
    priors = scaled_log_priors(counts, 1.0, run_dir).to(target)
    retried, failed, frames = list[str](), dict[str, list[str]](), 0
    with atomic_directory(out) as folder:
        dataset = load_for_model(acoustic, data, None, allow_pipes=allow_pipes, transforms=transforms)
        total = len(dataset.utterances)
        alignments = scores_then(
            aligner, acoustic.to(target), dataset.to(target), "log-likelihoods", priors, min(jobs, total)
        )

        def vectors(count: int) -> Iterator[tuple[str, Int32Array]]:
            nonlocal frames
            for utterance, aligned in islice(alignments, count):
                if aligned.transition_ids is None:
                    failed.setdefault(aligned.problem, []).append(utterance)
                    continue
                retried.extend([utterance] * aligned.retried)
                frames += len(aligned.transition_ids)
                yield utterance, aligned.transition_ids

        with closing(alignments):
            for job in range(jobs):
                count = total * (job + 1) // jobs - total * job // jobs
                write_int_vectors(folder / f"ali.{job + 1}.gz", vectors(count))
        for problem, names in failed.items():
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            log.warning("%s: %s: %s%s", plural(len(names), "utterance"), problem, ", ".join(names[:5]), more)
        if not frames:
            message = f"none of {plural(total, 'utterance')} could be aligned: {'; '.join(failed)}"
            raise DataError(message, location=data, hint=HINT_SYSTEM)
        (folder / "num_jobs").write_text(f"{jobs}\n")
        shutil.copyfile(model_path, folder / "final.mdl")
        shutil.copyfile(tree_path, folder / "tree")
        (folder / MODEL_DIGEST).write_bytes(of_network)
    aligned_count = total - sum(map(len, failed.values()))
    return AlignResult(str(out), total, aligned_count, frames, tuple(retried), failed, oov)
