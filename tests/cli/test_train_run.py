"""``moe-ncclep train`` from the outside: files, numbers, exit codes, and no process left behind."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHAPE = {"layers": 1, "hidden": 32, "heads": 2, "experts": 4, "ffn": 32, "seq": 32, "micro-batch": 2}
# The number of ranks is left to the default, 2 on a CPU: torchrun would take --nproc for an option of its own.
SIZE = [word for name, value in {**SHAPE, "lr": 0.02}.items() for word in (f"--{name}", value)]
STEPS = 40


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "moe_ncclep", "train", *map(str, args)]


def environment() -> dict[str, str]:
    """Of a user on a machine without GPUs, whatever this machine has."""
    outer = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**outer, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}


def run(*args: object) -> subprocess.CompletedProcess:
    return subprocess.run(command(*args), env=environment(), capture_output=True, text=True, timeout=240)


def start(*args: object) -> subprocess.Popen:
    """The command as a foreground job: SIGINT reaches it even where a shell ignores it for background jobs."""
    return subprocess.Popen(
        command(*args),
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def children(process: subprocess.Popen) -> list[int]:
    return [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def wait_for(process: subprocess.Popen, text: str) -> None:
    for line in process.stderr:
        if text in line:
            return
    pytest.fail(f"ended with {process.wait()} before it printed {text!r}")


def assert_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 5
    while alive := [p for p in processes if Path(f"/proc/{p}").exists()]:
        assert time.monotonic() < deadline, f"processes {alive} are left"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Repetitive text, learnt in a few steps."""
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_text("the same words again and again, and then the same words again. " * 200)
    return file


@pytest.fixture(scope="module")
def compared(text, tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    out = tmp_path_factory.mktemp("run")
    args = (*SIZE, "--steps", STEPS, "--eval-every", 20, "--data", text, "--out", out)
    return run(*args, "--compare", "alltoall", "--json"), out


@pytest.mark.megatron
def test_writes_metrics_and_plot(compared, text):
    done, out = compared
    assert done.returncode == 0, done.stderr
    metrics = json.loads((out / "metrics.json").read_text())
    assert json.loads(done.stdout) == metrics
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert metrics["config"]["nproc"] == 2
    assert metrics["hardware"]["device"] == "cpu"
    assert {"python", "torch", "megatron-core", "moe-ncclep"} <= metrics["versions"].keys()
    assert metrics["data"]["source"] == str(text)
    assert "train" in metrics["command"]


@pytest.mark.megatron
def test_loss_falls_below_byte_frequencies(compared):
    metrics = json.loads(compared[0].stdout)
    entropy = metrics["data"]["byte_frequency_nats"]
    assert entropy / math.log(2) == pytest.approx(metrics["data"]["byte_frequency_bits"])
    for one in metrics["runs"]:
        assert len(one["train_loss"]) == STEPS
        assert all(map(math.isfinite, one["train_loss"]))
        assert one["train_loss"][0] == pytest.approx(math.log(256), abs=0.1)
        assert one["final_train_loss"] < 0.7 * entropy
        assert [e["step"] for e in one["eval_loss"]] == [20, 40]
        assert one["final_eval_loss"] < 0.7 * entropy
        assert one["tokens_per_second"] > 0


@pytest.mark.megatron
def test_says_which_engine_and_why_and_that_the_losses_are_equal(compared):
    done, _ = compared
    first, second = json.loads(done.stdout)["runs"]
    assert (first["dispatcher"], first["engine"]) == ("ncclep", "collective")
    assert (second["dispatcher"], second["engine"]) == ("alltoall", "alltoall")
    assert f"engine {first['engine']}: {first['engine_reason']}" in done.stderr
    assert f"held out {first['final_eval_loss']:.4f} nats" in done.stderr
    comparison = json.loads(done.stdout)["comparison"]
    assert comparison["exact_expected"]
    assert comparison["max_abs_train_loss_difference"] == 0
    assert comparison["max_abs_eval_loss_difference"] == 0
    assert "over all steps: 0 in training, 0 held out; expected: exactly 0" in done.stderr


@pytest.mark.megatron
def test_under_torchrun_the_same_losses_again(compared, text, tmp_path):
    args = (*SIZE, "--steps", STEPS, "--eval-every", 20, "--data", text, "--out", tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    started = [*launcher, *command(*args, "--dispatcher", "alltoall", "--quiet")[2:]]
    done = subprocess.run(started, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    again = json.loads((tmp_path / "metrics.json").read_text())["runs"][0]
    before = json.loads(compared[0].stdout)["runs"][1]
    for what in ("train_loss", "eval_loss", "gradient_norm"):
        assert again[what] == before[what]


@pytest.mark.megatron
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_while_ranks_start(text, tmp_path, number, code):
    process = start(*SIZE, "--data", text, "--out", tmp_path)
    while len(ranks := children(process)) < 2:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in err
    assert_gone(ranks)


@pytest.mark.megatron
def test_interrupted_while_training(text, tmp_path):
    process = start(*SIZE, "--steps", 10**6, "--eval-every", 5, "--data", text, "--out", tmp_path)
    wait_for(process, "held out")
    ranks = children(process)
    assert len(ranks) == 2
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert_gone(ranks)


@pytest.mark.megatron
def test_killed_rank_ends_the_job(text, tmp_path):
    process = start(*SIZE, "--steps", 10**6, "--eval-every", 5, "--data", text, "--out", tmp_path)
    wait_for(process, "held out")
    ranks = children(process)
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - began < 10
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in err
    assert_gone(ranks)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--experts", "7"], "--experts 7 is not divisible by --ep 2"),
        (["--data", "/no/such/path"], "/no/such/path: No such file or directory"),
    ],
)
def test_bad_input_is_refused_before_any_rank_starts(tmp_path, args, message):
    done = run(*SIZE, "--out", tmp_path / "out", *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_unknown_option_is_a_usage_error():
    assert run("--no-such-option").returncode == 2


def test_help_and_version_do_not_import_torch():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom moe_ncclep.cli.main import app\n"
        "for args in (['--help'], ['train', '--help'], ['build', '--help'], ['--version']):\n"
        "    result = CliRunner().invoke(app, args)\n"
        "    assert result.exit_code == 0 and result.output, result\n"
        "assert 'torch' not in sys.modules and 'megatron' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
