"""The documentation site: `make docs` writes it to docs/_build. Sources are the Markdown pages of the whole project."""

from functools import partial
from importlib.metadata import version as version_of

from docutils.nodes import Element, SkipNode
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

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
exclude_patterns = ["docs/_build"]
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


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer(
        "mathml", (partial(formula, as_block=False), None), (partial(formula, as_block=True), None)
    )
