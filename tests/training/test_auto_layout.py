"""`parallel.columns: auto` and `parallel.stages: auto`: what is chosen, on machines that are made up and on this one."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.mpi_worlds import need_mpi
from distributed.test_cost import MACHINES
from distributed.threads import run_workers
from recipe.test_columns import recipe_with
from training.test_columns_mpi import new_recipe
from training.test_command import RunCli
from training.test_workers import ddnn

from ddnn.distributed.communicator import Communicator
from ddnn.distributed.cost import Layout, Size
from ddnn.recipe.load import contradictions, dump_recipe, load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.training import auto_layout
from ddnn.training.auto_layout import choose_layout, time_machines, with_layout
from ddnn.training.memory import describe_bytes
from ddnn.training.network_layers import network_layers
from ddnn.training.options import affine_sizes, estimate_memory
from ddnn.util.errors import DataError, RecipeError

GIB = 2**30
LARGE, SMALL = (440, 6, 2048, 8806), (440, 4, 512, 616)
AUTO = ("parallel.columns=auto", "parallel.stages=auto")


def arranged(folder: Path, network: tuple[int, ...], rows: int, workers: int, *settings: str) -> Recipe:
    _, layers, units, _ = network
    shape = (f"model.hidden_layers={layers}", f"model.hidden_units={units}", f"minibatch_size={rows}")
    recipe: Recipe = recipe_with(folder, *shape, f"parallel.workers={workers}", "precision=float32", *settings)
    return recipe


def sizes_of(recipe: Recipe, network: tuple[int, ...]) -> tuple[Size, ...]:
    return affine_sizes(recipe.optimizer, network_layers(recipe, network[0], network[-1]))


def chosen(
    folder: Path, name: str, network: tuple[int, ...], rows: int, workers: int, *settings: str, free: int = 100 * GIB
) -> Layout:
    recipe = arranged(folder, network, rows, workers, *(settings or AUTO))
    machines = {n: MACHINES[name] for n in range(1, workers + 1) if workers % n == 0}
    return choose_layout(recipe, sizes_of(recipe, network), machines, free)


@pytest.mark.parametrize(
    ("name", "network", "rows", "workers", "settings", "expected"),
    [
        ("two cores", LARGE, 256, 2, (), Layout(2)),
        ("two cores", SMALL, 1024, 2, (), Layout(2)),
        ("H200", LARGE, 1024, 4, (), Layout(4)),
        ("K20, FDR", SMALL, 256, 4, (), Layout(4)),
        # Averaging after each minibatch is dear, a replica of all workers averages nothing.
        ("K20, FDR", LARGE, 256, 2, (*AUTO, "parallel.averaging_period=2"), Layout(1, 2)),
        ("K20, Ethernet", LARGE, 256, 2, (*AUTO, "parallel.averaging_period=2"), Layout(1, 1, 2, 4)),
        ("K20, FDR", LARGE, 256, 4, (*AUTO, "parallel.strategy=gradient-all-reduce"), Layout(1, 4)),
        # The frames of an update are fixed.
        ("K20, FDR", LARGE, 1024, 4, (*AUTO, "minibatch_scope=total", "parallel.averaging_period=1"), Layout(1, 2, 2, 4)),
        ("two cores", LARGE, 256, 2, (*AUTO, "minibatch_scope=total", "parallel.averaging_period=1"), Layout(1, 2)),
        # Numbers that are given stay.
        ("K20, FDR", LARGE, 256, 4, ("parallel.columns=2", "parallel.stages=auto"), Layout(2, 2)),
        ("two cores", LARGE, 256, 2, ("parallel.columns=auto", "parallel.stages=2"), Layout(1, 1, 2, 4)),
        ("two cores", LARGE, 256, 2, ("parallel.stages=2", "parallel.columns=auto", "parallel.microbatches=3"), Layout(1, 1, 2, 3)),
        ("two cores", LARGE, 256, 2, (*AUTO, "parallel.microbatches=3"), Layout(2)),
    ],
)  # fmt: skip
def test_the_choice(
    tmp_path: Path, name: str, network: tuple[int, ...], rows: int, workers: int, settings: tuple[str, ...], expected: Layout
) -> None:  # fmt: skip
    assert chosen(tmp_path, name, network, rows, workers, *settings) == expected


def test_a_model_that_no_worker_can_hold_is_split(tmp_path: Path) -> None:
    recipe = arranged(tmp_path, LARGE, 256, 4, "parallel.columns=2", "parallel.stages=2")
    needed = sum(estimate_memory(recipe, 440, 8806, 1).cpu.values())
    assert chosen(tmp_path, "two cores", LARGE, 256, 4, free=needed) == Layout(1, 2, 2, 4)


def test_what_does_not_fit(tmp_path: Path) -> None:
    columns, stages = (
        sum(estimate_memory(arranged(tmp_path, LARGE, 256, 4, key), 440, 8806, 1).cpu.values())
        for key in ("parallel.columns=4", "parallel.stages=4")
    )
    assert stages < columns, "none of the layouts of four workers needs less than four stages"
    with pytest.raises(DataError) as caught:
        chosen(tmp_path, "two cores", LARGE, 256, 4, "parallel.columns=auto", "parallel.stages=1", free=stages)
    text = str(caught.value)
    assert f"columns 4, stages 1: {describe_bytes(columns)} are needed on each worker" in text
    assert (
        f"{describe_bytes(stages)} are free" in text and f"take columns 1, stages 4: {describe_bytes(stages)}" in text
    )
    with pytest.raises(DataError, match="take more workers, more memory, or a smaller network"):
        chosen(tmp_path, "two cores", LARGE, 256, 4, free=stages - 1)


def test_the_log_compares(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    chosen(tmp_path, "K20, FDR", SMALL, 1024, 4, "parallel.columns=4", "parallel.stages=auto")
    assert (
        "one worker (replicas x columns x stages): 1x4x1 0.52, a split over 4 workers would be slower than one (0.52)"
        in caplog.text
    )
    caplog.clear()
    chosen(tmp_path, "K20, FDR", LARGE, 256, 2, *AUTO, "parallel.averaging_period=2")
    assert "1x2x1 1.35, 2x1x1 0.89" in caplog.text and "slower" not in caplog.text


def test_the_first_workers_times_count(tmp_path: Path) -> None:
    recipe = arranged(tmp_path, LARGE, 256, 4, *AUTO)

    def work(comm: Communicator) -> Any:
        start = time.perf_counter()
        machines = time_machines(sizes_of(recipe, LARGE), 256, torch.float32, comm)
        return machines, time.perf_counter() - start

    (first, seconds), *others = run_workers(4, work)
    assert all(machines == first for machines, _ in others) and seconds < 20.0, "2 s, on cores that nobody else uses"
    assert first.keys() == {1, 2, 4} and first[1].latency == 0.0
    for machine in first.values():
        assert 1e8 < machine.flops < 1e15 and 0.0 <= machine.product_seconds < 0.1
        assert 1e8 < machine.memory_bandwidth < 1e13 and machine.byte_seconds < 1e-6
    assert 0.0 < first[2].latency < 1.0


def recorded(folder: Path, *settings: str) -> Path:
    folder.mkdir()
    (folder / "recipe.yaml").write_text(dump_recipe(recipe_with(folder, *settings)))
    return folder


@pytest.mark.parametrize(
    ("settings", "workers", "expected"),
    [
        (AUTO, 4, (2, 2, 8)),
        (("parallel.columns=auto",), 4, (2, 1, None)),
        (("parallel.columns=1", "parallel.stages=auto"), 4, (1, 2, 8)),
        ((*AUTO, "parallel.microbatches=2"), 4, (2, 2, 2)),
        (AUTO, 2, (1, 1, 1)),
    ],
)
def test_a_resume_keeps_the_numbers(
    tmp_path: Path, settings: tuple[str, ...], workers: int, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = list[int]()
    monkeypatch.setattr(auto_layout, "_measured", lambda *arguments: measured.append(1) or Layout(workers))
    run = recorded(
        tmp_path / "run", *("parallel.columns=2", "parallel.stages=2", "parallel.microbatches=8", "parallel.workers=4")
    )
    recipe = recipe_with(tmp_path, *settings, f"parallel.workers={workers}")
    for found in run_workers(workers, lambda comm: with_layout(recipe, "cpu", comm, run).parallel):
        assert (found.columns, found.stages, found.microbatches if found.stages > 1 else expected[2]) == expected
    assert len(measured) == (0 if workers == 4 else 2), "another number of workers chooses again"
    text = dump_recipe(
        with_layout(recipe_with(tmp_path, "parallel.columns=3"), "cpu", Communicator(0, 1, "n1", {}), run)
    )
    assert "columns: 3" in text, "numbers are left alone"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("parallel.columns=0",), "parallel.columns: 0 found, expected a whole number >= 1 or auto"),
        (("parallel.stages=-1",), "parallel.stages: -1 found, expected a whole number >= 1 or auto"),
        (("parallel.stages=two",), "parallel.stages: the text 'two' found, expected a whole number >= 1 or auto"),
        (("parallel.workers=2", "parallel.columns=auto", "parallel.overlap=true"), "true found beside columns: auto"),
        (("parallel.workers=3", "parallel.columns=2", "parallel.stages=auto"), "3 found, expected a multiple of"),
    ],
)
def test_what_a_recipe_cannot_say(tmp_path: Path, settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_with(tmp_path, *settings)
    assert message in str(caught.value)


def test_a_recipe_with_auto_is_one(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, *AUTO, "parallel.workers=4", "parallel.microbatches=8", "parallel.pipeline=1f1b")
    assert not list(contradictions(recipe)) and recipe.parallel.replicas == 4
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "again.yaml", must_exist=False).parallel == recipe.parallel


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["model.layers=[{conv: {filters: 4, patch: 2}}]"], "only the cost of affine layers on CPUs"),
        (["parallel.columns=4"], "4 found, expected at most 3: layer 2 has 3 outputs"),
    ],
)
def test_networks_whose_cost_is_not_known(tmp_path: Path, more: list[str], message: str) -> None:
    recipe = load_recipe(new_recipe(tmp_path), [*AUTO, "parallel.workers=4", *more])

    def work(comm: Communicator) -> str:
        with pytest.raises(RecipeError) as caught:
            with_layout(recipe, "cpu", comm)
        return str(caught.value)

    assert all(message in text for text in run_workers(4, work))


def test_a_training_that_chooses(tmp_path: Path, run_cli: RunCli) -> None:
    need_mpi()
    recipe, run = new_recipe(tmp_path), tmp_path / "run"
    words = ("train", recipe, "--run-dir", run, "--device", "cpu", *(w for key in AUTO for w in ("--set", key)))
    result = run_cli(*words, "--workers", 2, "--dry-run")
    assert result.exit_code == 0 and "columns: auto" in result.stdout
    done = ddnn(*words, "--workers", 2)
    assert done.returncode == 0, done.stderr
    parallel = load_recipe(run / "recipe.yaml").parallel
    assert isinstance(parallel.columns, int) and isinstance(parallel.stages, int)
    log = (run / "train.log").read_text()
    assert "predicted speed-ups" in log and "a split over 2 workers would be slower than one (0." in log, (
        "3 hidden units"
    )
    again = run_cli(*words, "--workers", 2, "--resume")
    assert again.exit_code == 0 and "this training has finished" in again.stdout + again.stderr
