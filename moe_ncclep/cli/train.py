"""``moe-ncclep train``."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from moe_ncclep.cli.errors import exit_codes
from moe_ncclep.train.config import DISPATCHERS, ITEM_BYTES, TrainConfig

SIZE, JOB, PARALLEL, OUTPUT = "Model", "Training", "Ranks and dispatcher", "Data and output"
_D = TrainConfig()


def train(
    steps: Annotated[int, typer.Option(rich_help_panel=JOB)] = _D.steps,
    layers: Annotated[int, typer.Option(rich_help_panel=SIZE)] = _D.layers,
    hidden: Annotated[int, typer.Option(rich_help_panel=SIZE)] = _D.hidden,
    heads: Annotated[int, typer.Option(help="Attention heads.", rich_help_panel=SIZE)] = _D.heads,
    experts: Annotated[int, typer.Option(help="Experts of each layer.", rich_help_panel=SIZE)] = _D.experts,
    topk: Annotated[int, typer.Option(help="Experts of each token.", rich_help_panel=SIZE)] = _D.topk,
    ffn: Annotated[int, typer.Option(help="Hidden size of one expert.", rich_help_panel=SIZE)] = _D.ffn,
    seq: Annotated[int, typer.Option(help="Bytes in a sequence.", rich_help_panel=SIZE)] = _D.seq,
    micro_batch: Annotated[
        int, typer.Option(help="Sequences of each rank in a step.", rich_help_panel=JOB)
    ] = _D.micro_batch,
    lr: Annotated[float, typer.Option(help="Peak learning rate.", rich_help_panel=JOB)] = _D.lr,
    seed: Annotated[int, typer.Option(rich_help_panel=JOB)] = _D.seed,
    aux_loss: Annotated[
        float, typer.Option(help="Coefficient of the load-balancing loss.", rich_help_panel=JOB)
    ] = _D.aux_loss,
    eval_every: Annotated[
        int, typer.Option(help="Steps between losses on held-out text.", rich_help_panel=JOB)
    ] = _D.eval_every,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Recompute MoE layers in the backward pass.", rich_help_panel=JOB)
    ] = _D.recompute,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"{' or '.join(ITEM_BYTES)}. Default: bf16 on GPUs, else float32.", rich_help_panel=JOB),
    ] = _D.dtype,
    nproc: Annotated[
        int | None,
        typer.Option(help="Ranks. Default: all GPUs, or 2 on a CPU. Not for torchrun.", rich_help_panel=PARALLEL),
    ] = _D.nproc,
    ep: Annotated[
        int | None, typer.Option(help="Expert-parallel size. Default: all ranks.", rich_help_panel=PARALLEL)
    ] = _D.ep,
    dispatcher: Annotated[
        str, typer.Option(help=f"One of {', '.join(DISPATCHERS)}.", rich_help_panel=PARALLEL)
    ] = _D.dispatcher,
    engine: Annotated[
        str, typer.Option(help="Engine of dispatcher ncclep: auto, or a name.", rich_help_panel=PARALLEL)
    ] = _D.engine,
    payload: Annotated[
        str, typer.Option(help="Wire format of dispatcher ncclep: input or fp8.", rich_help_panel=PARALLEL)
    ] = _D.payload,
    compare: Annotated[
        str | None,
        typer.Option(
            help="Train again with this dispatcher and the same seeds, and compare the losses.",
            rich_help_panel=PARALLEL,
        ),
    ] = _D.compare,
    data: Annotated[
        str | None,
        typer.Option(
            help="Text file, or folder of text files. Default: the sources of Python's standard library.",
            rich_help_panel=OUTPUT,
        ),
    ] = _D.data,
    out: Annotated[
        str, typer.Option(help="Folder for metrics.json, loss.png and logs.", rich_help_panel=OUTPUT)
    ] = _D.out,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only errors.", rich_help_panel=OUTPUT)] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the metrics to stdout as one JSON object.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Train a small mixture-of-experts GPT on real text, and plot its loss.

    The model is Megatron-Core's, the text is read as bytes. Ranks are started here: one on each GPU, or two on the CPU;
    under torchrun this process joins that job instead.
    """
    config = TrainConfig(
        steps=steps,
        layers=layers,
        hidden=hidden,
        heads=heads,
        experts=experts,
        topk=topk,
        ffn=ffn,
        seq=seq,
        micro_batch=micro_batch,
        lr=lr,
        seed=seed,
        nproc=nproc,
        ep=ep,
        dispatcher=dispatcher,
        engine=engine,
        payload=payload,
        dtype=dtype,
        aux_loss=aux_loss,
        eval_every=eval_every,
        data=data,
        out=out,
        compare=compare,
        recompute=recompute,
    )
    console = Console(stderr=True)
    with exit_codes(console):
        from moe_ncclep.train.job import run_job

        metrics = run_job(config, console, quiet)
    if as_json and metrics is not None:
        typer.echo(json.dumps(metrics))
