"""The text of docs/recipe.md, written from the schema: `python -m ddnn.recipe.reference > docs/recipe.md`."""

from __future__ import annotations

from typing import Any

from ddnn.recipe.include import fragments
from ddnn.recipe.keys import REQUIRED, Key, keys, sections

EXAMPLE = """\
include:                          # fragments first: below wins over above, the recipe over all of them
  - model/swbd.yaml               # 6 x 2048 sigmoids, minibatch 1024
  - schedule/newbob.yaml
seed: 1
data:
  train: data/train_fmllr         # a Kaldi data dir
  alignments: exp/tri4_ali        # ali.*.gz and final.mdl
  cv:
    fraction: 0.05                # of the training data, whole speakers
  splice: 5                       # 40 dims -> 440
  cmvn: none
  deltas: 0
  normalise: true
  store: float16                  # halves the memory
model:
  activation: sigmoid
init: random
optimizer:
  name: sgd
  momentum: 0.0
  l2: 0.0
schedule:
  initial: 0.002                  # over the fragment's 0.008; 2.048 on the mean gradient of 1024 frames
  min_epochs: 2
parallel:
  workers: 1
"""
"""A whole recipe; a test loads it."""

_INTRODUCTION = """\
# Recipes

<!-- Written from the schema by `python -m ddnn.recipe.reference > docs/recipe.md`; a test compares. -->

A recipe is one YAML file that says what to train, on what, and how: `ddnn train RECIPE`.
`ddnn train RECIPE --dry-run` checks it and prints it with everything filled in; training leaves that text in the run
dir as `recipe.yaml`. Only `data.train` and `data.alignments` must be given.

```yaml
{example}```

## How a recipe is read

- **Include.** `include:` takes a fragment's file name or a list of them. Each is looked for in the folder of the file
  that includes it, then among the fragments that come with ddnn:
  {fragments}.
  A later fragment wins over an earlier one, and the file itself over its fragments, key by key. Fragments may include
  others, in no circle.
- **`--set KEY=VALUE`** wins over the files, the last one over those before. KEY is written with dots
  (`schedule.initial`), VALUE is YAML.
- **`null`**, in a file or by `--set`, takes a key back to its default, as if no file had given it.
- **Paths** that are relative are tried against the working directory, then against the folder of the recipe (also
  those that a fragment or `--set` gives). A path that is in neither is an error.
- **Numbers** may be written `0.008`, `8e-3` or `.008`, in digits only; text in quotes is not a number, nor is `true`.
- **Problems** are reported all at once, with file and line: unknown keys (with the nearest known one), values out of
  range, keys that contradict each other, keys that the chosen schedule or optimizer never reads. The exit code is 2.
- Anchors, aliases, tags, tabs and keys given twice are errors.

## Keys
"""


def recipe_reference() -> str:
    """The reference of all keys in Markdown, with how a recipe is read and an example."""
    shipped = ", ".join(f"`{name}`" for name in fragments())
    parts = [_INTRODUCTION.format(example=EXAMPLE, fragments=shipped)]
    for section, meaning in sections().items():
        rows = [_row(key) for key in keys().values() if key.name.rpartition(".")[0] == section]
        title = f"`{section}`" if section else "At the top"
        text = meaning if section else "Beside the sections below:"
        table = "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows])
        parts.append(f"### {title}\n\n{text}\n\n{table}\n")
    return "\n".join(parts)


def _row(key: Key) -> str:
    return f"| `{key.name}` | {key.expects} | {_default(key.default)} | {key.meaning.replace('|', chr(92) + '|')} |"


def _default(default: Any) -> str:
    if default is REQUIRED:
        return "**required**"
    if default is None:
        return "not given"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    print(recipe_reference(), end="")
