"""`ddnn denlats`: denominator lattices of a data dir with a network, as Kaldi's steps/nnet/make_denlats.sh makes them.

Follows kaldi `decoder/lattice-simple-decoder.cc` (in the package kaldi_decoder, which has no max-active), whose raw lattices
are those of latgen-faster-mapped, and `ddnn.lattices.determinization`."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddnn.decoding.graph import DecodingGraph, read_graph
from ddnn.decoding.prepare import choose_with_jobs, scaled_log_priors, scores_then
from ddnn.decoding.search import import_kaldi
from ddnn.kaldi.alignments import check_same_tree
from ddnn.kaldi.basic_types import BasicTypeReader
from ddnn.kaldi.data_dir import read_text
from ddnn.kaldi.fst import write_fst
from ddnn.kaldi.lattice import Lattice, parse_lattice, write_lattices
from ddnn.lattices.determinization import determinize
from ddnn.nn.scorer import read_counts
from ddnn.runs.run_dir import load_run
from ddnn.runs.run_status import MODEL_DIGEST, PDF_COUNTS, digest_line, model_digest, run_dir_of
from ddnn.training.model_evaluation import load_for_model
from ddnn.util.arrays import Int32Array
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import ensure_directory, has_content, write_text
from ddnn.util.text import plural

log = logging.getLogger(__name__)

PART = 500
"""Utterances of an archive: what an interruption can cost."""
WEAK = 0.3
"""What `order_cost` is at most for graphs of a unigram, where only the context of phones depends on the order: AN4's have 0.02
to 0.03, that of a trigram 1.3 to 2.6."""
_SETTINGS = "denlats.json"


@dataclass(frozen=True)
class LatticeOptions:
    """Options of lattice generation, with the defaults of Kaldi's steps/nnet/make_denlats.sh. UserError: they cannot be.
    `raw`: lattices are not determinized."""

    beam: float = 13.0
    lattice_beam: float = 7.0
    acoustic_scale: float = 0.1
    raw: bool = False

    def __post_init__(self) -> None:
        for name in ("beam", "lattice_beam", "acoustic_scale"):
            if not 0 < (value := getattr(self, name)) < 1e6:
                location = f"--{name.replace('_', '-')}"
                raise UserError(f"{value:g} found, expected a number above 0", location=location)
        if self.lattice_beam > self.beam:
            message = f"the lattice beam {self.lattice_beam:g} is wider than the beam {self.beam:g}"
            raise UserError(message, location="--lattice-beam", hint="7 and 13 are usual")


@dataclass
class LatticeMaker:
    """Makes the lattice of an utterance. `fst`: a graph with pdf-id + 1 as input labels, and as output labels rows of
    `pairs`, int32 (pairs, 2): transition-id and word, of which row 0 is (0, 0). A folder for temporary files."""

    fst: Path
    pairs: Int32Array
    options: LatticeOptions

    @cached_property
    def graph(self) -> Any:
        return import_kaldi()[1].StdFst.read(str(self.fst))

    def __call__(self, utterance: str, loglikes: NDArray[np.float32]) -> Lattice | None:
        """`loglikes`: (frames, pdfs), not scaled. None where the search did not end in a final state."""
        kaldi_decoder, options = import_kaldi()[0], self.options
        scaled = np.ascontiguousarray(loglikes * np.float32(options.acoustic_scale))
        # The decoder does not keep its graph alive, nor the decodable its matrix.
        decodable = kaldi_decoder.DecodableCtc(scaled)
        config = kaldi_decoder.LatticeSimpleDecoderConfig(beam=options.beam, lattice_beam=options.lattice_beam)
        decoder = kaldi_decoder.LatticeSimpleDecoder(self.graph, config)
        decoder.decode(decodable)
        if not np.isfinite(decoder.final_relative_cost()):
            return None  # get_raw_lattice would have one that ends anywhere
        path = self.fst.with_name(f"{os.getpid()}.lat")
        decoder.get_raw_lattice()[1].write(str(path))
        lattice = parse_lattice(BasicTypeReader.from_bytes(path.read_bytes()))
        of_arcs = self.pairs[lattice.word]
        tids, words = of_arcs[np.diff(lattice.offsets) == 1, 0], of_arcs[:, 1]
        lattice = replace(lattice, tids=np.ascontiguousarray(tids), word=np.ascontiguousarray(words))
        if not options.raw:
            lattice = determinize(lattice, options.lattice_beam)
        return replace(lattice, acoustic_cost=lattice.acoustic_cost / np.float32(options.acoustic_scale))


def make_maker(graph: DecodingGraph, folder: Path, options: LatticeOptions) -> LatticeMaker:
    """Writes the graph for a LatticeMaker to `folder`."""
    labels = np.stack([graph.transition_ids, graph.fst.arcs["olabel"]], axis=1)
    pairs, rows = np.unique(np.concatenate([np.zeros((1, 2), np.int32), labels]), axis=0, return_inverse=True)
    arcs = graph.fst.arcs.copy()
    arcs["olabel"] = rows.reshape(-1)[1:]
    write_fst(folder / "pairs.fst", replace(graph.fst, arcs=arcs))
    return LatticeMaker(folder / "pairs.fst", pairs, options)


@dataclass(frozen=True)
class LatticesResult:
    """What lattice generation came to. `without_lattice`: utterances whose search did not end in a final state;
    `missing_words`: words of the transcripts that the graph lacks, and the utterances that have them."""

    lattices: str  # the scp
    utterances: int
    without_lattice: tuple[str, ...]
    frames: int  # of utterances with a lattice
    missing_words: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return vars(self)

    def as_text(self) -> str:
        done = self.utterances - len(self.without_lattice)
        return f"{self.lattices}: lattices of {done} of {plural(self.utterances, 'utterance')}, {self.frames} frames"


def make_lattices(
    run_dir: Path, data: Path, graph_dir: Path, model_path: Path, out: Path, options: LatticeOptions,
    device: str = "auto", jobs: int = 1, allow_pipes: bool = False, transforms: Path | None = None,
) -> LatticesResult:  # fmt: skip
    """Writes lattices of a data dir by a run's network to `out`: compact, in archives `lat.N.ark` of `PART` utterances with
    `lat.scp` for all, `num_jobs`, `final.mdl` and the model's digest; `raw_lat.N.ark` and `raw_lat.scp` where they are not
    determinized. What an interrupted run has completed is not made again. UserError: damaged input, files that are
    not of one system, or `out` has something else; no utterance has a lattice."""
    import_kaldi()
    target, acoustic = choose_with_jobs(device, jobs), load_run(run_dir)
    graph = read_graph(graph_dir, model_path)
    if graph.num_pdfs != acoustic.network.output_dim:
        message = f"{model_path.name} has {graph.num_pdfs} pdfs, the network {acoustic.network.output_dim}"
        raise DataError(
            message, location=model_path, hint="give graph and final.mdl of the network's training alignment"
        )
    check_same_tree(graph.transition_digest, acoustic.transition_digest, model_path, f"the network of {run_dir}")
    missing = _check_transcripts(graph, data / "text")
    folder = run_dir_of(run_dir)
    counts = read_counts(folder / PDF_COUNTS, acoustic.network.output_dim)
    priors = scaled_log_priors(counts, 1.0, run_dir).to(target)
    dataset = load_for_model(acoustic, data, None, allow_pipes=allow_pipes, transforms=transforms)
    digest, name = model_digest(run_dir), "raw_lat" if options.raw else "lat"
    settings = {**vars(options), "model": digest, "graph": model_digest(graph.location / "HCLG.fst")}
    lengths = dict(zip(dataset.utterances, dataset.num_frames.tolist(), strict=True))
    _begin(out, {**settings, "utterances": hashlib.sha256(json.dumps(lengths).encode()).hexdigest()})
    if options.raw:
        log.warning(
            "raw lattices hold all alignments of each word sequence: training with them optimizes another criterion"
        )
    shutil.copyfile(model_path, out / "final.mdl")
    (out / MODEL_DIGEST).write_bytes(digest_line(run_dir, out))
    scps = [out / f"{name}.{first // PART + 1}.scp" for first in range(0, len(lengths), PART)]
    complete = next((part for part, scp in enumerate(scps) if not scp.exists()), len(scps))
    if complete:
        log.info("%d of %s are there already", complete, plural(len(scps), "archive"))
    with tempfile.TemporaryDirectory(prefix="ddnn-graph-") as temporary:
        maker, rest = make_maker(graph, Path(temporary), options), slice(complete * PART, None)
        fields = {name: getattr(dataset, name)[rest] for name in ("utterances", "offsets", "num_frames")}
        todo = replace(dataset.to(target), **fields)
        made = scores_then(maker, acoustic.to(target), todo, "log-likelihoods", priors, jobs)
        with closing(made):
            for scp in scps[complete:]:
                lattices = ((utterance, lattice) for utterance, lattice in islice(made, PART) if lattice is not None)
                write_lattices(scp.with_suffix(".ark"), scp, lattices)
    return _finish(out, name, scps, lengths, missing)


def _check_transcripts(graph: DecodingGraph, text: Path) -> dict[str, int]:
    """Words of the transcripts that no arc of the graph has, with the number of utterances; a warning names them, and
    another one says where the graph is not of a weak language model."""
    if not text.exists():
        log.warning("%s does not exist: whether the graph has every word of the transcripts is not known", text)
        return {}
    words = {graph.words[label] for label in np.unique(graph.fst.arcs["olabel"]).tolist() if label}
    missing, affected, transcripts = dict[str, int](), 0, read_text(text).values()
    for transcript in transcripts:
        lacking = set(transcript) - words
        affected += bool(lacking)
        missing |= {word: missing.get(word, 0) + 1 for word in sorted(lacking)}
    if missing:
        message = (
            "%s lacks %s of the transcripts (%s), those of %s: their lattices do not hold the right path; make the "
        )
        message += "graph of these transcripts with ddnn graph"
        names = ", ".join([*list(missing)[:5], *["..."] * (len(missing) > 5)])
        log.warning(message, graph.location, plural(len(missing), "word"), names, plural(affected, "utterance"))
    if (cost := order_cost(graph, [words for words in transcripts if not missing.keys() & set(words)])) > WEAK:
        message = "%s is not of a weak language model: transcripts and the same words in reverse order differ in cost by %.1f a "
        message += "word, expected less than %.1f; lattices will lack competing words: make the graph with ddnn graph"
        log.warning(message, graph.location, cost, WEAK)
    return missing


def order_cost(graph: DecodingGraph, transcripts: Iterable[Sequence[str]]) -> float:
    """By how much the costs of transcripts and of the same words in reverse order differ: in absolute value, per word, mean of
    at most 20 transcripts; inf where the graph has no path for one of them. 0.0: there are no two different words."""
    kaldifst, ids = import_kaldi()[1], {word: label for label, word in graph.words.items()}
    of_words = [[ids[word] for word in words] for words in transcripts if words != words[::-1]]
    with tempfile.TemporaryDirectory(prefix="ddnn-graph-") as temporary:
        path = Path(temporary) / "words.fst"
        arcs = graph.fst.arcs.copy()
        np.maximum(
            arcs["weight"], 0, out=arcs["weight"]
        )  # a cycle without words whose cost is negative would have no shortest path
        write_fst(path, replace(graph.fst, arcs=arcs))
        fst = kaldifst.StdFst.read(str(path))

        def cost(words: list[int]) -> float:
            paths = kaldifst.compose(fst, kaldifst.make_linear_acceptor(words), match_side="right")
            if paths.start < 0:
                return math.inf
            return float(kaldifst.get_linear_symbol_sequence(kaldifst.shortest_path(paths))[3].value)

        chosen = of_words[:: len(of_words) // 20 + 1]
        costs = [(cost(words), cost(words[::-1]), len(words)) for words in chosen]
    differences = [abs(first - second) / count if first < math.inf else first for first, second, count in costs]
    return sum(differences) / max(1, len(differences))


def _begin(out: Path, settings: dict[str, Any]) -> None:
    """UserError where `out` has something else than a part of these lattices."""
    content = f"{json.dumps(settings, indent=1)}\n"
    ensure_directory(out)
    if not has_content(out / _SETTINGS, content.encode()):
        if any(out.iterdir()):
            message = f"{out.name} has something else than lattices of this model, graph, data and options"
            raise UserError(message, location=out, hint="name another --out, or remove it")
        write_text(out / _SETTINGS, content)


def _finish(out: Path, name: str, scps: list[Path], lengths: dict[str, int], missing: dict[str, int]) -> LatticesResult:
    lines = b"".join(scp.read_bytes() for scp in scps)
    made = {line.split()[0].decode() for line in lines.splitlines()}
    without = tuple(utterance for utterance in lengths if utterance not in made)
    if without:
        more = f" and {len(without) - 5} more" if len(without) > 5 else ""
        message = "%s without a lattice, whose search did not end in a final state: %s%s"
        log.warning(message, plural(len(without), "utterance"), ", ".join(without[:5]), more)
    if not made:
        hint = "check that network, graph and features are of one system, or give a wider --beam"
        raise DataError(f"none of {plural(len(without), 'utterance')} has a lattice", location=out, hint=hint)
    write_text(out / "num_jobs", f"{len(scps)}\n")
    scp = out / f"{name}.scp"
    write_text(scp, lines.decode())
    frames = sum(lengths[utterance] for utterance in made)
    return LatticesResult(str(scp), len(lengths), without, frames, missing)
