"""Run Megatron's whole training loop on CPU and gloo. For tests alone: it pretends more than a user's run may.

torchrun --nproc-per-node 2 -m tests.megatron.pretrain_cpu_shim recipes/pretrain_gpt.py ... --distributed-backend gloo
"""

from __future__ import annotations

import functools
import sys
import types
import typing
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moe_ncclep.megatron.cpu import apply_cpu_shim

_CPU = torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):
    """Every tensor that is asked for on CUDA is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs["device"] = _here(kwargs["device"])
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(_here(a) if isinstance(a, (str, torch.device)) else a for a in args)
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")  # the optimizer sorts parameters by these names
        return result


def _here(device: Any) -> Any:
    return _CPU if str(device).startswith("cuda") else device


def apply() -> None:
    """Patch torch and megatron.training; call it before Megatron initialises."""
    apply_cpu_shim()
    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # all that megatron.training needs of Python 3.12
    torch.cuda.device_count = lambda: 1  # none would leave the process groups out
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(major=9, minor=0)
    torch.nn.Module.cuda = lambda self, device=None: self
    _CudaMeansCpu().__enter__()

    from megatron.training import training

    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)


if __name__ == "__main__":
    apply()
    from moe_ncclep.launch import main

    sys.exit(main(sys.argv[1:]))
