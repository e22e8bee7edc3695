"""The compilers of this machine, small sources to compile, and a stand-in for nvcc that fails on demand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moe_ncclep.ep.nvlink.build import nvcc_path

needs_nvcc = pytest.mark.skipif(nvcc_path() is None, reason="no nvcc on this machine")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")

HEADER = "#pragma once\nconstexpr int kAnswer = 42;\n"
KERNEL = """\
#include <cuda_runtime.h>
#include "answer.h"

__global__ void store_answer(int* out) { *out = kAnswer; }

extern "C" int answer() { return kAnswer; }
extern "C" int launch_store_answer(int* out, cudaStream_t stream) {
  store_answer<<<1, 1, 0, stream>>>(out);
  return cudaGetLastError();
}
"""


def write_sources(folder: Path) -> Path:
    folder.mkdir()
    (folder / "answer.h").write_text(HEADER)
    (folder / "answer.cu").write_text(KERNEL)
    return folder


def write_nvcc(home: Path, body: str, version: str = "13.0.88") -> Path:
    """A CUDA_HOME whose nvcc is ``body``, a shell script that finds its output file in ``$out``."""
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = --version ] && {{ echo "Cuda compilation tools, release {version[:4]}, V{version}"; exit; }}\n'
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\n' + body
    )
    nvcc.chmod(0o755)
    return home
