"""Recipes and settings as fuzz targets."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from corpora import write_data_dir, write_pdfs
from fuzz import seeds
from fuzz.child import Target

from ddnn.recipe.load import dump_recipe, load_recipe
from ddnn.report.measured import read_measured
from ddnn.slurm.cluster import load_cluster
from ddnn.training.network_layers import network_layers
from ddnn.util.errors import UserError

RECIPE = b"""include: base.yaml
data: {train: data, alignments: pdfs, splice: 2, cmvn: mean, cv: {fraction: 0.2}}
model:
  hidden_layers: 2
  hidden_units: 16   # small
minibatch_size: 64
seed: 3
schedule: {name: newbob, initial_learning_rate: 0.05, max_epochs: 3}
parallel: {workers: 2, strategy: bmuf, averaging_period: 10, block_momentum: 0.5}
"""
LAYERS = b"""data: {train: data, alignments: pdfs, splice: 1}
model:
  layers:
    - conv: {filters: 3, patch: {time: 2, bands: 3}, pool: {bands: 2}, activation: prelu}
    - conv: {filters: 2, patch: 2, step: 1, max_norm: 3}
    - pool: {size: 2, step: 1, kind: average}
    - scale-and-shift
    - affine: 5
      repeat: 2
      dropout: 0.1
    - stored: {kind: copy, width: 5, columns: [4, 0, 0]}
    - stored: {kind: parallel, networks: [[{kind: length-norm, width: 1}], [{kind: shift, width: 2}]]}
  bands: 8
"""


BASE = b"optimizer: {name: ng-sgd, momentum: 0.5}\nmodel: {activation: 'tanh'}\n"


SETTING = b"model.hidden_units=32"


CLUSTER = b"""partition: gpu
account: "a1"
time: 1-12
nodes: 2
gpus_per_node: 4
mem: 64G
options: [--exclusive, "--mail-type=END"]
setup:
  - module load openmpi
  - source env/bin/activate
environment: {OMP_NUM_THREADS: 1, NAME: text}
"""


MEASURED = b"""network: 440-6x2048-8806
minibatch_size: 256
averaging_period: 10
strategy: butterfly
frames: 1.1e+8
unit: minutes
workers: [1, 2, 4]
total: [100.0, 60, 40.5]
communication: [0, 5, 8]
"""


YAML = (
    b"include: ",
    b"base.yaml",
    b"../../../etc/passwd",
    b"/dev/stdin",
    b"recipe.yaml",
    b"data:",
    b"{",
    b"}",
    b"[",
    b"]",
    b": ",
    b"- ",
    b"&a ",
    b"*a",
    b"!!python/object/apply:os.system ",
    b"<<: ",
    b"? ",
    b"|\n",
    b">-\n",
    b"'",
    b'"',
    b"# ",
    b"%YAML 1.1\n",
    b"---\n",
    b"...\n",
    b"\t",
    b"null",
    b"~",
    b"yes",
    b"\\uD800",
    b'"\\uD800"',
    b'"\\0"',
    b"environment: x\n",
    b"schedule.initial_learning_rate: 1\n",
    b".nan",
    b"-.inf",
    b"1e400",
    b"0o17",
    b"2026-01-01",
)


LAUGHS = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [*%c, *%c, *%c, *%c]\n" % (n + 1, n + 1, n, n, n, n) for n in range(97, 110)
)


YAML_CRAFTED = (
    LAUGHS,
    b"a: " + b"[" * 50_000,
    b"a: " + b"{b: " * 20_000,
    b"- " * 40_000,
    b"? " * 40_000,
    b"seed: " + b"1" * 60_000,
    b"seed: " + b"1" * 60_000 + b"x",
    b"seed: " + b"1" * 30_000 + b"." + b"1" * 30_000 + b"x",
    b"seed: 1e" + b"9" * 60_000,
    b"".join(b"key%d: 1\n" % n for n in range(5000)),
    b"".join(b"a%d: {b%d: 1}\n" % (n, n) for n in range(3000)),
    b"seed: [" + b"1, " * 20_000 + b"]",
    b"x" * 90_000 + b": 1",
    b"seed: !!python/object/apply:os.system [id]\n",
    b"include: [" + b"base.yaml, " * 5000 + b"]",
    b"include: /dev/zero\n",
    b"include: recipe.yaml\n",
    b"seed: '" + b"\\" * 50_000,
    b"a: |" + b"\n " * 40_000,
    b"\xff\xfes\0e\0e\0d\0",
    b"environment: x\nenvironment: {A: b}\n",
)


def _recipe(folder: Path) -> None:
    recipe = load_recipe(folder / "recipe.yaml")
    (folder / "again.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(folder / "again.yaml", must_exist=False) == recipe
    if recipe.model.layers is not None:
        network_layers(recipe, 8 * (2 * recipe.data.splice + 1) * (recipe.data.deltas + 1), 3)


def _recipe_beside(folder: Path) -> None:
    features, labels = seeds.MATRICES, seeds.PDFS
    write_data_dir(folder / "data", features)
    write_pdfs(folder / "pdfs", labels)
    (folder / "recipe.yaml").write_bytes(RECIPE)
    (folder / "base.yaml").write_bytes(BASE)


def _setting(folder: Path) -> None:
    try:
        setting = (folder / "setting").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UserError(str(error)) from error
    load_recipe(folder / "recipe.yaml", [setting])


_yaml = partial(Target, crafted=YAML_CRAFTED, tokens=YAML, per_byte=400, inputs=50)


def text_targets() -> list[Target]:
    """Recipes, fragments, --set, clusters, published times."""
    return [
        _yaml(
            "recipe",
            "recipe.yaml",
            _recipe,
            (RECIPE, LAYERS),
            beside=_recipe_beside,
        ),
        _yaml(
            "recipe, included",
            "base.yaml",
            _recipe,
            (BASE,),
            beside=_recipe_beside,
        ),
        Target(
            "recipe, --set",
            "setting",
            _setting,
            (SETTING, b"data.cv={fraction: 0.5}", b"seed=4"),
            tuple(b"seed=" + text for text in YAML_CRAFTED),
            beside=_recipe_beside,
            tokens=YAML,
            per_byte=400,
            inputs=50,
        ),
        _yaml(
            "cluster",
            "cluster.yaml",
            lambda folder: load_cluster(str(folder / "cluster.yaml")),
            (CLUSTER,),
        ),
        Target(
            "published times",
            "times.yaml",
            lambda folder: read_measured(folder / "times.yaml"),
            (MEASURED,),
            (*YAML_CRAFTED, MEASURED.replace(b"440-6x2048-8806", b"100x1-" * 9000 + b"1")),
            tokens=YAML,
            per_byte=400,
            inputs=50,
        ),
    ]
