"""A whole Megatron MoE layer, forward and backward, with ``ncclep`` and with ``alltoall`` in turns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moe_ncclep.bench.mismatch import raise_on_all
from moe_ncclep.bench.shapes import DTYPES
from moe_ncclep.bench.timing import Timing, of_slowest_rank, once_us

DISPATCHERS = ("alltoall", "ncclep")
_ROUNDING = 3e-2


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """An MoE layer and the tokens of each rank."""

    tokens: int
    hidden: int
    experts: int
    top_k: int
    ffn: int
    dtype: str = "bf16"
    grouped: bool = False
    """TransformerEngine's grouped experts instead of Megatron's own."""


class LayerBench:
    """The same layer and weights with each dispatcher, on the ranks of the default group."""

    def __init__(self, shape: LayerShape, device: torch.device, seed: int = 0):
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        import moe_ncclep.megatron  # noqa: F401 - registers the dispatcher

        size = dist.get_world_size()
        if shape.experts % size:
            raise ValueError(f"{shape.experts} experts cannot be spread evenly over {size} ranks")
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(expert_model_parallel_size=size)
        self.shape, self._device = shape, device
        self._layers = {}
        for dispatcher in DISPATCHERS:
            model_parallel_cuda_manual_seed(seed + 1)
            torch.manual_seed(seed + 1)
            layer = _make(shape, dispatcher, size)
            self._layers[dispatcher] = layer.to(device, DTYPES[shape.dtype])
        generator = torch.Generator().manual_seed(seed + dist.get_rank())
        x = torch.randn(shape.tokens, 1, shape.hidden, generator=generator)
        self._x = x.to(device, DTYPES[shape.dtype])

    def check(self) -> None:
        """Output and gradient of the input with both, to the rounding of another order of sums."""
        results = [self._step(name) for name in DISPATCHERS]
        problem = None
        for what, want, got in zip(("output", "gradient of the input"), *results, strict=True):
            gap = (got.float() - want.float()).abs().max() / want.float().abs().max()
            if not gap <= _ROUNDING:
                problem = f"rank {dist.get_rank()}: {what} of ncclep and alltoall differ by {float(gap):.1e}"
        raise_on_all(problem)

    def measure(self, repetitions: int) -> list[dict]:
        """Microseconds of forward + backward of the slowest rank, one result a dispatcher."""
        times: dict[str, list[float]] = {name: [] for name in DISPATCHERS}
        for _ in range(repetitions):
            for name in DISPATCHERS:
                dist.barrier()
                times[name].append(once_us(partial(self._step, name), self._device))
        return [
            {"contender": name, "phase": "layer forward+backward", **Timing.of(values).record()}
            for name, values in of_slowest_rank(times, self._device).items()
        ]

    def _step(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self._layers[name]
        x = self._x.detach().requires_grad_()
        out, _ = layer(x)
        out.backward(torch.ones_like(out))
        for parameter in layer.parameters():
            parameter.grad = None
        return out.detach(), x.grad


def _make(shape: LayerShape, dispatcher: str, size: int) -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = DTYPES[shape.dtype]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=8,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.top_k,
        moe_ffn_hidden_size=shape.ffn,
        moe_token_dispatcher_type=dispatcher,
        moe_router_dtype="fp32",
        moe_grouped_gemm=shape.grouped,
        expert_model_parallel_size=size,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
    )
    spec = get_moe_module_spec(use_te=shape.grouped, num_experts=shape.experts, moe_grouped_gemm=shape.grouped)
    return spec(config=config) if isinstance(spec, partial) else build_module(spec, config=config)
