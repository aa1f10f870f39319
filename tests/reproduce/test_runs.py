"""Which runs a table needs: each once, under a name that a changed recipe changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from reproduce.small import TOY, write_corpus
from reproduce.synthetic import TABLES, plan

from ddnn.recipe.load import load_recipe
from ddnn.reproduce.runs import (
    PlannedRun,
    RunRecord,
    plan_runs,
    read_records,
    recipe_digest,
    write_record,
)
from ddnn.reproduce.tables import Table, find_corpus, load_config, paper, select_tables
from ddnn.util.errors import DataError, RecipeError, UserError


def runs_of(folder: Path) -> list[PlannedRun]:
    return plan_runs(load_config(folder), folder, [TOY], folder / "out")


def made(run: PlannedRun) -> RunRecord:
    names = {"condition": run.condition, "workers": run.workers, "seed": run.seed}
    return RunRecord.model_validate({**names, "recipe": run.digest, "test_digest": run.test_digest})


def missing(runs: list[PlannedRun], records: dict[str, RunRecord]) -> list[PlannedRun]:
    return [run for run in runs if not run.is_recorded(records)]


def test_each_run_once_and_seed_by_seed(tmp_path: Path) -> None:
    runs = runs_of(write_corpus(tmp_path))
    assert [run.name for run in runs] == [
        *("sgd-1-1", "base-1-1", "sgd-2-1", "base-2-1"),
        *("sgd-1-2", "base-1-2", "sgd-2-2", "base-2-2"),
    ]
    assert all(run.dbn_digest for run in runs) and len({run.digest for run in runs}) == 8


def test_a_setting_that_is_another_shares_its_runs(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    (folder / "reproduce.yaml").write_text((folder / "reproduce.yaml").read_text() + "aliases: {sgd: base}\n")
    assert [run.name for run in runs_of(folder)] == ["base-1-1", "base-2-1", "base-1-2", "base-2-2"]


def test_a_changed_recipe_is_another_run_but_a_moved_corpus_is_not(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "a")
    before = runs_of(folder)
    records = {run.name: made(run) for run in before}
    assert missing(before, records) == []
    assert [run.digest for run in runs_of(write_corpus(tmp_path / "b"))] == [run.digest for run in before]
    base = folder / "tables" / "base.yaml"
    base.write_text(base.read_text() + "checkpoint: {keep_last: 3}\n")
    assert missing(runs_of(folder), records) == []
    base.write_text(base.read_text().replace("epochs: 2", "epochs: 3"))
    assert len(missing(runs_of(folder), records)) == 8


@pytest.mark.parametrize(
    ("settings", "digest"),
    [
        ((), "b642ffeaaedf1324"),
        (("optimizer.name=ng-sgd", "schedule={name: exponential, epochs: 3}"), "0b8344776bc49d72"),
        (("init=rbm", "schedule={name: power}"), "4da710087248be39"),
        (("schedule={name: constant}", "parallel={workers: 4, strategy: bmuf, overlap: false}"), "c57e311c024b2054"),
    ],
)
def test_a_new_key_of_recipes_makes_no_recorded_run_another(
    tmp_path: Path, settings: tuple[str, ...], digest: str
) -> None:
    """Its default changes nothing, so it belongs to ADDED_KEYS: else all recorded runs would be trained again."""
    for name in ("train", "ali"):
        (tmp_path / name).mkdir()
    path = tmp_path / "recipe.yaml"
    path.write_text(f"data: {{train: {tmp_path}/train, alignments: {tmp_path}/ali}}\n")
    assert recipe_digest(load_recipe(path, settings))[:16] == digest


def test_other_data_are_other_runs(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    before = [run.digest for run in runs_of(folder)]
    with (tmp_path / "data" / "feats.ark").open("ab") as handle:
        handle.write(b"x")
    assert not set(before) & {run.digest for run in runs_of(folder)}


def test_a_record_under_another_name_is_refused(tmp_path: Path) -> None:
    write_record(tmp_path, RunRecord(condition="base", workers=1, seed=1, recipe="x")).rename(
        tmp_path / "base-1-1.old.json"
    )
    with pytest.raises(DataError, match=r"the record of base-1-1"):
        read_records(tmp_path)


def test_other_tests_judge_again_what_did_not_diverge(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    records = {run.name: made(run) for run in runs_of(folder)}
    records["sgd-1-1"] = records["sgd-1-1"].model_copy(update={"failed": "it diverged"})
    text = (folder / "reproduce.yaml").read_text()
    (folder / "reproduce.yaml").write_text(text + "    acoustic_scales: [0.2]\n")
    left = [run.name for run in missing(runs_of(folder), records)]
    assert len(left) == 7 and "sgd-1-1" not in left


def test_the_stack_counts_as_part_of_the_recipe(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    text = (folder / "tables" / "base.yaml").read_text()
    (folder / "tables" / "stack.yaml").write_text(text)
    plan = (folder / "reproduce.yaml").read_text()
    (folder / "reproduce.yaml").write_text(plan + "dbn_recipe: tables/stack.yaml\n")
    before = [run.digest for run in runs_of(folder)]
    (folder / "tables" / "stack.yaml").write_text(text.replace("epochs: [1]", "epochs: [2]"))
    assert not set(before) & {run.digest for run in runs_of(folder)}


def test_a_folder_of_records_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "records"):
        with pytest.raises(UserError, match="cannot make the directory"):
            write_record(folder, RunRecord(condition="base", workers=2, seed=1, recipe="x"))


def test_a_stray_file_is_to_be_moved_and_a_damaged_record_deleted(tmp_path: Path) -> None:
    for name, hint in (("notes", "move it elsewhere"), ("base-1-1", "trained again if its run dir is gone")):
        path = tmp_path / f"{name}.json"
        path.write_text("{}")
        with pytest.raises(DataError, match=hint):
            read_records(tmp_path)
        path.unlink()


def test_records_outlive_their_run_dirs(tmp_path: Path) -> None:
    record = RunRecord(condition="base", workers=2, seed=1, recipe="x", failed="it diverged")
    write_record(tmp_path / "records", record)
    assert read_records(tmp_path / "records") == {"base-2-1": record}
    assert read_records(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"condition": 1}', "\xff", '{"condition":"a","workers":0}'])
def test_a_damaged_record_is_named(tmp_path: Path, damage: str) -> None:
    (tmp_path / "base-1-1.json").write_bytes(damage.encode("latin-1"))
    with pytest.raises(DataError, match=r"base-1-1\.json"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: Toy\nworkers: [2, 4]\nmax_workers: 2", "with 1 and 2"),
        ("name: Toy\nworkers: [1, 4]\nmax_workers: 2", "rising sizes"),
        ("name: Toy\nworkers: []\nmax_workers: 2", "rising sizes"),
        ("name: Toy\nworkers: [1, 2]\nmax_workers: 2\nfurther: 3", "further"),
        ("name: Toy\nworkers: [1, 2]\nmax_workers: 2\nseeds: [-1]", "seeds"),
        ("name: Toy\nworkers: [1, 2]\nmax_workers: 2\nseeds: [1, 1]", "each once"),
        ("name: Toy\nworkers: [1, 2]\nmax_workers: 2\nseeds: []", "at least 1 item"),
        ("name: Toy\nworkers: [1, 2]\nmax_workers: 2\ntests: {a: 1}", "tests"),
        ("name: Toy\nworkers: [1, 2]\nmax_workers: 2\ntests:\n  a: {data: x}\n  a: {data: x}", "given twice"),
        ("name: Toy\nworkers: [1, 2]\nmax_workers: 2\ntests: {CV: {data: .}}", "name the test set otherwise"),
        ("name: Toy\nworkers: &a [1, 2]\nmax_workers: *a", "anchors"),
        ("name: !!python/object:os.system x", "tags"),
        ("name: 2026-99-99\nworkers: [1, 2]\nmax_workers: " + 5000 * "9", "max_workers"),
        ("[" * 3000, "levels"),
        ("", "nothing found"),
    ],
)
def test_what_is_wrong_with_a_corpus_is_said(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "reproduce.yaml").write_text(text)
    with pytest.raises(DataError, match=said):
        load_config(tmp_path)


def test_a_setting_without_a_recipe_is_named(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    (folder / "tables" / "sgd.yaml").unlink()
    with pytest.raises(UserError, match="the condition sgd has no recipe"):
        runs_of(folder)


def test_runs_that_average_as_often_as_their_times_say_are_refused(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    (folder / "tables" / "sgd.yaml").write_text("include: base.yaml\nparallel: {averaging_frames: auto}\n")
    with pytest.raises(
        RecipeError, match=r"auto found, but runs of a table compare(?s:.*)sgd\.yaml(?s:.*)give a number"
    ):
        runs_of(folder)


def test_a_recipe_whose_data_are_missing_is_refused(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    (tmp_path / "ali" / "final.mdl").unlink()
    with pytest.raises(DataError, match=r"final\.mdl"):
        load_config(folder)
    (folder / "tables" / "sgd.yaml").write_text("include: base.yaml\nminibatch_sizee: 3\n")
    plan = (folder / "reproduce.yaml").read_text()
    (folder / "reproduce.yaml").write_text(plan[: plan.index("    text:")])
    with pytest.raises(RecipeError, match="minibatch_sizee"):
        runs_of(folder)
    (tmp_path / "data").rename(tmp_path / "moved")
    (folder / "reproduce.yaml").write_text(plan[: plan.index("tests:")])
    with pytest.raises(RecipeError, match=r"data\.train: .* does not exist(?s:.*)hint: .* from which their paths"):
        runs_of(folder)


def test_corpora_are_found_by_name_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert find_corpus("toy").resolve() == folder == find_corpus(str(folder))
    with pytest.raises(UserError, match="no corpus 'other'"):
        find_corpus("other")


def test_a_corpus_is_found_in_the_checkout_too_and_as_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_corpus(tmp_path)
    assert find_corpus(str(folder / "reproduce.yaml")) == folder
    (tmp_path / "ddnn").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("ddnn.__file__", str(tmp_path / "ddnn" / "__init__.py"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_corpus("toy") == folder
    with pytest.raises(UserError, match=r"DDNN/recipes/other"):
        find_corpus("other")
    with pytest.raises(UserError, match="no corpus"):
        find_corpus(str(folder / "tables" / "base.yaml"))


def test_missing_data_of_a_test_are_named_by_their_key(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    (folder / "README.md").touch()
    (tmp_path / "graph").rename(tmp_path / "moved")
    with pytest.raises(DataError, match=r"tests\.test\.graphs\.loop: .* does not exist") as error:
        load_config(folder)
    assert error.value.location == str(folder / "reproduce.yaml")
    assert error.value.hint is not None and "README.md says where the data come from" in error.value.hint


def test_tables_are_chosen_by_name() -> None:
    assert [table.name for table in select_tables(("table6", "table2", "table6"))] == ["table6", "table2"]
    assert select_tables(("all",)) == paper().tables
    with pytest.raises(UserError, match="no table 'table7'"):
        select_tables(("table7",))


@pytest.mark.parametrize("table", paper().tables, ids=lambda table: str(table.name))
def test_hypotheses_and_the_papers_numbers_belong_to_rows(table: Table) -> None:
    names = {condition.name for condition in table.conditions}
    assert len(names) == len(table.conditions)
    assert set(table.published) <= names
    for hypothesis in table.hypotheses:
        assert {hypothesis.expected_better[0], hypothesis.expected_worse[0]} <= names
    settings = table.settings(plan(workers=(1, 2, 4, 8), max_workers=8))
    for condition in table.conditions:
        columns = tuple(workers for other, workers in settings if other == condition)
        by_selection = {("all",): (1, 2, 4, 8), (1, "max"): (1, 8), ("max",): (8,), ("few",): (1, 2, 4)}[
            condition.workers or table.workers
        ]
        assert columns == tuple(n for n in by_selection if n > 1 or not condition.several_workers_only)


def test_the_papers_figures_as_published() -> None:
    """Some of them, by hand from the paper."""
    wer = paper().published_wer
    assert wer["base"][32] == {"SWB": 15.2, "CH": 27.1, "SWB01": 16.4, "SWB2P3": 21.7, "SWBCELL": 27.8}
    assert wer["minibatch-1024"][16] == wer["base"][16]
    assert wer["sgd"][16] == {"SWB": 16.3, "CH": 28.3}
    assert TABLES["table2"].published == {"random": (1, 32), "base": (1, 32)}
    assert all(
        gpus in wer[row] for table in TABLES.values() for row in table.published for gpus in table.published[row]
    )
    assert paper().published_speed_ups["butterfly"][32] == 18.02


def test_recipes_name_the_condition(tmp_path: Path) -> None:
    (tmp_path / "reproduce.yaml").write_text('name: Toy\nworkers: [1, 2]\nmax_workers: 2\nrecipes: "{setting}.yaml"\n')
    with pytest.raises(DataError, match=r"recipes: .*\{condition"):
        load_config(tmp_path)
