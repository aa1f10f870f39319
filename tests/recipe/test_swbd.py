"""recipes/swbd: each recipe is the paper's setting with the one change that it is named after, and all are there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import check_swbd
import pytest
from check_swbd import AFTERWARDS, NO_CELLS, RECIPES, Shape, cells, check_recipe, corpus, problems

from ddnn.recipe.load import load_recipe
from ddnn.reproduce.tables import load_config, paper
from ddnn.util.errors import UserError

SGD = {
    f"optimizer.{key}": None
    for key in ("rank_in", "rank_out", "alpha", "num_samples_history", "update_period", "max_change_per_sample",
                "max_change_scope")
} | {"optimizer.name": "sgd"}  # fmt: skip
BMUF = {"parallel.strategy": "bmuf", "parallel.nesterov": True, "parallel.averaging_period": 117}
WARM = {"parallel.warmup": "single-worker", "parallel.warmup_minibatches": 100}
DATA_PARALLEL = {
    **SGD,
    "schedule.initial_learning_rate": 0.002,
    "init": "random",
    "minibatch_scope": "total",
    "parallel.strategy": "gradient-all-reduce",
}
CHANGES: dict[str, dict[str, Any]] = {
    "base": {},
    "random": {"init": "random"},
    **{f"every-{n}": {"parallel.averaging_period": n} for n in (1, 5, 20, 50)},
    "minibatch-256": {"minibatch_size": 256},
    "gradient": {"parallel.strategy": "gradient-all-reduce"},
    "newbob": {
        "schedule.name": "newbob",
        "schedule.criterion": "frame-accuracy",
        "schedule.max_epochs": 20,
        "schedule.epochs": None,
    },
    "sgd": {**SGD, "schedule.initial_learning_rate": 0.002},
    "data-parallel": DATA_PARALLEL,
    "columns": {**DATA_PARALLEL, "parallel.columns": 2},
    "sgd-half": {**SGD, "schedule.initial_learning_rate": 0.001},
    **{name: {"parallel.strategy": name} for name in ("butterfly", "ring", "hopping-ring")},
    "bmuf": BMUF,
    "half-decay": {"schedule.final_learning_rate": 0.16},
    "combined": {
        "schedule.final_learning_rate": 0.16,
        "schedule.average_last": 4,
        "schedule.moving_average_epochs": 1,
    },
    "overlap": {"parallel.overlap": True},
    "bf16-exchange": {"parallel.comm_dtype": "bfloat16"},
    "each-worker": {"optimizer.max_change_scope": "local"},
    "warm-start": WARM,
    "closing": {**BMUF, **WARM},
}
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml") if path.name not in (*NO_CELLS, *AFTERWARDS))


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shape]:
    """A corpus of Switchboard's shape in the working directory."""
    with corpus(tmp_path_factory.mktemp("s5c")) as made:
        yield made


def test_paper_s_setting() -> None:
    recipe = load_recipe(RECIPES / "base.yaml", must_exist=False)
    optimizer, schedule = recipe.optimizer, recipe.schedule
    assert (recipe.model.hidden_layers, recipe.model.hidden_units, recipe.minibatch_size) == (6, 2048, 1024)
    assert (optimizer.name, optimizer.rank_in, optimizer.rank_out, optimizer.update_period) == ("ng-sgd", 30, 60, 4)
    assert (optimizer.num_samples_history, optimizer.alpha) == (2000.0, 4.0)
    assert (optimizer.max_change_per_sample, optimizer.max_change_scope) == (0.075, "unscaled")
    assert (schedule.name, schedule.initial_learning_rate, schedule.final_learning_rate, schedule.epochs) == (
        "exponential",
        0.32,
        0.0032,
        15,
    )
    assert (recipe.init, recipe.pretrain.hours, recipe.pretrain.epochs) == ("rbm", 100.0, None)
    assert (recipe.parallel.strategy, recipe.parallel.averaging_period, recipe.data.splice) == ("all-reduce", 10, 5)
    assert recipe.parallel.scale_learning_rate is True  # multiplied by the workers, but for bmuf
    assert recipe.data.cv.fraction == 0.1


@pytest.mark.parametrize("name", NAMES)
def test_a_cell_is_the_base_with_one_change(name: str) -> None:
    setting, _, workers = name.rpartition("-")
    changes = {**CHANGES[setting], "parallel.workers": int(workers)}
    overrides = [f"{key}={'null' if value is None else value}" for key, value in changes.items()]
    expected = load_recipe(RECIPES / "base.yaml", overrides, must_exist=False)
    assert load_recipe(RECIPES / f"{name}.yaml", must_exist=False).model_dump() == expected.model_dump()


def test_stack_is_that_of_the_base() -> None:
    base, rbm = (load_recipe(RECIPES / name, must_exist=False) for name in NO_CELLS)
    assert rbm.model_dump() == base.model_dump()


def test_sequence_training_holds_out_the_speakers_of_the_base() -> None:
    base, smbr = (load_recipe(RECIPES / name, must_exist=False) for name in ("base.yaml", "smbr.yaml"))
    assert (smbr.data.train, smbr.data.cv, smbr.seed) == (base.data.train, base.data.cv, base.seed)
    assert (smbr.criterion.name, smbr.criterion.acoustic_scale) == ("smbr", 0.0909)


def test_all_cells_are_there_and_no_more(shape: Shape) -> None:
    assert sorted(f"{condition}-{workers}" for condition, workers in cells(load_config(RECIPES))) == NAMES


@pytest.mark.parametrize("name", ["base-32", "sgd-16", "gradient-8", "closing-1", "newbob-1"])
def test_check_passes_on_a_recipe(shape: Shape, name: str) -> None:
    line = check_recipe(RECIPES / f"{name}.yaml", shape)
    assert line.startswith(f"{name}.yaml: 440-6x2048-8806 (39,928,422 parameters), rbm, ")
    assert f"{name.rpartition('-')[2]} worker" in line


def test_check_names_the_file_of_each_problem(
    shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_swbd, "cells", lambda plan: [("base", 1), ("base", 2), ("sgd", 1), ("sgd", 16)])
    for name in ("base.yaml", "rbm.yaml", "reproduce.yaml", "base-1.yaml", "base-2.yaml", "sgd-1.yaml"):
        shutil.copy(RECIPES / name, tmp_path)
    (tmp_path / "base-2.yaml").write_text("include: base.yaml\nparallel: {workers: 3}\n")
    (tmp_path / "sgd-1.yaml").write_text("include: base-1.yaml\noptimizer: {nam: sgd}\n")
    (tmp_path / "wide-1.yaml").write_text("include: base-1.yaml\ndata: {splice: 7}\n")
    found = problems(tmp_path, shape)
    said = "\n".join(found)
    assert len(found) == 5, said
    assert "parallel.workers: 3 found, expected 2" in said and str(tmp_path / "base-2.yaml") in said
    assert "optimizer.nam: unknown key" in said and str(tmp_path / "sgd-1.yaml") in said
    assert "network: (600, 2048" in said and str(tmp_path / "wide-1.yaml") in said
    assert f"the tables ask for it and it is not there\n  location: {tmp_path / 'sgd-16.yaml'}" in said
    assert f"no table asks for it\n  location: {tmp_path / 'wide-1.yaml'}" in said
    assert "base-1.yaml: 440-6x2048-8806" in capsys.readouterr().out


def test_too_many_workers_for_a_corpus_are_a_problem(shape: Shape, tmp_path: Path) -> None:
    path = tmp_path / "base-500.yaml"
    path.write_text(f"include: {RECIPES / 'base.yaml'}\nparallel: {{workers: 500}}\n")
    with pytest.raises(UserError, match=r"training: a worker has .* frames, expected 1024 or more"):
        check_recipe(path, shape)


def test_plan_of_the_corpus(shape: Shape) -> None:
    plan = load_config(RECIPES)
    assert (plan.workers, plan.max_workers, plan.dbn_recipe) == ((1, 2, 4, 8, 16, 32), 16, "rbm.yaml")
    assert [(name, test.graphs) for name, test in plan.tests.items()] == [("eval2000", {})]


def test_readme_has_the_paper_s_numbers() -> None:
    rows = {
        match[1]: [cell.strip() for cell in match[2].split("|")]
        for line in (RECIPES / "README.md").read_text().splitlines()
        if (match := re.match(r"\| `([a-z0-9-]+)\.yaml` \|(.*)\|$", line))
    }
    published = [
        (condition, gpus) for table in paper().tables for condition, sizes in table.published.items() for gpus in sizes
    ]
    assert len(rows) >= len(published) // 2 > 10
    for condition, workers in published:
        rates = paper().published_wer[condition][workers]
        name = f"{condition.replace('minibatch-1024', 'base')}-{workers}"
        assert rows[name][1:3] == [f"{rates['SWB']:.1f}", f"{rates['CH']:.1f}"], name
        if "SWB01" in rates:
            assert rows[name][3:6] == [f"{rates[key]:.1f}" for key in ("SWB01", "SWB2P3", "SWBCELL")], name
