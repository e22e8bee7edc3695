"""What this machine offers, and its description in the metrics."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("moe-ncclep", "torch", "megatron-core", "transformer-engine", "numpy")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where ranks run: on every CPU core, or one on each GPU."""

    device: str
    """``cpu`` (gloo) or ``cuda`` (NCCL)."""
    cores: int
    """CPU cores that this process may use."""
    gpus: int
    joined: bool = False
    """True if the ranks were started by someone else (torchrun): their number is no choice of ours."""

    @classmethod
    def detect(cls) -> Machine:
        """Look at this machine. Imports torch, but does not initialise CUDA."""
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(device="cuda" if gpus else "cpu", cores=usable_cores(), gpus=gpus, joined=is_joined())


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_joined() -> bool:
    """Whether this process already is a rank of a job, as under torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def describe_hardware(machine: Machine) -> dict:
    """CPU, memory and GPUs in words and numbers, for the metrics."""
    hardware = {
        "device": machine.device,
        "cpu": _cpu_name(),
        "cores": machine.cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [],
    }
    if machine.gpus:
        import torch

        hardware["gpus"] = [torch.cuda.get_device_name(i) for i in range(machine.gpus)]
    return hardware


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the result; absent ones are left out."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "moe-ncclep" not in versions:
        from moe_ncclep import __version__

        versions["moe-ncclep"] = __version__
    return versions


def describe_commit() -> str | None:
    """Of this checkout, unless MOE_NCCLEP_COMMIT says it: a copy on another machine need not be one."""
    if os.environ.get("MOE_NCCLEP_COMMIT"):
        return os.environ["MOE_NCCLEP_COMMIT"]
    root = Path(__file__).resolve().parent.parent.parent
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def loaded_nccl_version() -> tuple[int, int, int] | None:
    """Version of the NCCL library in this process; torch reports the one it was compiled with instead."""
    import torch  # noqa: F401  - loads the library

    try:
        library = ctypes.CDLL("libnccl.so.2")  # the one that is loaded already, if any
        code = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(code)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return code.value // 10_000, code.value // 100 % 100, code.value % 100


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
