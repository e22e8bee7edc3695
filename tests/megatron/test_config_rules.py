"""What is refused, by the name of the flag, and what is not although a stock dispatcher would be."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moe_ncclep.ep import EPOptions
from moe_ncclep.megatron import NCCLEPBackend, is_ncclep, options_of
from moe_ncclep.megatron.config_rules import check_config
from tests.megatron.configs import MOE_LAYER, VERSION, load, make_config

pytestmark = pytest.mark.megatron

SHARED = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True}
SINCE_19 = pytest.mark.skipif(VERSION < (0, 19), reason="the flag appeared in megatron-core 0.19")
GRAPH_MODULES = "cuda_graph_modules" if VERSION >= (0, 19) else "cuda_graph_scope"


def as_namespace(**changes) -> SimpleNamespace:
    """What the rules read of a configuration, for values with which Megatron makes none without a GPU."""
    return SimpleNamespace(**{**vars(make_config()), **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"num_moe_experts": 6, "expert_model_parallel_size": 4},
            "--num-experts 6 cannot be spread evenly over --expert-model-parallel-size 4 ranks",
        ),
        ({"num_moe_experts": 2049}, "--num-experts 2049 times --expert-tensor-parallel-size 1 is over .* 2048"),
        (
            {"num_moe_experts": 1032, "expert_tensor_parallel_size": 2},
            "--num-experts 1032 times --expert-tensor-parallel-size 2 is over the limit of 2048",
        ),
        (
            {"num_moe_experts": 256, "moe_router_topk": 129},
            "--moe-router-topk 129 times --expert-tensor-parallel-size 1 is over the limit of 128",
        ),
        (
            {"num_moe_experts": 256, "moe_router_topk": 65, "expert_tensor_parallel_size": 2},
            "--moe-router-topk 65 times --expert-tensor-parallel-size 2 is over the limit of 128",
        ),
        (
            {"hidden_size": 36, "bf16": True},
            "--hidden-size 36 in torch.bfloat16 makes rows of 72 bytes; .* multiple of 16",
        ),
        ({"hidden_size": 36, "fp16": True}, "--hidden-size 36 in torch.float16 makes rows of 72 bytes"),
        ({"hidden_size": 34, "num_attention_heads": 2}, "--hidden-size 34 in torch.float32 makes rows of 136 bytes"),
    ],
)
def test_refused_by_name(changes, text):
    with pytest.raises(ValueError, match=text):
        make_config(**changes)
    make_config("alltoall", **changes)  # it is our rule, not Megatron's


def test_limits_themselves_are_allowed():
    make_config(num_moe_experts=2048)
    make_config(num_moe_experts=256, moe_router_topk=64, expert_tensor_parallel_size=2)
    make_config(hidden_size=36)  # float32 rows of 144 bytes
    make_config(num_moe_experts=8, expert_model_parallel_size=8)


def with_nvlink(**changes) -> SimpleNamespace:
    """A configuration that asks for engine nvlink, checked."""
    config = make_config(moe_flex_dispatcher_backend=NCCLEPBackend(EPOptions(engine="nvlink")), **changes)
    check_config(config)
    return config


def test_the_nvlink_engine_has_a_limit_of_its_own():
    with_nvlink(num_moe_experts=256, moe_router_topk=16, expert_tensor_parallel_size=2)
    text = (
        "--moe-router-topk 17 times --expert-tensor-parallel-size 2 is over the limit of 32 of --ncclep-engine nvlink"
    )
    with pytest.raises(ValueError, match=text):
        with_nvlink(num_moe_experts=256, moe_router_topk=17, expert_tensor_parallel_size=2)


def test_rows_are_as_wide_as_the_latent_space():
    check_config(as_namespace(moe_latent_size=16, hidden_size=34))
    with pytest.raises(ValueError, match=r"--moe-latent-size 34 in torch\.float32 makes rows of 136 bytes"):
        check_config(as_namespace(moe_latent_size=34))


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="num_sms must be between 1 and 65536, got 0"):
        make_config(moe_flex_dispatcher_backend=NCCLEPBackend(EPOptions(num_sms=0)))


def test_fp8_rows_are_refused():
    with pytest.raises(ValueError, match="row_format 'fp8' cannot work with Megatron's experts"):
        make_config(moe_flex_dispatcher_backend=NCCLEPBackend(EPOptions(payload="fp8", row_format="fp8")))


def test_a_dense_model_passes_every_rule():
    config = make_config(num_moe_experts=None, hidden_size=36, bf16=True, moe_router_topk=500)
    stock = make_config("alltoall", num_moe_experts=None, hidden_size=36, bf16=True, moe_router_topk=500)
    differ = {name for name, value in vars(config).items() if value != getattr(stock, name) and not callable(value)}
    assert differ == {"moe_token_dispatcher_type", "moe_flex_dispatcher_backend"}
    check_config(as_namespace(num_moe_experts=None, cuda_graph_impl="local"))


# Shared experts


@pytest.mark.parametrize("changes", [{}, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}])
def test_shared_experts_may_overlap(changes):
    config = make_config(**SHARED, **changes)
    assert config.moe_shared_expert_overlap is True
    assert config.moe_flex_dispatcher_backend == "hybridep"
    assert dataclasses.replace(config).moe_shared_expert_overlap is True


def test_the_overlap_flag_is_restored_after_an_error():
    config = make_config(**SHARED)
    config.num_query_groups, config.tensor_model_parallel_size = 3, 2  # an error of Megatron's
    with pytest.raises(ValueError, match="num_query_groups"):
        config.__post_init__()
    assert config.moe_shared_expert_overlap is True
    assert is_ncclep(config)


def test_overlap_without_shared_experts_means_nothing():
    changes = {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]}
    assert make_config(moe_shared_expert_overlap=True, **changes).moe_shared_expert_overlap is True


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        (
            {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]},
            "--recompute-modules shared_ex",
        ),
        (
            {
                "overlap_moe_expert_parallel_comm": True,
                "expert_model_parallel_size": 2,
                "bf16": True,
                "recompute_granularity": None,
            },
            "--overlap-moe-expert-parallel-comm",
        ),
        ({"moe_latent_size": 16}, "--moe-latent-size"),
        (
            {"cuda_graph_impl": "transformer_engine", GRAPH_MODULES: ["attn", "moe_router"]},
            "--cuda-graph-impl transformer_engine",
        ),
        ({"external_cuda_graph": True, GRAPH_MODULES: ["attn"]}, "--cuda-graph-impl transformer_engine"),
    ],
    ids=["recompute", "1f1b", "latent", "graph", "graph-old-flag"],
)
def test_what_cannot_overlap_is_refused(changes, flag):
    make_config(**{**changes, **SHARED, "moe_shared_expert_overlap": False})
    with pytest.raises(ValueError, match=f"--moe-shared-expert-overlap cannot work with {flag}"):
        make_config(**changes, **SHARED)


# The static budget of 0.19


@SINCE_19
@pytest.mark.parametrize("changes", [{}, {"moe_paged_stash": True}], ids=["alone", "paged-stash"])
def test_rank_capacity_needs_no_op_fuser(changes):
    config = make_config(moe_expert_rank_capacity_factor=1.5, **changes)
    assert config.use_transformer_engine_op_fuser is False
    assert config.moe_expert_rank_capacity_factor == 1.5
    assert config.moe_flex_dispatcher_backend == "hybridep"
    assert config.moe_flex_dispatcher_backend != "ncclep"
    assert options_of(config) == EPOptions()
    with pytest.raises(ValueError, match="requires use_transformer_engine_op_fuser"):
        make_config("flex", moe_flex_dispatcher_backend="hybridep", moe_expert_rank_capacity_factor=1.5, **changes)


@SINCE_19
def test_the_backend_is_restored_after_an_error():
    config = make_config(moe_expert_rank_capacity_factor=1.5)
    config.num_query_groups, config.tensor_model_parallel_size = 3, 2
    with pytest.raises(ValueError, match="num_query_groups"):
        config.__post_init__()
    assert config.moe_flex_dispatcher_backend == "hybridep"


@SINCE_19
def test_paged_stash_still_needs_a_rank_capacity():
    with pytest.raises(ValueError, match="moe_paged_stash requires moe_expert_rank_capacity_factor"):
        make_config(moe_paged_stash=True)


# CUDA graphs


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("modules", [["attn"], ["moe_router"], ["attn", "moe_router", "moe_preprocess"]])
def test_graphs_beside_the_dispatcher_are_allowed(impl, modules):
    config = make_config(**{"cuda_graph_impl": impl, GRAPH_MODULES: modules})
    assert {module.name for module in getattr(config, GRAPH_MODULES)} >= set(modules)


DROP_AND_PAD = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


@pytest.mark.parametrize(
    ("changes", "scope"),
    [
        ({"cuda_graph_impl": "local", GRAPH_MODULES: []}, "full"),
        ({"cuda_graph_impl": "transformer_engine", GRAPH_MODULES: ["full"]}, "full"),
        ({"enable_cuda_graph": True}, "full"),
        ({"cuda_graph_impl": "local", GRAPH_MODULES: ["moe"], **DROP_AND_PAD}, "moe"),
        ({"cuda_graph_impl": "transformer_engine", GRAPH_MODULES: ["attn", "moe"], **DROP_AND_PAD}, "moe"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"], **DROP_AND_PAD}, "full_iteration"),
    ],
    ids=["local", "te-full", "old-flag", "moe", "attn-moe", "full-iteration"],
)
def test_graphs_around_the_dispatcher_are_refused(changes, scope):
    with pytest.raises(ValueError, match=f"--cuda-graph-impl .* with scope '{scope}' would capture.*moe_preproc"):
        make_config(**changes)
    make_config("alltoall", **changes)


@SINCE_19
@pytest.mark.parametrize("modules", ["moe", "full_iteration"])
def test_the_nvlink_engine_can_be_captured_with_fixed_sizes(modules):
    scope = {"cuda_graph_scope": ["full_iteration"]} if modules == "full_iteration" else {GRAPH_MODULES: ["moe"]}
    assert options_of(with_nvlink(cuda_graph_impl="local", **scope, **DROP_AND_PAD)).engine == "nvlink"


def test_the_nvlink_engine_cannot_be_captured_with_exact_sizes():
    with pytest.raises(ValueError, match=r"'full' would capture.*fixed only with --moe-pad-expert-input-to-capacity"):
        with_nvlink(**{"cuda_graph_impl": "local", GRAPH_MODULES: []})


@SINCE_19
def test_a_graph_of_the_full_iteration_is_refused():
    with pytest.raises(ValueError, match="with scope 'full_iteration'"):
        make_config(cuda_graph_impl="full_iteration", **DROP_AND_PAD)


@pytest.mark.skipif(VERSION < (0, 19), reason="0.16 has no CUDA graphs of their own for inference")
@pytest.mark.parametrize("modules", [["attn"], ["moe_router"], "full_iteration_inference"])
def test_a_graph_of_all_layers_in_inference_is_refused(modules):
    scope = {} if modules == "full_iteration_inference" else {"inference_cuda_graph_scope": "block"}
    with pytest.raises(ValueError, match=r"with scope '(block|full)' would capture the dispatcher"):
        make_config(cuda_graph_impl="local", cuda_graph_modules=modules, **scope)


# Selections and settings that meet the dispatcher


@pytest.mark.parametrize("changes", [{}, {"moe_expert_rank_capacity_factor": 1.5}], ids=["plain", "rank-capacity"])
def test_deepep_and_we_exclude_each_other(changes):
    if changes and VERSION < (0, 19):
        pytest.skip("the flag appeared in megatron-core 0.19")
    with pytest.raises(ValueError, match="--moe-enable-deepep cannot be combined with --moe-token-dispatcher-type"):
        make_config(moe_enable_deepep=True, **changes)
    stock = make_config("flex", moe_enable_deepep=True)
    assert stock.moe_flex_dispatcher_backend == "deepep"
    with pytest.raises(ValueError, match="--moe-enable-deepep"):
        dataclasses.replace(stock, moe_token_dispatcher_type="ncclep")


@pytest.fixture
def fake_group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        pytest.skip("torch.distributed is in use in this process")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_a_fake_process_group_is_refused(fake_group):
    with pytest.raises(ValueError, match="--fake-process-group cannot work with --moe-token-dispatcher-type ncclep"):
        make_config()
    make_config("alltoall")
    make_config(num_moe_experts=None)


@pytest.mark.parametrize("fake", [True, False])
def test_the_flag_of_a_fake_process_group_is_refused(fake, monkeypatch):
    """Megatron's own assertion looks for type flex, while its arguments still say ncclep."""
    global_vars = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(fake_process_group=fake))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", global_vars)
    if fake:
        with pytest.raises(ValueError, match="--fake-process-group"):
            check_config(as_namespace())
    else:
        check_config(as_namespace())


def test_variable_sequence_lengths_are_allowed():
    assert make_config(variable_seq_lengths=True).variable_seq_lengths is True
    with pytest.raises(ValueError, match="variable sequence length"):
        make_config("allgather", variable_seq_lengths=True)


def test_inference_optimized_layers_are_allowed():
    """They bring dispatchers of their own for generation; training and evaluation use ours."""
    inference = {
        "transformer_impl": "inference_optimized",
        "normalization": "RMSNorm",
        "moe_router_dtype": "fp32",
        "expert_tensor_parallel_size": 1,
    }
    assert is_ncclep(make_config(**inference))
    if VERSION >= (0, 19):
        # Shared experts in front of a latent space: the dispatcher for generation can overlap them.
        assert make_config(**inference, **SHARED, moe_latent_size=16).moe_shared_expert_overlap is True


def test_batch_invariant_mode_is_allowed():
    flash = load("megatron.core.transformer.enums").AttnBackend.flash
    changes = {"attention_backend": flash, "batch_invariant_mode": True, "attention_dropout": 0.0}
    if VERSION >= (0, 19):
        changes["flash_attention_version"] = 3
    assert make_config(**changes).batch_invariant_mode is True


def _through_the_dispatcher(config, hidden, routing_map, probs):
    load(MOE_LAYER)
    from moe_ncclep.megatron import NCCLEPTokenDispatcher

    groups = SimpleNamespace(ep=None, expt_tp=None, tp_ep=None)
    dispatcher = NCCLEPTokenDispatcher(8, list(range(8)), config=config, pg_collection=groups)
    tokens, topk_probs = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(tokens, topk_probs))
    out = torch.tanh(rows) * row_probs.unsqueeze(1)
    out = dispatcher.token_combine(dispatcher.combine_preprocess(out))
    return dispatcher.combine_postprocess(out), counts


def _routed(num_tokens):
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, 1, 32)
    scores = torch.rand(num_tokens, 8)
    routing_map = torch.zeros(num_tokens, 8, dtype=torch.bool).scatter_(1, scores.topk(2).indices, True)
    return hidden, routing_map, scores * routing_map


def test_a_token_does_not_depend_on_its_batch():
    """So batch-invariant mode keeps its promise, as far as it is ours."""
    config, (hidden, routing_map, probs) = make_config(), _routed(33)
    whole, _ = _through_the_dispatcher(config, hidden, routing_map, probs)
    for part in (slice(0, 1), slice(5, 18)):
        alone, _ = _through_the_dispatcher(config, hidden[part], routing_map[part], probs[part])
        assert torch.equal(alone, whole[part])


def test_router_padding_changes_nothing_but_is_allowed():
    """The dispatcher pads for every quantized format; the router is not asked to."""
    plain, routed = make_config(), _routed(33)
    fp8 = as_namespace(fp8="hybrid", fp8_recipe="tensorwise")
    padded = as_namespace(fp8="hybrid", fp8_recipe="tensorwise", moe_router_padding_for_quantization=True)
    expected, counts = _through_the_dispatcher(plain, *routed)
    for config in (fp8, padded):
        check_config(config)  # Megatron makes such a configuration only with TransformerEngine
        out, padded_counts = _through_the_dispatcher(config, *routed)
        assert torch.equal(out, expected)
        assert padded_counts.tolist() == [-(-count // 16) * 16 for count in counts.tolist()]
    with pytest.raises(ValueError, match="fp8/fp4 must be specified"):
        make_config(moe_router_padding_for_quantization=True)
