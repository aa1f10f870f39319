"""Recipes: what is read, and what is said about those that cannot be."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddnn.recipe import source
from ddnn.recipe.keys import keys
from ddnn.recipe.load import dump_recipe, load_recipe
from ddnn.recipe.schema import Recipe, TrainedModelConfig
from ddnn.recipe.source import configs_folder, parse_file, shipped_fragments
from ddnn.util.errors import RecipeError

DATA = "data: {train: train, alignments: ali}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment's folder, hostile in name, with data in it; the working directory is another one."""
    folder = tmp_path / "my éxp #1"
    for name in ("train", "ali", "cv", "cv_ali"):
        (folder / name).mkdir(parents=True)
    (folder / "speakers.txt").write_text("anna\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return folder


def load(folder: Path, text: str | bytes, *overrides: str) -> Recipe:
    path = folder / "r.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_recipe(path, overrides)


def problems(folder: Path, text: str | bytes, *overrides: str) -> list[str]:
    """The problems reported, one a line, without bullets."""
    with pytest.raises(RecipeError) as caught:
        load(folder, text, *overrides)
    assert caught.value.location == str(folder / "r.yaml")
    lines = caught.value.message.split("\n")
    if len(lines) == 1:
        return lines
    assert lines[0] == f"{len(lines) - 1} problems in the recipe:"
    return [line.removeprefix("  - ") for line in lines[1:]]


def one_problem(folder: Path, text: str | bytes, *overrides: str) -> str:
    found = problems(folder, text, *overrides)
    assert len(found) == 1, found
    return found[0]


def test_defaults_and_absolute_paths(folder: Path) -> None:
    recipe = load(folder, DATA)
    assert recipe.data.train == folder / "train"
    assert recipe.data.alignments == folder / "ali"
    assert (recipe.seed, recipe.minibatch_size, recipe.schedule.name, recipe.data.cv.fraction) == (
        1,
        256,
        "newbob",
        0.1,
    )


def test_relative_path_prefers_the_working_directory(folder: Path) -> None:
    here = Path.cwd() / "train"
    here.mkdir()
    assert load(folder, DATA).data.train == here
    assert load(folder, DATA).data.alignments == folder / "ali"


def test_path_that_is_nowhere_names_both_places(folder: Path) -> None:
    text = one_problem(folder, "data: {train: ../nix, alignments: ali}")  # both folders lie in the same one
    assert text.startswith(f"data.train: '../nix' does not exist: there is no {folder.parent / 'nix'}")
    text = one_problem(folder, "data: {train: nix, alignments: ali}")
    assert f"neither {Path.cwd() / 'nix'} nor {folder / 'nix'}" in text
    assert "there is no /nix/nix" in one_problem(folder, "data: {train: /nix/nix, alignments: ali}")


@pytest.mark.parametrize("path", ['""', r'"a\0b"', "x" * 5000, r'"\ud800"'])
def test_impossible_path(folder: Path, path: str) -> None:
    assert one_problem(folder, f"data: {{train: {path}, alignments: ali}}").startswith("data.train: ")


def test_dots_over_a_symbolic_link_name_the_same_place(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "far" / "train").mkdir()
    (folder / "link").symlink_to(tmp_path / "far" / "deep")
    recipe = load(folder, "data: {train: link/../train, alignments: train/../ali}")
    assert recipe.data.alignments == folder / "ali"
    assert recipe.data.train.samefile(tmp_path / "far" / "train")
    assert recipe.data.train.is_absolute()


def test_data_may_be_gone_for_finished_runs(folder: Path) -> None:
    path = folder / "r.yaml"
    path.write_text("data: {train: /gone/train, alignments: ali}")
    assert load_recipe(path, must_exist=False).data.train == Path("/gone/train")


def test_all_problems_at_once_with_file_and_line(folder: Path) -> None:
    text = """\
data: {train: train, alignments: ali, cv: {fraction: 0.2, speakers: speakers.txt}}
optimizer:
  momentum: -0.1
schedule:
  initail: 0.1
  final_learning_rate: 0.1
minibatch_size: true
modle: {hidden_layers: 2}
"""
    found = problems(folder, text, "model.hidden_units=0")
    file = folder / "r.yaml"
    assert found == [
        f"schedule.initail: unknown key; did you mean schedule.initial_learning_rate?  [{file}, line 5]",
        f"modle: unknown key; did you mean model?  [{file}, line 8]",
        "model.hidden_units: 0 found, expected a whole number >= 1  [--set model.hidden_units=0]",
        f"optimizer.momentum: -0.1 found, expected a number >= 0 and < 1  [{file}, line 3]",
        f"minibatch_size: true found, expected a whole number >= 1, or a mapping of start, end, epochs  [{file}, line 7]",
        "schedule.final_learning_rate: never read by newbob, only by exponential; remove it, set it to null, "
        "or change schedule.name"
        f"  [{file}, line 6]",
        "data.cv.fraction: given together with data.cv.speakers; these are different ways to hold out data: "
        f"keep one, set the others to null  [{file}, line 1]",
    ]


def test_missing_keys(folder: Path) -> None:
    found = problems(folder, "seed: 3")
    assert [line.split(";")[0].split(",")[0] for line in found] == ["data.train: missing", "data.alignments: missing"]
    assert "Kaldi data dir" in found[0]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("momentum=0.5", "did you mean optimizer.momentum?"),
        ("schedule.momentum=0.5", "did you mean optimizer.momentum?"),
        ("data.fraction=0.5", "did you mean data.cv.fraction?"),
        ("learning_rate=0.5", "did you mean schedule.initial_learning_rate?"),
        ("parallel.on_failure=continue", "did you mean parallel.max_restarts?"),
        ("parallel.timeout=60", "did you mean parallel.hang_timeout?"),
        ("optimiser.name=sgd", "optimiser: unknown key; did you mean optimizer?"),
        ("model.hiden_units=5", "did you mean model.hidden_units?"),
        (
            "zzz=5",
            "zzz: unknown key; the keys here are seed, init, criterion, minibatch_size, minibatch_scope, randomizer_size, precision, allow_tf32,",
        ),
        ("seed.x=5", "seed: a mapping found, expected a whole number >= 0 and < 2^63"),
        ("seed={}", "seed: a mapping found, expected a whole number"),
        ("model=3", "model: 3 found, expected a mapping of hidden_layers, hidden_units, activation"),
        ("model={hidden_layers: 2, x: 1}", "model.x: unknown key"),
        ("seed", "no KEY=VALUE found"),
        ("=3", "no KEY=VALUE found"),
        ("seed=[", "not YAML"),
        ("include=x.yaml", "include: cannot be set"),
        ("seed=&a 3", "anchors (&) and aliases (*) are not allowed"),
    ],
)
def test_bad_settings(folder: Path, setting: str, said: str) -> None:
    text = one_problem(folder, DATA, setting)
    assert said in text
    assert text.endswith(f"[--set {setting}]") or f"[--set {setting}, line " in text


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("minibatch_size=true", "true found, expected a whole number >= 1"),
        ("minibatch_size='256'", "the text '256' found, expected a whole number >= 1"),
        ("minibatch_size=256.0", "256.0 found, expected a whole number >= 1"),
        ("minibatch_size=-1", "-1 found"),
        ("minibatch_size=[1]", "a list found"),
        ("minibatch_size=1:30", "the text '1:30' found"),
        ("minibatch_size=" + "9" * 5000, "the text '999"),
        ("seed=9223372036854775808", "expected a whole number >= 0 and < 2^63"),
        ("schedule.initial_learning_rate=-0.008", "-0.008 found, expected a number > 0"),
        ("schedule.initial_learning_rate=0", "0 found, expected a number > 0"),
        ("schedule.initial_learning_rate=.inf", ".inf found, expected a number > 0"),
        ("schedule.initial_learning_rate=.nan", ".nan found, expected a number > 0"),
        ("schedule.initial_learning_rate=1e999", ".inf found, expected a number > 0"),
        ("schedule.initial_learning_rate=on", "true found, expected a number > 0"),
        ("schedule.initial_learning_rate=0,008", "the text '0,008' found"),
        ("schedule.halving_factor=1", "1 found, expected a number > 0 and < 1"),
        ("data.normalize=1", "1 found, expected true or false"),
        ("data.normalize='yes'", "the text 'yes' found, expected true or false"),
        ("data.cmvn=true", "true found, expected none, mean or mean-variance"),
        ("data.cmvn=means", "the text 'means' found, expected none, mean or mean-variance"),
        ("data.train=3", "3 found, expected a path"),
        ("schedule.name=newbobb", "the text 'newbobb' found, expected newbob, exponential, constant, power or passes"),
        ("schedule.name=[1]", "a list found, expected newbob, exponential, constant, power or passes"),
        ("parallel.strategy=3", "3 found, expected all-reduce, butterfly, "),
        ("data.cv.fraction=0", "0 found, expected a number > 0 and < 1"),
        ("data.splice=2023-13-45", "the text '2023-13-45' found"),
    ],
)
def test_values_of_the_wrong_kind(folder: Path, setting: str, said: str) -> None:
    key = setting.partition("=")[0]
    assert one_problem(folder, DATA, setting).startswith(f"{key}: ")
    assert said in one_problem(folder, DATA, setting)


def test_numbers_and_switches_as_people_write_them(folder: Path) -> None:
    text = DATA + "schedule: {initial_learning_rate: 1e-3, end_halving_impr: .5}\noptimizer: {momentum: 0, l2: 1e-05}\n"
    recipe = load(folder, text, "data.normalize=no", "data.allow_pipes=On", "seed=010")
    assert (recipe.schedule.initial_learning_rate, recipe.schedule.end_halving_impr, recipe.optimizer.l2) == (
        1e-3,
        0.5,
        1e-5,
    )
    assert isinstance(recipe.optimizer.momentum, float)
    assert (recipe.data.normalize, recipe.data.allow_pipes, recipe.seed) == (False, True, 10)


@pytest.mark.parametrize(
    ("text", "said", "place"),
    [
        ("- a\n- b\n", "a list found, expected `key: value` lines", "line 1"),
        ("just words\n", "plain text found, expected `key: value` lines", "line 1"),
        ("", "nothing found, expected `key: value` lines", ""),
        ("# only a comment\n", "nothing found", ""),
        ("data:\n\ttrain: x\n", "a tab found; use spaces", "line 2, column 1"),
        ("seed:\t3\n" + DATA, "a tab found; use spaces", "line 1, column 6"),
        (b"seed: 3\nname: \xff\xfe\n", "byte 0xff found, expected UTF-8 text", "line 2"),
        ("seed: 3\nminibatch_size: [3\n", "not YAML: ", "line 3, column 1"),
        ("seed: 3\nminibatch_size: \x07\n", "character '\\x07' found", "line 2"),
        ("seed: &a 3\n", "anchors (&) and aliases (*) are not allowed", "line 1, column 7"),
        ("seed: *a\n", "anchors (&) and aliases (*) are not allowed", "line 1, column 7"),
        ("seed: !!python/object/apply:os.system [ls]\n", "tags (!) are not allowed", "line 1, column 7"),
        ("? [a, b]\n: 3\n" + DATA, "a key that is a list or a mapping found, expected a word", "line 1"),
        (DATA + "seed: 1\nseed: 2\n", "seed: given twice, first in line 2", "line 3"),
        (DATA + "model:\n  hidden_units: 1\n  hidden_units: 1\n", "model.hidden_units: given twice", "line 4"),
        (DATA + "schedule.initial_learning_rate: 1\n", "here write schedule: {initial_learning_rate: ...}", "line 2"),
        ("a: " + "[" * 5000 + "\n", "more than 40 levels", "line 1, column 44"),
        ("a: 1\n---\nb: 2\n", "not YAML: ", "line 2, column 1"),
        ("#" + "x" * 100_000, "more than 100000 bytes found", ""),
    ],
)  # fmt: skip
def test_files_that_are_not_recipes(folder: Path, text: str | bytes, said: str, place: str) -> None:
    found = one_problem(folder, text)
    assert said in found
    assert found.endswith(f"[{folder / 'r.yaml'}, {place}]") if place else str(folder) not in found


def test_unreadable_files(folder: Path) -> None:
    with pytest.raises(RecipeError, match="cannot read the file: No such file"):
        load_recipe(folder / "nix.yaml")
    with pytest.raises(RecipeError, match="cannot read the file: Is a directory"):
        load_recipe(folder)


def test_byte_order_mark_is_no_part_of_the_first_key(folder: Path) -> None:
    assert load(folder, b"\xef\xbb\xbfseed: 7\n" + DATA.encode()).seed == 7


def test_include_order(folder: Path) -> None:
    (folder / "a.yaml").write_text("seed: 1\nminibatch_size: 1\nmodel: {hidden_units: 1}\nschedule: {max_epochs: 1}\n")
    (folder / "b.yaml").write_text(
        "include: a.yaml\nminibatch_size: 2\nmodel: {hidden_units: 2}\nschedule: {max_epochs: 2}\n"
    )
    (folder / "c.yaml").write_text("model: {hidden_units: 3}\nschedule: {max_epochs: 3}\n")
    recipe = load(folder, DATA + "include: [b.yaml, c.yaml]\nschedule: {max_epochs: 4}\n", "schedule.keep_lr_epochs=5")
    assert (recipe.seed, recipe.minibatch_size, recipe.model.hidden_units) == (1, 2, 3)
    assert (recipe.schedule.max_epochs, recipe.schedule.keep_lr_epochs) == (4, 5)
    assert load(folder, DATA + "seed: 3\n", "seed=4", "seed=5").seed == 5


def test_shipped_fragments(folder: Path) -> None:
    recipe = load(folder, DATA + "include: [model/swbd.yaml, schedule/exponential.yaml, optimizer/sgd.yaml]\n")
    assert (recipe.model.hidden_layers, recipe.model.hidden_units, recipe.minibatch_size) == (6, 2048, 1024)
    assert (recipe.schedule.name, recipe.schedule.epochs, recipe.schedule.final_learning_rate) == (
        "exponential",
        15,
        8e-5,
    )
    recipe = load(folder, DATA + "include:\n  - model/an4.yaml\n  - schedule/newbob.yaml\n")
    assert (recipe.model.hidden_layers, recipe.model.hidden_units, recipe.minibatch_size) == (4, 512, 256)
    assert (recipe.schedule.name, recipe.schedule.initial_learning_rate, recipe.schedule.max_epochs) == (
        "newbob",
        0.008,
        20,
    )


def test_every_shipped_fragment_says_what_it_is(folder: Path) -> None:
    assert len(shipped_fragments()) > 3
    for name in shipped_fragments():
        assert (configs_folder() / name).read_text().startswith("# "), name
        lattices = "init: {model: ali}\ncriterion: {lattices: ali, silence_phones: ali}\n"
        load(folder, DATA + f"include: {name}\n" + lattices * name.startswith("criterion/"))


def test_the_recipes_folder_comes_before_the_shipped_fragments(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "an4.yaml").write_text("seed: 77\n")
    assert load(folder, DATA + "include: model/an4.yaml\n").seed == 77


def test_missing_fragment_says_where_it_was_looked_for_and_which_exist(folder: Path) -> None:
    found = one_problem(folder, "include: model/swb.yaml\n")  # and no word of missing keys: it may have had them
    assert f"model/swb.yaml is neither {folder / 'model/swb.yaml'} nor " in found
    assert "model/an4.yaml, model/swbd.yaml" in found
    assert found.endswith(f"[{folder / 'r.yaml'}, line 1]")


def test_include_circle(folder: Path) -> None:
    (folder / "a.yaml").write_text("include: b.yaml\n")
    (folder / "b.yaml").write_text("include: [a.yaml]\n")
    found = one_problem(folder, DATA + "include: a.yaml\n")
    assert "include: a.yaml includes itself, by way of r.yaml -> a.yaml -> b.yaml" in found
    assert "includes itself" in one_problem(folder, "include: r.yaml\n")


def test_includes_that_double_at_every_level_end(folder: Path) -> None:
    for n in range(30):
        (folder / f"{n}.yaml").write_text(f"include: [{n + 1}.yaml, {n + 1}.yaml]\n")
    (folder / "30.yaml").write_text("seed: 1\n")
    assert "include: more than 20 files in all" in problems(folder, "include: 0.yaml\n")[0]


@pytest.mark.parametrize("value", ["3", "{a: b}", "[[a]]", "[3]", '""', r'"a\0"'])
def test_include_that_names_no_file(folder: Path, value: str) -> None:
    assert "expected a file name or a list of them" in one_problem(folder, f"include: {value}\n")


def test_problem_in_a_fragment_names_the_fragment(folder: Path) -> None:
    (folder / "a.yaml").write_text("# here\nminibatch_size: 0\n")
    assert one_problem(folder, DATA + "include: a.yaml\n").endswith(f"[{folder / 'a.yaml'}, line 2]")
    assert load(folder, DATA + "include: a.yaml\nminibatch_size: 5\n").minibatch_size == 5


def test_a_key_takes_a_value_or_a_mapping(folder: Path) -> None:
    recipe = load(folder, DATA + "init: {model: train}\n")
    assert isinstance(recipe.init, TrainedModelConfig)
    assert (recipe.init.model, recipe.init.output_layer) == (folder / "train", "keep")
    assert load(folder, DATA, "init.model=train", "init.output_layer=random") == load(
        folder, DATA, "init={model: train, output_layer: random}"
    )
    for settings_ in ([], ["init=rbm"], ["init.model=train", "init.output_layer=random"]):
        recipe = load(folder, DATA, *settings_)
        assert load(folder, dump_recipe(recipe)) == recipe
    assert yaml.safe_load(dump_recipe(recipe))["init"] == {"model": str(folder / "train"), "output_layer": "random"}


def test_the_later_of_a_value_and_a_mapping_replaces_the_other(folder: Path) -> None:
    (folder / "model.yaml").write_text("init: {model: train, output_layer: random}\n")
    (folder / "rbm.yaml").write_text("init: rbm\n")
    assert load(folder, DATA + "include: [model.yaml, rbm.yaml]\n").init == "rbm"
    recipe = load(folder, DATA + "include: [rbm.yaml, model.yaml]\n", "init.model=ali")
    assert recipe.init == TrainedModelConfig(model=folder / "ali", output_layer="random")
    assert load(folder, DATA + "include: model.yaml\n", "init=random").init == "random"
    assert load(folder, DATA + "include: model.yaml\n", "init=null").init == "random"
    assert load(folder, DATA + "include: rbm.yaml\n", "init.model=null").init == "rbm"
    both = DATA + "include: [rbm.yaml, model.yaml]\n"
    assert load(folder, both, "init.model=null", "init.output_layer=null").init == "random"
    found = one_problem(folder, DATA + "include: rbm.yaml\n", "init.output_layer=random")
    assert found.startswith("init.model: missing") and found.endswith("[--set init.output_layer=random]")


def test_all_problems_with_a_mapping_at_once(folder: Path) -> None:
    text = "init:\n  output_layer: new\n  modle: train\nseed: {x: 1}\npretrain: {hours: 3}\n"
    found = problems(folder, DATA + text)
    file = folder / "r.yaml"
    assert [line.partition(". ")[0] for line in found] == [
        f"init.modle: unknown key; did you mean init.model?  [{file}, line 4]",
        f"seed: a mapping found, expected a whole number >= 0 and < 2^63  [{file}, line 5]",
        "init.model: missing, expected a path",
        f"init.output_layer: the text 'new' found, expected keep or random  [{file}, line 3]",
        f"pretrain.hours: never read, as init is random; remove it or set it to null  [{file}, line 6]",
    ]
    assert found[2].endswith(f"[{file}, line 2]")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("init=rmb", "init: the text 'rmb' found, expected random or rbm, or a mapping of model, output_layer"),
        ("init=3", "init: 3 found, expected random or rbm, or a mapping of model, output_layer"),
        ("init=[rbm]", "init: a list found, expected random or rbm, or a mapping of model, output_layer"),
        ("init={}", "init.model: missing, expected a path"),
        ("init.output_layer=random", "init.model: missing, expected a path"),
        ("init.model=nix", "init.model: 'nix' does not exist"),
        ("init.model=3", "init.model: 3 found, expected a path"),
        ("init.model={a: b}", "init.model: a mapping found, expected a path"),
        ("ini=rbm", "ini: unknown key; did you mean init?"),
    ],
)
def test_neither_the_value_nor_the_mapping_of_a_key(folder: Path, setting: str, said: str) -> None:
    found = one_problem(folder, DATA, setting)
    assert found.startswith(said) and found.endswith(f"[--set {setting}]")


def test_null_takes_a_key_back_to_its_default(folder: Path) -> None:
    text = DATA.replace("}", ", cv: {speakers: speakers.txt}}") + "minibatch_size: 3\nschedule:\n"
    recipe = load(folder, text, "data.cv.speakers=null", "data.cv.fraction=0.2", "minibatch_size=")
    assert (recipe.data.cv.speakers, recipe.data.cv.fraction, recipe.minibatch_size) == (None, 0.2, 256)
    assert "data.train: missing" in one_problem(folder, DATA, "data.train=")


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        (["init=rbm", "model.activation=tanh"], "model.activation: tanh found, expected sigmoid"),
        (["init=rbm", "model.hidden_layers=0"], "model.hidden_layers: 0 found, expected 1 or more"),
        (["pretrain.learning_rate=0.1"], "pretrain.learning_rate: never read, as init is random"),
        (
            ["model={hidden_layers: 2, freeze: [0, 3]}"],
            "model.freeze: 3 found, expected 0 (the first hidden layer) to 2 (the output layer)",
        ),
        (["model.freeze=[-1]"], "model.freeze: -1 found, expected 0 (the first hidden layer) to 6 (the output layer)"),
        (["model={hidden_layers: 2, freeze: [0, 2, 1]}"], "model.freeze: all 3 layers are frozen, so that nothing is"),
        (
            ["init=rbm", "pretrain.epochs=[2]", "pretrain.hours=3"],
            "pretrain.hours: never read, as pretrain.epochs is given",
        ),
        (
            ["init=rbm", "pretrain.feature_transform=."],
            "pretrain.feature_transform: never read, as there is no pretrain.dbn",
        ),
        (
            ["init=rbm", "pretrain.dbn=.", "pretrain.learning_rate=1"],
            "pretrain.learning_rate: never read, as pretrain.dbn names",
        ),
        (
            ["init=rbm", "pretrain.epochs=[2, x]"],
            "pretrain.epochs: a list found, expected a list, each a whole number >= 1",
        ),
        (["data.cv.data=cv"], "data.cv.data: needs data.cv.alignments"),
        (["data.cv.alignments=cv_ali"], "data.cv.alignments: needs data.cv.data"),
        (["data.cv.transforms=cv_ali"], "data.cv.transforms: never read, as there is no data.cv.data"),
        (
            ["data.cv.data=cv", "data.cv.alignments=cv_ali", "data.cv.transforms=cv_ali"],
            "data.cv.transforms: never read, as there is no data.transforms",
        ),
        (
            ["data.cv={data: cv, alignments: cv_ali, fraction: 0.1}"],
            "data.cv.fraction: given together with data.cv.data",
        ),
        (
            ["schedule.final_learning_rate=0.001"],
            "schedule.final_learning_rate: never read by newbob, only by exponential",
        ),
        (
            ["schedule={name: power, decay_epochs: 0}"],
            "schedule.decay_epochs: 0 found, expected a number >= 0.001 and <=",
        ),
        (["schedule={name: power, exponent: -1}"], "schedule.exponent: -1 found, expected a number > 0 and <= 10"),
        (
            ["schedule={name: constant, decay_epochs: 2}"],
            "schedule.decay_epochs: never read by constant, only by power",
        ),
        (["schedule={name: constant, epochs: 0}"], "schedule.epochs: 0 found, expected a whole number >= 1"),
        (
            ["minibatch_scope=total", "minibatch_size=256", "parallel.workers=3"],
            "minibatch_size: 256 found, expected a multiple of parallel.workers = 3, as minibatch_scope is total: 255 or 258",
        ),
        (
            ["minibatch_scope=total", "minibatch_size=2", "parallel.workers=3"],
            "expected a multiple of parallel.workers = 3, as minibatch_scope is total: 3  [",
        ),
        (
            ["minibatch_size={start: 256, end: 999}", "minibatch_scope=total", "parallel.workers=3"],
            "minibatch_size.start: 256 found, expected a multiple of parallel.workers = 3, as minibatch_scope is total: 255 or",
        ),
        (
            ["minibatch_size={start: 256, end: 128}"],
            "minibatch_size.end: 128 found, expected at least minibatch_size.start",
        ),
        (["minibatch_size={start: 0, end: 128}"], "minibatch_size.start: 0 found, expected a whole number >= 1"),
        (
            ["minibatch_size={start: 8, end: 16, epochs: 1}"],
            "minibatch_size.epochs: 1 found, expected a whole number >= 2",
        ),
        (["minibatch_size={start: 256}"], "minibatch_size.end: missing, expected a whole number >= 1"),
        (
            ["minibatch_size=0"],
            "minibatch_size: 0 found, expected a whole number >= 1, or a mapping of start, end, epochs",
        ),
        (
            ["parallel={strategy: 1-bit, comm_dtype: bfloat16}"],
            "parallel.comm_dtype: bfloat16 found beside strategy: 1-bit, which sends one bit for each parameter; set it to",
        ),
        (["parallel={strategy: 1-bit, elasticity: 0.9}"], "parallel.elasticity: never read by 1-bit"),
        (["parallel.strategy=2-bit"], "parallel.strategy: the text '2-bit' found, expected"),
        (["minibatch_scope=all"], "minibatch_scope: the text 'all' found, expected worker or total"),
        (
            ["parallel={strategy: ring, averaging_frames: epoch}"],
            "parallel.averaging_frames: epoch found beside strategy: ring, whose epochs end with the mean of all-reduce; set",
        ),
        (
            ["parallel={overlap: true, averaging_frames: epoch}"],
            "parallel.averaging_frames: epoch found beside overlap: true, but there is no interval to train beside; set",
        ),
        (
            ["parallel={comm_dtype: bfloat16, averaging_frames: epoch}"],
            "parallel.comm_dtype: never read, as the mean at the end of an epoch is sent as float32; remove it",
        ),
        (
            ["parallel={strategy: bmuf, local_momentum: keep, averaging_frames: epoch}"],
            "parallel.local_momentum: never read, as the optimizer's momentum is cleared where parallel.averaging_frames is",
        ),
        (
            ["parallel={strategy: gradient-all-reduce, averaging_frames: epoch}"],
            "parallel.averaging_frames: never read, as gradients are averaged at every minibatch; remove it",
        ),
        *(
            (
                [f"parallel={{strategy: async, averaging_frames: {frames}}}"],
                f"parallel.averaging_frames: {frames} found beside strategy: async, whose workers exchange within an epoch",
            )
            for frames in ("epoch", "auto")
        ),
        (
            ["parallel={strategy: gradient-all-reduce, averaging_frames: auto}"],
            "parallel.averaging_frames: never read, as gradients are averaged at every minibatch; remove it",
        ),
        (
            ["parallel.averaging_frames=epochs"],
            "parallel.averaging_frames: the text 'epochs' found, expected a whole number >= 1 or epoch or auto",
        ),
        (["schedule={name: exponential, criterion: loss}"], "schedule.criterion: never read by exponential"),
        (
            ["schedule={name: exponential, final_learning_rate: 0.1}"],
            "final_learning_rate: 0.1 found, expected at most schedule.initial_learning_rate = 0.008",
        ),
    ],
)
def test_contradictions(folder: Path, settings_: list[str], said: str) -> None:
    assert said in one_problem(folder, DATA, *settings_)


NEWBOB = "schedule: {name: newbob, max_epochs: 3, min_epochs: 1}\n"


@pytest.mark.parametrize(
    ("text", "settings_", "dropped"),
    [
        (NEWBOB, ["schedule.name=exponential"], "schedule.max_epochs [{}, line 2], schedule.min_epochs [{}, line 2]"),
        (NEWBOB, ["schedule={name: constant, epochs: 2}"], "schedule.max_epochs [{}, line 2], schedule.min_epochs"),
        ("optimizer: {name: ng-sgd, alpha: 2}", ["optimizer.name=sgd"], "optimizer.alpha [{}, line 2]"),
        ("init: rbm\npretrain: {epochs: [2, 1]}", ["init=random"], "pretrain.epochs [{}, line 3]"),
        ("init: rbm\npretrain: {epochs: [2, 1], l2: 0.1}", ["pretrain.dbn=cv"], "pretrain.epochs [{}, line 3], pretrain.l2"),
        ("init: rbm\npretrain: {hours: 3}", ["pretrain.epochs=[2]"], "pretrain.hours [{}, line 3]"),
        ("init: rbm\npretrain: {hours: 3}", ["init.model=train"], "pretrain.hours [{}, line 3]"),
        ("model: {hidden_units: 8}", ["model.layers=[affine: 4]"], "model.hidden_units [{}, line 2]"),
        ("parallel: {block_momentum: 0.5, strategy: bmuf}", ["parallel.strategy=ring"], "parallel.block_momentum"),
    ],
)  # fmt: skip
def test_a_setting_replaces_a_choice_of_the_file(
    folder: Path, caplog: pytest.LogCaptureFixture, text: str, settings_: list[str], dropped: str
) -> None:
    caplog.set_level("INFO", "ddnn")
    nulls = [f"{key.split()[0]}=null" for key in dropped.split(", ") if "." in key]
    chosen = load(folder, DATA + text, *settings_)
    (note,) = caplog.messages
    assert dropped.replace("{}", str(folder / "r.yaml")) in note and note.startswith("--set chooses otherwise")
    assert chosen == load(folder, DATA + text, *settings_, *nulls), "as if they had been set to null by hand"


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("optimizer", "ng-sgd", "optimizer.name=ng-sgd"),
        ("schedule", "newbob", "schedule.name=newbob"),
        ("init", "exp/dnn", "init.model=exp/dnn"),
    ],
)
def test_the_choice_alone_in_place_of_its_mapping(folder: Path, key: str, value: str, meant: str) -> None:
    section, chooser = meant.partition("=")[0].split(".")
    assert f"; write {meant}  [--set" in one_problem(folder, DATA, f"{key}={value}")
    assert f"; write {section}: {{{chooser}: {value}}}  [" in one_problem(folder, f"{DATA}{key}: {value}\n")


def test_a_number_of_epochs_without_its_section(folder: Path) -> None:
    assert "did you mean schedule.max_epochs or schedule.epochs?" in one_problem(folder, DATA, "epochs=3")


def test_a_setting_replaces_the_way_to_hold_out(folder: Path) -> None:
    held_out = "data: {train: train, alignments: ali, cv: {%s}}"
    for first, key, value in (
        ("fraction: 0.2, by: speaker", "speakers", "speakers.txt"),
        ("speakers: gone.txt", "fraction", "0.3"),
        ("data: cv, alignments: cv_ali", "utterances", "speakers.txt"),
    ):
        cv = load(folder, held_out % first, f"data.cv.{key}={value}").data.cv
        assert {name for name, chosen in cv if chosen is not None} == {key}
    assert "different ways to hold out" in one_problem(
        folder, held_out % "fraction: 0.2", "data.cv.speakers=speakers.txt", "data.cv.utterances=speakers.txt"
    ), "two of --set"


def test_a_contradiction_of_the_file_itself_stays_one(folder: Path) -> None:
    text = "schedule: {name: newbob, epochs: 3}\n"
    assert "schedule.epochs: never read by newbob" in one_problem(folder, DATA + text, "seed=2")
    assert "schedule.epochs: never read by newbob" in one_problem(folder, DATA, "schedule.epochs=2"), "of --set"


def test_sound_combinations(folder: Path) -> None:
    own = load(folder, DATA, "data.cv.data=cv", "data.cv.alignments=cv_ali")
    assert own.data.cv.alignments == folder / "cv_ali"
    exponential = load(
        folder, DATA, "schedule.name=exponential", "schedule.final_learning_rate=0.008", "schedule.halving_factor=null"
    )
    assert exponential.schedule.final_learning_rate == exponential.schedule.initial_learning_rate == 0.008


def test_a_growing_minibatch(folder: Path) -> None:
    recipe = load(folder, DATA + "minibatch_size: {start: 256, end: 1024}")
    assert recipe.minibatch == "256 to 1024 over 5 epochs"
    assert load(folder, dump_recipe(recipe)) == recipe
    assert load(folder, dump_recipe(recipe), "minibatch_size=64").minibatch_size == 64


def test_dump_is_readable_and_in_schema_order(folder: Path) -> None:
    text = dump_recipe(load(folder, "minibatch_size: 100\n" + DATA, "data.cv.speakers=speakers.txt"))
    tree = yaml.safe_load(text)
    assert list(tree) == [name for name in Recipe.model_fields if name in tree]
    assert tree["data"]["cv"] == {"speakers": str(folder / "speakers.txt")}
    assert f"train: {folder / 'train'}\n" in text.replace("'", "")
    assert "null" not in text
    assert "final_learning_rate" not in tree["schedule"]


FRACTION = st.floats(0, 1, exclude_min=True, exclude_max=True)
POSITIVE = st.floats(1e-300, 1e300)
VALUES = {
    "seed": st.integers(0, 2**63 - 1),
    "minibatch_size": st.integers(1, 10**12),
    "data.num_pdfs": st.integers(1, 10**6),
    "data.splice": st.integers(0, 100),
    "data.normalize": st.booleans(),
    "data.feature_dtype": st.sampled_from(["float16", "float32"]),
    "data.max_skipped_fraction": FRACTION,
    "data.cv.fraction": FRACTION,
    "model.activation": st.sampled_from(["sigmoid", "tanh", "relu"]),
    "optimizer.l2": POSITIVE,
    "schedule.name": st.sampled_from(["newbob", "exponential", "constant", "power"]),
    "schedule.initial_learning_rate": POSITIVE,
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_dump_and_load_give_an_equal_recipe(folder: Path, values: dict[str, object]) -> None:
    assert set(VALUES) <= set(keys())
    recipe = load(folder, DATA, *(f"{key}={str(value).lower()}" for key, value in values.items()))
    again = load(folder, dump_recipe(recipe))
    assert again == recipe
    for key, value in values.items():
        found: object = again
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value


CHARACTERS = list(":-[]{},'\"#|>%?0.é \n\t\0")
PIECES = st.sampled_from([*CHARACTERS, "data", "seed", "include", "&a", "*a", "!!x", "1e", "---", ": ", "- "])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.lists(PIECES, max_size=30).map("".join).map(str.encode), st.binary(max_size=60)))
def test_any_bytes_give_a_recipe_or_an_error(folder: Path, text: bytes) -> None:
    try:
        recipe = load(folder, text)
    except RecipeError as error:
        assert str(folder / "r.yaml") in str(error)
    else:
        assert recipe.data.train.is_absolute()


def test_special_floats_are_numbers() -> None:
    found = parse_file(b"a: -.inf\nb: .NaN\nc: +.5\nd: 3.\ne: 1_000\n", "x")
    assert found.problems == []
    values = found.values
    assert values["a"] == -math.inf
    assert math.isnan(values["b"])
    assert [values[key] for key in "cde"] == [0.5, 3.0, "1_000"]


def test_other_names_lead_to_keys() -> None:
    names = yaml.safe_load((Path(source.__file__).with_name("other_names.yaml")).read_text())
    offered = {
        key
        for table in names.values()
        for value in table.values()
        for key in ([value] if isinstance(value, str) else value)
    }
    assert offered <= set(keys())
    assert not set(names["renamed"]) & set(keys())


def test_keys_of_another_optimizer_are_refused_and_not_dumped(folder: Path) -> None:
    assert "optimizer.alpha: never read by sgd, only by ng-sgd" in one_problem(folder, DATA, "optimizer.alpha=4")
    assert list(yaml.safe_load(dump_recipe(load(folder, DATA)))["optimizer"]) == [
        "name",
        "momentum",
        "l2",
        "max_gradient_norm",
    ]
