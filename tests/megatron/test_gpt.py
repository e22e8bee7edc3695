"""A GPT of MoE layers: loss and every gradient as with alltoall; and the 1F1B schedule's pieces."""

from __future__ import annotations

import pytest

from tests.megatron import gpt, layers
from tests.ranks import RankError, pool

pytestmark = pytest.mark.megatron


def check(world: int, limit: float, *args, **kwargs) -> None:
    for rank, difference in enumerate(pool(world, layers.setup).run(gpt.compare_gpt, *args, **kwargs)):
        worst = max(difference, key=difference.get)
        assert difference[worst] <= limit, f"rank {rank}: {worst} differs by {difference[worst]:.2e}"


@pytest.mark.parametrize(("world", "ep", "tp"), [(2, 2, 1), (4, 4, 2), (4, 2, 1), (2, 1, 1)])
def test_loss_and_gradients_equal_alltoall(world, ep, tp):
    check(world, 0.0, ep, tp)


def test_wide_top_k_to_rounding():
    check(2, 1e-4, 2, 1, {"moe_router_topk": 5})


def test_multi_token_prediction():
    # No auxiliary loss: Megatron's process-wide tracker of it is sized by the first model.
    balancing = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    changes = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1, **balancing}
    check(2, 0.0, 2, 1, changes, mtp=True)


def test_full_recompute():
    changes = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    check(2, 0.0, 2, 1, changes)


@pytest.mark.parametrize("name", ["plain", "shared_experts"])
def test_1f1b_callables_with_the_real_free_policy(name):
    changes = {"moe_shared_expert_intermediate_size": 48} if name == "shared_experts" else {}
    for difference in pool(2, layers.setup).run(gpt.schedule_1f1b, "ncclep", 2, None, changes):
        assert set(difference.values()) == {0.0}


def test_1f1b_would_notice_a_wrong_policy():
    """Freed as for a type that Megatron does not know, the rows that FC1 saved are gone."""
    with pytest.raises(RankError, match=r"not allocated|storage"):
        pool(2, layers.setup).run(gpt.schedule_1f1b, "ncclep", 2, True, {})
