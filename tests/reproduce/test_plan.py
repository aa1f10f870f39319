"""Which runs a table needs: each once, under a name that a changed recipe changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from reproduce.small import TOY, write_corpus

from ddnn.errors import DataError, RecipeError, UserError
from ddnn.reproduce.corpus import find_corpus, load_corpus_plan
from ddnn.reproduce.plan import Run, missing, plan_runs
from ddnn.reproduce.records import Record, read_records, write_record
from ddnn.reproduce.table import sizes
from ddnn.reproduce.tables import TABLES, chosen


def runs_of(folder: Path) -> list[Run]:
    return plan_runs(load_corpus_plan(folder), folder, [TOY])


def made(run: Run) -> Record:
    names = {"setting": run.setting, "workers": run.workers, "seed": run.seed}
    return Record.model_validate({**names, "recipe": run.digest, "judged": run.judged})


def test_each_run_once_and_seed_by_seed(tmp_path: Path) -> None:
    runs = runs_of(write_corpus(tmp_path))
    assert [run.name for run in runs] == [
        *("sgd-1-1", "base-1-1", "sgd-2-1", "base-2-1"),
        *("sgd-1-2", "base-1-2", "sgd-2-2", "base-2-2"),
    ]
    assert all(run.stack for run in runs) and len({run.digest for run in runs}) == 8


def test_a_setting_that_is_another_shares_its_runs(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    (folder / "reproduce.yaml").write_text((folder / "reproduce.yaml").read_text() + "same: {sgd: base}\n")
    assert [run.name for run in runs_of(folder)] == ["base-1-1", "base-2-1", "base-1-2", "base-2-2"]


def test_a_changed_recipe_is_another_run_but_a_moved_corpus_is_not(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "a")
    before = runs_of(folder)
    records = {run.name: made(run) for run in before}
    assert missing(before, records) == []
    assert [run.digest for run in runs_of(write_corpus(tmp_path / "b"))] == [run.digest for run in before]
    base = folder / "tables" / "base.yaml"
    base.write_text(base.read_text() + "checkpoint: {keep: 3}\n")
    assert missing(runs_of(folder), records) == []
    base.write_text(base.read_text().replace("epochs: 2", "epochs: 3"))
    assert len(missing(runs_of(folder), records)) == 8


def test_other_data_are_other_runs(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    before = [run.digest for run in runs_of(folder)]
    with (tmp_path / "data" / "feats.ark").open("ab") as handle:
        handle.write(b"x")
    assert not set(before) & {run.digest for run in runs_of(folder)}


def test_a_record_under_another_name_is_refused(tmp_path: Path) -> None:
    write_record(tmp_path, Record(setting="base", workers=1, seed=1, recipe="x")).rename(tmp_path / "base-1-1.old.json")
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
    (folder / "reproduce.yaml").write_text(plan + "stack: tables/stack.yaml\n")
    before = [run.digest for run in runs_of(folder)]
    (folder / "tables" / "stack.yaml").write_text(text.replace("passes: [1]", "passes: [2]"))
    assert not set(before) & {run.digest for run in runs_of(folder)}


def test_a_folder_of_records_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "records"):
        with pytest.raises(UserError, match="cannot make the directory"):
            write_record(folder, Record(setting="base", workers=2, seed=1, recipe="x"))


def test_a_stray_file_is_to_be_moved_and_a_damaged_record_deleted(tmp_path: Path) -> None:
    for name, mend in (("notes", "move it elsewhere"), ("base-1-1", "trained again where its run dir is gone")):
        path = tmp_path / f"{name}.json"
        path.write_text("{}")
        with pytest.raises(DataError, match=mend):
            read_records(tmp_path)
        path.unlink()


def test_records_outlive_their_run_dirs(tmp_path: Path) -> None:
    record = Record(setting="base", workers=2, seed=1, recipe="x", failed="it diverged")
    write_record(tmp_path / "records", record)
    assert read_records(tmp_path / "records") == {"base-2-1": record}
    assert read_records(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"setting": 1}', "\xff", '{"setting":"a","workers":0}'])
def test_a_damaged_record_is_named(tmp_path: Path, damage: str) -> None:
    (tmp_path / "base-1-1.json").write_bytes(damage.encode("latin-1"))
    with pytest.raises(DataError, match=r"base-1-1\.json"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: Toy\nworkers: [2, 4]\nmany: 2", "with 1 and 2"),
        ("name: Toy\nworkers: [1, 4]\nmany: 2", "rising sizes"),
        ("name: Toy\nworkers: []\nmany: 2", "rising sizes"),
        ("name: Toy\nworkers: [1, 2]\nmany: 2\nfurther: 3", "further"),
        ("name: Toy\nworkers: [1, 2]\nmany: 2\nseeds: [-1]", "seeds"),
        ("name: Toy\nworkers: [1, 2]\nmany: 2\nseeds: [1, 1]", "each once"),
        ("name: Toy\nworkers: [1, 2]\nmany: 2\nseeds: []", "one or more"),
        ("name: Toy\nworkers: [1, 2]\nmany: 2\ntests: {a: 1}", "tests"),
        ("name: Toy\nworkers: [1, 2]\nmany: 2\ntests:\n  a: {data: x}\n  a: {data: x}", "given twice"),
        ("name: Toy\nworkers: &a [1, 2]\nmany: *a", "anchors"),
        ("name: !!python/object:os.system x", "tags"),
        ("name: 2026-99-99\nworkers: [1, 2]\nmany: " + 5000 * "9", "many"),
        ("[" * 3000, "levels"),
        ("", "nothing found"),
    ],
)
def test_what_is_wrong_with_a_corpus_is_said(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "reproduce.yaml").write_text(text)
    with pytest.raises(DataError, match=said):
        load_corpus_plan(tmp_path)


def test_a_setting_without_a_recipe_is_named(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    (folder / "tables" / "sgd.yaml").unlink()
    with pytest.raises(UserError, match="the setting sgd has no recipe"):
        runs_of(folder)


def test_a_recipe_whose_data_are_missing_is_refused(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    (tmp_path / "ali" / "final.mdl").unlink()
    with pytest.raises(DataError, match=r"final\.mdl"):
        load_corpus_plan(folder)
    (folder / "tables" / "sgd.yaml").write_text("include: base.yaml\nminibatchh: 3\n")
    plan = (folder / "reproduce.yaml").read_text()
    (folder / "reproduce.yaml").write_text(plan[: plan.index("    text:")])
    with pytest.raises(RecipeError, match="minibatchh"):
        runs_of(folder)
    (tmp_path / "data").rename(tmp_path / "moved")
    (folder / "reproduce.yaml").write_text(plan[: plan.index("tests:")])
    with pytest.raises(RecipeError, match=r"data\.train: .* does not exist(?s:.*)mend: .* from which their paths"):
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
        load_corpus_plan(folder)
    assert error.value.where == str(folder / "reproduce.yaml")
    assert error.value.mend is not None and "README.md says where they come from" in error.value.mend


def test_tables_are_chosen_by_name() -> None:
    assert [table.name for table in chosen(("table6", "table2", "table6"))] == ["table6", "table2"]
    assert chosen(("all",)) == tuple(TABLES.values())
    with pytest.raises(UserError, match="no table 'table7'"):
        chosen(("table7",))


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: str(table.name))
def test_contrasts_and_the_papers_numbers_belong_to_rows(table: object) -> None:
    assert hasattr(table, "settings")
    names = {setting.name for setting in table.settings}
    assert {setting for setting, _ in table.paper} <= names
    for contrast in table.contrasts:
        assert {contrast.better[0], contrast.worse[0]} <= names
    assert sizes(table, (1, 2, 4), 4) == {"every size": (1, 2, 4), "one and many": (1, 4), "many": (4,)}[table.columns]
