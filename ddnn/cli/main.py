"""The `ddnn` command: its subcommands, and which exit code an error has. docs/reference/run-dir.md has the table of all exit codes; a
test walks through it."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from contextlib import nullcontext
from itertools import chain

import click

from ddnn import __version__
from ddnn.cli import tools, training
from ddnn.util.errors import exit_code, user_message
from ddnn.util.process import open_missing_streams
from ddnn.util.text import escaped_output, log_to_stderr, show


class _StagedGroup(click.Group):
    """Lists the commands by the stage of the work that they are for, and in the order in which one uses them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for stage, commands in STAGES.items():
            with formatter.section(stage):
                formatter.write_dl([(f"{c.name:{width}}", c.get_short_help_str(limit=200)) for c in commands])


@click.group(
    cls=_StagedGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
    epilog="""\b
    Examples:
      ddnn synth demo/corpus --hours 0.3            make a synthetic corpus
      ddnn train recipes/demo/demo.yaml             -> exp/demo
      ddnn evaluate exp/demo --data demo/corpus/test --alignments demo/corpus/ali_test
      ddnn decode-prep exp/demo --data demo/corpus/test --out exp/demo/decode

    \b
    Each command has --help. Recipes: docs/reference/recipe.md. Completion: ddnn completion --help.""",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Train hybrid DNN-HMM acoustic models on Kaldi features and alignments."""


@click.command(
    epilog="""\b
    Examples:
      echo 'eval "$(ddnn completion bash)"' >> ~/.bashrc
      ddnn completion fish > ~/.config/fish/completions/ddnn.fish"""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell."""
    from click.shell_completion import get_completion_class

    completion_class = get_completion_class(shell)
    assert completion_class is not None
    click.echo(completion_class(cli, {}, "ddnn", "_DDNN_COMPLETE").source())


STAGES = {
    "Data": (tools.synth, tools.info),
    "Training": (training.train, training.pretrain, tools.status),
    "Decoding and scoring": (
        training.evaluate, training.decode_prep, training.score, training.align, training.graph, training.denlats,
        training.export, training.import_nnet1,
    ),
    "Comparing": (training.compare_wer, tools.report, tools.scale, tools.reproduce),
    "Tools": (tools.bench, completion),
}  # fmt: skip
"""All commands, by the heading that they have in the help."""
for command in chain(*STAGES.values()):
    cli.add_command(command)


def main() -> None:
    """Entry point of `ddnn`: runs the command and turns what went wrong into a message and an exit code."""
    open_missing_streams()
    with nullcontext() if "_DDNN_COMPLETE" in os.environ else escaped_output():  # a shell's completion is in bytes
        try:
            code = _run()
        except SystemExit as ended:  # a signal, or nobody reads the output
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a full disk, a closed pipe: Python would try again at its end, and exit with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def _run() -> int:
    log_to_stderr()
    logging.getLogger("ddnn").setLevel(logging.INFO)
    try:
        try:
            code = cli.main(prog_name="ddnn", standalone_mode=False)
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:  # click's comes from the other
        print("ddnn: interrupted", file=sys.stderr)
        return int(getattr(error.__cause__ or error, "code", 130))  # of another signal, while MPI starts
    except Exception as error:  # noqa: BLE001 (also a bug, which is printed with its traceback)
        message = user_message(error)
        if message is None:
            traceback.print_exc()
            message = f"this is a bug in ddnn {__version__}; please report it with the lines above"
            show(f"ddnn: {message}", sys.stderr, "red")
        else:
            show(f"ddnn: error: {message}", sys.stderr, "red")
        return exit_code(error)
    return code if isinstance(code, int) else 0
