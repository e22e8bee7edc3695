"""A whole benchmark: what is asked for, where it runs, and the record it leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moe_ncclep.bench import contenders
from moe_ncclep.bench.shapes import ROUTINGS, Shape
from moe_ncclep.ep.nvlink.structs import MAX_RANKS
from moe_ncclep.train.machine import Machine, describe_commit, describe_hardware, describe_versions, loaded_nccl_version
from moe_ncclep.train.ranks import run_ranks

MODES = ("auto", "virtual", "ranks", "layer")
MAX_REPETITIONS = 100_000


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One run of ``moe-ncclep bench``; every combination of the lists is measured."""

    mode: str = "auto"
    ranks: int | None = None
    tokens: tuple[int, ...] = (2048,)
    hidden: int = 7168
    experts: int = 64
    top_k: int = 8
    ffn: int = 2048
    dtype: str = "bf16"
    formats: tuple[str, ...] = ("bf16",)
    """Of payload and rows: ``bf16`` (the dtype of the tokens), ``fp8`` (on the wire), ``fp8-rows`` (delivered)."""
    routings: tuple[str, ...] = ("uniform",)
    num_sms: tuple[int, ...] = ()
    contenders: tuple[str, ...] = contenders.NAMES
    late_us: float = 0.0
    repetitions: int = 30
    seed: int = 0
    device: str = field(default="", metadata={"help": "filled in by resolve"})

    def resolve(self, machine: Machine) -> BenchConfig:
        """The same with the machine's defaults filled in, checked.

        Raises:
            ValueError: naming the value and the limit.
        """
        if self.mode not in MODES:
            raise ValueError(f"unknown mode {self.mode!r}; choose one of {', '.join(MODES)}")
        mode = self.mode
        if mode == "auto":
            mode = "virtual" if machine.gpus == 1 and not machine.joined else "ranks"
        if mode == "virtual" and not machine.gpus:
            raise ValueError("mode virtual needs a CUDA GPU; this machine has none")
        world = int(os.environ["WORLD_SIZE"]) if machine.joined else None
        if machine.joined and mode != "virtual" and self.ranks not in (None, world):
            raise ValueError(f"--ranks {self.ranks} differs from WORLD_SIZE {world} of the job of this process")
        ranks = self.ranks or (world if mode != "virtual" else None) or max(2, machine.gpus)
        if not 2 <= ranks <= MAX_RANKS:
            raise ValueError(f"ranks must be between 2 and {MAX_RANKS}, got {ranks}")
        config = dataclasses.replace(self, mode=mode, ranks=ranks, device=machine.device)
        config._check()
        return config

    def _check(self) -> None:
        if not 1 <= self.repetitions <= MAX_REPETITIONS:
            raise ValueError(f"repetitions must be between 1 and {MAX_REPETITIONS}, got {self.repetitions}")
        if not 0 <= self.late_us <= 1e6:
            raise ValueError(f"late_us must be between 0 and 1000000, got {self.late_us}")
        for name in self.contenders:
            if name not in contenders.NAMES:
                raise ValueError(f"unknown contender {name!r}; choose one of {', '.join(contenders.NAMES)}")
        for routing in self.routings:
            if routing not in ROUTINGS:
                raise ValueError(f"unknown routing {routing!r}; choose one of {', '.join(ROUTINGS)}")
        for num_sms in self.num_sms:
            if num_sms < 2 * self.ranks and self.mode == "virtual":
                raise ValueError(f"num_sms must be at least 2 for each of {self.ranks} virtual ranks, got {num_sms}")
        if self.ffn < 1:
            raise ValueError(f"ffn must be at least 1, got {self.ffn}")
        for shape in self.shapes():
            shape.validate(self.ranks)

    def shapes(self) -> list[Shape]:
        """Every combination of tokens, routing and format."""
        kinds = {"bf16": ("input", "input"), "fp8": ("fp8", "input"), "fp8-rows": ("fp8", "fp8")}
        for name in self.formats:
            if name not in kinds:
                raise ValueError(f"unknown format {name!r}; choose one of {', '.join(kinds)}")
        return [
            Shape(
                tokens=tokens,
                hidden=self.hidden,
                experts=self.experts,
                top_k=self.top_k,
                dtype=self.dtype,
                payload=kinds[name][0],
                row_format=kinds[name][1],
                routing=routing,
            )
            for tokens in self.tokens
            for routing in self.routings
            for name in self.formats
        ]


def run_bench(config: BenchConfig, on_event: Callable[[dict], None]) -> dict | None:
    """Check, then measure; returns the record, None on all ranks but the first of a job that was joined.

    Raises:
        ValueError: for bad input, before anything runs.
        Mismatch, RankFailure: if a result is wrong, or a rank ended early.
    """
    machine = Machine.detect()
    config = config.resolve(machine)
    started = datetime.datetime.now(datetime.timezone.utc)
    if config.mode == "virtual":
        from moe_ncclep.bench.work import virtual

        measured = virtual(config, on_event)
    elif machine.joined:
        measured = _joined(config, machine, on_event)
    else:
        job = dataclasses.asdict(config)
        with tempfile.TemporaryDirectory(prefix="moe_ncclep_bench_") as logs:
            result = run_ranks(
                "moe_ncclep.bench.rank", job, config.ranks, machine.device, machine.cores, Path(logs), on_event
            )
        measured = result["run"]
    if measured is None:
        return None
    return {
        "command": _command(),
        "commit": describe_commit(),
        "started": started.isoformat(timespec="seconds"),
        "hardware": describe_hardware(machine) | {"ranks_share_gpus": config.ranks > machine.gpus > 0},
        "versions": describe_versions() | _gpu_versions(),
        "config": dataclasses.asdict(config),
        **measured,
    }


def to_json(record: dict) -> str:
    """Readable JSON, a result on one line."""
    text = json.dumps(record, indent=1, allow_nan=False)
    return re.sub(r"\{[^{}]*\}|\[[^][{}]*\]", lambda found: " ".join(found.group().split()), text) + "\n"


def _joined(config: BenchConfig, machine: Machine, on_event: Callable[[dict], None]) -> dict | None:
    import torch.distributed as dist

    from moe_ncclep.bench.work import between_ranks
    from moe_ncclep.train.rank import join

    device = join(machine.device)
    first = dist.get_rank() == 0
    measured = between_ranks(config, device, on_event if first else lambda event: None)
    dist.destroy_process_group()
    return measured if first else None


def _command() -> str:
    """As it was typed, without the name of the file that this goes to."""
    arguments = iter(sys.argv[1:])
    kept = []
    for argument in arguments:
        if argument == "--json":
            next(arguments, None)
        elif not argument.startswith("--json="):
            kept.append(argument)
    return " ".join(["moe-ncclep", *kept])


def _gpu_versions() -> dict[str, str]:
    import torch

    versions = {}
    if torch.cuda.is_available():
        versions["cuda"] = torch.version.cuda
        nccl = loaded_nccl_version()
        if nccl is not None:
            versions["nccl"] = ".".join(map(str, nccl))
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions["triton"] = importlib.metadata.version("triton")
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.CalledProcessError, IndexError):
            lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
            versions["driver"] = lines[0]
    return versions
