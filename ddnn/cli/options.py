"""Options and arguments that several commands share, and how results are shown. Imports nothing heavy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ddnn.slurm import SlurmOptions
from ddnn.util.errors import UserError

PATH = click.Path(path_type=Path)
DEVICES = click.Choice(["cpu", "cuda", "auto"])

Command = TypeVar("Command", bound=Callable[..., None])

device_option = click.option("--device", type=DEVICES, default="auto", show_default=True, help="Where to compute.")
pipes_option = click.option(
    "--allow-pipes", is_flag=True, help="Run the shell commands of an scp. Only for files that you wrote yourself."
)
json_option = click.option("--json", "json_", is_flag=True, help="Print JSON.")


def recipe_options(run_dir_help: str) -> Callable[[Command], Command]:
    """The recipe and what may be said about it: of `train` and `pretrain`."""
    options = (
        click.argument("recipe", type=PATH),
        click.option("--run-dir", type=PATH, help=run_dir_help),
        click.option(
            "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a recipe key; repeatable."
        ),
        click.option("--workers", type=int, help="The same as --set parallel.workers=N."),
        device_option,
        click.option("--dry-run", is_flag=True, help="Check the recipe and print it resolved; train nothing."),
    )
    return lambda command: functools.reduce(lambda one, option: option(one), reversed(options), command)


def slurm_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options for Slurm; the command gets them as `slurm`: a SlurmOptions, or None without --slurm.

    Raises (when the command runs):
        UserError: one of the others is given without --slurm.
    """

    @functools.wraps(command)
    def gathered(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in ("cluster", "job_name", *_SETTINGS)}
        given = {name: value for name, value in given.items() if value is not None}
        if not arguments["slurm"]:
            if given:
                options = ", ".join("--" + name.replace("_", "-") for name in given)
                raise UserError(
                    f"{options} without --slurm", location="the command line", hint="add --slurm, or remove it"
                )
            command(**{**arguments, "slurm": None})
            return
        settings = {name: value for name, value in given.items() if name in _SETTINGS}
        command(**{**arguments, "slurm": SlurmOptions(given.get("cluster"), given.get("job_name"), settings)})

    return functools.reduce(lambda one, option: option(one), reversed(_SLURM), gathered)


_SETTINGS = ("nodes", "gpus_per_node", "workers_per_node", "time", "partition", "account", "launcher")
_SLURM = (
    click.option("--slurm", is_flag=True, help="Submit a Slurm job; with --dry-run, print its script."),
    click.option("--cluster", metavar="NAME|FILE", help="Slurm: settings of the cluster, see docs/slurm.md."),
    click.option("--nodes", type=int, help="Slurm: number of nodes of a job."),
    click.option("--gpus-per-node", type=int, help="Slurm: GPUs on each node, one worker on each; 0: CPU."),
    click.option("--workers-per-node", type=int, help="Slurm: workers on each node.  [default: one for each GPU]"),
    click.option("--time", help="Slurm: time limit, as HOURS:MM:SS or DAYS-HOURS."),
    click.option("--partition", help="Slurm: partition."),
    click.option("--account", help="Slurm: account to charge."),
    click.option("--launcher", type=click.Choice(["mpirun", "srun"]), help="Slurm: program that starts the workers."),
    click.option("--job-name", help="Slurm: name of the job.  [default: that of the run dir]"),
)


class OrderedGroup(click.Group):
    """Lists the commands in the order in which one uses them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def show(result: Any, json_: bool) -> None:
    """Prints the result of a command: its `as_text`, or its `as_dict` as JSON."""
    if json_:
        show_json(result.as_dict())
    else:
        click.echo(result.as_text())


def show_json(value: Any) -> None:
    """Prints plain values as JSON."""
    import json

    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def parse_numbers(text: str, option: str) -> tuple[float, ...]:
    """Numbers with commas between; UserError otherwise."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        expected = f"{text!r} found, expected numbers with commas between"
        raise UserError(expected, location=option, hint=f"give them as in {option} 1,2,4") from error


def parse_sizes(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers with commas between; UserError otherwise."""
    numbers = parse_numbers(text, option)
    if not all(number.is_integer() for number in numbers):
        expected = f"{text!r} found, expected whole numbers with commas between"
        raise UserError(expected, location=option, hint=f"give them as in {option} 1,2,4")
    return tuple(int(number) for number in numbers)
