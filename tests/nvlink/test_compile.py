"""The real sources: each kernel compiles for each architecture, each header without CUDA."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from moe_ncclep.ep.nvlink.build import COMPILE_FLAGS, DEFAULT_ARCHS, nvcc_path, source_dir
from tests.nvlink.native import compile_shared
from tests.nvlink.toolchain import needs_gxx, needs_nvcc

KERNELS = sorted(source_dir().rglob("*.cu"))
HEADERS = sorted(source_dir().rglob("*.h"))


def name(value: Path | str) -> str:
    return str(value.relative_to(source_dir())) if isinstance(value, Path) else value


def test_there_are_kernels():
    assert KERNELS, f"no *.cu in {source_dir()}"


@needs_nvcc
@pytest.mark.parametrize("arch", DEFAULT_ARCHS)
@pytest.mark.parametrize("kernel", KERNELS, ids=name)
def test_kernel_compiles(kernel, arch, tmp_path):
    code = f"-arch=sm_{arch.replace('.', '')}"
    command = [nvcc_path(), "-cubin", *COMPILE_FLAGS, code, f"-I{source_dir()}", "-o", tmp_path / "out.cubin", kernel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_gxx
@pytest.mark.parametrize("header", HEADERS, ids=name)
def test_header_compiles_on_its_own_without_cuda(header):
    compile_shared(f'#include "{name(header)}"\n' * 2)


@needs_gxx
def test_host_code_runs():
    native = compile_shared('extern "C" int add(int a, int b) { return a + b; }')
    assert native.add(2, 3) == 5
    assert compile_shared('extern "C" int add(int a, int b) { return a + b; }') is native
    with pytest.raises(AssertionError, match="unused variable"):
        compile_shared("static void f() { int unused; }")
