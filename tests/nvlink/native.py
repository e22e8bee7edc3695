"""Host code of ``csrc/`` on the CPU: compiled with g++, called with ctypes."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

from moe_ncclep.ep.nvlink.build import source_dir

FLAGS = ("-std=c++17", "-O1", "-Wall", "-Werror", "-fPIC", "-shared")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="moe_ncclep_native_")


@functools.cache
def compile_shared(source: str) -> ctypes.CDLL:
    """The library made of C++ text, which may include headers of ``csrc/`` by name; compiled once in a process.

    Functions to be called are ``extern "C"``.
    """
    file = Path(tempfile.mkdtemp(dir=_folder().name), "native.cpp")
    file.write_text(source)
    library = file.with_suffix(".so")
    done = subprocess.run(
        ["g++", *FLAGS, f"-I{source_dir()}", "-o", library, file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"g++ failed:\n{done.stderr}\n{source}"
    return ctypes.CDLL(str(library))
