"""Records of trainings that never ran, with figures as they could be."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from ddnn.reproduce.runs import FrameMetrics, MeasuredEpoch, RunRecord, TestMetrics, TimeBreakdown, WordErrors
from ddnn.reproduce.tables import ReproduceConfig, Table, TestSet, paper

TABLES = {table.name: table for table in paper().tables}
WORDS = (7, 3, 9, 1, 5, 4, 8, 6) * 5
SPEAKERS = tuple(number // 4 for number in range(len(WORDS)))


def plan(**changes: object) -> ReproduceConfig:
    """A corpus of three seeds, 1 to 16 workers, one test set with two graphs."""
    test = TestSet(
        data=Path("test"),
        alignments=Path("ali_test"),
        text=Path("text"),
        model=Path("final.mdl"),
        graphs={"trigram": Path("graph"), "unigram": Path("graph_ug")},
    )
    fields = {
        "name": "synthetic",
        "workers": (1, 2, 4, 16),
        "max_workers": 16,
        "tests": {"test": test},
        "seeds": (1, 2, 3),
    }
    return ReproduceConfig.model_validate({**fields, **changes})


def record(condition: str, workers: int, seed: int, accuracy: float, wer: float = 0.2, **changes: object) -> RunRecord:
    """One run: frame accuracy (0 to 1) and word error rate (0 to 1), with errors drawn from the name of the run."""
    draw = random.Random(f"{condition} {workers} {seed}")
    figures = FrameMetrics(loss=2.0 - accuracy, frame_accuracy=accuracy)
    epochs = tuple(
        FrameMetrics(loss=2.0, frame_accuracy=accuracy * (1.0 - 0.4 / (epoch + 1) ** 2)) for epoch in range(1, 11)
    )
    wers = {}
    for name, factor in (("test trigram", 1.0), ("test unigram", 2.0)):
        errors = tuple(sum(draw.random() < factor * wer for _ in range(count)) for count in WORDS)
        wers[name] = WordErrors(
            wer=100.0 * sum(errors) / sum(WORDS), acoustic_scale=0.1, words=WORDS, errors=errors, speakers=SPEAKERS
        )
    found = RunRecord(
        condition=condition,
        workers=workers,
        seed=seed,
        recipe="0" * 64,
        epochs=10,
        cv=figures.model_copy(update={"frame_accuracy": accuracy - 0.01}),
        cv_by_epoch=epochs,
        tests={"test": TestMetrics.model_validate(dict(figures))},
        wers=wers,
        time=TimeBreakdown(
            seconds=100.0 / workers + 5.0,
            compute_seconds=90.0 / workers,
            comm_seconds=3.0,
            wait_seconds=1.0,
            averagings=0 if workers == 1 else 900 // workers,
            bytes_sent=0.0 if workers == 1 else 1e9,
            cores=2,
        ),
        machine="a machine, 2 cores",
        date=f"2026-01-0{1 + seed % 9}",
        version="ddnn 0.1.0, torch 2.13.0",
        command=f"ddnn train {condition}.yaml",
    )
    return found.model_copy(update=changes)


def epoch(workers: int, seconds: float) -> MeasuredEpoch:
    """Of a run in which each worker had a core."""
    return MeasuredEpoch(
        strategy="all-reduce",
        comm_dtype="float32",
        overlap=False,
        num_parameters=468_584,
        flop_per_frame=2.6e6,
        minibatch_size=256,
        averaging_period=10,
        frames=230_000.0,
        seconds=seconds,
        comm_seconds=0.0 if workers == 1 else 0.1,
        averagings=0.0 if workers == 1 else 45.0,
        compute_seconds=0.95 * seconds,
        other_seconds=0.0,
        interval_seconds_std=None,
        final_mean=True,
    )


def diverged(condition: str, workers: int, seed: int, why: str = "the training diverged") -> RunRecord:
    """A run that ended without a model."""
    return RunRecord(condition=condition, workers=workers, seed=seed, recipe="0" * 64, failed=why)


BASELINE = FrameMetrics(loss=5.474, frame_accuracy=0.11)


def collapsed(condition: str, workers: int, seed: int, loss: float = 5.1, accuracy: float = 0.083) -> RunRecord:
    """A run that ended with a model as AN4's SGD on 16 workers did: with figures, but it learned next to nothing."""
    cv = FrameMetrics(loss=loss, frame_accuracy=accuracy)
    return record(condition, workers, seed, accuracy, 0.95, cv=cv, cv_by_epoch=(cv, cv), baseline=BASELINE)


def by_name(records: Iterable[RunRecord]) -> dict[str, RunRecord]:
    """As read_records gives them."""
    return {found.name: found for found in records}


def table_records(
    corpus: ReproduceConfig,
    tables: Iterable[Table] = paper().tables,
    lost: Mapping[str, float] | None = None,
) -> dict[str, RunRecord]:
    """All runs of these tables; `lost` is frame accuracy by condition, and more workers lose a little."""
    found = []
    for table in tables:
        for condition, workers in table.settings(corpus):
            name = corpus.recipe_name(condition.name)
            for seed in corpus.seeds:
                wobble = random.Random(f"{name} {workers} {seed}").gauss(0.0, 0.001)
                down = (lost or {}).get(name, 0.0) + 0.001 * workers.bit_length() + wobble
                found.append(record(name, workers, seed, 0.6 - down, 0.1 + down))
    return by_name(found)
