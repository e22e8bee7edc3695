"""What this machine's GPUs allow: which of the GPU tests can run, and why not."""

from __future__ import annotations

import functools
import os

from moe_ncclep.train.machine import loaded_nccl_version

RANKS_OF_MARKER = {"gpu1": 1, "gpu2": 2, "gpu4": 4, "gpu8": 8}
SHARING_NEEDS = (2, 30)
"""NCCL version from which several ranks may share a GPU."""


@functools.cache
def why_not(marker: str) -> str | None:
    """Reason why tests with ``marker`` cannot run here; None if they can."""
    import torch

    ranks = RANKS_OF_MARKER[marker]
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    gpus = torch.cuda.device_count()
    if gpus >= ranks:
        return None
    if marker == "gpu8":
        return f"needs {ranks} GPUs, this machine has {gpus}"
    version = loaded_nccl_version()
    if version is None or version[:2] < SHARING_NEEDS:
        have = "none" if version is None else ".".join(map(str, version))
        return f"{ranks} ranks on {gpus} GPU need NCCL >= {'.'.join(map(str, SHARING_NEEDS))}, loaded: {have}"
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return f"{ranks} ranks on {gpus} GPU need NCCL_MULTI_RANK_GPU_ENABLE=1"
    return None
