"""Compile the kernels of ``csrc/`` to one shared library, keep it in a cache, load it with ctypes.

The library has a plain C interface and needs nothing of torch, so a single nvcc command makes it; nvcc itself compiles
files and architectures in parallel. ``torch.utils.cpp_extension.load`` would need ninja, would link libraries that a
CPU-only torch does not have, and its lock file blocks every later process once a build has crashed.

Environment: ``MOE_NCCLEP_CACHE_DIR`` (default ``~/.cache/moe_ncclep``), ``MOE_NCCLEP_CUDA_ARCHS`` (where no GPU is
visible), ``CUDA_HOME``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import torch

import moe_ncclep

LIBRARY = "libmoe_ncclep.so"
DEFAULT_ARCHS = ("9.0a", "10.0a")
"""Where nothing else is known: Hopper and Blackwell."""
COMPILE_FLAGS = ("-O3", "-std=c++17", "-lineinfo", "-Xcompiler", "-fPIC")
LINK_FLAGS = (
    "-shared",
    # A runtime of its own, as NCCL has: loads without libcudart and without a driver, and cannot meet a different
    # libcudart of torch. Streams and contexts belong to the driver, so those of torch are valid here.
    *("-cudart", "static"),
    # A missing symbol fails here and not when the library is loaded.
    *("-Xlinker", "--no-undefined"),
)
_NVCC_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")
_SUFFIXES = (".cu", ".cuh", ".h")
_ERROR_LINES = 40
_BUILD_PREFIX = ".build-"
_STALE_S = 24 * 3600
_PACKAGE = Path(moe_ncclep.__file__).parent

_library: ctypes.CDLL | None = None
_library_lock = threading.Lock()


def source_dir() -> Path:
    """Folder of the CUDA sources: inside an installed package, beside it in a checkout."""
    installed = _PACKAGE / "csrc"
    return installed if installed.is_dir() else _PACKAGE.parent / "csrc"


def cache_dir() -> Path:
    """Folder of the compiled libraries; it may not exist yet, and machines may share it."""
    own = os.environ.get("MOE_NCCLEP_CACHE_DIR")
    if own:
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_ncclep"


def nvcc_path() -> Path | None:
    """The nvcc of ``CUDA_HOME`` or ``CUDA_PATH`` if one is set, else of PATH, else of ``/usr/local/cuda``."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = None if home else shutil.which("nvcc")
    nvcc = Path(found) if found else Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    return nvcc.absolute() if os.access(nvcc, os.X_OK) else None


def missing_toolchain() -> str | None:
    """Why ``load_library`` cannot work on this machine, or None if the library is cached or can be compiled.

    Asks torch for the visible GPUs, which initialises CUDA: check first that the tensors are on a GPU.
    """
    try:
        if cached_library() is not None:
            return None
        _find_nvcc()
        _cuda_sources()
    except (RuntimeError, ValueError) as error:
        return str(error)
    if not os.environ.get("NVCC_CCBIN") and shutil.which("g++") is None:
        return "no g++ on PATH, which nvcc needs: install it, or set NVCC_CCBIN"
    return None


def target_archs(archs: Iterable[str] | None = None) -> tuple[str, ...]:
    """``archs`` in order and without repetition; None: those to compile for here.

    These are the visible GPUs', else those of ``MOE_NCCLEP_CUDA_ARCHS``, else Hopper's and Blackwell's.

    Raises:
        ValueError: if one is not a compute capability such as 9.0a, or there is none.
    """
    if archs is None:
        archs = _visible_archs() or _archs_from_env() or _default_archs()
    ordered = tuple(sorted(set(archs), key=_arch_order))
    if not ordered:
        raise ValueError("no architecture to compile for")
    return ordered


def cached_library(archs: Iterable[str] | None = None) -> Path | None:
    """A library in the cache, of the present sources, that serves all of ``archs`` (None: see ``target_archs``).

    It may serve more. If this machine has nvcc, only a library of that nvcc counts.
    """
    wanted = {_sm(arch) for arch in target_archs(archs)}
    nvcc = nvcc_path()
    found = []
    for library in cache_dir().glob(f"{_source_key()}-cuda*/{LIBRARY}"):
        _, cuda, *has = library.parent.name.split("-")
        version = cuda.removeprefix("cuda")
        if wanted <= set(has) and (nvcc is None or version == _nvcc_version(nvcc)):
            found.append((_numbers(version), library))
    return max(found)[1] if found else None


def build_library(archs: Iterable[str] | None = None, *, verbose: bool = False) -> Path:
    """Path of the library for ``archs`` (None: see ``target_archs``), compiled now if the cache has none.

    Any number of processes may do this at once, on machines that share the cache: each compiles in a folder of its own,
    the first to finish gives that folder its final name, and the others take what they find there.

    Args:
        archs: compute capabilities, such as 9.0a.
        verbose: print the command and what the compiler says to stderr.

    Raises:
        ValueError: see ``target_archs``.
        RuntimeError: if there is no nvcc, the cache cannot be written, or the compiler fails (with its last lines).
    """
    archs = target_archs(archs)
    library = cached_library(archs)
    if library is not None:
        if verbose:
            print(f"{library}: already compiled", file=sys.stderr)
        return library
    nvcc = _find_nvcc()
    sms = "-".join(map(_sm, archs))
    entry = cache_dir() / f"{_source_key()}-cuda{_nvcc_version(nvcc)}-{sms}"
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        _remove_stale_builds()
        with tempfile.TemporaryDirectory(prefix=_BUILD_PREFIX, dir=cache_dir()) as scratch:
            made = Path(scratch, "library")
            made.mkdir()
            _compile(nvcc, archs, made / LIBRARY, verbose)
            _publish(made, entry)
    except OSError as error:
        raise RuntimeError(
            f"cannot write to the cache of compiled kernels: {error}; set MOE_NCCLEP_CACHE_DIR"
        ) from error
    return entry / LIBRARY


def load_library() -> ctypes.CDLL:
    """The library of this machine's GPUs, compiled if need be, loaded once in a process.

    Raises:
        ValueError, RuntimeError: see ``build_library``.
    """
    global _library
    with _library_lock:
        if _library is None:
            _library = ctypes.CDLL(str(build_library()))
        return _library


def _visible_archs() -> list[str]:
    if not torch.cuda.is_available():
        return []
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    # From Hopper on, the features of one generation alone (a) are what the kernels are for.
    return [f"{major}.{minor}" + ("a" if major >= 9 else "") for major, minor in capabilities]


def _archs_from_env() -> list[str]:
    return re.findall(r"[^\s,;]+", os.environ.get("MOE_NCCLEP_CUDA_ARCHS", ""))


def _default_archs() -> tuple[str, ...]:
    nvcc = nvcc_path()
    knows_blackwell = nvcc is None or _numbers(_nvcc_version(nvcc)) >= (12, 8)
    return DEFAULT_ARCHS if knows_blackwell else DEFAULT_ARCHS[:1]


def _arch_order(arch: str) -> tuple[int, int, str]:
    match = re.fullmatch(r"(\d+)\.(\d)([af]?)", arch)
    if match is None:
        raise ValueError(f"architecture {arch!r} is not a compute capability such as 9.0a or 10.0a")
    return int(match[1]), int(match[2]), match[3]


def _sm(arch: str) -> str:
    return "sm" + arch.replace(".", "")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _find_nvcc() -> Path:
    nvcc = nvcc_path()
    if nvcc is None:
        raise RuntimeError(
            "no nvcc to compile the CUDA kernels: install the CUDA toolkit of torch's CUDA version, or set CUDA_HOME "
            "to the folder whose bin/nvcc it is, or share MOE_NCCLEP_CACHE_DIR with a machine that ran moe-ncclep build"
        )
    return nvcc


@functools.cache
def _nvcc_version(nvcc: Path) -> str:
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{nvcc} does not work: {error}") from error
    match = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    if match is None:
        raise RuntimeError(f"{nvcc} --version names no version: {text.strip()!r}")
    return match[1]


def _cuda_sources() -> list[Path]:
    sources = sorted(source_dir().rglob("*.cu"))
    if not sources:
        raise RuntimeError(f"no CUDA sources (*.cu) in {source_dir()}")
    return sources


def _source_key() -> str:
    """Hash of all that decides what the library does, except the version of nvcc and the architectures."""
    settings = [torch.__version__, platform.machine(), *COMPILE_FLAGS, *LINK_FLAGS]
    settings += [os.environ.get(name, "") for name in _NVCC_VARIABLES]
    parts = [setting.encode() for setting in settings]
    for path in sorted(path for path in source_dir().rglob("*") if path.suffix in _SUFFIXES):
        parts += [str(path.relative_to(source_dir())).encode(), path.read_bytes()]
    key = hashlib.sha256()
    for part in parts:
        key.update(len(part).to_bytes(8, "little") + part)
    return key.hexdigest()[:16]


def _compile(nvcc: Path, archs: tuple[str, ...], library: Path, verbose: bool) -> None:
    codes = [arch.replace(".", "") for arch in archs]
    targets = [f"-gencode=arch=compute_{code},code=sm_{code}" for code in codes]
    # --threads 0: as many as there are cores.
    flags = [*COMPILE_FLAGS, *LINK_FLAGS, *targets, "--threads", "0", f"-I{source_dir()}"]
    command = [nvcc, *flags, "-o", library, *_cuda_sources()]
    shown = shlex.join(map(str, command))
    if verbose:
        print(shown, file=sys.stderr)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = done.stdout.decode(errors="replace").strip()
    if verbose and output:
        print(output, file=sys.stderr)
    if done.returncode != 0 or not library.is_file():
        last = "\n".join(output.splitlines()[-_ERROR_LINES:]) or "no output"
        raise RuntimeError(f"nvcc failed with exit code {done.returncode}:\n{last}\nThe command was:\n{shown}")


def _publish(made: Path, entry: Path) -> None:
    """Give ``made`` its final name, unless another process was faster.

    A library once published is never replaced: on a network file system that would break those who have it mapped.
    Renaming a folder onto one that is not empty fails, on every file system.
    """
    with open(made / LIBRARY, "rb") as library:
        os.fsync(library.fileno())
    try:
        os.rename(made, entry)
    except OSError:
        if not (entry / LIBRARY).is_file():
            raise


def _remove_stale_builds() -> None:
    """Remove what crashed builds left behind."""
    for left in cache_dir().glob(f"{_BUILD_PREFIX}*"):
        try:
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:  # another process removed it
            continue
