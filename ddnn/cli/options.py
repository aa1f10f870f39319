"""Options and arguments that several commands share, and how results are shown. Imports nothing heavy."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click import option

from ddnn.slurm.options import SlurmOptions
from ddnn.util.errors import UserError
from ddnn.util.text import set_terminal_level

PATH = click.Path(path_type=Path)
DEVICES = click.Choice(["cpu", "cuda", "auto"])

Command = TypeVar("Command", bound=Callable[..., None])

json_option = option("--json", "json_", is_flag=True, help="Print JSON.")
device_option = option("--device", type=DEVICES, default="auto", help="Where to compute.")
pipes_option = option(
    "--allow-pipes", is_flag=True, help="Run the shell commands of an scp. Only for files that you wrote yourself."
)
transforms_option = option(
    "--transforms",
    type=PATH,
    help="Kaldi dir of this data's transforms, if the network was trained with data.transforms.",
)
_SLURM_NAMES = ("cluster", "job_name", "nodes", "gpus_per_node", "workers_per_node", "time", "mem", "partition",
                "account", "qos", "constraint", "options", "launcher")  # fmt: skip


def options(*added: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, in the order of the help."""
    return lambda command: functools.reduce(lambda one, add: add(one), reversed(added), command)


def recipe_options(run_dir_help: str) -> Callable[[Command], Command]:
    """The recipe and how it may be changed: of `train` and `pretrain`."""
    return options(
        click.argument("recipe", type=PATH),
        option("--run-dir", type=PATH, help=run_dir_help),
        option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a recipe key; repeatable."),
        option("--workers", type=int, help="The same as --set parallel.workers=N."),
        device_option,
        pipes_option,
        option("--dry-run", is_flag=True,
               help="Check recipe and data (from headers), summarize them, and print the resolved recipe; train nothing."),
        option("--no-data", is_flag=True, help="With --dry-run: check the recipe alone; its data may be elsewhere."),
        option("--quiet", is_flag=True, expose_value=False, callback=_show_less_or_more,
               help="Show warnings only; train.log stays complete."),
        option("--verbose", is_flag=True, expose_value=False, callback=_show_less_or_more,
               help="Show each averaging and other details, also in train.log."),
    )  # fmt: skip


def _show_less_or_more(context: click.Context, given: click.Parameter, value: bool) -> None:
    """Callback of --quiet and --verbose. UserError: both are given."""
    if value:
        if context.meta.setdefault("ddnn.verbosity", given.name) != given.name:
            message = "--quiet and --verbose contradict each other"
            raise UserError(message, location="the command line", hint="give one of them")
        set_terminal_level({"quiet": "WARNING", "verbose": "DEBUG"}[given.name or ""])


class CommandWithSlurm(click.Command):
    """Its help lists the options whose text begins with "Slurm: " below a heading of their own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Slurm": []}
        for parameter in self.get_params(ctx):
            names, described = parameter.get_help_record(ctx) or ("", "")
            text = described.removeprefix("Slurm: ")
            if text:  # arguments have none
                sections["Options" if text == described else "Slurm"].append((names, text[0].upper() + text[1:]))
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def slurm_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options for Slurm; the command gets them as `slurm`: a SlurmOptions, or None without --slurm. When it
    runs, UserError: one of the others is given without --slurm."""

    @options(
        option("--slurm", is_flag=True, help="Slurm: submit a job; with --dry-run, print its script."),
        option("--cluster", metavar="NAME|FILE", help="Slurm: settings of the cluster, see docs/how-to/cluster.md."),
        option("--nodes", type=int, help="Slurm: number of nodes of a job."),
        option("--gpus-per-node", type=int, help="Slurm: GPUs on each node, one worker on each; 0: CPU."),
        option("--workers-per-node", type=int, help="Slurm: workers on each node.  [default: one for each GPU]"),
        option("--time", help="Slurm: time limit, as HOURS:MM:SS or DAYS-HOURS."),
        option("--mem", help="Slurm: memory on each node, as 64G; 0 is all of it."),
        option("--partition", help="Slurm: partition."),
        option("--account", help="Slurm: account to charge."),
        option("--qos", help="Slurm: quality of service."),
        option("--constraint", help="Slurm: features that the nodes must have."),
        option("--sbatch-option", "options", multiple=True, metavar="OPTION",
               help="Slurm: any other option of sbatch, as in --sbatch-option=--exclusive; repeatable."),
        option("--launcher", type=click.Choice(["mpirun", "srun"]), help="Slurm: program that starts the workers."),
        option("--job-name", help="Slurm: name of the job.  [default: that of the run dir]"),
    )  # fmt: skip
    @functools.wraps(command)
    def gathered(slurm: bool, **arguments: Any) -> None:
        values = {name: value for name in _SLURM_NAMES if (value := arguments.pop(name)) not in (None, ())}
        if values and not slurm:
            names = ", ".join("--" + name.replace("_", "-") for name in values)
            names = names.replace("--options", "--sbatch-option")
            raise UserError(f"{names} without --slurm", location="the command line", hint="add --slurm, or remove it")
        cluster, job_name = values.pop("cluster", None), values.pop("job_name", None)
        command(**arguments, slurm=SlurmOptions(cluster, job_name, values) if slurm else None)

    return gathered


def print_result(result: Any, json_: bool) -> None:
    """Prints the result of a command: its `as_text`, or its `as_dict` as JSON."""
    if json_:
        print_json(result.as_dict())
    else:
        click.echo(result.as_text())


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def parse_numbers(_: Any, given: click.Parameter, text: str | None, whole: bool = False) -> tuple[float, ...] | None:
    """Callback of an option that takes numbers, or `whole` ones, with commas between; UserError otherwise."""
    kind = "numbers"
    try:
        numbers = None if text is None else tuple(map(float, text.split(",")))
        if numbers is None or not whole:
            return numbers
        if all(map(float.is_integer, numbers)):
            return tuple(map(int, numbers))
        kind = "whole numbers"
    except ValueError:
        pass
    expected, name = f"{text!r} found, expected {kind} with commas between", given.opts[0]
    raise UserError(expected, location=name, hint=f"give them as in {name} 1,2,4")


parse_sizes = functools.partial(parse_numbers, whole=True)
