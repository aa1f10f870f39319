"""The word error rates that Kaldi's scoring found in decode dirs, as files for `ddnn report` and `ddnn reproduce`:

    python sclite.py exp/reproduce/swbd/runs/*/decode-eval2000

writes DECODE_DIR/NAME.json with the lowest rate of each test set, from the files of Kaldi's `local/score_sclite.sh`:

    score_LMWT/NAME.ctm[.SUBSET].filt.{sys,raw}             s5b
    score_LMWT_PENALTY/NAME.ctm[.SUBSET].filt.{sys,raw}     s5c, with a word insertion penalty

NAME is that of the data dir; eval2000 has the subsets `swbd` and `callhm`, rt03 `swbd` and `fsh`. `.sys` has percentages
with one decimal, `.raw` counts of words, which are preferred. The best weight counts for each subset by itself, as in
`utils/best_wer.sh`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

PAPER_NAMES = {("eval2000", "swbd"): "SWB", ("eval2000", "callhm"): "CH"}
"""Kaldi's data dir and subset -> the paper's name. Other test sets have a `swbd` too: it is not the paper's SWB."""
MAX_BYTES = 1 << 20  # of a summary, which has a line of some hundred bytes for each speaker

_SUMMARY = re.compile(r"score_\d+(?:_\d+(?:\.\d+)?)?/([A-Za-z0-9_-]+)\.ctm(?:\.([A-Za-z0-9_-]+))?\.filt\.(?:sys|raw)")
_N = rb"[0-9]{1,9}(?:\.[0-9]{1,4})?"
_TOTALS = re.compile(
    rb"^[ \t|]*(Sum/Avg|Sum)[ \t]*\|[ \t]*%b[ \t]+(%b)[ \t]*\|(?:[ \t]*%b){4}[ \t]+(%b)[ \t]+%b[ \t]*(?:\|.*)?$"
    % (_N, _N, _N, _N, _N),
    re.MULTILINE,
)
"""Sentences and words | correct, sub, del, ins, all errors, sentence errors; of Sum/Avg (`.sys`) percentages."""


def best_scores(decode_dir: Path) -> dict[str, float]:
    """The lowest word error rates of a decode dir, in percent: NAME for the whole of a test set, SWB and CH for subsets of
    eval2000, "NAME SUBSET" for those of others. ValueError: a summary cannot be read or is malformed, or two data dirs
    have been scored into one directory."""
    summaries: dict[tuple[str, str, str], Path] = {}  # score folder, data dir, subset ("" for all of it)
    for path in sorted(decode_dir.glob("*/*.filt.*")):  # .raw comes before .sys
        if match := _SUMMARY.fullmatch(f"{path.parent.name}/{path.name}"):
            summaries.setdefault((path.parent.name, match[1], match[2] or ""), path)
    data_dirs = sorted({data for _, data, _ in summaries})
    if len(data_dirs) > 1:
        raise ValueError(f"{decode_dir}: two data dirs have been scored here, {' and '.join(data_dirs)}")
    scores: dict[str, float] = {}
    for (_, data, subset), path in sorted(summaries.items()):
        name, wer = PAPER_NAMES.get((data, subset), f"{data} {subset}".rstrip()), read_summary(path)
        scores[name] = min(scores.get(name, wer), wer)
    return dict(sorted(scores.items()))


def read_summary(path: Path) -> float:
    """The word error rate of a `.sys` or `.raw`, in percent. ValueError: it is not what sclite writes."""
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path}: not a regular file of at most {MAX_BYTES} bytes")
    totals = _TOTALS.findall(path.read_bytes())
    if len(totals) != 1:
        raise ValueError(f"{path}: {len(totals)} lines of totals with 8 numbers found, expected one (Sum/Avg or Sum)")
    name, words, errors = totals[0][0], float(totals[0][1]), float(totals[0][2])
    if words < 1:
        raise ValueError(f"{path}: the reference has no words")
    return 100.0 * errors / words if name == b"Sum" else errors


def main(decode_dirs: list[str]) -> int:
    for decode_dir in map(Path, decode_dirs):
        try:
            scores = best_scores(decode_dir)
        except (ValueError, OSError) as error:
            print(f"sclite.py: {error}: score again with Kaldi's local/score.sh", file=sys.stderr)
            return 2
        texts = [f"{name} {wer:.2f} %" for name, wer in scores.items()]
        print(f"{decode_dir}: {', '.join(texts) or 'not scored'}")
        for name, wer in scores.items():
            (decode_dir / f"{name}.json").write_text(json.dumps({"wer": wer}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
