"""``moe-ncclep bench`` as a user runs it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from moe_ncclep.bench import job
from moe_ncclep.bench.ranks import PHASES
from moe_ncclep.cli.main import app
from moe_ncclep.train.machine import Machine

TINY = ["--tokens", "8", "--hidden", "16", "--experts", "4", "--top-k", "2", "--dtype", "fp32", "--repetitions", "2"]
runner = CliRunner()


def bench(*arguments: str):
    return runner.invoke(app, ["bench", *arguments])


def test_it_measures_between_ranks_and_records_how(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", ["moe-ncclep", "bench", "--json", "x", "--mode", "ranks"])
    file = tmp_path / "result.json"
    result = bench("--mode", "ranks", *TINY, "--tokens", "4", "--routing", "zipf", "--json", str(file))
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    assert record["command"] == "moe-ncclep bench --mode ranks"
    assert record["config"]["ranks"] == 2
    assert record["hardware"]["cores"] >= 1
    assert record["versions"]["torch"]
    assert [r["phase"] for r in record["results"]] == list(PHASES) * 4
    assert [r["tokens"] for r in record["results"]] == [8] * 8 + [4] * 8
    assert {r["routing"] for r in record["results"]} == {"zipf"}
    assert "alltoall" in result.output
    assert "left out: nvlink" in result.output


@pytest.mark.megatron
def test_it_measures_a_layer(tmp_path):
    file = tmp_path / "layer.json"
    result = bench("--mode", "layer", *TINY, "--ffn", "32", "--json", str(file))
    assert result.exit_code == 0, result.output
    names = [(r["contender"], r["phase"]) for r in json.loads(file.read_text())["results"]]
    assert names == [("alltoall", "layer forward+backward"), ("ncclep", "layer forward+backward")]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--mode", "fast"], "unknown mode 'fast'; choose one of auto, virtual, ranks, layer"),
        (["--preset", "gpt-5"], "unknown preset 'gpt-5'"),
        (["--payload", "int4"], "unknown format 'int4'; choose one of bf16, fp8, fp8-rows"),
        (["--routing", "even"], "unknown routing 'even'"),
        (["--contender", "mpi"], "unknown contender 'mpi'"),
        (["--repetitions", "0"], "repetitions must be between 1 and 100000, got 0"),
        (["--late-us", "-1"], "late_us must be between 0 and 1000000, got -1"),
        (["--ranks", "1"], "ranks must be between 2 and 72, got 1"),
        (["--ffn", "0"], "ffn must be at least 1, got 0"),
        (["--experts", "63"], "63 experts cannot be spread evenly over 2 ranks"),
        (["--hidden", "0"], "hidden 0 in bf16 makes rows of 0 bytes"),
    ],
)
def test_bad_input_is_named(arguments, text):
    result = bench("--mode", "ranks", *arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


def test_what_needs_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(job.Machine, "detect", lambda: Machine(device="cpu", cores=2, gpus=0))
    result = bench("--mode", "virtual")
    assert result.exit_code == 2
    assert "mode virtual needs a CUDA GPU; this machine has none" in result.output


@pytest.mark.parametrize(
    ("gpus", "mode", "ranks"), [(0, "ranks", 2), (1, "virtual", 2), (2, "ranks", 2), (8, "ranks", 8)]
)
def test_auto_looks_at_the_machine(gpus, mode, ranks):
    config = job.BenchConfig().resolve(Machine(device="cuda" if gpus else "cpu", cores=2, gpus=gpus))
    assert (config.mode, config.ranks) == (mode, ranks)


def test_few_sms_for_virtual_ranks_are_named():
    with pytest.raises(ValueError, match="num_sms must be at least 2 for each of 4 virtual ranks, got 7"):
        job.BenchConfig(mode="virtual", ranks=4, num_sms=(7,)).resolve(Machine(device="cuda", cores=2, gpus=1))


def test_a_joined_job_has_its_own_size(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    machine = Machine(device="cuda", cores=2, gpus=4, joined=True)
    assert job.BenchConfig().resolve(machine).ranks == 4
    with pytest.raises(ValueError, match="--ranks 2 differs from WORLD_SIZE 4"):
        job.BenchConfig(ranks=2).resolve(machine)
