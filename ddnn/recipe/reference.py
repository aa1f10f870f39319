"""The text of docs/recipe.md, generated from the schema: `python -m ddnn.recipe.reference > docs/recipe.md`."""

from __future__ import annotations

from typing import Any

from ddnn.recipe.keys import REQUIRED, KeyInfo, keys, sections
from ddnn.recipe.source import shipped_fragments

EXAMPLE = """\
include:                          # fragments; a later one overrides an earlier one, the recipe overrides all
  - model/swbd.yaml               # 6 x 2048 sigmoids, minibatch 1024
  - schedule/newbob.yaml
seed: 1
data:
  train: data/train_fmllr         # a Kaldi data dir
  alignments: exp/tri4_ali        # ali.*.gz and final.mdl
  cv:
    fraction: 0.05                # of the training data, as whole speakers
  splice: 5                       # 40 dims -> 440
  cmvn: none
  deltas: 0
  normalize: true
  feature_dtype: float16          # halves the memory
model:
  activation: sigmoid
init: random
optimizer:
  name: sgd
  momentum: 0.0
  l2: 0.0
schedule:
  initial_learning_rate: 0.002    # overrides 0.008 of the fragment; 2.048 on the mean gradient of 1024 frames
  min_epochs: 2
parallel:
  workers: 1
"""
"""A whole recipe; a test loads it."""

_INTRODUCTION = """\
# Recipes

<!-- Generated from the schema by `python -m ddnn.recipe.reference > docs/recipe.md`; a test compares them. -->

A recipe is a YAML file that describes a training: `ddnn train RECIPE`. `ddnn train RECIPE --dry-run` checks it and prints
it with all defaults filled in; training writes the same text as `recipe.yaml` into the run dir. Only `data.train` and
`data.alignments` are required.

```yaml
{example}```

## How a recipe is read

- **Include.** `include:` takes the file name of a fragment, or a list of them. Each is looked up in the folder of the
  file that includes it, then among the fragments that come with ddnn:
  {fragments}.
  A later fragment overrides an earlier one, and the file itself overrides its fragments, key by key. Fragments may
  include others, but not each other in a circle.
- **`--set KEY=VALUE`** overrides the files; a later `--set` overrides an earlier one. KEY is written with dots
  (`schedule.initial_learning_rate`), VALUE is YAML.
- **`null`**, in a file or with `--set`, resets a key to its default, as if no file had given it.
- **Relative paths** are looked up in the working directory, then in the folder of the recipe (also those given by a
  fragment or by `--set`). A path that exists in neither is an error.
- **Numbers** may be written `0.008`, `8e-3` or `.008`, with digits only; text in quotes and `true` are not numbers.
- **Problems** are reported all at once, with file and line: unknown keys (with the nearest known key), keys of version
  0.1 (with their new name), values out of range, keys that contradict each other, keys that the selected schedule,
  optimizer or strategy does not use. The exit code is 2.
- Anchors, aliases, tags, tabs and duplicate keys are errors.

## Keys
"""


def recipe_reference() -> str:
    """The reference of all keys in Markdown, with how a recipe is read and an example."""
    shipped = ", ".join(f"`{name}`" for name in shipped_fragments())
    parts = [_INTRODUCTION.format(example=EXAMPLE, fragments=shipped)]
    for section, meaning in sections().items():
        rows = [_row(key) for key in keys().values() if key.name.rpartition(".")[0] == section]
        title = f"`{section}`" if section else "Top level"
        text = meaning if section else "Keys outside the sections below:"
        table = "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows])
        parts.append(f"### {title}\n\n{text}\n\n{table}\n")
    return "\n".join(parts)


def _row(key: KeyInfo) -> str:
    only = f"{' or '.join(f'`{variant}`' for variant in key.variants)}: " if key.variants else ""
    meaning = (only + key.meaning).replace("|", "\\|")
    return f"| `{key.name}` | {key.expects} | {_default(key.default)} | {meaning} |"


def _default(default: Any) -> str:
    if default is REQUIRED:
        return "**required**"
    if default is None:
        return "not given"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    print(recipe_reference(), end="")
