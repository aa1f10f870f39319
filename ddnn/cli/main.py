"""The `ddnn` command: its subcommands, and which exit code an error has. Exit codes: 0 success; 2 an error that the
user can fix, in one message on stderr; 3 a training diverged; 75 stopped by a signal, to be resumed; 130 interrupted; 1
anything else."""

from __future__ import annotations

import logging
import os
import sys
from types import TracebackType

import click

from ddnn import __version__
from ddnn.cli import tools, training
from ddnn.util.errors import exit_code, user_message


class _OrderedGroup(click.Group):
    """Lists the commands in the order in which one uses them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_OrderedGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
    epilog="""\b
    Examples:
      ddnn synth demo/corpus --hours 0.3            a corpus from nothing
      ddnn train recipes/demo/demo.yaml             -> exp/demo
      ddnn evaluate exp/demo --data demo/corpus/test --alignments demo/corpus/ali_test
      ddnn decode-prep exp/demo --data demo/corpus/test --out exp/demo/decode

    \b
    Each command has --help. Recipes: docs/recipe.md. Completion: ddnn completion --help.""",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Train hybrid DNN-HMM acoustic models on Kaldi features and alignments."""


for command in (*training.COMMANDS, *tools.COMMANDS):
    cli.add_command(command)


@cli.command(
    epilog="""\b
    Examples:
      echo 'eval "$(ddnn completion bash)"' >> ~/.bashrc
      ddnn completion fish > ~/.config/fish/completions/ddnn.fish"""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "ddnn", "_DDNN_COMPLETE").source())


def _unhandled_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    print(f"ddnn: this is a bug in ddnn {__version__}; please report it with the lines above", file=sys.stderr)


def main() -> None:
    """Entry point of `ddnn`: runs the command and turns what went wrong into a message and an exit code."""
    try:
        _run()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # a full disk, a closed pipe: Python would try again at its end, and exit with 120
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run() -> None:
    sys.excepthook = _unhandled_exception
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("ddnn").setLevel(logging.INFO)
    try:
        code = cli.main(prog_name="ddnn", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        print("ddnn: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        print(f"ddnn: error: {message}", file=sys.stderr)
        sys.exit(exit_code(error))
    sys.exit(code if isinstance(code, int) else 0)
