"""What alignment and graphs read of a Kaldi lang dir: its lexicon FST, and transcripts as its word-ids."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from ddnn.decoding.graph import check_epsilon_cycles
from ddnn.decoding.hmm import HINT_SYSTEM
from ddnn.kaldi.data_dir import read_text
from ddnn.kaldi.fst import Fst, read_fst, read_symbols
from ddnn.kaldi.transition_model import TransitionModel
from ddnn.util.errors import DataError
from ddnn.util.files import read_bytes_limited

HINT_LEXICON = "make it again with utils/prepare_lang.sh"


def read_lexicon(path: Path, transitions: TransitionModel, disambiguation: frozenset[int] = frozenset()) -> Fst:
    """An `L.fst`, or an `L_disambig.fst` with the ids of its disambiguation symbols. DataError: it is damaged, or has other
    phones than those of the transition model."""
    fst = read_fst(path)
    if fst.start < 0:
        raise DataError(f"{path.name} has no states", location=path, hint=HINT_LEXICON)
    for phone in np.unique(fst.arcs["ilabel"]).tolist():
        if phone and phone not in disambiguation and phone not in transitions.topology.phone_to_entry:
            message = f"{path.name} has the phone-id {phone}, for which final.mdl has no HMM"
            reason = "phones/disambig.int lacks it" if disambiguation else "not L_disambig.fst"
            raise DataError(message, location=path, hint=f"{HINT_SYSTEM}; {reason}")
    check_epsilon_cycles(fst, path, HINT_LEXICON)
    return fst


def read_transcripts(text: Path, lang: Path) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The word-ids of each utterance, and how often each word replaces one that words.txt lacks, by `oov.int`."""
    ids = {word: number for number, word in read_symbols(lang / "words.txt").items()}
    transcripts = read_text(text)
    oov = Counter(word for words in transcripts.values() for word in words if word not in ids)
    if oov:
        ids |= dict.fromkeys(oov, _read_oov(lang / "oov.int", next(iter(oov))))
    return {utterance: [ids[word] for word in words] for utterance, words in transcripts.items()}, dict(oov)


def _read_oov(path: Path, word: str) -> int:
    try:
        content = read_bytes_limited(path, 100).strip()
    except OSError as error:
        message = f"words.txt lacks {word!r}, and oov.int, which says what replaces it, cannot be read"
        hint = "utils/prepare_lang.sh writes oov.int; or correct the transcripts"
        raise DataError(f"{message}: {error.strerror}", location=path, hint=hint) from error
    if not content.isdigit() or int(content) < 1:
        raise DataError(f"expected the word-id for words outside words.txt, found {content!r}", location=path)
    return int(content)
