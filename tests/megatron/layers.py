"""Real Megatron-Core MoE layers in the workers, and their comparison between dispatchers."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HIDDEN, EXPERTS, FFN = 32, 8, 64


def setup() -> None:
    """Of every worker: registration and the CPU shim, before anything builds a model."""
    import warnings

    from moe_ncclep.megatron.cpu import apply_cpu_shim

    warnings.filterwarnings("ignore")
    apply_cpu_shim()
    import moe_ncclep.megatron  # noqa: F401


def setup_nvlink() -> None:
    """The same, with the engine nvlink, which auto does not take where ranks share a GPU."""
    os.environ["MOE_NCCLEP_ENGINE"] = "nvlink"
    setup()


def init_parallel(ep: int, tp: int = 1, etp: int = 1) -> None:
    """(Re)create Megatron's process groups and seed its generators."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    wanted = (ep, tp, etp)
    initialized = parallel_state.model_parallel_is_initialized()  # not after the end of the last task
    if not initialized or getattr(init_parallel, "current", None) != wanted:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
        )
        init_parallel.current = wanted
    model_parallel_cuda_manual_seed(123)


def make_config(dispatcher: str, ep: int, tp: int = 1, etp: int = 1, **changes: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": FFN,
        "moe_token_dispatcher_type": dispatcher,
        "use_cpu_initialization": True,
        "add_bias_linear": False,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "moe_aux_loss_coeff": 0.01,
        "gated_linear_unit": True,
        "init_method_std": 0.5,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    settings.update(changes)
    return TransformerConfig(**settings)


def make_layer(config: Any, *, te: bool = False) -> torch.nn.Module:
    """A stock MoELayer with the same weights for every dispatcher; ``te`` for TransformerEngine's grouped experts."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    spec = get_moe_module_spec(use_te=te, num_experts=EXPERTS, moe_grouped_gemm=te)
    model_parallel_cuda_manual_seed(123)
    torch.manual_seed(7)
    if isinstance(spec, partial):  # 0.19
        return spec(config=config)
    from megatron.core.transformer.spec_utils import build_module

    return build_module(spec, config=config)


def forward_backward(layer: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and all gradients for a loss that weighs every element differently."""
    x = x.detach().clone().requires_grad_()
    with quantisation(layer.config):
        out, _ = layer(x)
    # float32 first: the weights must not be rounded away in 16 bits
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    (out.float() * weights).sum().backward()
    result = {"output": out.detach(), "input.grad": x.grad}
    result.update({f"{n}.grad": p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None})
    return result


def quantisation(config: Any) -> AbstractContextManager:
    """The context that Megatron's transformer block opens around FP8 layers."""
    if not config.fp8:
        return nullcontext()
    from megatron.core.fp8_utils import get_fp8_context

    return get_fp8_context(config, 0)


def starve_first_rank(layer: torch.nn.Module, ep: int) -> None:
    """Route no token to the experts of expert-parallel rank 0."""
    gating = layer.router.gating
    penalty = torch.zeros(EXPERTS, device=layer.router.weight.device)
    penalty[: EXPERTS // ep] = -1e9
    layer.router.gating = lambda x: gating(x) + penalty.to(x.dtype)


def compare(
    reference: str,
    ep: int,
    tp: int = 1,
    etp: int = 1,
    *,
    length: int = 16,
    uneven: bool = False,
    starve: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    te: bool = False,
    changes: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Largest difference of each tensor between ``ncclep`` and ``reference``, relative to its largest value."""
    init_parallel(ep, tp, etp)
    rank = dist.get_rank()
    length = 4 + 4 * (rank // tp) if uneven else length
    torch.manual_seed(100 + rank)
    x = torch.randn(length, 2, (changes or {}).get("hidden_size", HIDDEN)).to(device, dtype)
    results = []
    for dispatcher in (reference, "ncclep"):
        layer = make_layer(make_config(dispatcher, ep, tp, etp, **(changes or {})), te=te).to(device, dtype)
        expected = "NCCLEPTokenDispatcher" if dispatcher == "ncclep" else "MoEA"
        assert type(layer.token_dispatcher).__name__.startswith(expected)
        if starve:
            starve_first_rank(layer, ep)
        results.append(forward_backward(layer, x))
    stock, ours = results
    assert stock.keys() == ours.keys()
    difference = {}
    for name, want in stock.items():
        assert ours[name].dtype == want.dtype, name
        assert ours[name].shape == want.shape, name
        scale = max(float(want.float().abs().max()), 1e-9) if want.numel() else 1.0
        gap = float((ours[name].float() - want.float()).abs().max()) if want.numel() else 0.0
        difference[name] = gap / scale
    return difference
