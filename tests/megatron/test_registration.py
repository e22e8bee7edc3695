"""The three patches: what they change, what they leave alone, and that they can be taken back."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import typing
from types import SimpleNamespace

import pytest

import moe_ncclep.megatron as plugin
from moe_ncclep.ep import EPOptions
from moe_ncclep.megatron import NCCLEPBackend, is_ncclep, options_of
from tests.megatron.configs import ARGUMENTS, CONFIG, HAS_TRAINING, MOE_LAYER, VERSION, load, make_config, run_code

pytestmark = pytest.mark.megatron

OPTIONS = EPOptions(engine="collective", payload="fp8", num_sms=24, nvtx=False)


@pytest.fixture(autouse=True)
def _registered():
    plugin.register()
    yield
    plugin.register()


@pytest.fixture
def config_with_options(monkeypatch):
    monkeypatch.setenv("MOE_NCCLEP_ENGINE", "collective")
    monkeypatch.setenv("MOE_NCCLEP_PAYLOAD", "fp8")
    monkeypatch.setenv("MOE_NCCLEP_NUM_SMS", "24")
    monkeypatch.setenv("MOE_NCCLEP_NVTX", "off")
    config = make_config()
    for name in ("ENGINE", "PAYLOAD", "NUM_SMS", "NVTX"):
        monkeypatch.delenv(f"MOE_NCCLEP_{name}")
    return config


@pytest.mark.parametrize("name", ["TransformerConfig", "MLATransformerConfig"])
def test_the_type_is_admitted_beside_the_stock_ones(name):
    config_class = getattr(load(CONFIG), name)
    (field,) = [f for f in dataclasses.fields(config_class) if f.name == "moe_token_dispatcher_type"]
    assert typing.get_args(field.type) == ("allgather", "alltoall", "flex", "ncclep")
    assert typing.get_type_hints(config_class)["moe_token_dispatcher_type"] == field.type


@pytest.mark.parametrize("mla", [False, True])
def test_the_type_becomes_flex_with_our_backend(mla):
    config = make_config(mla=mla)
    assert config.moe_token_dispatcher_type == "flex"
    assert isinstance(config.moe_flex_dispatcher_backend, NCCLEPBackend)
    assert config.moe_flex_dispatcher_backend == "hybridep"
    assert is_ncclep(config)
    assert options_of(config) == EPOptions()


@pytest.mark.parametrize(
    "clone",
    [
        copy.copy,
        copy.deepcopy,
        lambda config: pickle.loads(pickle.dumps(config)),
        dataclasses.replace,
        lambda config: dataclasses.replace(config, moe_router_topk=1, moe_router_pre_softmax=True),
        lambda config: dataclasses.replace(config, moe_token_dispatcher_type="ncclep"),
    ],
    ids=["copy", "deepcopy", "pickle", "replace", "replace-topk", "replace-type"],
)
def test_options_survive(clone, config_with_options):
    clone = clone(config_with_options)
    assert is_ncclep(clone)
    assert options_of(clone) == OPTIONS
    assert clone.moe_token_dispatcher_type == "flex"


def test_a_backend_given_by_hand_brings_its_options():
    config = make_config(moe_flex_dispatcher_backend=NCCLEPBackend(OPTIONS))
    assert options_of(config) == OPTIONS
    assert options_of(make_config("flex", moe_flex_dispatcher_backend=NCCLEPBackend(OPTIONS))) == OPTIONS


def test_replace_runs_the_rules_again():
    with pytest.raises(ValueError, match=r"--moe-router-topk 8 times --expert-tensor-parallel-size 32 .*limit of 128"):
        dataclasses.replace(make_config(), moe_router_topk=8, expert_tensor_parallel_size=32)
    with pytest.raises(ValueError, match="--hidden-size 36"):
        dataclasses.replace(make_config(), hidden_size=36, bf16=True)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_replace_can_leave_us_and_come_back(dispatcher, config_with_options):
    other = dataclasses.replace(config_with_options, moe_token_dispatcher_type=dispatcher)
    assert not is_ncclep(other)
    assert other.moe_token_dispatcher_type == dispatcher
    with pytest.raises(ValueError, match=f"moe_token_dispatcher_type='{dispatcher}' is not 'ncclep'"):
        options_of(other)
    back = dataclasses.replace(other, moe_token_dispatcher_type="ncclep")
    assert options_of(back) == OPTIONS


def test_replace_can_choose_a_stock_backend():
    stock = dataclasses.replace(make_config(), moe_flex_dispatcher_backend="hybridep")
    assert stock.moe_token_dispatcher_type == "flex"
    assert not is_ncclep(stock)


@pytest.mark.parametrize(
    ("dispatcher", "changes"),
    [
        ("allgather", {}),
        ("alltoall", {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}),
        ("flex", {}),
        ("flex", {"moe_flex_dispatcher_backend": "hybridep", "hidden_size": 36}),
    ],
    ids=["allgather", "alltoall", "deepep", "hybridep"],
)
def test_stock_configurations_are_as_without_us(dispatcher, changes, monkeypatch):
    monkeypatch.setenv("MOE_NCCLEP_ENGINE", "nonsense")  # must not even be looked at
    with_us = make_config(dispatcher, **changes)
    plugin.unregister()
    without_us = make_config(dispatcher, **changes)
    assert not is_ncclep(with_us)
    skipped = {"init_method", "output_layer_init_method", "embedding_init_method", "mup_output_layer_init_method"}
    values = {name: value for name, value in vars(with_us).items() if name not in skipped}
    assert values == {name: value for name, value in vars(without_us).items() if name not in skipped}


def test_stock_checks_still_refuse_what_they_did():
    with pytest.raises(ValueError, match="Only one backend is supported"):
        make_config("flex", moe_flex_dispatcher_backend="hybridep", moe_enable_deepep=True)
    with pytest.raises(ValueError, match="deepep backend does not support moe_pad_expert_input_to_capacity"):
        make_config("flex", moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    if VERSION < (0, 19):
        with pytest.raises(ValueError, match="only works with alltoall"):
            make_config("flex", moe_shared_expert_intermediate_size=64, moe_shared_expert_overlap=True)


@pytest.fixture
def groups(monkeypatch):
    """Makes collections of process groups, as far as dispatchers look at them when they are made: their sizes."""
    utils = load("megatron.core.transformer.moe.token_dispatcher").utils
    monkeypatch.setattr(utils, "get_pg_size", lambda size: size)
    monkeypatch.setattr(utils, "get_pg_rank", lambda size: 0)
    return lambda ep: SimpleNamespace(ep=ep, expt_tp=1, tp_ep=ep)


@pytest.mark.parametrize("by_keyword", [True, False])
def test_the_name_in_moe_layer_makes_ours_for_our_configuration(by_keyword, groups):
    cls, config = load(MOE_LAYER).MoEFlexTokenDispatcher, make_config()
    if by_keyword:
        made = cls(num_local_experts=4, local_expert_indices=[0, 1, 2, 3], config=config, pg_collection=groups(2))
    else:
        made = cls(4, [0, 1, 2, 3], config, groups(2))
    assert type(made) is plugin.NCCLEPTokenDispatcher
    assert made.config is config
    assert (made.num_local_experts, made.ep_size, made.tp_size) == (4, 2, 1)


def test_the_name_in_moe_layer_makes_the_stock_class_for_a_stock_configuration(monkeypatch, groups):
    stock = load("megatron.core.transformer.moe.token_dispatcher")
    cls = load(MOE_LAYER).MoEFlexTokenDispatcher
    config = make_config("flex", moe_router_dtype="fp32")
    with pytest.raises(AssertionError, match="requires TPxEP > 1"):
        cls(8, list(range(8)), config=config, pg_collection=groups(1))
    with pytest.raises(ImportError, match="DeepEP is not installed"):
        cls(4, [0, 1, 2, 3], config=config, pg_collection=groups(2))
    with pytest.raises(TypeError, match="config"):
        cls(4, [0, 1, 2, 3])

    monkeypatch.setattr(stock, "_DeepepManager", lambda **kwargs: "manager")
    made = cls(4, [0, 1, 2, 3], config=config, pg_collection=groups(2))
    assert type(made) is stock.MoEFlexTokenDispatcher
    assert made._comm_manager == "manager"
    assert isinstance(made, cls)
    assert not isinstance(object(), cls)


def test_the_name_in_moe_layer_looks_like_the_stock_class():
    stock = load("megatron.core.transformer.moe.token_dispatcher").MoEFlexTokenDispatcher
    cls = load(MOE_LAYER).MoEFlexTokenDispatcher
    assert cls is not stock
    assert issubclass(cls, stock)
    assert (cls.__name__, cls.__module__, cls.__doc__) == (stock.__name__, stock.__module__, stock.__doc__)
    assert cls.dispatch_preprocess is stock.dispatch_preprocess

    class Derived(cls):
        def __init__(self, config):
            self.config = config

    derived = Derived(make_config())
    assert type(derived) is Derived
    assert isinstance(derived, cls)
    assert not isinstance(plugin.NCCLEPTokenDispatcher.__new__(plugin.NCCLEPTokenDispatcher), Derived)


def _patched_state() -> dict:
    config_class = load(CONFIG).TransformerConfig
    state = {
        "field type": config_class.__dataclass_fields__["moe_token_dispatcher_type"].type,
        "MLA field type": load(CONFIG).MLATransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"].type,
        "annotation": config_class.__annotations__["moe_token_dispatcher_type"],
        "post_init": config_class.__dict__["__post_init__"],
        "dispatcher": load(MOE_LAYER).MoEFlexTokenDispatcher,
    }
    if HAS_TRAINING:
        state["parser"] = load(ARGUMENTS).add_megatron_arguments
    return state


def test_unregister_takes_everything_back():
    _patched_state()  # all modules are there
    plugin.unregister()
    stock = _patched_state()
    assert stock["dispatcher"] is load("megatron.core.transformer.moe.token_dispatcher").MoEFlexTokenDispatcher
    assert typing.get_args(stock["field type"]) == ("allgather", "alltoall", "flex")
    assert make_config("ncclep", num_moe_experts=8).moe_token_dispatcher_type == "ncclep"  # Megatron checks no literals
    plugin.unregister()

    plugin.register()
    patched = _patched_state()
    assert all(patched[name] is not stock[name] for name in stock), "every patch shows"
    assert is_ncclep(make_config())

    plugin.unregister()
    again = _patched_state()
    assert all(again[name] is stock[name] for name in stock)


def test_registering_twice_patches_once():
    plugin.unregister()
    stock = _patched_state()
    plugin.register()
    once = _patched_state()
    plugin.register()
    twice = _patched_state()
    assert all(twice[name] is once[name] for name in once)
    plugin.unregister()
    assert all(value is stock[name] for name, value in _patched_state().items())


def test_configurations_made_before_are_not_affected():
    plugin.unregister()
    before = make_config("ncclep")
    plugin.register()
    assert not is_ncclep(before)
    with pytest.raises(ValueError, match=r"moe_ncclep\.megatron was imported after the configuration was made"):
        options_of(before)


_CHECK = """
import moe_ncclep.megatron as plugin
from megatron.core.transformer.transformer_config import TransformerConfig
import megatron.core.transformer.moe.moe_layer as moe_layer
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_moe_experts=8,
                           moe_ffn_hidden_size=64, moe_token_dispatcher_type="ncclep")
print(plugin.is_ncclep(config), moe_layer.MoEFlexTokenDispatcher is not MoEFlexTokenDispatcher)
"""


@pytest.mark.parametrize(
    "first",
    [
        "import moe_ncclep.megatron; assert 'megatron.core' not in sys.modules",
        f"import {CONFIG}",
        f"import {MOE_LAYER}",
    ],
    ids=["before-megatron", "after-config", "after-moe-layer"],
)
def test_the_order_of_imports_does_not_matter(first):
    assert run_code(f"{first}\n{_CHECK}") == "True True"


def test_unregister_before_megatron_calls_the_patches_off():
    code = f"""
import torch  # has finders of its own
finders = list(sys.meta_path)
import moe_ncclep.megatron as plugin
print(len(sys.meta_path) - len(finders))
plugin.unregister()
print(sys.meta_path == finders)
from {CONFIG} import TransformerConfig
print(TransformerConfig.__annotations__["moe_token_dispatcher_type"].__args__)
"""
    assert run_code(code).splitlines() == ["3", "True", "('allgather', 'alltoall', 'flex')"]


def test_names_of_the_package():
    load(MOE_LAYER)
    assert plugin.NCCLEPTokenDispatcher.__module__ == "moe_ncclep.megatron.dispatcher"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = plugin.nothing
    assert repr(NCCLEPBackend(EPOptions(num_sms=3))).startswith("NCCLEPBackend(EPOptions(")


@pytest.mark.parametrize("node", ["pre_dispatch_computation", "attn", "moe_dispatch", "mlp", "moe_combine"])
@pytest.mark.parametrize("is_moe", [True, False])
def test_the_schedule_frees_what_it_frees_for_hybridep(node, is_moe):
    if VERSION < (0, 19):
        from megatron.core.models.gpt.fine_grained_callables import should_free_input

        arguments = ()
    else:
        from megatron.core.models.common.utils import should_free_input

        arguments = (4,)
    ours = should_free_input(node, is_moe, make_config(), *arguments)
    hybridep = make_config("flex", moe_flex_dispatcher_backend="hybridep")
    assert ours == should_free_input(node, is_moe, hybridep, *arguments)
    assert ours == (is_moe and node == "moe_combine"), "dispatch inputs and expert inputs are needed in backward"
