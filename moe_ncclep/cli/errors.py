"""From exceptions to messages and exit codes, the same for every subcommand.

0: done. 1: the work failed. 2: bad usage or input. 130: Ctrl-C. 143: SIGTERM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from moe_ncclep.train.ranks import RankFailure

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


@contextmanager
def exit_codes(
    console: Console, failure: type[Exception] = RankFailure, interrupted: str = "all ranks were ended"
) -> Iterator[None]:
    """Turn ``ValueError``, ``failure`` and Ctrl-C into a message on ``console`` and an exit code."""
    try:
        yield
    except ValueError as error:
        _say(console, "error", str(error))
        raise typer.Exit(BAD_INPUT) from None
    except failure as error:
        _say(console, "failed", str(error))
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        _say(console, "interrupted", interrupted)
        raise typer.Exit(INTERRUPTED) from None


def _say(console: Console, label: str, text: str) -> None:
    console.print(f"[bold red]{label}:[/] ", end="")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
