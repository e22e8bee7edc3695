"""Real Megatron-Core models on CPU and gloo, for machines without a GPU: tests, and a first look at the project.

Megatron-Core assumes CUDA in a few places that its MoE layers reach. The shim gives those places a CPU meaning. It does
nothing where CUDA is available and is no way to train in earnest.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types

import torch

_applied = False


class _Event:
    """Everything has happened already on a CPU."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        """Nothing to record."""

    def wait(self, stream=None):
        """Nothing to wait for."""

    def synchronize(self):
        """Nothing to wait for."""

    def query(self):
        """Done."""
        return True

    def elapsed_time(self, other):
        """Milliseconds; there is no device time."""
        return 0.0


class _Stream:
    """The one order of events that a CPU has."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        """Nothing to wait for."""

    def wait_event(self, event):
        """Nothing to wait for."""

    def record_event(self, event=None):
        """An event that has happened."""
        return event or _Event()

    def synchronize(self):
        """Nothing to wait for."""

    def query(self):
        """Idle."""
        return True


def apply_cpu_shim() -> bool:
    """Make Megatron-Core's MoE and GPT models run without CUDA; call it before building any.

    Idempotent. Returns False, and changes nothing, where CUDA is available.
    """
    global _applied
    if torch.cuda.is_available():
        return False
    if not _applied:
        _patch_torch()
        _stand_in_for_triton_kernels()
        _patch_megatron()
        _applied = True
    return True


def _patch_torch() -> None:
    cuda, cpu, stream = torch.cuda, torch.device("cpu"), _Stream()
    cuda.current_device = lambda: cpu
    cuda.device_count = lambda: 0
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream
    cuda.stream = lambda stream: contextlib.nullcontext(stream)
    cuda.set_stream = lambda stream: None
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: None
    torch.Tensor.record_stream = lambda self, stream: None
    # Megatron seeds, saves and restores the state of CUDA's generator around dropout and recomputation.
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = lambda seed: None  # called by torch.manual_seed itself
    cuda.initial_seed = lambda: torch.initial_seed()


def _stand_in_for_triton_kernels() -> None:
    """0.19 imports these kernels wherever it schedules a pipeline. A fake triton would mislead torch instead."""
    name = "megatron.core.transformer.moe.ops.paged_stash"
    if importlib.util.find_spec("triton") is None and name not in sys.modules:
        module = types.ModuleType(name)
        module.GLOBAL_BLOCK_SIZE = 1024
        module.paged_stash_copy_kernel = module.paged_stash_pop_kernel = None
        sys.modules[name] = module


def _patch_megatron() -> None:
    import megatron.core.fusions.fused_softmax as fused_softmax
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 reads the name even without TransformerEngine

    fused_softmax.get_default_causal_mask = lambda size: torch.ones(size, size).triu(diagonal=1).bool()

    def to_host(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # Converts CUDA tensors only, but the all-to-all dispatcher needs its split sizes as numbers.
    token_dispatcher.maybe_move_tensor_to_cpu = to_host
