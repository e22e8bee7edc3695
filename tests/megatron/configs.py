"""Megatron configurations, and Python processes that have seen nothing of Megatron yet."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moe_ncclep.megatron.cpu import _stand_in_for_triton_kernels

# Not importorskip: without Triton, 0.19 raises ModuleNotFoundError and would be skipped too.
if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
VERSION = tuple(int(part) for part in importlib.metadata.version("megatron-core").split(".")[:2])
HAS_TRAINING = VERSION >= (0, 19)  # the wheel of 0.16 has no megatron.training
CONFIG = "megatron.core.transformer.transformer_config"
MOE_LAYER = "megatron.core.transformer.moe.moe_layer"
ARGUMENTS = "megatron.training.arguments"

# Heads of scripts: what importing Megatron takes on any machine, and none of our modules.
PREPARE = """
import importlib.util, sys, types, typing, warnings
warnings.filterwarnings("ignore")
typing.override = getattr(typing, "override", lambda f: f)
if importlib.util.find_spec("triton") is None:
    kernels = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    kernels.GLOBAL_BLOCK_SIZE = kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None
    sys.modules[kernels.__name__] = kernels
"""


def load(name: str) -> ModuleType:
    """Import a Megatron module, without a GPU, Triton and Python 3.12 if need be."""
    _stand_in_for_triton_kernels()
    if not hasattr(typing, "override"):
        typing.override = lambda f: f
    return importlib.import_module(name)


def make_config(dispatcher: str = "ncclep", *, mla: bool = False, **changes: Any) -> Any:
    """A small MoE configuration; ``num_moe_experts=None`` makes it dense."""
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 64,
        "moe_token_dispatcher_type": dispatcher,
        "add_bias_linear": False,
    }
    settings.update(changes)
    if settings["num_moe_experts"] is None:
        settings["moe_ffn_hidden_size"] = None
    module = load(CONFIG)
    return (module.MLATransformerConfig if mla else module.TransformerConfig)(**settings)


def run_python(*args: str, timeout: float = 120, **environ: str | None) -> subprocess.CompletedProcess:
    """Run ``python *args`` with the package on its path; ``None`` takes a variable out of the environment."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths, "MOE_NCCLEP": None, **environ}
    env = {name: value for name, value in env.items() if value is not None}
    return subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, timeout=timeout)


def run_code(code: str, **environ: str | None) -> str:
    """Standard output of a script, which must succeed."""
    result = run_python("-c", PREPARE + code, **environ)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
