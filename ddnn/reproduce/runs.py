"""Which runs the tables need, and the records of finished ones: for each run a JSON file of a few kilobytes that outlives
the run dir, and from which the report is written."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from ddnn.recipe.keys import keys
from ddnn.recipe.load import dump_recipe, load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.recipe.section import Section, as_list, get_value
from ddnn.recipe.source import first_error
from ddnn.report.scaling import CommScheme, Job, Measurement
from ddnn.reproduce.tables import ReproduceConfig, Table, file_fingerprint, test_digest
from ddnn.runs.rows import no_better_than_baseline
from ddnn.runs.run_status import DBN, FINAL
from ddnn.util.errors import DataError, RecipeError, UserError
from ddnn.util.files import ensure_directory, read_bytes_limited, write_text

RESULT_VERSION = 1  # to be raised when what is computed by the same recipe changes: all runs are then trained again
NON_RESULT_KEYS = (
    *("data.cache_dir", "data.loader_processes", "data.feature_device", "data.max_skipped_fraction", "cuda_graphs"),
    *("parallel.cpu_threads", "parallel.hang_timeout", "parallel.max_restarts", "parallel.oversubscribe_gpus"),
    "parallel.gpu_transport",
)
"""Keys that change nothing that a training computes, or only its last bits; nor do those of `checkpoint` and `log`."""
ADDED_KEYS = frozenset(
    {
        *("minibatch_scope", "data.transforms", "data.cv.transforms", "data.cv.by", "data.cv.utterances"),
        *("schedule.average_last", "schedule.moving_average_epochs", "schedule.keep", "optimizer.max_gradient_norm"),
        *("model.layers", "model.bands", "randomizer_size", "optimizer.exact", "parallel.columns"),
        *("parallel.stages", "parallel.microbatches", "parallel.pipeline", "parallel.averaging_frames", "criterion"),
    }
)
"""Keys that were added after runs had been recorded, with defaults that change nothing. At their defaults they are left
out of the digest, so that these records still count."""
MAX_BYTES = 16 << 20  # of a record: the errors of half a million utterances
OF_PARAMETERS = "parameters "  # how a `RunRecord.dbn` begins that compares with others
CV_ACCURACY, ACCURACY, WER = "CV frame accuracy", " frame accuracy", " WER"
"""A metric of a run is called CV_ACCURACY, TEST frame accuracy, or TEST GRAPH WER; its values are in percent."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0.0, le=1e15, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=1e-9, le=1e18, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**53)]
PositiveCount = Annotated[int, Field(ge=1, le=2**53)]
WordCount = Annotated[int, Field(ge=0, le=1_000_000)]  # of an utterance: sums of all fit into 64 bits


class FrameMetrics(Section):
    """Loss per frame (nats) and frame accuracy (0 to 1) on some frames."""

    loss: Finite
    frame_accuracy: Annotated[float, Field(ge=0.0, le=1.0)]


class TestMetrics(FrameMetrics):
    """On a test set; frames and those of another pdf than the aligned one, of each speaker in the order of their first utterances;
    empty where the speakers are unknown."""

    __test__ = False  # not one of pytest's

    frames: tuple[Count, ...] = ()
    errors: tuple[Count, ...] = ()


class WordErrors(Section):
    """Word errors with one decoding graph, at the acoustic scale that was best for this run. `words`, `errors` and
    `speakers` have a number for each utterance, in the order of the test set; empty if another scorer counted. Without
    `speakers` each utterance counts as a speaker."""

    wer: Amount  # in percent of the words
    acoustic_scale: Finite | None = None  # the best one; None if another scorer chose it
    words: tuple[WordCount, ...] = ()  # of the reference
    errors: tuple[WordCount, ...] = ()
    speakers: tuple[Count, ...] = ()


class TimeBreakdown(Section):
    """Where the time of a training went, summed over its epochs; times of workers are means over the workers."""

    seconds: Amount  # wall-clock time without cross-validation
    compute_seconds: Amount | None = None  # computing, and waiting for data
    comm_seconds: Amount | None = None  # moving parameters
    wait_seconds: Amount | None = None  # waiting for other workers
    averagings: Count = 0
    bytes_sent: Amount | None = None  # by one worker in the whole training
    cores: Count = 0  # of the machine, which the workers shared; 0: unknown
    compute_cpu_fraction: Amount | None = None  # CPU time in the computing time, on CPUs; None: unknown


class MeasuredEpoch(Section):
    """A mean epoch, the input of the scaling model: the fields of CommScheme, Job and Measurement, in their
    order, as far as records have them."""

    strategy: str
    comm_dtype: str
    overlap: bool
    num_parameters: PositiveCount
    flop_per_frame: Positive
    minibatch_size: PositiveCount
    averaging_period: PositiveCount
    frames: Positive
    seconds: Positive
    comm_seconds: Amount
    averagings: Amount
    compute_seconds: Amount | None
    other_seconds: Amount | None
    interval_seconds_std: Amount | None
    final_mean: bool
    columns: PositiveCount = 1

    @classmethod
    def of(cls, epoch: Measurement) -> MeasuredEpoch:
        _, _, scheme, job, *rest = astuple(epoch)
        return cls(**dict(zip(cls.model_fields, (*scheme, *job[:5], *rest[:-3]), strict=True)))

    def to_measurement(self, workers: int) -> Measurement:
        fields: list[Any] = list(dict(self).values())
        return Measurement("record", workers, CommScheme(*fields[:3]), Job(*fields[3:8]), *fields[8:])


class RunRecord(Section):
    """One finished run of a condition."""

    condition: str
    workers: PositiveCount
    seed: Count
    recipe: str  # SHA-256 of what its recipe says, resolved, without paths; another recipe: another run
    test_digest: str = ""  # SHA-256 of what the model was tested on; other tests: it is evaluated again
    failed: str | None = None  # why there is no model: the training ended with exit code 3. Results: None or empty
    epochs: Count = 0
    cv: FrameMetrics | None = None  # the final model on the cross-validation set
    cv_by_epoch: tuple[FrameMetrics | None, ...] = ()  # the same after each epoch, from 1 on; None: not finite
    initial_cv: FrameMetrics | None = None  # the same before training; None: unknown
    baseline: FrameMetrics | None = None  # models that ignore their input, on the same set; None: unknown
    tests: dict[str, TestMetrics] = Field({})  # test set -> the final model on it, where it has alignments
    wers: dict[str, WordErrors] = Field({})  # test set, or "NAME GRAPH" of several graphs -> word errors
    time: TimeBreakdown | None = None
    measured: MeasuredEpoch | None = None
    machine: str = ""  # the processor or GPU that trained it
    precision: str = ""  # of its arithmetic; this and the next two are "" where they are unknown
    optimizer: str = ""  # its name and settings
    train_digest: str = ""  # of the utterances that it was trained on
    date: str = ""  # when it was recorded
    version: str = ""  # of ddnn and torch
    command: str = ""  # that trains it
    # `dbn_parameters` of the RBMs that it was trained from; in old records digits of the SHA-256 of their file, which say
    # nothing about the parameters, since its form has changed. "": none, or unknown.
    dbn: str = ""

    @property
    def name(self) -> str:
        return f"{self.condition}-{self.workers}-{self.seed}"

    @property
    def percentages(self) -> dict[str, float]:
        """The results of the final model, by metric."""
        frames = {CV_ACCURACY: self.cv, **{name + ACCURACY: result for name, result in self.tests.items()}}
        accuracies = {metric: 100.0 * result.frame_accuracy for metric, result in frames.items() if result is not None}
        return accuracies | {name + WER: errors.wer for name, errors in self.wers.items()}

    @property
    def kind_of_machine(self) -> str:
        """Without the number of cores; several where it was resumed on another; "": unknown."""
        return "; ".join(sorted({machine.split(",")[0] for machine in self.machine.split("; ")}))

    @property
    def failure(self) -> str | None:
        """Why the run did not train, None if it did: training ended without a model, or with one that is no better on
        the cross-validation set than the network before training, or than models that ignore their input."""
        if self.failed is not None or self.cv is None:
            return self.failed or ("no epoch was accepted" if self.cv_by_epoch else None)
        loss, initial, baseline = self.cv.loss, self.initial_cv, self.baseline
        if initial is not None and loss >= initial.loss:
            return f"CV loss {loss:.4g}, {initial.loss:.4g} before training"
        if baseline is None or not no_better_than_baseline(self.cv.model_dump(), baseline.model_dump()):
            return None
        if loss >= baseline.loss:
            return f"CV loss {loss:.4g}, {baseline.loss:.4g} by the frequencies of the pdfs alone"
        constant = f"{100 * baseline.frame_accuracy:.1f} % by always choosing the most frequent pdf"
        return f"CV frame accuracy {100 * self.cv.frame_accuracy:.1f} %, {constant}"


def write_record(folder: Path, record: RunRecord) -> Path:
    """Writes a record as NAME.json, completely or not at all. UserError: it cannot be written."""
    path = folder / f"{record.name}.json"
    ensure_directory(folder)
    write_text(path, record.model_dump_json() + "\n")
    return path


def read_record(path: Path) -> RunRecord:
    """Reads a record. DataError: it cannot be read, or is not a record."""
    hint = "delete it: its run is then evaluated again, or trained again if its run dir is gone"
    if not re.fullmatch(r".+-\d+-\d+", path.stem):
        hint = "move it elsewhere: records are called CONDITION-WORKERS-SEED.json, without any other .json beside them"
    try:
        record = RunRecord.model_validate_json(read_bytes_limited(path, MAX_BYTES), strict=True)
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", location=path, hint=hint) from error
    except ValidationError as error:
        raise DataError(f"not the record of a run: {first_error(error)}", location=path, hint=hint) from error
    if record.name != path.stem:
        raise DataError(f"the record of {record.name}", location=path, hint="a record has the name of its run")
    return record


def read_records(folder: Path) -> dict[str, RunRecord]:
    """Name -> record, of all in a folder, which need not exist. DataError: one is damaged."""
    return {path.stem: read_record(path) for path in sorted(folder.glob("*.json"))}


@dataclass(frozen=True)
class PlannedRun:
    """A training that a table needs, and where its results go: into `output_dir`."""

    condition: str  # after the corpus's `aliases`
    workers: int
    seed: int
    recipe: Path
    digest: str  # of what the recipe says; in the run dir's name, so that a changed recipe gets another
    dbn_digest: str  # of the recipe of the seed's RBMs; empty if the run does not start from them
    test_digest: str  # of what its model is tested on
    output_dir: Path

    @property
    def name(self) -> str:
        return f"{self.condition}-{self.workers}-{self.seed}"

    @property
    def run_dir(self) -> Path:
        return self.output_dir / "runs" / f"{self.name}-{self.digest[:8]}"

    @property
    def dbn_dir(self) -> Path:
        return self.output_dir / "dbns" / f"{self.seed}-{self.dbn_digest[:8]}"

    @property
    def dbn_name(self) -> str:
        return f"dbn-{self.seed}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """For --set."""
        settings = f"seed={self.seed}", f"parallel.workers={self.workers}"
        pretrain = json.dumps({"dbn": str(self.dbn_dir), "epochs": None})
        return (*settings, f"pretrain={pretrain}") if self.dbn_digest else settings

    @property
    def is_trained(self) -> bool:
        return (self.run_dir / FINAL).exists()

    @property
    def lacks_dbn(self) -> bool:
        """Whether it is not trained, and the RBMs that it starts from do not exist yet."""
        return bool(self.dbn_digest) and not self.is_trained and not (self.dbn_dir / DBN).exists()

    def is_recorded(self, records: Mapping[str, RunRecord]) -> bool:
        """Whether there is a record of this very recipe and these tests."""
        record = records.get(self.name)
        if record is None or record.recipe != self.digest:
            return False
        return record.failed is not None or record.test_digest == self.test_digest


def plan_runs(config: ReproduceConfig, folder: Path, tables: Iterable[Table], output_dir: Path) -> list[PlannedRun]:
    """The runs of these tables, each once, seed by seed, from the recipes in the corpus's folder. UserError: a
    condition has no recipe. RecipeError: a recipe is damaged, or its data do not exist."""
    recipes: dict[tuple[int, str], Path] = {}
    for table in tables:
        for condition, workers in table.settings(config):
            name = config.recipe_name(condition.name)
            path = folder / config.recipes.replace("{condition}", name).replace("{workers}", str(workers))
            if not condition.extension or path.is_file():
                recipes[workers, name] = path
    dbn, tests = recipe_digest(_load(folder / config.dbn_recipe, "the RBMs")), test_digest(config.tests)
    runs = []
    for seed in config.seeds:
        for (workers, name), path in sorted(recipes.items(), key=lambda item: item[0][0]):
            recipe = _load(path, f"the condition {name}", (f"seed={seed}", f"parallel.workers={workers}"))
            if recipe.parallel.averaging_frames == "auto":
                message = "auto found, but runs of a table compare: how often each averages may not depend on its times"
                raise RecipeError(message, location=f"{path}: parallel.averaging_frames", hint="give a number")
            own_dbn = dbn if recipe.init == "rbm" and recipe.pretrain.dbn is None else ""
            digest = recipe_digest(recipe, own_dbn)
            runs.append(PlannedRun(name, workers, seed, path, digest, own_dbn, tests, output_dir))
    return runs


def _load(path: Path, subject: str, overrides: tuple[str, ...] = ()) -> Recipe:
    if not path.is_file():
        raise UserError(f"{subject} has no recipe on this corpus", location=path, hint="write it, or name other tables")
    try:
        return load_recipe(path, overrides, user_supplied=False)
    except RecipeError as error:
        hint = "if data are missing, run it in the folder from which their paths lead to them; else fix the recipe"
        raise RecipeError(error.message, location=error.location, hint=error.hint or hint) from error


def recipe_digest(recipe: Recipe, dbn: str = "") -> str:
    """SHA-256 of what a recipe says, and of the digest of its RBMs' recipe. For data the names and sizes count, not where
    they are; keys that change no result do not count."""
    tree: dict[str, Any] = yaml.safe_load(dump_recipe(recipe))
    tree.pop("log", None)  # what is reported, not what is computed
    for name, key in keys().items():
        *above, last = name.split(".")
        section = tree
        for part in above:
            inner = section.get(part)  # a key that takes a value or a mapping may have a value here
            section = inner if isinstance(inner, dict) else {}
        has_no_effect = name in ADDED_KEYS and section.get(last) == key.default
        if has_no_effect or name in NON_RESULT_KEYS or name.startswith("checkpoint."):
            section.pop(last, None)
        elif key.is_path and last in section:
            prints = [file_fingerprint(path) for path in as_list(get_value(recipe, name))]
            section[last] = prints if isinstance(section[last], list) else prints[0]
    return hashlib.sha256(json.dumps([RESULT_VERSION, tree, dbn], sort_keys=True).encode()).hexdigest()
