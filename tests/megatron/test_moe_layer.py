"""A stock MoE layer gives the same output and gradients through ``ncclep`` as through Megatron's own dispatchers."""

from __future__ import annotations

import pytest
import torch

from tests.megatron import layers
from tests.ranks import pool

pytestmark = pytest.mark.megatron

EXACT, ROUNDING = 0.0, 3e-6

SAME = {
    "plain": {},
    "recompute": {"changes": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
    "probs_on_input": {
        "changes": {"moe_router_topk": 1, "moe_apply_probs_on_input": True, "moe_router_pre_softmax": True}
    },
    "shared_experts": {"changes": {"moe_shared_expert_intermediate_size": 48}},
    "shared_expert_overlap": {
        "changes": {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_overlap": True}
    },
    "fp32_router": {"changes": {"moe_router_dtype": "fp32"}},
    "fp64_router": {"changes": {"moe_router_dtype": "fp64"}},
    "dropping": {"changes": {"moe_expert_capacity_factor": 0.75}},
    "drop_and_pad": {"changes": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}},
    "drop_and_pad_all": {
        "changes": {"moe_expert_capacity_factor": layers.EXPERTS / 2, "moe_pad_expert_input_to_capacity": True}
    },
    "dropping_by_position": {"changes": {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"}},
    "bias": {"changes": {"add_bias_linear": True}},
    "uneven": {"uneven": True},
    "a_rank_receives_nothing": {"starve": True},
    "z_loss": {"changes": {"moe_z_loss_coeff": 0.1}},
    "sigmoid_groups": {
        "changes": {
            "moe_router_score_function": "sigmoid",
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_router_pre_softmax": True,
        }
    },
}


def check(world: int, limit: float, *args, **kwargs) -> None:
    for rank, difference in enumerate(pool(world, layers.setup).run(layers.compare, *args, **kwargs)):
        worst = max(difference, key=difference.get)
        assert difference[worst] <= limit, f"rank {rank}: {worst} differs by {difference[worst]:.2e}"
        assert "output" in difference
        assert "input.grad" in difference
        assert "router.weight.grad" in difference


@pytest.mark.parametrize("name", SAME)
def test_ep2_equals_alltoall(name):
    check(2, EXACT, "alltoall", 2, **SAME[name])


@pytest.mark.parametrize("name", ["plain", "recompute", "drop_and_pad", "dropping", "uneven", "shared_expert_overlap"])
def test_ep4_tp2_with_sequence_parallelism_equals_alltoall(name):
    check(4, EXACT, "alltoall", 4, 2, 1, **SAME[name])


@pytest.mark.parametrize("top_k", [3, 6])
def test_wide_top_k_equals_alltoall_to_rounding(top_k):
    check(2, ROUNDING, "alltoall", 2, changes={"moe_router_topk": top_k})


@pytest.mark.parametrize("ep", [1, 2])
def test_ep1_and_ep2_in_bf16_agree_to_rounding(ep):
    check(2, 2e-2, "alltoall", ep, dtype=torch.bfloat16, changes={"params_dtype": torch.bfloat16, "bf16": True})


@pytest.mark.parametrize("name", ["plain", "a_rank_receives_nothing", "fp32_router", "recompute"])
def test_expert_tensor_parallelism_equals_allgather_to_rounding(name):
    """alltoall over gloo cannot gather unequal counts over ETP, so allgather is the reference."""
    check(4, 1e-5, "allgather", 2, 2, 2, **SAME[name])


def test_etp_without_expert_parallelism():
    check(2, 1e-5, "allgather", 1, 2, 2)


def test_tp2_with_etp1():
    check(2, EXACT, "alltoall", 2, 2, 1)
