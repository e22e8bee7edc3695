"""``moe-ncclep build``."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Annotated

import typer
from rich.console import Console

from moe_ncclep.cli.errors import exit_codes


def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(
            help="Compute capability such as 9.0a; repeat it for several. Default: the visible GPUs', else those of "
            "MOE_NCCLEP_CUDA_ARCHS, else 9.0a and 10.0a."
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the command and what the compiler says.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result to stdout as one JSON object.")] = False,
) -> None:
    """Compile the CUDA kernels ahead of time.

    Needs nvcc but no GPU. The library goes to MOE_NCCLEP_CACHE_DIR, by default ~/.cache/moe_ncclep; jobs on machines
    that see this folder use it without nvcc.
    """
    console = Console(stderr=True)
    with exit_codes(console, failure=RuntimeError, interrupted="nothing was compiled"):
        from moe_ncclep.ep.nvlink.build import build_library, cached_library, target_archs

        archs = target_archs(arch or None)
        cached = cached_library(archs) is not None
        began = time.perf_counter()
        names = ", ".join(archs)
        with contextlib.nullcontext() if verbose else console.status(f"compiling the CUDA kernels for {names}"):
            library = build_library(archs, verbose=verbose)
        seconds = time.perf_counter() - began
    if as_json:
        result = {"library": str(library), "archs": list(archs), "cached": cached, "seconds": round(seconds, 3)}
        typer.echo(json.dumps(result))
    else:
        typer.echo(f"{library}\n{names}: {'already compiled' if cached else f'compiled in {seconds:.1f} s'}")
