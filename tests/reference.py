"""`make docs`: docs/reference/recipe/*.md, a page for each section of a recipe, and docs/reference/cluster.md, from the descriptions in
the schemas. Their mentions of pages and of other keys become links."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from pydantic_core import PydanticUndefined

from ddnn.recipe.keys import REQUIRED, KeyInfo, keys, keys_in, layer_keys, sections
from ddnn.recipe.layers import LAYERS
from ddnn.recipe.schema import VARIANTS, Recipe
from ddnn.slurm.cluster import ClusterConfig

ROOT = Path(__file__).parents[1]
RECIPE, CLUSTER = Path("docs/reference/recipe"), Path("docs/reference/cluster.md")
TOP = "general"  # page of the keys outside of sections

LAYERS_TEXT = """\
Each entry of `model.layers` is a mapping of its kind to its keys. Below, `conv.filters` is the key `filters` of the kind `conv`.

```yaml
model:
  layers:
    - conv: {filters: 128, patch: 8, pool: 3}     # 40 bands: 33 patches, 11 pools
    - conv: {filters: 256, patch: 4}              # 11 bands: 8 patches
    - affine: 1024
      repeat: 4
      activation: sigmoid
      dropout: 0.1
```

The keys may also be written next to the kind, as `repeat` above. Some kinds accept a shorthand, which sets the first of the
keys below: `affine: 1024` means `affine: {units: 1024}`. The output layer is always added, on top of the last entry.

Messages and `model.freeze` count layers from 0, and every repetition counts. A `conv` with all that belongs to it, such as
its pooling, is one layer.

If `model.bands` is set, layer sizes are checked when the recipe is read. Otherwise they are checked as soon as the feature
dimension is known: when training starts, in a dry run, when a Slurm job is submitted. Windows must come out even: (bands -
patch) is a multiple of step, and (patches - pool) of pool_step. docs/reference/layers.md says what each layer computes."""

CLUSTER_TEXT = """\
`ddnn train RECIPE --slurm --cluster NAME` reads `configs/cluster/NAME.yaml` in the working directory, or else the file of
that name that comes with ddnn (`gpu` and `cpu`, examples to copy). `--cluster FILE` reads any file. All keys are optional.
Options of the command line override them, and whatever neither sets is left to Slurm's own defaults. See docs/how-to/cluster.md.

```yaml
partition: gpu
time: 12:00:00
gpus_per_node: 4
cpus_per_worker: 4
mem: 64G
options: [--exclusive, --mail-type=END]
setup:
  - module load openmpi
environment: {NCCL_DEBUG: INFO}
```"""


def recipe_page(name: str) -> Path:
    """The page of a dotted key or section of a recipe."""
    top = name.partition(".")[0]
    return RECIPE / f"{top if top in sections() else TOP}.md"


def anchor(heading: str) -> str:
    """Of a heading, as code hosts and the site derive it from its text."""
    return "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def targets() -> dict[str, str]:
    """Page and anchor of every key and section of a recipe, and of every key of a layer."""
    names = {name: f"{recipe_page(name)}{anchor(name)}" for name in [*keys(), *sections()]}
    names |= {name: str(recipe_page(name)) for name in sections() if "." not in name}  # headings of pages
    layers = (f"{kind}.{name}" for kind in LAYERS for name in layer_keys()[kind])
    return names | {name: f"{RECIPE / 'layers.md'}{anchor(name)}" for name in layers}


class Page:
    """A page at `path`. `names`: where the keys are that its texts mention."""

    def __init__(self, path: Path, title: str, source: str, names: dict[str, str]) -> None:
        self.path, self.names = path, names
        self.blocks = [
            f"# {title}",
            f"<!-- Written by `python tests/reference.py` from {source}; a test compares them. -->",
        ]

    def add(self, text: str, scope: str, own: str = "") -> None:
        """A text that mentions the keys of the section `scope` by their last part; it does not link to `own`, its key."""

        linked = {own}

        def key(mention: re.Match[str]) -> str:
            for name in (f"{scope}.{mention[1]}", mention[1]):
                if name in self.names and name not in linked:
                    linked.add(name)  # the first mention
                    return f"[{mention[0]}]({self._link(self.names[name])})"
            return mention[0]

        text = re.sub(r"`([\w.]+)(?:: [^`]*)?`", key, text)
        text = re.sub(r"docs/[\w/-]+\.md", lambda page: f"[{Path(page[0]).name}]({self._link(page[0])})", text)
        self.blocks.append(text)

    def _link(self, target: str) -> str:
        path, hash_, heading = target.partition("#")
        return (
            f"{'' if Path(path) == self.path and heading else os.path.relpath(path, self.path.parent)}{hash_}{heading}"
        )

    def add_key(self, key: KeyInfo, level: int, name: str = "") -> None:
        """A key under a heading of its own; at level 1 the title is its heading."""
        name = name or key.name
        if level > 1:
            self.blocks.append(f"{'#' * level} `{name}`")
        meaning, _, default = key.meaning.partition(" Default: ")
        expects = (
            key.expects
            if name not in sections()
            else re.sub("a mapping of .*", "a mapping of the keys below", key.expects)
        )
        facts, texts = [f"**Value:** {expects}"], [meaning]
        if key.default is REQUIRED:
            facts.append("**Required**")
        elif default or key.default is not None:
            facts.append(f"**Default:** {default.rstrip('.') or value(key.default)}")
        else:
            facts.append("**Optional**")
        section, _, last = name.rpartition(".")
        if section in VARIANTS and last != VARIANTS[section][0]:
            if key.variants:
                first, *others = [f"`{variant}`" for variant in key.variants]
                facts.append(f"**Only with** {listed([f'`{section}.{VARIANTS[section][0]}: {first[1:]}', *others])}")
            for variant, other, text in differences(section, last):
                if other != key.default:
                    facts[1] += f"; {value(other)} with `{variant}`"
                if text:
                    texts.append(f"With `{variant}`: {text[0].lower()}{text[1:]}")
        self.add(" · ".join(facts), section, name)
        self.add(" ".join(texts), section, name)
        for example in key.examples:
            self.blocks.append(f"**Example:** `{last}: {example}`")

    def text(self) -> str:
        return "\n\n".join(self.blocks) + "\n"


def value(default: object) -> str:
    return f"`{str(default).lower() if isinstance(default, bool) else str(default).replace('e-0', 'e-')}`"


def listed(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def differences(section: str, last: str) -> Iterable[tuple[str, object, str]]:
    """Of a key that several variants of a section have, each later variant with its default and, where it differs, its meaning."""
    having = [kind for kind in get_args(Recipe.model_fields[section].annotation) if last in kind.model_fields]
    for kind in having[1:]:
        field = kind.model_fields[last]
        if field.default is not PydanticUndefined:
            differs = field.description != having[0].model_fields[last].description
            text = " ".join((field.description or "").split()) if differs else ""
            yield kind.model_fields[VARIANTS[section][0]].default, field.default, text


def pages() -> dict[Path, str]:
    """All generated pages, by their path from the root of the project."""
    names = targets()
    made = {TOP: Page(RECIPE / f"{TOP}.md", "Top-level keys", "ddnn/recipe/schema.py", names)}
    own_page = [name for name in keys() if name in sections()]
    others = f"{', '.join(f'`{name}`' for name in own_page[:-1])} and `{own_page[-1]}`"
    made[TOP].add(
        f"The keys outside of sections. {others}, which take a value or a mapping, have pages of their own.", ""
    )
    for section, meaning in sections().items():
        if not section:
            continue
        page = made.get(section.partition(".")[0])
        if page is None:
            page = made[section] = Page(RECIPE / f"{section}.md", f"`{section}`", "ddnn/recipe/schema.py", names)
            if section in keys():
                page.add_key(keys()[section], 1)
        else:
            page.blocks.append(f"## `{section}`")
        page.add(meaning, section, section)
        level = 2 + section.count(".")
        for key in keys().values():
            if key.name.rpartition(".")[0] == section:
                page.add_key(key, level)
    for key in keys().values():
        if recipe_page(key.name) == made[TOP].path:
            made[TOP].add_key(key, 2)

    layers = made["layers"] = Page(RECIPE / "layers.md", "`model.layers`", "ddnn/recipe/layers.py", names)
    layers.add(LAYERS_TEXT, "", "model.layers")
    for kind, config in LAYERS.items():
        layers.blocks.append(f"## `{kind}`")
        layers.add(" ".join((config.__doc__ or "").split()), kind)
        for name, key in layer_keys()[kind].items():
            layers.add_key(key, 3, f"{kind}.{name}")

    cluster = Page(CLUSTER, "The cluster file", "ddnn/slurm/cluster.py", names)
    cluster.names = {**names, **{name: f"{CLUSTER}{anchor(name)}" for name in ClusterConfig.model_fields}}
    cluster.add(CLUSTER_TEXT, "")
    for key in keys_in(ClusterConfig).values():
        cluster.add_key(key, 2)
    return {page.path: page.text() for page in [*made.values(), cluster]}


if __name__ == "__main__":
    for page in (ROOT / RECIPE).glob("*.md"):
        page.unlink()  # of a section that is no more
    for path, text in pages().items():
        (ROOT / path).write_text(text)
