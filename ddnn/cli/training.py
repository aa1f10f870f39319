"""`ddnn train`, `pretrain` and `evaluate`."""

from __future__ import annotations

from pathlib import Path

import click

from ddnn.cli.options import PATH, device_option, json_option, pipes_option, recipe_options, show, slurm_options
from ddnn.slurm import SlurmOptions


@click.command(
    epilog="""\b
    Examples:
      ddnn train recipes/an4/sgd-random.yaml --run-dir exp/an4
      ddnn train my.yaml --set schedule.initial_learning_rate=0.004 --set seed=2 --dry-run
      ddnn train exp/an4 --resume
      ddnn train my.yaml --slurm --cluster gpu --nodes 2 --time 12:00:00"""
)
@recipe_options("Run directory.  [default: exp/NAME OF THE RECIPE]")
@click.option("--resume", is_flag=True, help="Continue from the newest checkpoint of the run dir, if there is one.")
@slurm_options
def train(
    recipe: Path, run_dir: Path | None, settings: tuple[str, ...], workers: int | None, device: str, dry_run: bool,
    resume: bool, slurm: SlurmOptions | None,
) -> None:  # fmt: skip
    """Train the network that RECIPE describes. With --resume, RECIPE may be the run dir."""
    if slurm is not None:
        from ddnn.slurm.submit import submit_training

        run_dir = run_dir or (recipe if resume and recipe.is_dir() else Path("exp", recipe.stem))
        sent = submit_training(recipe, run_dir, settings, workers, device, slurm, dry_run=dry_run, resume=resume)
        click.echo(sent.text)
        return
    if dry_run:
        _show_recipe(recipe, settings, workers)
        return
    from ddnn.training.start import start_training

    said = start_training(recipe, run_dir, settings, workers, device, resume)
    if said is not None:
        click.echo(said)


@click.command(
    epilog="""\b
    Examples:
      ddnn pretrain my.yaml --run-dir exp/rbm
      ddnn pretrain my.yaml --slurm --cluster gpu --workers 1 --time 12:00:00"""
)
@recipe_options("Directory for the DBN.  [default: exp/NAME OF THE RECIPE-rbm]")
@slurm_options
def pretrain(
    recipe: Path, run_dir: Path | None, settings: tuple[str, ...], workers: int | None, device: str, dry_run: bool,
    slurm: SlurmOptions | None,
) -> None:  # fmt: skip
    """Pretrain the DBN that RECIPE describes, and stop.

    A training uses it by pretrain.dbn. The same command resumes a pretraining that was interrupted.
    """
    if slurm is not None:
        from ddnn.slurm.submit import submit_pretraining

        run_dir = run_dir or Path("exp", f"{recipe.stem}-rbm")
        click.echo(submit_pretraining(recipe, run_dir, settings, workers, device, slurm, dry_run=dry_run).text)
        return
    if dry_run:
        _show_recipe(recipe, settings, workers)
        return
    from ddnn.training.start import start_pretraining

    start_pretraining(recipe, run_dir, settings, workers, device)


@click.command()
@click.argument("run_dir", type=PATH)
@click.option("--data", type=PATH, required=True, help="Kaldi data dir.")
@click.option("--alignments", type=PATH, required=True, help="Its alignment dir, or an archive of pdf-ids.")
@device_option
@pipes_option
@json_option
def evaluate(run_dir: Path, data: Path, alignments: Path, device: str, allow_pipes: bool, json_: bool) -> None:
    """Compute the loss per frame and the frame accuracy of a trained network."""
    from ddnn.training.evaluation import evaluate_run

    show(evaluate_run(run_dir, data, alignments, device=device, allow_pipes=allow_pipes), json_)


def _show_recipe(path: Path, settings: tuple[str, ...], workers: int | None) -> None:
    from ddnn.recipe.load import dump_recipe, load_recipe
    from ddnn.training.job import describe

    loaded = load_recipe(path, (*settings, *(() if workers is None else (f"parallel.workers={workers}",))))
    click.echo(f"# {describe(loaded)}\n{dump_recipe(loaded)}", nl=False)


COMMANDS = (train, pretrain, evaluate)
