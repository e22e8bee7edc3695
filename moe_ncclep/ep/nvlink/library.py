"""The compiled kernels, typed and checked."""

from __future__ import annotations

import ctypes
import functools

from moe_ncclep.ep.nvlink import build
from moe_ncclep.ep.nvlink.structs import IN_ORDER, SIGNATURES


@functools.cache
def load() -> ctypes.CDLL:
    """Compile (once, see :mod:`~moe_ncclep.ep.nvlink.build`) and load the kernels.

    Raises:
        RuntimeError: if they cannot be compiled, or do not fit this version of the package.
    """
    return declare(build.load_library())


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give every function of ``library`` its types, and make sure that both sides mean the same structs."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for number, struct in enumerate(IN_ORDER):
        theirs, ours = library.ncclep_sizeof(number), ctypes.sizeof(struct)
        if theirs != ours:
            raise RuntimeError(f"{struct.__name__} has {theirs} bytes in the compiled kernels, {ours} in the package")
    return library


def check(library: ctypes.CDLL, status: int, what: str) -> None:
    """Raise ``RuntimeError`` if a launch failed."""
    if status != 0:
        raise RuntimeError(f"launching {what} failed: {library.ncclep_error_string(status).decode()}")
