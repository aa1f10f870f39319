"""The documentation site: `make docs` writes it to docs/_build. Sources are the Markdown pages of the whole project."""

from importlib.metadata import version as version_of

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
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
smartquotes = False  # --hours is not an en dash
html_theme = "furo"
html_title = f"ddnn {version}"
html_show_sphinx = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
copybutton_exclude = ".linenos, .gp"
