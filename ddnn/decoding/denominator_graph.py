"""`ddnn graph`: the decoding graph of a unigram language model, for denominator lattices.

Follows kaldi `egs/wsj/s5/utils/mkgraph.sh` and `hmm/hmm-utils.cc` (GetHTransducer, AddSelfLoops). Composition and
determinization are OpenFst's and Kaldi's, in the package kaldifst."""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddnn.decoding.hmm import ContextHmms, read_hmms
from ddnn.decoding.lang_dir import HINT_LEXICON, read_lexicon, read_transcripts
from ddnn.decoding.search import import_kaldi
from ddnn.kaldi.fst import ARC, Fst, read_fst, read_symbols, write_fst
from ddnn.kaldi.transition_model import TransitionModel, read_transition_model
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import atomic_directory, read_bytes_limited
from ddnn.util.text import plural

_MAX_DISAMBIGUATION = 1_000_000  # bytes of phones/disambig.int


@dataclass(frozen=True)
class GraphResult:
    """What was made. `oov`: how often each word that words.txt lacks was replaced."""

    out: str
    states: int
    arcs: int
    words: int  # different words
    utterances: int
    oov: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return vars(self)

    def as_text(self) -> str:
        text = (
            f"{self.out}: {plural(self.states, 'state')}, {plural(self.arcs, 'arc')}, {plural(self.words, 'word')} of "
        )
        text += plural(self.utterances, "utterance")
        return text + f"; {sum(self.oov.values())} words outside words.txt" * bool(self.oov)


def make_graph(
    lang: Path, tree_path: Path, model_path: Path, text: Path, out: Path, transition_scale: float = 1.0,
    self_loop_scale: float = 0.1,
) -> GraphResult:  # fmt: skip
    """Writes a Kaldi graph dir, all or nothing, to the new directory `out`: `HCLG.fst` of the unigram of the transcripts
    `text`, `words.txt`, `num_pdfs`, and what the lang dir has of `phones.txt` and `phones/`. `lang`: with `L_disambig.fst`,
    `words.txt`, `phones/disambig.int`, and `oov.int` where words of `text` are not in words.txt. UserError: damaged input,
    files that are not of one system, no words, words without a pronunciation, or the lexicon is not determinizable."""
    kaldifst = import_kaldi()[1]
    for name, scale in (("transition", transition_scale), ("self-loop", self_loop_scale)):
        if not 0 <= scale < 1e6:
            raise UserError(f"{scale:g} found, expected a number of at least 0", location=f"--{name}-scale")
    transitions = read_transition_model(model_path)
    hmms = read_hmms(tree_path, transitions, transition_scale, self_loop_scale)
    location = lang / "L_disambig.fst"
    disambiguation = _read_disambiguation(lang / "phones/disambig.int")
    lexicon = read_lexicon(location, transitions, disambiguation)
    transcripts, oov = read_transcripts(text, lang)
    counts = Counter(word for words in transcripts.values() for word in words)
    if not counts:
        raise DataError("the transcripts have no words", location=text, hint="give the text of the training data")
    if silent := sorted(counts.keys() - (set(lexicon.arcs["olabel"].tolist()) - {0})):
        names = read_symbols(lang / "words.txt")
        message = f"{plural(len(silent), 'word')} of {text} without a pronunciation: "
        message += ", ".join([*(names[word] for word in silent[:5]), *["..."] * (len(silent) > 5)])
        raise DataError(message, location=location, hint="add them to the lexicon, or correct the transcripts")
    with atomic_directory(out) as folder:
        try:
            unigram = _unigram(counts, len(transcripts))
            graph = _compose(kaldifst.StdFst.read(str(location)), unigram, hmms, transitions, disambiguation)
        except RuntimeError as error:
            message = f"the graph of {location.name} cannot be determinized: {str(error).splitlines()[-1]}"
            hint = f"words of one pronunciation need disambiguation symbols: {HINT_LEXICON}"
            raise DataError(message, location=location, hint=hint) from error
        path = folder / "HCLG.fst"
        graph.write(str(path))
        fst = add_self_loops(read_fst(path), hmms, transitions)
        write_fst(path, fst)
        (folder / "num_pdfs").write_text(f"{transitions.num_pdfs}\n")
        (folder / "phones").mkdir()
        for file in (lang / "words.txt", lang / "phones.txt", *(lang / "phones").iterdir()):
            if file.is_file():
                shutil.copyfile(file, folder / file.relative_to(lang))
    return GraphResult(str(out), fst.num_states, fst.num_arcs, len(counts), len(transcripts), oov)


def _read_disambiguation(path: Path) -> frozenset[int]:
    try:
        ids = read_bytes_limited(path, _MAX_DISAMBIGUATION).decode("ascii", "replace").split()
    except OSError as error:
        message = f"cannot read the ids of disambiguation symbols: {error.strerror}"
        raise DataError(message, location=path, hint=HINT_LEXICON) from error
    if wrong := [word for word in ids if not re.fullmatch("[0-9]{1,9}", word)]:
        raise DataError(f"expected phone-ids, found {wrong[0][:80]!r}", location=path, hint=HINT_LEXICON)
    return frozenset(map(int, ids))


def _one_state(arcs: Iterable[tuple[int, int, float]], final_cost: float = 0.0) -> Any:
    """A kaldifst.StdVectorFst of one state and self-loops (input label, output label, cost)."""
    kaldifst = import_kaldi()[1]
    fst = kaldifst.StdVectorFst()
    fst.start = fst.add_state()
    fst.set_final(fst.start, final_cost)
    for ilabel, olabel, cost in arcs:
        fst.add_arc(fst.start, kaldifst.StdArc(ilabel, olabel, cost, fst.start))
    return fst


def _unigram(counts: Counter[int], utterances: int) -> Any:
    """G: words by their share of words and ends."""
    total = counts.total() + utterances
    return _one_state(
        ((word, word, -math.log(count / total)) for word, count in sorted(counts.items())),
        -math.log(utterances / total),
    )


def _compose(
    lexicon: Any, unigram: Any, hmms: ContextHmms, transitions: TransitionModel, disambiguation: frozenset[int]
) -> Any:
    """HCLG without self-loops: transition-ids to words. RuntimeError: it cannot be determinized."""
    kaldifst, tree = import_kaldi()[1], hmms.tree
    words = kaldifst.StdVectorFst(kaldifst.compose(lexicon, unigram, match_side="right"))
    kaldifst.determinize_star(words, use_log=True)
    kaldifst.minimize_encoded(words)
    kaldifst.arcsort(words, "ilabel")
    in_context, windows = kaldifst.compose_context(
        sorted(disambiguation), tree.context_width, tree.central_position, words
    )
    kaldifst.arcsort(in_context, "ilabel")
    first_symbol = last = transitions.num_transition_ids + 1
    h = _one_state(())
    for number, window in enumerate(windows[1:], 1):
        if len(window) == 1 and window[0] <= 0:  # a disambiguation symbol
            h.add_arc(h.start, kaldifst.StdArc(last, number, 0.0, h.start))
            last += 1
            continue
        arcs = hmms.arcs(tuple(window))
        states = [h.add_state() for _ in range(max(arc.destination for arc in arcs))] + [h.start]
        h.add_arc(h.start, kaldifst.StdArc(0, number, 0.0, states[0]))
        for source, destination, transition_id, cost in arcs:
            h.add_arc(states[source], kaldifst.StdArc(transition_id, 0, cost, states[destination]))
    graph = kaldifst.StdVectorFst(kaldifst.compose(h, in_context))
    kaldifst.determinize_star(graph, use_log=True)
    ids = range(1, last)
    without_symbols = _one_state((number * (number < first_symbol), number, 0.0) for number in ids)
    graph = kaldifst.StdVectorFst(kaldifst.compose(without_symbols, graph))
    kaldifst.rmepsilon(graph)
    kaldifst.minimize_encoded(graph)
    return graph


def add_self_loops(fst: Fst, hmms: ContextHmms, transitions: TransitionModel) -> Fst:
    """The graph, reordered: a transition enters a state, and then come the self-loops of the HMM state that it left. A
    state has a copy for each transition-state by which it is entered, and one for arcs without transition-id; leaving a copy
    costs what leaving the HMM state does."""
    state_of, costs = transitions.transition_states()[0], hmms.costs
    _, first = np.unique(state_of, return_index=True)
    entered_by = first[state_of][fst.arcs["ilabel"]]  # the first transition-id of the transition-state
    ids = len(state_of)
    copies, targets = np.unique(
        np.append(fst.arcs["nextstate"].astype(np.int64) * ids + entered_by, fst.start * ids), return_inverse=True
    )
    original, transition_id = np.divmod(copies, ids)
    leave, loop, loop_id = (np.array(x)[transition_id] for x in (costs.leave, costs.loop, costs.loop_id))
    counts = np.diff(fst.offsets)[original]
    source = np.repeat(np.arange(len(copies)), counts)
    numbers = np.arange(len(source)) + np.repeat(fst.offsets[original] - np.cumsum(counts) + counts, counts)
    arcs = fst.arcs[numbers]
    arcs["nextstate"] = targets[numbers]
    arcs["weight"] += leave[source].astype(np.float32)
    looping = np.flatnonzero(loop_id)
    loops = np.zeros(len(looping), ARC)
    loops["ilabel"], loops["weight"], loops["nextstate"] = loop_id[looping], loop[looping], looping
    source = np.concatenate([source, looping])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(source, minlength=len(copies)))])
    final = (fst.final[original] + leave).astype(np.float32)
    arcs = np.concatenate([arcs, loops])[np.argsort(source, kind="stable")]
    return Fst(int(targets[-1]), final, offsets, arcs)
