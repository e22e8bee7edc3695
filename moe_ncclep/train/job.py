"""A whole training job: checks, ranks, progress, files."""

from __future__ import annotations

import dataclasses
import datetime
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from moe_ncclep.train import report
from moe_ncclep.train.config import TrainConfig, check_megatron
from moe_ncclep.train.data import Corpus, load_corpus
from moe_ncclep.train.machine import Machine, describe_hardware, describe_versions
from moe_ncclep.train.ranks import run_ranks

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM


def run_job(config: TrainConfig, console: Console, quiet: bool = False) -> dict | None:
    """Train once for each dispatcher of ``config``, write ``metrics.json`` and ``loss.png``, return the metrics.

    Starts its own ranks, anew for each dispatcher; under torchrun it joins that job instead.

    Args:
        config: what the user asked for; None stands for the machine's default.
        console: where progress goes.
        quiet: no progress.

    Returns:
        The metrics; None on every rank but the first of a job that was joined.

    Raises:
        ValueError: for bad input, before any rank is started.
        RankFailure: if a rank ended before its work was done.
    """
    check_megatron()
    machine = Machine.detect()
    config = _joined_size(config) if machine.joined else config
    config = config.resolve(machine)
    config.validate(machine)
    corpus = load_corpus(config.data)
    corpus.check(config.nproc, config.seq, config.micro_batch)
    started = datetime.datetime.now(datetime.timezone.utc)
    with _ended_by_sigterm():
        runs = (_run_joined if machine.joined else _run_here)(config, corpus, machine, console, quiet)
    if runs is None:
        return None
    metrics = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": started.isoformat(timespec="seconds"),
        "hardware": describe_hardware(machine),
        "versions": describe_versions(),
        "config": dataclasses.asdict(config),
        "data": _describe(corpus),
        "runs": runs,
        "comparison": report.compare(runs, config, machine.device),
    }
    out = _make_out(config)
    files = [report.write_metrics(metrics, out), report.write_plot(metrics, out)]
    if not quiet:
        for label, text in report.summary(metrics, files):
            console.print(f"[bold]{label:<17}[/]", end="")
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    return metrics


def _run_here(config: TrainConfig, corpus: Corpus, machine: Machine, console: Console, quiet: bool) -> list[dict]:
    runs = []
    for dispatcher in config.dispatchers():
        job = dataclasses.asdict(dataclasses.replace(config, dispatcher=dispatcher, compare=None))
        logs = _make_out(config) / "logs" / dispatcher
        logs.mkdir(parents=True, exist_ok=True)
        with _progress(dispatcher, config.steps, console, quiet) as on_event:
            result = run_ranks(
                "moe_ncclep.train.rank", job, config.nproc, machine.device, machine.cores, logs, on_event
            )
        runs.append(result["run"])
    return runs


def _run_joined(
    config: TrainConfig, corpus: Corpus, machine: Machine, console: Console, quiet: bool
) -> list[dict] | None:
    import torch
    import torch.distributed as dist

    from moe_ncclep.train.loop import train
    from moe_ncclep.train.rank import join

    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, machine.cores // local_ranks))
    device = join(machine.device)
    first = dist.get_rank() == 0
    runs = []
    for dispatcher in config.dispatchers():
        with _progress(dispatcher, config.steps, console, quiet or not first) as on_event:
            one = dataclasses.replace(config, dispatcher=dispatcher, compare=None)
            runs.append(train(one, corpus, device, on_event))
    dist.destroy_process_group()
    return runs if first else None


def _joined_size(config: TrainConfig) -> TrainConfig:
    world = int(os.environ["WORLD_SIZE"])
    if config.nproc not in (None, world):
        raise ValueError(
            f"--nproc {config.nproc} differs from WORLD_SIZE {world} of the job that this process belongs to"
        )
    return dataclasses.replace(config, nproc=world)


def _make_out(config: TrainConfig) -> Path:
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {config.out}: {error.strerror}") from None
    return out


def _describe(corpus: Corpus) -> dict:
    entropy = corpus.byte_frequency_entropy()
    return {
        "source": corpus.source,
        "files": corpus.files,
        "split": corpus.split,
        "train_bytes": len(corpus.train),
        "held_out_bytes": len(corpus.held_out),
        "truncated": corpus.truncated,
        "sha256": corpus.digest(),
        "byte_frequency_nats": entropy,
        "byte_frequency_bits": entropy / report.LN2,
    }


@contextmanager
def _progress(dispatcher: str, steps: int, console: Console, quiet: bool) -> Iterator[Callable[[dict], None]]:
    """A bar with step, loss and tokens/s; yields the function that takes the events of the ranks."""
    if quiet:
        yield lambda event: None
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(dispatcher, total=steps, status="starting ranks")

        def on_event(event: dict) -> None:
            if event["event"] == "start":
                console.print(
                    f"{dispatcher}: {event['parameters']:,} parameters, engine {event['engine']} ({event['reason']})",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
            elif event["event"] == "step":
                status = f"loss {event['loss']:.4f}  {event['tokens_per_s']:,.0f} tokens/s"
                progress.update(task, completed=event["step"], status=status)
            elif event["event"] == "eval":
                status = progress.tasks[task].fields["status"]
                console.print(f"step {event['step']:>6}  {status}  held out {event['loss']:.4f}", highlight=False)

        yield on_event


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that ranks are ended in order."""

    def end(_number: int, _frame: types.FrameType | None) -> None:
        raise SystemExit(SIGTERM_EXIT_CODE)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
