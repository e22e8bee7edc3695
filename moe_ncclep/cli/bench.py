"""``moe-ncclep bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moe_ncclep.cli.errors import exit_codes

SHAPE, WHERE, OUTPUT = "Shape", "Where and against what", "Output"


def bench(
    mode: Annotated[
        str,
        typer.Option(
            help="virtual: all ranks on one GPU in this process, beside floors. ranks: real processes, beside other "
            "engines and all-to-all. layer: a Megatron MoE layer, forward and backward. auto: virtual with one GPU, "
            "else ranks.",
            rich_help_panel=WHERE,
        ),
    ] = "auto",
    ranks: Annotated[
        int | None, typer.Option(help="Default: one for each GPU, at least 2. Not for torchrun.", rich_help_panel=WHERE)
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(
            help="nvlink, collective, alltoall or nccl_ep; repeat it for several. Default: all that can run here.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    num_sms: Annotated[
        list[int] | None,
        typer.Option(help="Also with so many SMs in all; repeat it for several.", rich_help_panel=WHERE),
    ] = None,
    late_us: Annotated[
        float, typer.Option(help="Rank 0 enters so much later; times are without it.", rich_help_panel=WHERE)
    ] = 0.0,
    preset: Annotated[
        str, typer.Option(help="Model whose hidden size, experts, top-k and FFN are taken.", rich_help_panel=SHAPE)
    ] = "reference",
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="Of each rank; repeat it for several. Default: 2048.", rich_help_panel=SHAPE),
    ] = None,
    hidden: Annotated[int | None, typer.Option(rich_help_panel=SHAPE)] = None,
    experts: Annotated[int | None, typer.Option(rich_help_panel=SHAPE)] = None,
    top_k: Annotated[int | None, typer.Option(rich_help_panel=SHAPE)] = None,
    ffn: Annotated[int | None, typer.Option(help="Of one expert, for mode layer.", rich_help_panel=SHAPE)] = None,
    dtype: Annotated[str, typer.Option(help="Of the tokens: bf16, fp16 or fp32.", rich_help_panel=SHAPE)] = "bf16",
    payload: Annotated[
        list[str] | None,
        typer.Option(
            help="bf16 (tokens as they are), fp8 (on the wire) or fp8-rows (also delivered so); repeat it for "
            "several. Default: bf16.",
            rich_help_panel=SHAPE,
        ),
    ] = None,
    routing: Annotated[
        list[str] | None,
        typer.Option(
            help="uniform, zipf, hot-rank or hot-expert; repeat it for several. Default: uniform.",
            rich_help_panel=SHAPE,
        ),
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Of each measurement.", rich_help_panel=OUTPUT)] = 30,
    seed: Annotated[int, typer.Option(rich_help_panel=OUTPUT)] = 0,
    json_file: Annotated[
        str | None,
        typer.Option("--json", help="Write the record to this file; - prints it to stdout.", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Measure route, dispatch and combine, after checking that they are right.

    Microseconds p50 and p95, of the slowest rank; contenders take turns. In mode virtual each phase runs in a CUDA
    graph and stands beside a floor: the plainest kernel that moves the same bytes on one GPU.
    """
    console = Console(stderr=True)
    with exit_codes(console, failure=RuntimeError):
        from moe_ncclep.bench.job import BenchConfig, run_bench, to_json
        from moe_ncclep.bench.shapes import PRESETS

        if preset not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}; choose one of {', '.join(PRESETS)}")
        model = PRESETS[preset]

        def chosen(value: int | None, default: int) -> int:
            return default if value is None else value

        config = BenchConfig(
            mode=mode,
            ranks=ranks,
            tokens=tuple(tokens or (2048,)),
            hidden=chosen(hidden, model.hidden),
            experts=chosen(experts, model.experts),
            top_k=chosen(top_k, model.top_k),
            ffn=chosen(ffn, model.ffn),
            dtype=dtype,
            formats=tuple(payload or ("bf16",)),
            routings=tuple(routing or ("uniform",)),
            num_sms=tuple(num_sms or ()),
            contenders=tuple(contender or BenchConfig.contenders),
            late_us=late_us,
            repetitions=repetitions,
            seed=seed,
        )
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("starting")

            def on_event(event: dict) -> None:
                progress.update(task, description=event["what"], completed=event["done"], total=event["total"])

            record = run_bench(config, on_event)
        if record is None:
            return
        if json_file not in (None, "-"):
            Path(json_file).write_text(to_json(record))
    _print(record, Console(stderr=json_file == "-"))
    if json_file == "-":
        typer.echo(to_json(record), nl=False)


def _print(record: dict, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("T", "H", "E", "K", "payload", "routing", "SMs", "contender", "phase"):
        table.add_column(name)
    for name in ("p50 us", "p95 us", "wire MB", "of floor"):
        table.add_column(name, justify="right")
    for row in record["results"]:
        kind = {"input": row["dtype"], "fp8": "fp8"}[row.get("payload", "input")]
        if row.get("row_format") == "fp8":
            kind = "fp8 rows"
        share = row.get("share_of_floor")
        table.add_row(
            *(str(row[name]) for name in ("tokens", "hidden", "experts", "top_k")),
            kind,
            row.get("routing", "router"),
            str(row.get("num_sms") or "all"),
            row["contender"],
            row["phase"],
            f"{row['us_p50']:,.1f}",
            f"{row['us_p95']:,.1f}",
            f"{row['wire_bytes'] / 1e6:,.2f}" if row.get("wire_bytes") else "",
            "" if share is None else f"{share:.0%}",
        )
    console.print(table)
    for name, reason in record["left_out"].items():
        console.print(f"left out: {name} ({reason})", markup=False, highlight=False, soft_wrap=True)
