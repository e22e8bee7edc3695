"""The dispatcher by itself: what Megatron's other code reads, writes and expects of it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.conftest import MEGATRON
from tests.megatron import layers
from tests.ranks import pool

pytestmark = pytest.mark.megatron
only_019 = pytest.mark.skipif((MEGATRON or "").startswith("0.16"), reason="megatron-core 0.16 has no such option")


def run(world: int, fn, *args):
    return pool(world, layers.setup).run(fn, *args)


def _dispatcher(ep: int, tp: int = 1, etp: int = 1, **changes):
    layers.init_parallel(ep, tp, etp)
    return layers.make_layer(layers.make_config("ncclep", ep, tp, etp, **changes)).token_dispatcher


def _round_trip(dispatcher, x, routing_map, probs):
    """All six calls with experts that double; returns (rows, tokens_per_expert, probs of the rows, result)."""
    hidden, p = dispatcher.dispatch_preprocess(x, routing_map, probs)
    hidden, p = dispatcher.token_dispatch(hidden, p)
    rows, counts, p = dispatcher.dispatch_postprocess(hidden, p)
    out = dispatcher.token_combine(dispatcher.combine_preprocess(rows * 2))
    return rows, counts, p, dispatcher.combine_postprocess(out)


def _routing(num_tokens: int, seed: int, top_k: int = 2):
    g = torch.Generator().manual_seed(seed)
    idx = torch.rand(num_tokens, layers.EXPERTS, generator=g).topk(top_k, dim=1).indices
    routing_map = torch.zeros(num_tokens, layers.EXPERTS, dtype=torch.bool).scatter_(1, idx, True)
    return routing_map, torch.rand(num_tokens, layers.EXPERTS, generator=g) * routing_map


def _overrides_the_interface() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    from moe_ncclep.megatron import NCCLEPTokenDispatcher

    for name, method in inspect.getmembers(MoETokenDispatcher, inspect.isfunction):
        if getattr(method, "__isabstractmethod__", False):
            ours = getattr(NCCLEPTokenDispatcher, name)
            assert ours is not method, f"{name} is not overridden"
            assert len(inspect.signature(ours).parameters) == len(inspect.signature(method).parameters), name
    dispatcher = _dispatcher(2)
    for name in dispatcher.cudagraph_attrs:
        assert "." not in name  # 0.16 calls getattr with the raw name
        assert hasattr(dispatcher, name)
    assert not isinstance(dispatcher, torch.nn.Module)
    manager = dispatcher._comm_manager
    for name in ("token_probs", "dispatched_probs", "moe_expert_rank_capacity_factor", "over_budget"):
        assert hasattr(manager, name)


def test_overrides_the_whole_interface():
    run(2, _overrides_the_interface)


def _shapes_and_no_state() -> None:
    dispatcher = _dispatcher(2)
    rank = dist.get_rank()
    x = torch.randn(3, 2, layers.HIDDEN, requires_grad=True)
    routing_map, probs = _routing(6, rank)
    rows, counts, p, y = _round_trip(dispatcher, x, routing_map, probs.requires_grad_())
    assert y.shape == x.shape
    assert counts.dtype == torch.int64
    assert counts.tolist() == dispatcher._comm_manager.get_number_of_tokens_per_expert().tolist()
    assert int(counts.sum()) == rows.shape[0] == p.shape[0]
    assert p.dim() == 1
    torch.testing.assert_close(y, 4 * x)  # top-2, doubled
    assert dispatcher._handle is None  # nothing of this forward is kept for the next one
    (y.sum() + p.sum()).backward()
    assert torch.equal(x.grad, torch.full_like(x, 4.0))
    assert torch.equal(probs.grad != 0, routing_map)


def test_shapes_gradients_and_no_state_between_forwards():
    run(2, _shapes_and_no_state)


QUANTISED = {
    "fp8": ({"fp8": "e4m3", "fp8_recipe": "delayed"}, 16),
    "mxfp8": ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32),
    "fp4": ({"fp4": "e2m1", "fp4_recipe": "nvfp4"}, 128),
}


def _quantisation_padding(name: str) -> None:
    dispatcher = _dispatcher(2)
    settings, alignment = QUANTISED[name]
    vars(dispatcher.config).update(settings)  # set late: the configuration's own checks want TransformerEngine
    x = torch.randn(5, 1, layers.HIDDEN)
    rows, counts, p, y = _round_trip(dispatcher, x, *_routing(5, dist.get_rank()))
    assert all(n % alignment == 0 for n in counts.tolist())
    assert rows.shape[0] == int(counts.sum())
    assert min(n for n in counts.tolist() if n) == alignment
    valid = (rows != 0).any(1)
    assert 0 < int(valid.sum()) < rows.shape[0]
    assert torch.equal(p[~valid], torch.zeros_like(p[~valid]))
    torch.testing.assert_close(y, 4 * x)


@pytest.mark.parametrize("name", QUANTISED)
def test_rows_are_padded_for_quantised_experts(name):
    run(2, _quantisation_padding, name)


def _drop_and_pad_layout() -> None:
    from megatron.core.transformer.moe.moe_utils import get_capacity

    dispatcher = _dispatcher(2, moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True)
    routing_map, probs = _routing(7, dist.get_rank())
    everything = torch.ones_like(routing_map)  # the router's filler: in the map, with probability 0
    x = torch.randn(7, 1, layers.HIDDEN)
    rows, counts, _, y = _round_trip(dispatcher, x, everything, probs)
    capacity = get_capacity(num_tokens=14, num_experts=layers.EXPERTS, capacity_factor=2.0)
    assert counts.tolist() == [capacity * 2] * 4
    assert rows.shape[0] == 4 * 2 * capacity
    torch.testing.assert_close(y, 4 * x)


def test_drop_and_pad_has_exactly_the_capacity_and_ignores_fillers():
    run(2, _drop_and_pad_layout)


def _decode_padding() -> None:
    from megatron.core.inference.utils import set_decode_expert_padding

    layers.init_parallel(2)
    layer = layers.make_layer(layers.make_config("ncclep", 2))
    model = torch.nn.ModuleList([layer])
    model.config = layer.config
    x = torch.randn(4, 1, layers.HIDDEN)
    with torch.no_grad():
        before, _ = layer(x)
        set_decode_expert_padding(model, True, capacity_factor=layers.EXPERTS / 2)
        assert layer.token_dispatcher.drop_and_pad
        padded, _ = layer(x)
        assert layer.token_dispatcher._comm_manager.get_number_of_tokens_per_expert().tolist() == [8] * 4
        set_decode_expert_padding(model, False)
        after, _ = layer(x)
    torch.testing.assert_close(before, padded)  # other sizes of the expert GEMMs, so other rounding
    assert torch.equal(before, after)


def test_inference_may_switch_padding_on_and_off():
    run(2, _decode_padding)


def _uneven_drop_and_pad() -> str:
    dispatcher = _dispatcher(2, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    num_tokens = 8 + 8 * dist.get_rank()
    with pytest.raises(ValueError, match="ranks disagree on rows_per_expert") as caught:
        _round_trip(dispatcher, torch.randn(num_tokens, 1, layers.HIDDEN), *_routing(num_tokens, 0))
    return str(caught.value)


def test_drop_and_pad_with_uneven_tokens_is_refused_on_every_rank():
    first, second = run(2, _uneven_drop_and_pad)
    assert first == second


def _too_many_experts() -> None:
    dispatcher = _dispatcher(2)
    routing_map, probs = _routing(4, 0, top_k=3)
    with pytest.raises(ValueError, match="names more experts than top-k"):
        _round_trip(dispatcher, torch.randn(4, 1, layers.HIDDEN), routing_map, probs)


def test_a_map_wider_than_top_k_is_refused():
    run(2, _too_many_experts)


def _latent_width() -> None:
    dispatcher = _dispatcher(2)
    x = torch.randn(4, 2, 8)  # MoELayer projects before it calls
    rows, _, _, y = _round_trip(dispatcher, x, *_routing(8, dist.get_rank()))
    assert rows.shape[1] == 8
    torch.testing.assert_close(y, 4 * x)


def test_width_comes_from_the_tokens_so_latent_moe_works():
    run(2, _latent_width)


def _non_contiguous() -> None:
    dispatcher = _dispatcher(2)
    x = torch.randn(2, 4, layers.HIDDEN).transpose(0, 1)
    _, _, _, y = _round_trip(dispatcher, x, *_routing(8, dist.get_rank()))
    torch.testing.assert_close(y, 4 * x)


def test_tokens_need_not_be_contiguous():
    run(2, _non_contiguous)


def _two_ep_sizes() -> None:
    """Two models with EP 2 and EP 4 in one process, their layers called in turn."""
    from megatron.core import parallel_state

    layers.init_parallel(2)
    narrow = layers.make_layer(layers.make_config("ncclep", 2))
    reference = layers.make_layer(layers.make_config("alltoall", 2))
    narrow_groups = parallel_state.get_expert_model_parallel_group()
    world = dist.group.WORLD
    assert narrow_groups.size() == 2

    from moe_ncclep.megatron import NCCLEPTokenDispatcher

    alone = dist.new_subgroups(1)[0]
    groups = SimpleNamespace(ep=world, expt_tp=alone, tp_ep=world)
    wide = NCCLEPTokenDispatcher(2, [2 * dist.get_rank(), 2 * dist.get_rank() + 1], narrow.config, groups)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        x = torch.randn(4, 2, layers.HIDDEN)
        assert torch.equal(narrow(x)[0], reference(x)[0])
        _, counts, _, y = _round_trip(wide, x, *_routing(8, dist.get_rank()))
        assert counts.numel() == 2
        torch.testing.assert_close(y, 4 * x)


def test_two_expert_parallel_sizes_in_one_process():
    run(4, _two_ep_sizes)


def _deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        for dispatcher in ("alltoall", "ncclep"):
            layers.init_parallel(2)
            layer = layers.make_layer(layers.make_config(dispatcher, 2, moe_router_topk=5))
            torch.manual_seed(dist.get_rank())
            x = torch.randn(16, 2, layers.HIDDEN)
            first = layers.forward_backward(layer, x)
            layer.zero_grad()
            second = layers.forward_backward(layer, x)
            assert all(torch.equal(first[n], second[n]) for n in first)
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_mode_repeats_bit_for_bit():
    run(2, _deterministic)


def _nvtx() -> list[str]:
    names: list[str] = []
    nvtx, initialized = torch.cuda.nvtx, torch.cuda.is_initialized
    push, pop = nvtx.range_push, nvtx.range_pop
    torch.cuda.is_initialized = lambda: True
    nvtx.range_push = lambda name: names.append(name)
    nvtx.range_pop = lambda: names.append("-")
    try:
        layers.init_parallel(2)
        layer = layers.make_layer(layers.make_config("ncclep", 2))
        layers.forward_backward(layer, torch.randn(4, 1, layers.HIDDEN))
    finally:
        torch.cuda.is_initialized, nvtx.range_push, nvtx.range_pop = initialized, push, pop
    return names


def test_nvtx_ranges_around_each_phase():
    phases = ["route", "dispatch", "combine", "combine.backward", "dispatch.backward"]
    expected = [name for phase in phases for name in (f"moe_ncclep.{phase}", "-")]
    for names in run(2, _nvtx):
        assert names == expected


def _over_budget_rerun() -> tuple[bool, int, list[bool]]:
    """Megatron's own runner: drops, is noticed on all ranks, repeats without a budget, restores the factor."""
    import megatron.core.transformer.moe.paged_stash as paged_stash

    layers.init_parallel(2)
    layer = layers.make_layer(layers.make_config("ncclep", 2, moe_expert_rank_capacity_factor=1.1))
    plain = layers.make_layer(layers.make_config("ncclep", 2))
    for each in (layer, plain):
        layers.starve_first_rank(each, 2)  # everything goes to rank 1
    x = torch.randn(16, 2, layers.HIDDEN)
    dropped = []

    def forward_backward(**kwargs):
        result = layers.forward_backward(layer, x)["output"]
        dropped.append(bool(layer.token_dispatcher.check_over_budget()))
        return result

    nothing = torch.zeros(1)
    paged_stash.check_paged_stash_overflow = paged_stash.check_paged_stash_host_spill = lambda: nothing
    runner = object.__new__(paged_stash.PagedStashRunner)
    runner.__dict__.update(
        config=layer.config,
        moe_layers=[layer],
        model=[],
        optimizer=None,
        copy_main_params=False,
        forward_backward_func=forward_backward,
        stash_manager=SimpleNamespace(overflow=None, host_spill=None, release_stash_buffers=lambda: None),
        _configs_to_sync_moe_paged_stash=[],
    )
    output = runner(model=[layer], data_iterator=None, num_microbatches=1, seq_length=16, forward_only=False)
    assert torch.equal(output, layers.forward_backward(plain, x)["output"])
    factor = layer.token_dispatcher._comm_manager.moe_expert_rank_capacity_factor
    return factor == 1.1, len(dropped), dropped


@only_019
def test_over_budget_is_reported_and_rerun_without_a_budget():
    first, second = run(2, _over_budget_rerun)
    assert first == (True, 2, [False, False])  # rank 0 gets nothing, and reruns because rank 1 did drop
    assert second == (True, 2, [True, False])


def _within_budget() -> None:
    changes = {"moe_expert_rank_capacity_factor": 4.0}
    difference = layers.compare("alltoall", 2, changes={})
    assert max(difference.values()) == 0.0
    layers.init_parallel(2)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(16, 2, layers.HIDDEN)
    bounded = layers.make_layer(layers.make_config("ncclep", 2, **changes))
    free = layers.make_layer(layers.make_config("ncclep", 2))
    want, got = layers.forward_backward(free, x), layers.forward_backward(bounded, x)
    assert all(torch.equal(want[n], got[n]) for n in want)
    assert not bool(bounded.token_dispatcher.check_over_budget())


@only_019
def test_a_wide_budget_changes_nothing():
    run(2, _within_budget)


def _delayed_wgrad() -> list[str]:
    """Megatron hangs its delayed weight gradients on the tensors around dispatch; both must be differentiable."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    layers.init_parallel(2)
    layer = layers.make_layer(layers.make_config("ncclep", 2))
    layer.config.overlap_dispatch_backward_with_experts_wgrad = True  # set late: its check wants TransformerEngine
    MoELayer.setup_delayed_wgrad_for_dispatch_backward_overlap(layer)
    calls: list[str] = []
    layer.experts.backward_dw = lambda: calls.append("experts' weight gradients")
    layers.forward_backward(layer, torch.randn(8, 1, layers.HIDDEN))
    return calls


@only_019
def test_delayed_weight_gradients_run_in_backward():
    assert run(2, _delayed_wgrad) == [["experts' weight gradients"]] * 2


def _eval_between_training() -> list[float]:
    """Generation runs in inference mode; what it leaves behind must not disturb training."""
    layers.init_parallel(2)
    layer = layers.make_layer(layers.make_config("ncclep", 2, moe_expert_rank_capacity_factor=0.5))
    torch.manual_seed(dist.get_rank())
    x = torch.randn(8, 1, layers.HIDDEN)
    with torch.inference_mode():
        layer(x)
    first = layers.forward_backward(layer, x)
    layer.zero_grad()
    assert bool(layer.token_dispatcher.check_over_budget())
    layer.token_dispatcher.reset_over_budget()
    assert not bool(layer.token_dispatcher.check_over_budget())
    with torch.no_grad():
        layer.eval()(x)
    second = layers.forward_backward(layer.train(), x)
    return [float((first[n] - second[n]).abs().max()) for n in first]


@only_019
def test_inference_mode_before_training_with_a_budget():
    for difference in run(2, _eval_between_training):
        assert set(difference) == {0.0}


def _no_tokens() -> None:
    """Megatron's router refuses an empty batch, the dispatcher does not."""
    dispatcher = _dispatcher(2)
    num_tokens = 6 * dist.get_rank()
    x = torch.randn(num_tokens, 1, layers.HIDDEN, requires_grad=True)
    routing_map, probs = _routing(num_tokens, 0)
    _, counts, p, y = _round_trip(dispatcher, x, routing_map, probs.requires_grad_())
    assert counts.numel() == layers.EXPERTS // 2
    torch.testing.assert_close(y, 4 * x)
    (y.sum() + p.sum()).backward()
    assert torch.equal(x.grad, torch.full_like(x, 4.0))
    assert torch.equal(probs.grad, routing_map.float())


def test_a_rank_without_tokens():
    run(2, _no_tokens)


def _pairs_of_probability_zero() -> None:
    """The map counts, not the probability: dropped pairs leave the map, unless it is padded to capacity."""
    dispatcher = _dispatcher(2)
    routing_map, probs = _routing(6, dist.get_rank())
    x = torch.randn(6, 1, layers.HIDDEN)
    probs = (probs - 0.5).masked_fill(~routing_map, 0)  # negative ones too
    probs[0] = 0
    probs.requires_grad_()
    rows, _, p, y = _round_trip(dispatcher, x, routing_map, probs)
    torch.testing.assert_close(y, 4 * x)
    p.sum().backward()
    assert torch.equal(probs.grad, routing_map.float())
    num_rows = torch.tensor(rows.shape[0])
    dist.all_reduce(num_rows)
    assert num_rows == 2 * 6 * 2


def test_pairs_of_probability_zero_are_sent():
    run(2, _pairs_of_probability_zero)


def _budget_of_quantised_shards() -> tuple[int, int]:
    """Budget, alignment and expert tensor parallelism at once: 5 tokens x top-2 x 2 shards, rounded up to 16."""
    dispatcher = _dispatcher(2, 2, 2, moe_expert_rank_capacity_factor=1.0)
    dispatcher.config.fp8, dispatcher.config.fp8_recipe = "e4m3", "delayed"
    x = torch.randn(5, 1, layers.HIDDEN, requires_grad=True)
    rows, counts, p, y = _round_trip(dispatcher, x, *_routing(5, dist.get_rank()))
    assert all(n % 16 == 0 for n in counts.tolist())
    assert rows.shape[0] == p.shape[0] == int(counts.sum()) <= 32
    assert bool(dispatcher.check_over_budget())  # four experts want 16 rows each at the least
    (y.sum()).backward()
    torch.testing.assert_close(y / x, x.grad)

    dispatcher._comm_manager.moe_expert_rank_capacity_factor = 8.0
    dispatcher.reset_over_budget()
    x = x.detach()
    rows, counts, _, y = _round_trip(dispatcher, x, *_routing(5, dist.get_rank()))
    torch.testing.assert_close(y, 8 * x)  # two experts of two shards each, doubled
    assert not bool(dispatcher.check_over_budget())
    return rows.shape[0], int(counts.sum())


@only_019
def test_budget_with_alignment_and_expert_tensor_parallelism():
    for num_rows, counted in run(4, _budget_of_quantised_shards):
        assert num_rows == counted
        assert num_rows % 16 == 0


def _shared_experts_in_evaluation(overlap: bool) -> None:
    layers.init_parallel(2)
    changes = {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_overlap": overlap}
    results = []
    for name in ("alltoall", "ncclep"):
        layer = layers.make_layer(layers.make_config(name, 2, **changes))
        torch.manual_seed(dist.get_rank())
        x = torch.randn(8, 1, layers.HIDDEN)
        before = layers.forward_backward(layer, x)
        with torch.inference_mode():
            output, _ = layer.eval()(x)
        layer.zero_grad()
        after = layers.forward_backward(layer.train(), x)
        assert all(torch.equal(before[n], after[n]) for n in before)
        assert torch.equal(output, before["output"])
        results.append(before)
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


@pytest.mark.parametrize("overlap", [False, True])
def test_evaluation_between_training_steps(overlap):
    run(2, _shared_experts_in_evaluation, overlap)


def _stored_state() -> list[str]:
    layers.init_parallel(2)
    states = [layers.make_layer(layers.make_config(d, 2)).state_dict() for d in ("alltoall", "ncclep")]
    assert list(states[0]) == list(states[1])
    return list(states[0])


def test_the_dispatcher_adds_nothing_to_the_state():
    assert all(run(2, _stored_state))
