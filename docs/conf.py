"""The documentation site: `make docs` writes it to docs/_build. Sources are the Markdown pages of the whole project."""

import re
from functools import partial
from importlib.metadata import version as version_of
from typing import Any

from docutils.nodes import Element, Node, SkipNode, Text, document, literal, paragraph, reference
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from ddnn.recipe.keys import keys

project = "ddnn"
author = "the ddnn authors"
project_copyright = f"2026, {author}"
version = release = version_of("ddnn")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "docs/**.md",
    "recipes/*/README.md",
    "recipes/*/corpus/README.md",
    "tests/golden/README.md",
]
exclude_patterns = [".*", "docs/_build"]  # without the first it looks through .venv
myst_enable_extensions = ["alert", "colon_fence", "dollarmath"]
myst_heading_anchors = 4
smartquotes = False  # --hours is not an en dash
html_theme = "furo"
html_title = f"ddnn {version}"
html_show_sphinx = False
html_math_renderer = "mathml"  # needs no script and no network
autodoc_member_order = "bysource"
autodoc_typehints = "description"
copybutton_exclude = ".linenos, .gp"


def formula(translator: HTML5Translator, node: Element, as_block: bool) -> None:
    """Browsers show MathML themselves; docutils makes it of the formula's LaTeX."""
    translator.body.append(tex2mathml(node.astext(), as_block=as_block))
    raise SkipNode


def add_sections(app: Sphinx, name: str, source: list[str]) -> None:
    """The sidebar has the sections of a recipe below their page, in the order of its table."""
    if name == "docs/reference/recipe":
        pages = "\n".join(dict.fromkeys(re.findall(r"\]\((recipe/\w+)\.md", source[0])))
        source[0] += f"\n```{{toctree}}\n:hidden:\n{pages}\n```\n"


def show_as_written(app: Sphinx, context: Any, lines: list[str]) -> None:
    """The examples of a command are code: the indented lines below "Examples:"."""
    text = "\n".join(line.removeprefix("| ") for line in lines)
    lines[:] = re.sub(r"^(Examples?:)$", r"\1:\n", text, flags=re.MULTILINE).split("\n")


def link_mentions(app: Sphinx, tree: document, name: str) -> None:
    """Links from keys of recipes in backticks, and from pages that texts for the terminal name: docs/...md. A word without a
    dot and an underscore is a key only if it has a value: `seed: 2`."""
    targets = {f"{page}.md": (page, "") for page in app.env.found_docs}
    for page in app.env.found_docs:
        if page.startswith("docs/reference/recipe/"):
            slugs = app.env.metadata[page].get("myst_slugs", {}).values()
            targets |= {key: (page, f"#{anchor}") for _, anchor, key in slugs if key in keys()}

    def linked(word: str, node: Node, own: list[str]) -> Node:
        page, anchor = targets.get(word, ("", ""))
        if not page or anchor[1:] in own:  # a key's own text
            return node
        return reference("", "", node, refuri=app.builder.get_relative_uri(name, page) + anchor, internal=True)

    for text in list(tree.findall(paragraph)):
        own = text.parent.get("ids", [])
        for part in list(text):
            if isinstance(part, literal) and re.search(r"[._]|: ", part.astext()):
                text.replace(part, linked(part.astext().partition(": ")[0], part, own))
            elif isinstance(part, Text):
                words = re.split(r"(?<![\w/])(docs/[\w/-]+\.md)", part)
                text.replace(part, [linked(word, Text(word), own) for word in words])


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_sections)
    app.connect("sphinx-click-process-epilog", show_as_written)
    app.connect("doctree-resolved", link_mentions)
    app.add_html_math_renderer(
        "mathml", (partial(formula, as_block=False), None), (partial(formula, as_block=True), None)
    )
