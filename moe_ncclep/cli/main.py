"""The ``moe-ncclep`` command. Subcommands import torch only when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from moe_ncclep import __version__
from moe_ncclep.cli.bench import bench
from moe_ncclep.cli.build import build
from moe_ncclep.cli.train import train

app = typer.Typer(
    name="moe-ncclep",
    help="Mixture-of-experts token dispatch for Megatron-Core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(train)
app.command()(build)
app.command()(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moe-ncclep {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Mixture-of-experts token dispatch for Megatron-Core."""


def main() -> None:
    """Entry point of the ``moe-ncclep`` script."""
    app()
