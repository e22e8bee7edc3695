"""The measuring itself, in this process (virtual ranks) or as one of several ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from moe_ncclep.bench.job import BenchConfig
    from moe_ncclep.bench.shapes import Shape


def virtual(config: BenchConfig, on_event: Callable[[dict], None]) -> dict:
    """Every shape with every number of SMs on virtual ranks."""
    import torch

    from moe_ncclep.bench.virtual import VirtualBench

    results = []
    for shape, num_sms, common in _cases(config, on_event):
        bench = VirtualBench(shape, config.ranks, num_sms, config.seed)
        bench.check()
        results += [common | result for result in bench.measure(config.repetitions)]
        del bench
        torch.cuda.empty_cache()
    return {"results": results, "left_out": {}}


def between_ranks(config: BenchConfig, device: torch.device, on_event: Callable[[dict], None]) -> dict:
    """Every shape between the ranks of the default group; the same record on every rank."""
    if config.mode == "layer":
        return _layers(config, device, on_event)
    from moe_ncclep.bench.ranks import RanksBench

    results, left_out = [], {}
    for shape, num_sms, common in _cases(config, on_event):
        bench = RanksBench(shape, config.contenders, device, num_sms=num_sms, late_us=config.late_us, seed=config.seed)
        bench.check()
        results += [common | result for result in bench.measure(config.repetitions)]
        left_out |= bench.left_out
        bench.close()
    return {"results": results, "left_out": left_out}


def _cases(config: BenchConfig, on_event: Callable[[dict], None]) -> Iterator[tuple[Shape, int | None, dict]]:
    """Every shape with every number of SMs, and what all its results have in common; tells of each before it."""
    cases = [(shape, num_sms) for shape in config.shapes() for num_sms in (*config.num_sms, None)]
    for done, (shape, num_sms) in enumerate(cases):
        on_event({"event": "case", "done": done, "total": len(cases), "what": _describe(shape, num_sms)})
        yield shape, num_sms, dataclasses.asdict(shape) | {"ranks": config.ranks, "num_sms": num_sms}


def _layers(config: BenchConfig, device: torch.device, on_event: Callable[[dict], None]) -> dict:
    import importlib.util

    from moe_ncclep.bench.layer import LayerBench, LayerShape

    grouped = device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    if device.type == "cpu":
        from moe_ncclep.megatron.cpu import apply_cpu_shim

        apply_cpu_shim()
    results = []
    for done, tokens in enumerate(config.tokens):
        shape = LayerShape(
            tokens=tokens,
            hidden=config.hidden,
            experts=config.experts,
            top_k=config.top_k,
            ffn=config.ffn,
            dtype=config.dtype,
            grouped=grouped,
        )
        what = f"layer: T={tokens} H={config.hidden} E={config.experts} K={config.top_k} FFN={config.ffn}"
        on_event({"event": "case", "done": done, "total": len(config.tokens), "what": what})
        bench = LayerBench(shape, device, config.seed)
        bench.check()
        common = dataclasses.asdict(shape) | {"ranks": config.ranks}
        results += [common | result for result in bench.measure(config.repetitions)]
    return {"results": results, "left_out": {}}


def _describe(shape: Shape, num_sms: int | None) -> str:
    sms = "" if num_sms is None else f" {num_sms} SMs"
    kind = shape.dtype if shape.payload == "input" else "fp8" if shape.row_format == "input" else "fp8 rows"
    return f"T={shape.tokens} H={shape.hidden} E={shape.experts} K={shape.top_k} {kind} {shape.routing}{sms}"
