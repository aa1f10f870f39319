"""The best path of each utterance through a decoding graph, by token passing (Kaldi's `decoder/faster-decoder.cc` in the
package kaldi_decoder). The packages of the extra `[decode]` are imported only when needed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddnn.decoding.graph import DecodingGraph
from ddnn.decoding.options import DecodeOptions
from ddnn.decoding.word_errors import HINT_INSTALL
from ddnn.kaldi.fst import write_fst
from ddnn.util.errors import DataError, UserError
from ddnn.util.pool import worker_pool


@dataclass(frozen=True)
class Hypothesis:
    """The words of the best path at one acoustic scale, none where no path survived; whether it ends in a final state,
    as it must in a complete utterance; and the frame, from 0, of the label of each word on the path."""

    words: tuple[str, ...]
    reached_final: bool
    starts: tuple[int, ...] = ()


def _check_loglikes(utterance: str, matrix: NDArray[np.float32], graph: DecodingGraph) -> NDArray[np.float32]:
    """The matrix in the form that the decoder needs. The decoder itself reads past the end of a matrix with too few
    columns."""
    hint = "write it again with ddnn decode-prep, with the model that belongs to this graph"
    if matrix.ndim != 2 or matrix.shape[0] == 0 or matrix.shape[1] != graph.num_pdfs:
        message = f"utterance {utterance}: log-likelihoods of shape {'x'.join(map(str, matrix.shape))} (frames x pdfs)"
        message += f", expected at least one frame and {graph.num_pdfs} pdfs"
        raise DataError(message, location=graph.location, hint=hint)
    with np.errstate(over="ignore", invalid="ignore"):
        matrix = np.ascontiguousarray(matrix, dtype=np.float32)
    possible = np.abs(matrix) < 1e30  # false for NaN too; Kaldi gives a pdf that was never seen -1.8e19
    if not possible.all():
        frame, pdf = np.argwhere(~possible)[0].tolist()
        message = f"utterance {utterance}: the log-likelihood of pdf {pdf} in frame {frame} is {matrix[frame, pdf]}"
        raise DataError(f"{message}, expected a finite number", location=graph.location, hint=hint)
    if np.all(matrix >= 0) and np.allclose(matrix.sum(axis=1), 1, atol=1e-2):
        message = f"utterance {utterance}: posteriors found (each frame sums to 1), expected log-likelihoods"
        raise DataError(message, location=graph.location, hint=hint)
    return matrix


def import_kaldi() -> tuple[Any, Any]:
    """The modules kaldi_decoder and kaldifst. UserError: they are missing."""
    try:
        import kaldi_decoder
        import kaldifst
    except ImportError as error:
        message = f"decoding needs packages that are not installed ({error.name})"
        raise UserError(message, hint=HINT_INSTALL) from error
    return kaldi_decoder, kaldifst


class _Decoder:
    """Decodes at each acoustic scale with the FST in a file, whose output labels are `words`. UserError: the packages are
    missing."""

    def __init__(self, fst: Path, words: dict[int, str], options: DecodeOptions) -> None:
        kaldi_decoder, kaldifst = import_kaldi()
        self.kaldi, self.words, self.scales = kaldi_decoder, words, options.acoustic_scales
        limits = {"beam": options.beam, "max_active": options.max_active, "min_active": options.min_active}
        self.config = kaldi_decoder.FasterDecoderOptions(**limits)
        self.fst = kaldifst.StdFst.read(str(fst))

    def __call__(self, loglikes: NDArray[np.float32]) -> tuple[Hypothesis, ...]:
        """One hypothesis per scale. `loglikes`: checked by `_check_loglikes`."""
        return tuple(self._decode(np.ascontiguousarray(loglikes * np.float32(scale))) for scale in self.scales)

    def _decode(self, scaled: NDArray[np.float32]) -> Hypothesis:
        # A decoder's hash table remembers the size of utterances before, which changes the order of tokens: a new one
        # makes the result that of this utterance alone. It does not keep the FST alive, nor the decodable its matrix.
        decoder, decodable = self.kaldi.FasterDecoder(self.fst, self.config), self.kaldi.DecodableCtc(scaled)
        decoder.decode(decodable)
        reached = bool(decoder.reached_final())
        survived, path = decoder.get_best_path()
        labels = _output_labels(path.start, path.to_str()) if survived else []
        words, starts = tuple(self.words[label] for label, _ in labels), tuple(start for _, start in labels)
        return Hypothesis(words, reached and bool(survived), starts)


def _output_labels(state: int, arcs: str) -> list[tuple[int, int]]:
    """The output labels of a linear lattice, printed as OpenFst prints it, each with the number of frames before it."""
    lines = (line.split()[:4] for line in arcs.splitlines())
    following = {int(line[0]): (int(line[1]), int(line[2]), int(line[3])) for line in lines if len(line) == 4}
    labels, frame = [], 0
    while state in following:
        state, consumed, label = following.pop(state)
        if label:
            labels.append((label, frame))
        frame += consumed != 0
    return labels


def decode_utterances(
    loglikes: Iterable[tuple[str, NDArray[np.float32]]], graph: DecodingGraph, options: DecodeOptions, jobs: int = 1
) -> Iterator[tuple[str, int, tuple[Hypothesis, ...]]]:
    """Decodes each utterance at each acoustic scale (frames x pdfs, not yet scaled), in `jobs` processes with the same
    result; yields in order the utterance, its number of frames and one hypothesis per scale. UserError: the packages
    are missing. DataError: a matrix that is empty, has another number of pdfs than the graph, or holds NaN or Inf."""
    checked = ((name, _check_loglikes(name, matrix, graph)) for name, matrix in loglikes)
    with tempfile.TemporaryDirectory(prefix="ddnn-graph-") as folder:
        arguments = Path(folder) / "pdfs.fst", graph.words, options
        write_fst(arguments[0], graph.fst)
        if jobs == 1:
            decoder = _Decoder(*arguments)
            yield from ((name, len(matrix), decoder(matrix)) for name, matrix in checked)
            return
        with worker_pool(jobs, "a process of --jobs", "--jobs 1") as pool:
            pool.initialize(_start_decoding, *arguments)
            yield from pool.run((_decode, *utterance) for utterance in checked)


_decoder: list[_Decoder] = []  # of a process of --jobs


def _start_decoding(fst: Path, words: dict[int, str], options: DecodeOptions) -> None:
    _decoder[:] = [_Decoder(fst, words, options)]


def _decode(utterance: str, loglikes: NDArray[np.float32]) -> tuple[str, int, tuple[Hypothesis, ...]]:
    return utterance, len(loglikes), _decoder[0](loglikes)
