"""Muon against singular value decompositions in float64, and against PyTorch's, which computes in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from optim.test_adam import LAYERS, LR, Training
from twins import twin_loss

from ddnn.optim.adam import AdamOptions
from ddnn.optim.muon import MuonOptions
from ddnn.recipe.load import load_recipe
from ddnn.util.errors import RecipeError


def gradients(made: Training, labels: torch.Tensor) -> list[torch.Tensor]:
    """Those of the layers' weights, in float64."""
    flat = twin_loss(made.network, made.network.parameters, made.workspace.x, labels)[2]
    return [views["weight"] for views in made.network.split(flat)]


def weights(made: Training) -> list[torch.Tensor]:
    return [views["weight"].double() for views in made.network.views]


@pytest.mark.parametrize("momentum", [0.95, 0.5, 0.0])
def test_steps_of_hidden_weights_are_those_of_the_singular_values(momentum: float) -> None:
    made = Training(MuonOptions(momentum))
    means = [torch.zeros_like(weight) for weight in weights(made)]
    for _ in range(6):
        labels, before = made.minibatch(), weights(made)
        of_layers = gradients(made, labels)
        made.step(labels)
        for i in (0, 1):
            means[i] = momentum * means[i] + (1 - momentum) * of_layers[i]
            u, s, v = torch.linalg.svd((1 - momentum) * of_layers[i] + momentum * means[i], full_matrices=False)
            s = s / torch.linalg.vector_norm(s)
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            step = LR * LAYERS[i].learn_rate_coef * 0.2 * max(before[i].shape) ** 0.5
            torch.testing.assert_close(weights(made)[i], before[i] - step * (u * s) @ v, rtol=1e-3, atol=1e-5)


def test_steps_of_hidden_weights_are_about_those_of_pytorch() -> None:
    made = Training(MuonOptions())
    twins = [weight.float().clone().requires_grad_() for weight in weights(made)[:2]]
    reference = torch.optim.Muon(twins, LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for _ in range(6):
        labels, before = made.minibatch(), weights(made)
        for twin, weight, gradient in zip(twins, before, gradients(made, labels), strict=False):
            twin.data.copy_(weight)
            twin.grad = gradient.float()
        reference.step()
        made.step(labels)
        for twin, now, old, layer in zip(twins, weights(made), before, LAYERS, strict=False):
            found, expected = now - old, layer.learn_rate_coef * (twin.detach().double() - old)
            assert torch.linalg.matrix_norm(found - expected) < 0.05 * torch.linalg.matrix_norm(expected)


def test_biases_and_the_output_layer_have_the_steps_of_adam() -> None:
    muon, adam = Training(MuonOptions()), Training(AdamOptions(0.95))
    for made in (muon, adam):
        made.step(made.minibatch())
    for i, (views, others) in enumerate(zip(muon.network.views, adam.network.views, strict=True)):
        for name, view in views.items():
            assert torch.equal(view, others[name]) == (name == "bias" or i == 2)


@pytest.mark.parametrize("name", ["muon", "shampoo"])
@pytest.mark.parametrize("key", ["columns", "stages"])
def test_matrices_in_parts_are_refused(key: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"data: {{train: ., alignments: .}}\noptimizer: {{name: {name}}}\nmodel: {{hidden_layers: 2, hidden_units: 8}}\n"
        f"parallel: {{workers: 2, {key}: 2}}\n"
    )
    with pytest.raises(RecipeError, match=f"parallel.{key}: 2 found, expected 1 with optimizer.name: {name}"):
        load_recipe(path, must_exist=False)
    load_recipe(path, [f"parallel.{key}=1"], must_exist=False)
