"""A corpus of toys with a reproduce.yaml: two conditions, sizes 1 and 2, trained in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corpora import labelled_utterances, write_ali_dir, write_data_dir, write_graph_dir

from ddnn.reproduce.executor import LocalExecutor
from ddnn.reproduce.runs import PlannedRun, plan_runs
from ddnn.reproduce.tables import Condition, Hypothesis, Table, load_config

TOY = Table(
    name="toy",
    title="Toys",
    workers=(1, "max"),
    conditions=(
        Condition(name="sgd", label="SGD"),
        Condition(name="base", label="NG-SGD"),
        Condition(name="further", label="without a recipe", extension=True),
    ),
    hypotheses=(Hypothesis(statement="NG-SGD is better", expected_better=("base", 1), expected_worse=("sgd", 1)),),
    published={"base": (1,)},
)


def write_corpus(root: Path, *, graphs: bool = True, init: str = "rbm", rate: float = 0.01) -> Path:
    """A corpus in `root`; returns the folder with its reproduce.yaml."""
    features, labels = labelled_utterances()
    write_data_dir(root / "data", features)
    write_ali_dir(root / "ali", labels)
    write_graph_dir(root / "graph")
    (root / "data" / "text").write_text("".join(f"{name} a b\n" for name in sorted(features)))
    folder = root / "recipes" / "toy"
    (folder / "tables").mkdir(parents=True)
    pretrain = "pretrain: {epochs: [1]}\n" if init == "rbm" else ""
    (folder / "tables" / "base.yaml").write_text(
        f"data: {{train: {root}/data, alignments: {root}/ali, splice: 1}}\ninit: {init}\n{pretrain}"
        "model: {hidden_layers: 1, hidden_units: 4}\nminibatch_size: 32\nprecision: float32\n"
        f"optimizer: {{name: ng-sgd, rank_in: 2, rank_out: 2}}\n"
        f"schedule: {{name: exponential, epochs: 2, initial_learning_rate: {rate:g}}}\n"
        "parallel: {averaging_period: 2}\n"
    )
    sgd = "include: base.yaml\noptimizer: {name: sgd, rank_in: null, rank_out: null}\n"
    (folder / "tables" / "sgd.yaml").write_text(sgd)
    decoding = f"    text: {root}/data/text\n    model: {root}/ali/final.mdl\n    graphs: {{loop: {root}/graph}}\n"
    (folder / "reproduce.yaml").write_text(
        f"name: Toy\nseeds: [1, 2]\nworkers: [1, 2]\nmax_workers: 2\ntests:\n  test:\n    data: {root}/data\n"
        f"    alignments: {root}/ali\n{decoding if graphs else ''}"
    )
    return folder


def one_seed(folder: Path) -> Path:
    """The corpus, with one seed from now on."""
    path = folder / "reproduce.yaml"
    path.write_text(path.read_text().replace("seeds: [1, 2]", "seeds: [1]"))
    return folder


def local_executor(folder: Path, out: Path, cores: int = 2) -> tuple[LocalExecutor, list[PlannedRun]]:
    """With all runs of the toy table."""
    config = load_config(folder)
    executor = LocalExecutor(folder, folder / config.dbn_recipe, out / "records", "cpu", cores, lambda line: None)
    return executor, plan_runs(config, folder, [TOY], out)


@dataclass(frozen=True)
class Toy:
    """A corpus, which no test changes, and a copy of the output directory of its two runs with one worker."""

    folder: Path
    out: Path
    runs: list[PlannedRun]
    executor: LocalExecutor
