"""Megatron's MoE layer on GPUs: ``ncclep`` beside alltoall over NCCL, with plain and with TransformerEngine experts."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist

from tests.megatron import layers
from tests.megatron.test_moe_layer import SAME
from tests.ranks import pool

pytestmark = [pytest.mark.megatron, pytest.mark.gpu2]
needs_te = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="TransformerEngine is not installed"
)
BF16 = {"params_dtype": torch.bfloat16, "bf16": True, "moe_router_dtype": "fp32"}
# Sizes that every quantised GEMM takes.
WIDE = {**BF16, "hidden_size": 256, "moe_ffn_hidden_size": 256, "num_attention_heads": 4, "init_method_std": 0.05}


SETUPS = {"collective": layers.setup, "nvlink": layers.setup_nvlink}


@pytest.fixture(params=SETUPS)
def engine(request) -> str:
    """The engine that ``ncclep`` uses."""
    return request.param


def check(limit: float, engine: str, **kwargs) -> None:
    """Compare on two ranks; differences are relative to the largest value of each tensor."""
    results = pool(2, SETUPS[engine], "cuda").run(layers.compare, "alltoall", 2, device="cuda", **kwargs)
    for rank, difference in enumerate(results):
        worst = max(difference, key=difference.get)
        assert difference[worst] <= limit, f"rank {rank}: {worst} differs by {difference[worst]:.2e}"
        assert "router.weight.grad" in difference


@pytest.mark.parametrize("name", SAME)
def test_plain_experts_in_float32_equal_alltoall(name, engine):
    rounded = engine == "nvlink" and name == "fp64_router"  # probs travel in float32 there
    check(1e-5 if rounded else 0.0, engine, **SAME[name])


@pytest.mark.parametrize("top_k", [2, 6])
def test_plain_experts_in_bf16_to_rounding(top_k, engine):
    check(2e-2, engine, dtype=torch.bfloat16, changes={**BF16, "moe_router_topk": top_k})


TE_CHANGES = {
    "plain": {},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "permute_fusion": {"moe_permute_fusion": True},
    "latent": {"moe_latent_size": 128},
    "shared_expert_overlap": {"moe_shared_expert_intermediate_size": 256, "moe_shared_expert_overlap": True},
    "drop_and_pad": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "fp8_delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "fp8_tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8_blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "fp8_router_padding": {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "moe_router_padding_for_quantization": True,
    },
}


@needs_te
@pytest.mark.parametrize("name", TE_CHANGES)
def test_grouped_experts_of_transformer_engine(name, engine):
    # Router padding sends filler tokens through alltoall's experts, which change the scale of the whole tensor; a step
    # of E5M2, the format of the gradients, is an eighth.
    limit = 2.5e-1 if name == "fp8_router_padding" else 1e-1 if name.startswith("fp8") else 3e-2
    check(limit, engine, dtype=torch.bfloat16, length=64, te=True, changes={**WIDE, **TE_CHANGES[name]})


@needs_te
def test_grouped_experts_on_a_rank_that_receives_nothing(engine):
    check(3e-2, engine, dtype=torch.bfloat16, length=64, te=True, starve=True, changes=WIDE)


def _captured(te: bool) -> None:
    """A whole layer, forward and backward, captured once and replayed with new tokens."""
    layers.init_parallel(2)
    torch.manual_seed(dist.get_rank())
    changes = {**WIDE, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    layer = layers.make_layer(layers.make_config("ncclep", 2, **changes), te=te).to("cuda", torch.bfloat16)
    inputs = [torch.randn(64, 2, WIDE["hidden_size"], device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    x, weights = inputs[0].clone().requires_grad_(), torch.randn_like(inputs[0])

    def step():
        out, _ = layer(x)
        return out, *torch.autograd.grad((out * weights).sum(), (x, *layer.parameters()))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for tokens in inputs:
        with torch.no_grad():
            x.copy_(tokens)
        graph.replay()
        torch.cuda.synchronize()
        got = [tensor.clone() for tensor in captured]
        for mine, want in zip(got, step(), strict=True):
            assert torch.equal(mine, want)


@pytest.mark.parametrize("te", [False, pytest.param(True, marks=needs_te)], ids=["local", "te"])
def test_a_layer_in_a_cuda_graph(te):
    pool(2, layers.setup_nvlink, "cuda").run(_captured, te)


def _fused_experts_with_a_budget() -> dict[str, float]:
    """Differences between TransformerEngine's plain and its fused grouped experts, the latter with a wide budget."""
    os.environ["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"  # without it Megatron refuses the op fuser
    layers.init_parallel(2)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(64, 2, WIDE["hidden_size"], device="cuda", dtype=torch.bfloat16)
    results = []
    for changes in ({}, {"use_transformer_engine_op_fuser": True, "moe_expert_rank_capacity_factor": 4.0}):
        layer = layers.make_layer(layers.make_config("ncclep", 2, **WIDE, **changes), te=True)
        results.append(layers.forward_backward(layer.to("cuda", torch.bfloat16), x))
    assert not bool(layer.token_dispatcher.check_over_budget())
    plain, fused = ({n: t.float() for n, t in result.items()} for result in results)
    assert plain.keys() == fused.keys()
    return {n: float((fused[n] - plain[n]).abs().max() / plain[n].abs().max()) for n in plain}


@needs_te
def test_fused_experts_with_a_budget():
    for difference in pool(2, layers.setup, "cuda").run(_fused_experts_with_a_budget):
        assert max(difference.values()) < 3e-2
