"""`make docs`: docs/tutorials/python.ipynb, the page python.md as a notebook. A block of Python is a cell, a block without a language
behind it is the cell's output, and the text between is Markdown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs/tutorials/python.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def cells(page: str) -> list[dict[str, Any]]:
    """In the format of nbformat 4.5."""
    made: list[dict[str, Any]] = []

    def add(kind: str, source: str, **more: Any) -> None:
        if source.strip():
            cell = {
                "cell_type": kind,
                "id": f"cell-{len(made)}",
                "metadata": {},
                "source": source.strip("\n").splitlines(True),
            }
            made.append(cell | more)

    end = 0
    for block in BLOCK.finditer(page):
        add("markdown", page[end : block.start()])
        output = {"output_type": "stream", "name": "stdout", "text": (block[2] or "").splitlines(True)}
        add("code", block[1], execution_count=None, outputs=[output] if block[2] else [])
        end = block.end()
    add("markdown", page[end:])
    return made


def notebook(page: str) -> str:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells(page), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text()))
