"""The cache of compiled kernels: what decides a library, many processes at once, failures and crashes."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moe_ncclep.cli.main import app
from moe_ncclep.ep.nvlink import build
from moe_ncclep.ep.nvlink.build import LIBRARY, build_library, cached_library, missing_toolchain, target_archs
from tests.nvlink.toolchain import KERNEL, needs_nvcc, write_nvcc, write_sources

ROOT = Path(__file__).parents[2]
VISIBLE_ARCHS = build._visible_archs
WORKS = 'echo complete > "$out"\n'
FAILS = 'echo half > "$out"; echo "x.cu(7): error: no such thing"; exit 3\n'
BUILDER = """\
import sys
from pathlib import Path
from moe_ncclep.ep.nvlink import build
build.source_dir = lambda: Path(sys.argv[1])
print(build.build_library(sys.argv[2:]))
"""


@pytest.fixture(autouse=True)
def sources(tmp_path, monkeypatch) -> Path:
    """Small sources, an empty cache, and a machine without a GPU."""
    folder = write_sources(tmp_path / "csrc")
    monkeypatch.setattr(build, "source_dir", lambda: folder)
    monkeypatch.setattr(build, "_visible_archs", lambda: [])
    monkeypatch.setattr(build, "_library", None)
    for name in ("MOE_NCCLEP_CUDA_ARCHS", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MOE_NCCLEP_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """Replace nvcc by a shell script: ``nvcc(body)``; without a body there is none."""
    count = 0

    def replace(body: str | None = None, version: str = "13.0.88") -> None:
        nonlocal count
        count += 1
        home = tmp_path / f"cuda{count}"
        monkeypatch.setenv("CUDA_HOME", str(home if body is None else write_nvcc(home, body, version)))

    return replace


def entries(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "cache"))


def start_builder(sources: Path, *archs: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", BUILDER, str(sources), *archs]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def new_flags(sources, monkeypatch, nvcc):
    monkeypatch.setattr(build, "COMPILE_FLAGS", (*build.COMPILE_FLAGS, "-G"))


def new_torch(sources, monkeypatch, nvcc):
    monkeypatch.setattr(build.torch, "__version__", "0.0")


def new_header(sources, monkeypatch, nvcc):
    (sources / "answer.h").write_text("#pragma once\nconstexpr int kAnswer = 43;\n")


def new_name(sources, monkeypatch, nvcc):
    (sources / "answer.cu").rename(sources / "other.cu")


def new_file(sources, monkeypatch, nvcc):
    (sources / "deeper").mkdir()
    (sources / "deeper" / "new.cuh").touch()


def new_environment(sources, monkeypatch, nvcc):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")


def new_nvcc(sources, monkeypatch, nvcc):
    nvcc(WORKS, version="13.1.2")


CHANGES = [new_flags, new_torch, new_header, new_name, new_file, new_environment, new_nvcc]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.removeprefix("new_"))
def test_a_change_asks_for_a_new_library(sources, nvcc, monkeypatch, change):
    nvcc(WORKS)
    first = build_library()
    assert build_library() == first
    change(sources, monkeypatch, nvcc)
    assert cached_library() is None
    assert build_library() != first


def test_other_files_do_not_matter(sources, nvcc):
    nvcc(WORKS)
    first = build_library()
    (sources / "notes.md").write_text("not compiled")
    assert build_library() == first


def test_a_library_serves_the_architectures_it_has(nvcc):
    nvcc(WORKS)
    both = build_library(["10.0a", "9.0a", "9.0a"])
    assert both == build_library(("9.0a", "10.0a")) == build_library(["9.0a"]) == build_library(["10.0a"])
    assert cached_library(["9.0"]) is None
    assert cached_library(["9.0a", "10.3a"]) is None
    assert build_library(["10.3a"]) != both


def test_architectures(nvcc, monkeypatch):
    nvcc(WORKS)
    assert target_archs() == ("9.0a", "10.0a")
    monkeypatch.setenv("MOE_NCCLEP_CUDA_ARCHS", " 10.0a;9.0, 9.0a ")
    assert target_archs() == ("9.0", "9.0a", "10.0a")
    monkeypatch.setattr(build, "_visible_archs", lambda: ["10.3a"])
    assert target_archs() == ("10.3a",)
    assert target_archs(["9.0a"]) == ("9.0a",)
    for malformed in ("sm_90", "90", "9.0b", "9.0+PTX", ""):
        with pytest.raises(ValueError, match="is not a compute capability"):
            target_archs([malformed])
    with pytest.raises(ValueError, match="no architecture"):
        target_archs([])


def test_an_nvcc_before_blackwell_compiles_for_hopper(nvcc):
    nvcc(WORKS, version="12.6.85")
    assert target_archs() == ("9.0a",)


def test_places(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.delenv("MOE_NCCLEP_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert build.cache_dir() == Path("/somewhere/moe_ncclep")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_dir() == Path.home() / ".cache" / "moe_ncclep"
    monkeypatch.setenv("MOE_NCCLEP_CACHE_DIR", "~/mine")
    assert build.cache_dir() == Path.home() / "mine"

    assert build.source_dir() == ROOT / "csrc"
    monkeypatch.setattr(build, "_PACKAGE", tmp_path / "moe_ncclep")
    (tmp_path / "moe_ncclep" / "csrc").mkdir(parents=True)
    assert build.source_dir() == tmp_path / "moe_ncclep" / "csrc"


def test_which_nvcc(tmp_path, monkeypatch):
    first, second = (write_nvcc(tmp_path / name, WORKS) for name in ("first", "second"))
    monkeypatch.setenv("PATH", str(first / "bin"))
    assert build.nvcc_path() == first / "bin" / "nvcc"
    monkeypatch.setenv("CUDA_PATH", str(second))
    assert build.nvcc_path() == second / "bin" / "nvcc"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "empty"))
    assert build.nvcc_path() is None


def test_two_processes_at_once_get_the_same_finished_library(sources, nvcc, tmp_path):
    # Neither compiler ends before both have begun. Each writes its library in two halves.
    (tmp_path / "begun").mkdir()
    nvcc(
        f'touch {tmp_path}/begun/$$; echo $$ > "$out"\n'
        f"while [ $(ls {tmp_path}/begun | wc -l) -lt 2 ]; do sleep 0.02; done\n"
        'sleep 0.2; echo $$ >> "$out"\n'
    )
    processes = [start_builder(sources, "9.0a") for _ in range(2)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    paths = {Path(out.strip()) for out, _ in results}
    assert len(paths) == 1
    halves = paths.pop().read_text().split()
    assert len(halves) == 2
    assert halves[0] == halves[1]
    assert halves[0] in os.listdir(tmp_path / "begun")
    assert len(entries(tmp_path)) == 1


def test_a_published_library_is_never_replaced(nvcc, tmp_path):
    nvcc(WORKS)
    library = build_library()
    inode = library.stat().st_ino
    late = tmp_path / "cache" / "late"
    late.mkdir()
    (late / LIBRARY).write_text("other")
    build._publish(late, library.parent)
    assert (library.stat().st_ino, library.read_text()) == (inode, "complete\n")


def test_failed_compile_raises_with_the_compilers_text_and_leaves_nothing(sources, nvcc, tmp_path):
    nvcc(FAILS)
    with pytest.raises(RuntimeError, match="exit code 3") as error:
        build_library()
    assert "x.cu(7): error: no such thing" in str(error.value)
    assert f"{sources / 'answer.cu'}" in str(error.value)
    assert "-gencode=arch=compute_90a,code=sm_90a" in str(error.value)
    assert entries(tmp_path) == []
    nvcc("exit 0\n")
    with pytest.raises(RuntimeError, match="no output"):
        build_library()
    assert entries(tmp_path) == []


def test_crash_in_the_middle_leaves_the_cache_usable(sources, nvcc, tmp_path):
    nvcc('echo half > "$out"; kill -9 $PPID\n')
    crashed = start_builder(sources, "9.0a")
    crashed.communicate(timeout=120)
    assert crashed.returncode == -signal.SIGKILL
    (left,) = entries(tmp_path)
    assert cached_library(["9.0a"]) is None

    nvcc(WORKS)
    library = build_library(["9.0a"])
    assert library.read_text() == "complete\n"
    assert left in entries(tmp_path), "it could be a build in progress"
    yesterday = time.time() - 25 * 3600
    os.utime(tmp_path / "cache" / left, (yesterday, yesterday))
    build_library(["10.0a"])
    assert left not in entries(tmp_path)
    assert library.exists()


def test_without_nvcc_a_cached_library_is_enough(nvcc):
    nvcc()
    assert missing_toolchain().startswith("no nvcc")
    with pytest.raises(RuntimeError, match="set CUDA_HOME"):
        build_library()
    nvcc(WORKS, version="13.1.9")
    build_library()
    nvcc(WORKS, version="13.1.10")
    newest = build_library()
    nvcc()
    assert missing_toolchain() is None
    assert build_library(["9.0a"]) == newest
    assert cached_library(["12.0a"]) is None


def test_what_is_missing(sources, nvcc, monkeypatch, tmp_path):
    nvcc(WORKS)
    assert missing_toolchain() is None
    monkeypatch.setenv("MOE_NCCLEP_CUDA_ARCHS", "hopper")
    assert "'hopper' is not a compute capability" in missing_toolchain()
    monkeypatch.delenv("MOE_NCCLEP_CUDA_ARCHS")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_toolchain().startswith("no g++")
    monkeypatch.setenv("NVCC_CCBIN", "/opt/clang")
    assert missing_toolchain() is None
    (sources / "answer.cu").unlink()
    assert "no CUDA sources" in missing_toolchain()
    home = write_nvcc(tmp_path / "broken", "")
    (home / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert "does not work" in missing_toolchain()


def test_a_cache_that_cannot_be_written(nvcc, tmp_path, monkeypatch):
    nvcc(WORKS)
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOE_NCCLEP_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(RuntimeError, match="set MOE_NCCLEP_CACHE_DIR"):
        build_library()


@needs_nvcc
def test_the_library_is_loaded_once_and_works(monkeypatch):
    library = build.load_library()
    assert library.answer() == 42
    assert build.load_library() is library
    dependencies = subprocess.run(["ldd", library._name], capture_output=True, text=True).stdout
    assert "cudart" not in dependencies


@needs_nvcc
@pytest.mark.gpu1
def test_kernels_run_in_streams_of_torch_on_every_gpu(monkeypatch):
    monkeypatch.setattr(build, "_visible_archs", VISIBLE_ARCHS)
    library = build.load_library()
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index), torch.cuda.stream(torch.cuda.Stream()):
            out = torch.zeros(1, dtype=torch.int32, device="cuda")
            stream = torch.cuda.current_stream().cuda_stream
            assert library.launch_store_answer(ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(stream)) == 0
            assert out.item() == 42


@needs_nvcc
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("int broken() { return no_such_name; }", r'identifier "no_such_name" is undefined'),
        ('extern "C" int elsewhere();\nextern "C" int broken() { return elsewhere(); }', "undefined reference"),
    ],
    ids=["compile", "link"],
)
def test_real_errors(sources, tmp_path, line, message):
    (sources / "answer.cu").write_text(KERNEL + line)
    with pytest.raises(RuntimeError, match=message):
        build_library(["9.0a"])
    assert entries(tmp_path) == []


def command(*args: str):
    return CliRunner().invoke(app, ["build", *args], env={"COLUMNS": "200"})


def test_command(nvcc):
    nvcc(WORKS)
    result = command("--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert Path(told["library"]) == cached_library()
    assert told["archs"] == ["9.0a", "10.0a"]
    assert told["cached"] is False
    assert 0 <= told["seconds"] < 60
    assert json.loads(command("--json", "--arch", "9.0a").stdout)["cached"] is True
    assert command().stdout == f"{told['library']}\n9.0a, 10.0a: already compiled\n"
    compiled = command("--arch", "10.3a", "--arch", "9.0a", "--verbose")
    assert "9.0a, 10.3a: compiled in 0." in compiled.stdout
    assert "-gencode=arch=compute_103a,code=sm_103a" in compiled.stderr


def test_command_fails(nvcc):
    result = command("--arch", "sm_90")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "architecture 'sm_90' is not a compute capability" in result.stderr
    nvcc(FAILS)
    result = command("--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "x.cu(7): error: no such thing" in result.stderr
    nvcc()
    assert command().exit_code == 1
