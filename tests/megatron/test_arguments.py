"""Options from the environment and from Megatron's own command line."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from types import SimpleNamespace

import pytest

from moe_ncclep.ep import EPOptions
from moe_ncclep.ep.options import flag_fields
from moe_ncclep.megatron import is_ncclep, options_of
from moe_ncclep.megatron.arguments import (
    add_arguments,
    current_options,
    options_from_args,
    options_from_env,
    patch_parser,
    unpatch_parser,
)
from tests.megatron.configs import ARGUMENTS, HAS_TRAINING, load, make_config

pytestmark = pytest.mark.megatron

needs_training = pytest.mark.skipif(not HAS_TRAINING, reason="this megatron-core wheel has no megatron.training")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for f in flag_fields():
        monkeypatch.delenv(f"MOE_NCCLEP_{f.name.upper()}", raising=False)


@pytest.fixture
def global_args(monkeypatch):
    """Sets what Megatron's ``get_args`` returns."""
    if HAS_TRAINING:
        module = load("megatron.training.global_vars")
    else:
        module = SimpleNamespace()
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    return lambda args: monkeypatch.setattr(module, "_GLOBAL_ARGS", args, raising=False)


EVERY = EPOptions(
    engine="local",
    payload="fp8",
    fp8_power_of_two=True,
    num_sms=24,
    timeout_s=2.5,
    buffer_mib=512,
    max_tokens=8192,
    nvtx=False,
)
"""Every flag with a value that is not its default."""


# Environment


def test_empty_environment_means_defaults():
    assert options_from_env({}) == EPOptions()
    assert options_from_env({"MOE_NCCLEP": "1", "MOE_NCCLEP_ENGINE": "", "OTHER": "x"}) == EPOptions()


def test_every_variable():
    variables = {
        "MOE_NCCLEP_ENGINE": "collective",
        "MOE_NCCLEP_PAYLOAD": "fp8",
        "MOE_NCCLEP_FP8_POWER_OF_TWO": "1",
        "MOE_NCCLEP_NUM_SMS": "24",
        "MOE_NCCLEP_TIMEOUT_S": "2.5",
        "MOE_NCCLEP_BUFFER_MIB": "512",
        "MOE_NCCLEP_MAX_TOKENS": "8192",
        "MOE_NCCLEP_NVTX": "0",
    }
    assert set(variables) == {f"MOE_NCCLEP_{f.name.upper()}" for f in flag_fields()}
    assert options_from_env(variables) == EVERY.replace(engine="collective")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("YES", True), ("on", True), ("0", False), ("False", False), ("no", False)],
)
def test_truth_values(text, value):
    assert options_from_env({"MOE_NCCLEP_NVTX": text}).nvtx is value


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("ENGINE", "warp", "unknown engine 'warp'; choose one of auto, local, collective, nvlink"),
        ("PAYLOAD", "bf16", "unknown payload 'bf16'; choose one of input, fp8"),
        ("NUM_SMS", "many", "must be of type int"),
        ("NUM_SMS", "0", "num_sms must be between 1 and 65536, got 0"),
        ("TIMEOUT_S", "long", "must be of type float"),
        ("TIMEOUT_S", "nan", "timeout_s must be between 0.001 and 86400, got nan"),
        ("BUFFER_MIB", "1.5", "must be of type int"),
        ("MAX_TOKENS", "0", "max_tokens must be between 1 and 16777216, got 0"),
        ("FP8_POWER_OF_TWO", "2", "must be one of 1, true, yes, on, 0, false, no, off"),
        ("NVTX", "maybe", "must be one of 1, true, yes, on, 0, false, no, off"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(name, text, problem, monkeypatch):
    message = f"MOE_NCCLEP_{name}='{text}'"
    with pytest.raises(ValueError, match=message) as error:
        options_from_env({f"MOE_NCCLEP_{name}": text})
    assert problem in str(error.value)
    monkeypatch.setenv(f"MOE_NCCLEP_{name}", text)
    with pytest.raises(ValueError, match=message):
        make_config()


# Flags, and which wins


def _parse(*argv: str) -> argparse.Namespace:
    return add_arguments(argparse.ArgumentParser()).parse_args(argv)


def test_flags_that_are_not_given_leave_the_choice_open():
    assert vars(_parse()) == dict.fromkeys(f"ncclep_{f.name}" for f in flag_fields())
    fallback = EPOptions(engine="local", num_sms=7, nvtx=False)
    assert options_from_args(_parse(), fallback) == fallback


def test_every_flag():
    args = _parse(
        *("--ncclep-engine", "local", "--ncclep-payload", "fp8", "--ncclep-fp8-power-of-two"),
        *("--ncclep-num-sms", "24", "--ncclep-timeout-s", "2.5", "--ncclep-buffer-mib", "512"),
        *("--ncclep-max-tokens", "8192", "--no-ncclep-nvtx"),
    )
    assert all(value is not None for value in vars(args).values())
    assert options_from_args(args, EPOptions()) == EVERY
    assert options_from_args(_parse("--no-ncclep-fp8-power-of-two"), EVERY).fp8_power_of_two is False
    assert options_from_args(_parse("--ncclep-nvtx"), EPOptions(nvtx=False)).nvtx is True


def test_a_wrong_flag_is_named_with_its_value():
    with pytest.raises(ValueError, match="--ncclep-num-sms 0: num_sms must be between 1"):
        options_from_args(_parse("--ncclep-num-sms", "0"), EPOptions())
    with pytest.raises(ValueError, match=r"--ncclep-timeout-s 0.0: timeout_s must be between 0.001 and 86400"):
        options_from_args(_parse("--ncclep-timeout-s", "0"), EPOptions())


def test_arguments_over_environment_over_defaults(monkeypatch, global_args):
    assert current_options() == EPOptions()
    monkeypatch.setenv("MOE_NCCLEP_NUM_SMS", "8")
    monkeypatch.setenv("MOE_NCCLEP_NVTX", "0")
    assert current_options() == EPOptions(num_sms=8, nvtx=False)
    global_args(_parse("--ncclep-num-sms", "24", "--ncclep-engine", "collective"))
    assert current_options() == EPOptions(engine="collective", num_sms=24, nvtx=False)
    assert options_of(make_config()) == EPOptions(engine="collective", num_sms=24, nvtx=False)
    global_args(SimpleNamespace())  # arguments parsed without our flags
    assert current_options() == EPOptions(num_sms=8, nvtx=False)


def test_help_names_flag_and_variable():
    text = add_arguments(argparse.ArgumentParser()).format_help()
    for f in flag_fields():
        assert f"--ncclep-{f.name.replace('_', '-')}" in text
        assert f"MOE_NCCLEP_{f.name.upper()}" in " ".join(text.split())


def test_patching_a_parser_twice_and_back():
    def stock(parser):
        parser.add_argument("--stock")
        return parser

    module = SimpleNamespace(add_megatron_arguments=stock)
    patch_parser(module)
    once = module.add_megatron_arguments
    patch_parser(module)
    assert module.add_megatron_arguments is once
    args = once(argparse.ArgumentParser()).parse_args(["--stock", "x", "--ncclep-num-sms", "3"])
    assert (args.stock, args.ncclep_num_sms) == ("x", 3)
    unpatch_parser(module)
    assert module.add_megatron_arguments is stock
    unpatch_parser(module)
    assert module.add_megatron_arguments is stock


# Megatron's own parser


MODEL = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--max-position-embeddings", "16", "--micro-batch-size", "1", "--num-experts", "8", "--moe-router-topk", "2"),
    *(
        "--moe-ffn-hidden-size",
        "64",
        "--disable-bias-linear",
        "--no-bias-gelu-fusion",
        "--no-rope-fusion",
        "--moe-token-dispatcher-type",
    ),
]


def _megatron_args(monkeypatch, *argv: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *MODEL, *argv])
    return load(ARGUMENTS).parse_args()


@needs_training
def test_megatron_parses_our_flags(monkeypatch):
    args = _megatron_args(
        monkeypatch, "ncclep", "--ncclep-engine", "collective", "--ncclep-num-sms", "24", "--no-ncclep-nvtx"
    )
    assert args.moe_token_dispatcher_type == "ncclep"
    assert (args.ncclep_engine, args.ncclep_num_sms, args.ncclep_nvtx, args.ncclep_payload) == (
        "collective",
        24,
        False,
        None,
    )


@needs_training
@pytest.mark.parametrize("argv", [["ncclep", "--ncclep-engine", "warp"], ["nccl"], ["ncclep", "--ncclep-num-sms", "x"]])
def test_megatron_refuses_a_wrong_choice(argv, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_:
        _megatron_args(monkeypatch, *argv)
    assert exit_.value.code == 2
    assert f"{argv[-1]!r}" in capsys.readouterr().err


@needs_training
def test_megatron_lists_us_in_its_help():
    parser = load(ARGUMENTS).add_megatron_arguments(argparse.ArgumentParser())
    for action in parser._actions:
        if action.dest == "moe_paged_stash_buffer_size_factor_cuda":
            action.help = None  # its bare percent sign breaks --help of 0.19.2, with us or without
    text = " ".join(parser.format_help().split())
    assert "--moe-token-dispatcher-type {allgather,alltoall,flex,ncclep}" in text
    assert "--ncclep-engine {auto,local,collective,nvlink}" in text
    assert "--ncclep-nvtx, --no-ncclep-nvtx" in text


def _config_of(args: argparse.Namespace):
    from megatron.training.argument_utils import core_transformer_config_from_args

    defaults = load("megatron.core.transformer.transformer_config").TransformerConfig
    (params_dtype,) = [f.default for f in dataclasses.fields(defaults) if f.name == "params_dtype"]
    args.params_dtype = params_dtype  # otherwise set by validate_args, which needs a GPU
    return core_transformer_config_from_args(args)


@needs_training
def test_a_configuration_made_by_megatron_carries_the_options(monkeypatch, global_args):
    monkeypatch.setenv("MOE_NCCLEP_PAYLOAD", "fp8")
    args = _megatron_args(
        monkeypatch, "ncclep", "--ncclep-engine", "collective", "--ncclep-num-sms", "24", "--no-ncclep-nvtx"
    )
    global_args(args)
    config = _config_of(args)
    assert is_ncclep(config)
    assert config.moe_token_dispatcher_type == "flex"
    assert config.num_moe_experts == 8
    assert options_of(config) == EPOptions(engine="collective", payload="fp8", num_sms=24, nvtx=False)
    assert args.moe_token_dispatcher_type == "ncclep", "what a checkpoint records stays plain"


@needs_training
def test_a_fake_process_group_is_refused_by_its_flag(monkeypatch, global_args):
    args = _megatron_args(monkeypatch, "ncclep", "--fake-process-group")
    global_args(args)
    with pytest.raises(ValueError, match="--fake-process-group cannot work with"):
        _config_of(args)


@needs_training
def test_checkpoint_arguments_do_not_bring_the_type_back(monkeypatch):
    """So a run without the plug-in can use the arguments of a checkpoint that was written with it."""
    checkpointing = load("megatron.training.checkpointing")
    stored = _megatron_args(monkeypatch, "ncclep", "--ncclep-num-sms", "24")
    stored.hidden_size = 64
    state = {"args": stored, "checkpoint_version": 3.0, "iteration": 5}
    monkeypatch.setattr(checkpointing, "_load_base_checkpoint", lambda *args, **kwargs: (state, "x", False, None))
    args = _megatron_args(monkeypatch, "alltoall", "--load", "/nowhere")
    args.hidden_size = None
    args, _ = checkpointing.load_args_from_checkpoint(args)
    assert args.hidden_size == 64
    assert args.moe_token_dispatcher_type == "alltoall"
