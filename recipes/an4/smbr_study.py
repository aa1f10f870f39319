"""Tables and plot of `smbr_study.sh`: python recipes/an4/smbr_study.py exp/an4/smbr-study --out docs/results/an4-smbr

Writes OUT.json, what each run came to, and OUT.svg, and prints the tables. With OUT.json in place of the folder it makes plot
and tables of what is recorded there.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ddnn.decoding.word_errors import bootstrap_wer, edit_counts, read_reference, speaker_numbers
from ddnn.kaldi.data_dir import read_text
from ddnn.report.figures import legend_below, new_figure, style, tidy
from ddnn.reproduce.plots import save_svg
from ddnn.runs.metrics import read_metrics
from ddnn.util.text import plural

GRAPHS = ("graph", "graph_ug")
Study = dict[str, Any]


def collect(folder: Path, test: Path) -> Study:
    """Of each run dir that is scored: the held-out figure of each pass, from 0, and the word errors of each utterance."""
    reference = read_reference(test / "text")
    runs = {}
    for run in sorted(path.parent for path in folder.glob("*/score.graph_ug")):
        metrics = read_metrics(run / "metrics.jsonl")
        figure = "expected_accuracy" if "expected_accuracy" in metrics.cv[0].figures else "frame_accuracy"
        words = {graph: read_text(run / f"score.{graph}" / "text") for graph in GRAPHS}
        runs[run.name] = {
            figure: [100 * (row.figures[figure] or 0) for row in metrics.cv],
            "training": [100 * (row.figures[figure] or 0) for row in metrics.train],
            "averagings": max((row.averagings for row in metrics.workers), default=0),
            "errors": {
                graph: [sum(edit_counts(reference[name], hypotheses[name])) for name in reference]
                for graph, hypotheses in words.items()
            },
        }
    return {
        "words": [len(words) for words in reference.values()],
        "speakers": list(speaker_numbers(test / "utt2spk", list(reference))),
        "runs": runs,
    }


def seeds_of(study: Study, *names: str) -> list[int]:
    """Seeds of which all of these runs are there. A name lacks its seed."""
    seeds = {int(seed) for run in study["runs"] if (seed := run.rpartition("-")[2]).isdigit()}
    return [seed for seed in sorted(seeds) if all(f"{name}-{seed}" in study["runs"] for name in names)]


def wer_table(study: Study, pairs: Sequence[tuple[str, str, str]]) -> list[str]:
    """A row for each (title, before, after): word error rates by seed, and the paired bootstrap over speakers and seeds."""
    lines = [
        "| | graph | WER (%) before, by seed | after | mean before -> after | gain, 95 % interval |",
        "|---|---|---|---|---|---|",
    ]
    total = sum(study["words"])
    for title, before, after in pairs:
        if not (seeds := seeds_of(study, before, after)):
            continue
        for graph in GRAPHS:
            first, second = (
                np.array([study["runs"][f"{name}-{seed}"]["errors"][graph] for seed in seeds])
                for name in (before, after)
            )
            by_seed = [", ".join(f"{100 * sum(errors) / total:.2f}" for errors in rows) for rows in (first, second)]
            means = [100 * rows.sum(axis=1).mean() / total for rows in (first, second)]
            gain = bootstrap_wer(first, second, np.array(study["words"]), np.array(study["speakers"]))
            interval = f"{gain.difference:+.2f} ({gain.low:+.2f} .. {gain.high:+.2f})"
            lines.append(
                f"| {title} | `{graph}` | {by_seed[0]} | {by_seed[1]} | {means[0]:.2f} -> {means[1]:.2f} | {interval} |"
            )
    return lines


def accuracy_table(study: Study, family: str) -> list[str]:
    """A row for each number of workers and learning rate: gain of held-out expected accuracy after each pass, the mean over the
    seeds that all rows have, and of the last pass each seed's."""
    names, seeds = runs_of(study, family)
    if not names or not seeds:
        return ["No seed has all of these runs."]
    lines = [
        "| workers | learning rate | averagings a pass | gain after pass 1 | 2 | 3 | 4 | of each seed | WER `graph` | `graph_ug` |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    total = sum(study["words"])
    for (workers, rate), name in names.items():
        runs = [study["runs"][f"{name}-{seed}"] for seed in seeds]
        gains = [[accuracy - run["expected_accuracy"][0] for accuracy in run["expected_accuracy"][1:]] for run in runs]
        means = [f"{fmean(at):+.3f}" for at in zip(*gains, strict=False)]
        cells = [workers, rate, runs[0]["averagings"], *means, *["ended"] * (4 - len(means))]
        cells.append(", ".join(f"{gain[-1]:+.3f}" for gain in gains))
        cells += [f"{fmean(100 * sum(run['errors'][graph]) / total for run in runs):.2f}" for graph in GRAPHS]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    before = fmean(study["runs"][f"{next(iter(names.values()))}-{seed}"]["expected_accuracy"][0] for seed in seeds)
    return [
        *lines,
        "",
        f"Points of held-out expected accuracy, which is {before:.3f} % before training (mean of seeds {', '.join(map(str, seeds))}).",
    ]


def runs_of(study: Study, family: str) -> tuple[dict[tuple[int, str], str], list[int]]:
    """Names of runs without their seeds by number of workers and learning rate; the seeds of which all are there."""
    pattern = re.compile(rf"({family}-(\d+)w-(.*))-\d+")
    names = {(int(match[2]), match[3]): match[1] for run in study["runs"] if (match := pattern.fullmatch(run))}
    names = dict(sorted(names.items(), key=lambda item: (item[0][0], float(item[0][1]))))
    return names, seeds_of(study, *names.values())


def draw(study: Study, path: Path) -> Path:
    """Held-out expected accuracy by pass, mean over the seeds: a panel for each family of starting networks."""
    figure = new_figure(10.0, 4.2)
    titles = {
        "own": "Starting network trained on one worker",
        "avg16": "Starting network trained by 16 workers with averaging",
    }
    panels = figure.subplots(1, len(titles))
    for axes, (family, title) in zip(panels, titles.items(), strict=True):
        names, seeds = runs_of(study, family)
        for (workers, rate), name in names.items():
            curves = [study["runs"][f"{name}-{seed}"]["expected_accuracy"] for seed in seeds]
            passes = range(min(map(len, curves)))
            color, marker, _ = style({1: 0, 4: 1, 16: 2}[workers])
            line = {1e-5: "-", 2e-5: "--", 4e-5: "--" if workers == 16 else ":", 1.6e-4: ":"}[float(rate)]
            means = [fmean(curve[p] for curve in curves) for p in passes]
            axes.plot(
                passes, means, color=color, marker=marker, linestyle=line, label=f"{plural(workers, 'worker')}, {rate}"
            )
        tidy(axes, title, "pass", "held-out expected accuracy (%)")
        axes.set_xticks(range(5))
    legend_below(figure, panels[0])
    return save_svg(figure, path)


PAIRS = (
    ("sMBR, own alignment and lattices", "ce", "own-1w-1e-5"),
    ("sMBR, alignment and lattices of Kaldi's network", "ce", "kaldi-1w-1e-5"),
    ("sMBR on 4 workers, 4e-5", "ce", "own-4w-4e-5"),
    ("sMBR on 16 workers, 1.6e-4", "ce", "own-16w-1.6e-4"),
    ("sMBR of a network trained by 16 workers", "ce16", "avg16-1w-1e-5"),
    ("the same, sMBR by 16 workers, 1.6e-4", "ce16", "avg16-16w-1.6e-4"),
    ("cross-entropy on the realignment", "ce", "realigned"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="folder of smbr_study.sh, or an OUT.json")
    parser.add_argument("--test", type=Path, default=Path("recipes/an4/corpus/test"), help="data dir of the test set")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    source, out = arguments.study, arguments.out
    study = collect(source, arguments.test) if source.is_dir() else json.loads(source.read_text())
    out.with_suffix(".json").write_text(f"{json.dumps(study, separators=(',', ':'))}\n")
    draw(study, out.with_suffix(".svg"))
    sections = {
        "Word error rates": wer_table(study, PAIRS),
        "Several workers": accuracy_table(study, "own"),
        "From a network trained by 16 workers": accuracy_table(study, "avg16"),
    }
    print("\n\n".join(f"## {title}\n" + "\n".join(lines) for title, lines in sections.items()))


if __name__ == "__main__":
    main()
