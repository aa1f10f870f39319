"""The `ddnn` command. Each subcommand imports what it needs when it runs and calls one function."""

from ddnn.cli.main import cli, main

__all__ = ["cli", "main"]
