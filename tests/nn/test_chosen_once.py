"""Which arithmetic, which layer: that is decided once, where objects are made, and asked nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ddnn"
CHOOSING = {"nn/arithmetic.py", "nn/kernels/__init__.py"}
"""Where the arithmetics and their kernels are."""
MAY_ASK = CHOOSING | {"nn/precision.py", "nn/network.py"}
"""Where they are chosen, and given memory."""
AFFINE = {"nn/layers.py", "training/pretraining.py", "training/network_layers.py", "nn/rbm.py"}
"""Where a layer may be known to be affine: its class, RBMs, which become such layers, and what makes them of a recipe."""

QUESTIONS = {
    r"\b(?:kernels|low|bf16_copy|low_gradient) is (?:not )?None\b": CHOOSING,
    r"\bif (?:not )?(?:\w+\.)*(?:kernels|low)\b": CHOOSING,
    r"\bload_library\(": CHOOSING,
    r"\b(?:is|=)instance\([^()]*(?:Float32|BFloat16)": set(),
    r"\bisinstance\([^()]*\b(?:Affine|Layer)\b": {"training/network_layers.py"},
    r"\.activation\b": AFFINE | {"recipe"},
    r"\bAffine\(": AFFINE,
    r"\._version\b|increment_version": set(),
}
DTYPE = re.compile(r"\bdtype\s*(?:==|!=|is)\s|(?:==|!=|is)\s+torch\.(?:bfloat16|float32)\b")


def code(path: Path) -> str:
    """Without comments and docstrings, as far as lines tell."""
    text = re.sub(r'"""(?:[^"\\]|\\.|"(?!""))*"""', "", path.read_text())
    return re.sub(r"(?m)#.*$", "", text)


FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
PARTS = ("nn/", "optim/", "training/", "bench/", "averaging/", "data/", "decoding/")


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_was_decided_is_not_asked_again(question: str) -> None:
    allowed = QUESTIONS[question]
    found = {
        f"{name}: {line.strip()}"
        for name, path in FILES.items()
        if name.startswith(PARTS) and name not in allowed
        for line in code(path).splitlines()
        if re.search(question, line) and "recipe.model" not in line and "model.activation" not in line
    }
    assert found == set()


@pytest.mark.parametrize(
    "name",
    [
        "nn/layers.py",
        "nn/loss.py",
        "optim/sgd.py",
        "optim/ng_sgd.py",
        "training/step.py",
        "training/trainer.py",
    ],
)
def test_no_type_of_a_tensor_decides(name: str) -> None:
    """But for the check of a state that is loaded."""
    lines = [line.strip() for line in code(FILES[name]).splitlines() if DTYPE.search(line)]
    assert [line for line in lines if "found.dtype !=" not in line] == []


@pytest.mark.parametrize(
    "line",
    [
        "if workspace.kernels is not None:",
        "made = flat if buffers.low_gradient is None else buffers.low_gradient",
        "if self.arithmetic.kernels:",
        "if isinstance(arithmetic, BFloat16Kernels):",
        "torch.autograd.graph.increment_version(parameters)",
        "if parameters._version != self.version:",
    ],
)
def test_the_questions_are_recognized(line: str) -> None:
    assert any(re.search(question, line) for question in QUESTIONS)


def test_optimizers_know_no_recipe() -> None:
    for name, path in FILES.items():
        if name.startswith(("optim/", "nn/", "data/")):
            assert "ddnn.recipe" not in code(path), name
