"""Run Megatron-Core models on machines without a GPU: CPU tensors, gloo process groups.

For tests, for debugging, and for checking a job's parallel layout on a laptop. Never for training: where CUDA is
available :func:`apply_cpu_shim` changes nothing. The shim makes ``torch.cuda`` answer for the CPU in the whole
process; it does not add TransformerEngine, FP8, CUDA graphs or fused kernels.

A model still has to be configured for the CPU::

    TransformerConfig(..., use_cpu_initialization=True, gradient_accumulation_fusion=False, moe_grouped_gemm=False,
                      bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False)
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")
_applied = False


class _Event:
    """CPU work is done when the call returns, so an event has always happened."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class _Stream:
    """All CPU work is ordered by the program itself."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


_DEFAULT_STREAM = _Stream()


@contextlib.contextmanager
def _stream_context(stream: Any) -> Iterator[Any]:
    yield stream


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _on_cpu(factory: Callable) -> Callable:
    """Wrap a tensor factory so that ``device="cuda"``, which Megatron writes literally, means the CPU."""

    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return wrapper


def _type_like_cuda(original: Callable) -> Callable:
    """Wrap ``Tensor.type``: Megatron's optimizers compare its text with ``torch.cuda.FloatTensor`` and the like."""

    @functools.wraps(original)
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return wrapper


def _patch_torch() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: _CPU  # only ever used as a device= argument
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda device=None: _DEFAULT_STREAM
    cuda.stream = _stream_context
    cuda.set_stream = cuda.synchronize = _nothing
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push = cuda.nvtx.range_pop = cuda.nvtx.mark = _nothing

    # Megatron's tracker of random states and its recompute save and restore "the CUDA generator".
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.initial_seed = torch.initial_seed
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed)) and None

    torch.Tensor.record_stream = _nothing
    torch.Tensor.type = _type_like_cuda(torch.Tensor.type)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    for name in ("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _stub_triton_kernels() -> None:
    """Let 0.19 import without triton, which ``moe.ops.paged_stash`` wants unconditionally.

    Only the module with the kernels is replaced: a fake ``triton`` would mislead torch's own checks for it.
    """
    if importlib.util.find_spec("triton") is not None:
        return

    def missing_kernel(name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    stub = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    stub.__getattr__ = missing_kernel  # every kernel is None
    sys.modules.setdefault(stub.__name__, stub)


def _patch_megatron() -> None:
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    # These reach into torch.cuda's generators directly.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    # 0.16.1 reads this name without TransformerEngine, which alone binds it.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    # The original converts CUDA tensors only, so the split sizes of the all-to-all would stay tensors.
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def apply_cpu_shim() -> bool:
    """Make Megatron-Core run on the CPU of this machine; for machines without a GPU only.

    Call it before the first ``import megatron.core`` (without triton, 0.19 cannot be imported earlier) or right after
    it. Calling it again is harmless. There is no way back within the process.

    Returns:
        True if the shim is in effect, False if CUDA is available and nothing was changed.
    """
    global _applied
    if torch.cuda.is_available():
        return False
    if not _applied:
        _stub_triton_kernels()
        _patch_torch()
        _patch_megatron()
        _applied = True
    return True
