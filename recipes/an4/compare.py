"""Word error rates of a model of ng-random.yaml, in a table with those of Kaldi's GMM and networks:

    python recipes/an4/compare.py demo/an4        # a run dir with graph/score.json and graph_ug/score.json, from `ddnn score --out`

Kaldi's figures are those of the corpus's README.md, where ddnn's are computed from the run's words.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

README = Path(__file__).parent / "corpus" / "README.md"
NETWORK = "ddnn, random initialization, NG-SGD"


def wer(score: Path) -> str:
    """The word error rate at the best acoustic scale, with its 95 % interval."""
    result = json.loads(score.read_text())
    (best,) = [scale for scale in result["scales"] if scale["acoustic_scale"] == result["best"]]
    low, high = best["interval"]
    return f"{best['wer']:5.2f} % ({low:.1f} .. {high:.1f})"


def table(run_dir: Path) -> str:
    """The rows of Kaldi, and one of the run."""
    rows = re.findall(r"^\| (Kaldi [^|]*) \| ([\d.]+ %) \| ([\d.]+ %) \|$", README.read_text(), re.MULTILINE)
    rows = [(system, *(f"{figure:>7}" for figure in figures)) for system, *figures in rows]
    ours = (NETWORK, *(wer(run_dir / graph / "score.json") for graph in ("graph", "graph_ug")))
    lines = [("word error rate on AN4's test set", "trigram", "unigram"), *rows, ours]
    return "\n".join(f"{system:36}  {trigram:22}  {unigram}".rstrip() for system, trigram, unigram in lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
    print(
        "ddnn: 95 % intervals by speakers. Kaldi: one run each, figures of recipes/an4/corpus/README.md, not computed here."
    )
    print("Each at its best acoustic scale or language-model weight on the test set; one of its 773 words is 0.13 %.")
