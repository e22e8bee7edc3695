from __future__ import annotations

import itertools

import pytest

from moe_ncclep.train import config as config_module
from moe_ncclep.train.config import TrainConfig, check_megatron
from moe_ncclep.train.machine import Machine
from moe_ncclep.train.optim import FINAL_LR, learning_rate
from moe_ncclep.train.report import expectation

CPU = Machine(device="cpu", cores=2, gpus=0)
GPU = Machine(device="cuda", cores=64, gpus=8)


def checked(machine: Machine = CPU, **changes) -> TrainConfig:
    config = TrainConfig(**changes).resolve(machine)
    config.validate(machine)
    return config


def test_defaults_follow_the_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_cpu, on_gpu = checked(), checked(GPU)
    assert (on_cpu.nproc, on_cpu.ep, on_cpu.dtype) == (2, 2, "float32")
    assert (on_gpu.nproc, on_gpu.ep, on_gpu.dtype) == (8, 8, "bf16")
    assert checked(nproc=4).ep == 4
    assert checked(dtype="bf16").dtype == "bf16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"micro_batch": 0}, "--micro-batch must be at least 1, got 0"),
        ({"seq": 1}, "--seq must be at least 2, got 1"),
        ({"seed": -1}, "--seed must be at least 0, got -1"),
        ({"lr": 0.0}, "--lr must be above 0 and at most 1, got 0.0"),
        ({"lr": float("nan")}, "--lr must be above 0 and at most 1, got nan"),
        ({"aux_loss": -0.5}, "--aux-loss must be between 0 and 1, got -0.5"),
        ({"dtype": "fp16"}, "unknown dtype 'fp16'; choose one of float32, bf16"),
        ({"dispatcher": "magic"}, "unknown dispatcher 'magic'; choose one of ncclep, alltoall, allgather, flex"),
        ({"compare": "magic"}, "unknown dispatcher 'magic'"),
        ({"compare": "ncclep"}, "--compare ncclep is the same dispatcher as --dispatcher ncclep"),
        ({"dispatcher": "flex"}, "dispatcher 'flex' needs CUDA GPUs"),
        ({"engine": "warp"}, "unknown engine 'warp'; choose one of auto, local, collective"),
        ({"payload": "int4"}, "unknown payload 'int4'"),
        ({"dispatcher": "alltoall", "engine": "local"}, "--engine local belongs to dispatcher ncclep, not to alltoall"),
        ({"nproc": 9, "experts": 9}, r"--nproc 9 is more than 8 ranks \(4 for each of 2 CPU cores\)"),
        ({"nproc": 4, "ep": 3}, "--nproc 4 is not divisible by --ep 3"),
        ({"experts": 7}, "--experts 7 is not divisible by --ep 2"),
        ({"topk": 9}, "--topk 9 is more than --experts 8"),
        ({"heads": 3}, "--hidden 128 is not divisible by --heads 3"),
        ({"hidden": 12, "heads": 4}, "--hidden 12 / --heads 4 = 3 is odd"),
        (
            {"hidden": 12, "heads": 2, "dtype": "bf16"},
            "--hidden 12 bf16 values has 24 bytes; it must be a multiple of 16",
        ),
    ],
)
def test_bad_values_are_named_with_their_limit(changes, message):
    with pytest.raises(ValueError, match=message):
        checked(**changes)


def test_ranks_are_limited_by_gpus():
    with pytest.raises(ValueError, match=r"--nproc 16 is more than 8 ranks \(this machine has 8 GPUs\)"):
        checked(GPU, nproc=16, experts=16)


def test_ranks_started_by_someone_else_are_not_limited(tmp_path):
    joined = Machine(device="cpu", cores=2, gpus=0, joined=True)
    assert checked(joined, nproc=64, experts=64, out=str(tmp_path)).ep == 64


def test_out_must_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file, not a folder"):
        checked(out=str(tmp_path / "file" / "below"))


def test_missing_megatron_is_said_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(config_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "moe-ncclep\[megatron\]"'):
        check_megatron()


def test_learning_rate_warms_up_and_decays():
    rates = [learning_rate(step, 200, 1.0) for step in range(200)]
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(FINAL_LR, abs=1e-3)
    assert learning_rate(0, 1, 1.0) == 1.0


@pytest.mark.parametrize(
    ("changes", "device", "exact"),
    [
        ({}, "cpu", True),
        ({"topk": 1}, "cpu", True),
        ({"topk": 3}, "cpu", False),
        ({"dtype": "bf16"}, "cpu", False),
        ({"payload": "fp8"}, "cpu", False),
        ({}, "cuda", False),
    ],
)
def test_what_a_comparison_should_give(changes, device, exact):
    config = TrainConfig(**{"dtype": "float32", "compare": "alltoall", **changes})
    assert expectation(config, device)[0] is exact
