"""On a machine with GPUs: run the GPU tests, then the recipe with alltoall and with ncclep, and compare the losses.

python tools/gpu_parity.py OUT                     everything that needs no TransformerEngine
python tools/gpu_parity.py OUT --parts te          the recipe with TransformerEngine's grouped experts
python tools/gpu_parity.py OUT -- --train-iters 20 arguments for the recipe

Every run has its own processes and time limit and writes a log in OUT, so that one failure costs nothing else.
``parity-*.json`` is made for ``recipes/results/``. Two ranks may share one GPU with NCCL >= 2.30; then times mean
nothing, but numbers do.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from moe_ncclep.train.machine import describe_commit, loaded_nccl_version  # noqa: E402 - the tools are not a package

TESTS = [sys.executable, "-m", "pytest", "-m", "gpu1 or gpu2 or gpu4", "-q", "--durations=10", "--timeout=150", "tests"]
RUNS = {"alltoall": "alltoall", "ncclep": "ncclep", "alltoall again": "alltoall"}
DETERMINISTIC = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
REPORTED = [
    "world_size",
    "expert_model_parallel_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_router_dtype",
    "moe_grouped_gemm",
    "transformer_impl",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "params_dtype",
    "lr",
    "seed",
    "deterministic_mode",
]


def run(command: list[str], log: Path, limit_s: float, environment: dict[str, str]) -> int | None:
    """Run ``command`` with its output in ``log``; returns its exit status, None if it ran out of time."""
    started = time.monotonic()
    with log.open("a") as out:
        out.write(f"$ {' '.join(command)}\n")
        out.flush()
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
            out.write(f"\nkilled after {limit_s:.0f} s\n")
    seconds = time.monotonic() - started
    print(f"{log.name}: {'out of time' if status is None else f'exit {status}'} after {seconds:.0f} s", flush=True)
    return status


def time_left(options: argparse.Namespace) -> float:
    """Seconds until all must be over, at least one."""
    return max(1.0, options.deadline - time.monotonic())


def pretrain(
    kind: str, deterministic: bool, options: argparse.Namespace
) -> tuple[dict[str, dict[str, list]], dict[str, Any]]:
    """Train with every entry of ``RUNS``; losses of those that ended well, and what the logs say of the runs."""
    losses, facts = {}, {"config": {}, "engine": None, "command": {}, "status": {}}
    for name, dispatcher in RUNS.items():
        log = options.out / f"{kind}-{dispatcher}.log"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "losses.json")
            arguments = ["--logging-level", "20", *["--deterministic-mode"] * deterministic, *options.arguments]
            command = ["bash", "recipes/pretrain_gpt.sh", *arguments, "--loss-json", str(path)]
            environment = {
                "DISPATCHER": dispatcher,
                "NPROC": str(options.nproc),
                "TE": str(int(kind == "te")),
                "PYTHON": sys.executable,
                "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            }
            environment |= DETERMINISTIC if deterministic else {}
            facts["status"][name] = status = run(command, log, min(options.limit, time_left(options)), environment)
            if status == 0 and path.exists():
                losses[name] = json.loads(path.read_text())
        shown = [
            f"{k}={environment[k]}" for k in ("DISPATCHER", "NPROC", "TE", *(DETERMINISTIC if deterministic else ()))
        ]
        facts["command"][name] = " ".join([*shown, "recipes/pretrain_gpt.sh", *arguments])
        text = log.read_text()
        printed = dict(re.findall(r"^ *(\w+) \.{3,} (.*)$", text, re.MULTILINE))
        facts["config"] = {k: printed[k] for k in REPORTED if k in printed}
        engines = re.findall(r"engine (\w+) for a group of \d+: .*", text)
        if dispatcher == "ncclep" and engines:
            facts["engine"] = engines[-1]
    return losses, facts


def largest_difference(losses: dict[str, dict[str, list]], one: str, other: str) -> dict[str, float] | None:
    """Largest absolute difference over all iterations, of losses and of gradient norms."""
    if one not in losses or other not in losses:
        return None
    return {
        name: max(abs(a - b) for a, b in zip(losses[one][name], losses[other][name], strict=True))
        for name in losses[one]
        if name != "iteration"
    }


def hardware(nproc: int) -> dict[str, Any]:
    """GPUs, as the driver names them."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    return {"gpus": gpus, "ranks": nproc, "ranks_share_gpus": nproc > len(gpus) > 0, "cpu": platform.machine()}


def versions() -> dict[str, str | None]:
    """Of everything that takes part."""
    import torch

    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "megatron-core", "transformer-engine", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    nccl = loaded_nccl_version()
    found["nccl"] = None if nccl is None else ".".join(map(str, nccl))
    return found


def to_json(result: dict[str, Any]) -> str:
    """Readable JSON, every list on one line."""
    text = json.dumps(result, indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found.group().split()), text) + "\n"


def parity(kind: str, options: argparse.Namespace) -> bool:
    """Train, compare and write ``parity-KIND.json``; True if all runs ended well and ncclep really ran."""
    deterministic = True
    losses, facts = pretrain(kind, deterministic, options)
    if any(facts["status"].values()):  # out of time is None, and another try would fare no better
        print(f"{kind}: a run failed with --deterministic-mode; once more without", flush=True)
        deterministic = False
        losses, facts = pretrain(kind, deterministic, options)
    difference = largest_difference(losses, "alltoall", "ncclep")
    noise = largest_difference(losses, "alltoall", "alltoall again")
    result = {
        "hardware": hardware(options.nproc),
        "versions": versions(),
        "commit": options.commit or describe_commit(),
        **facts,
        "largest_difference": {"ncclep and alltoall": difference, "alltoall and alltoall again": noise},
        "losses": losses,
    }
    (options.out / f"parity-{kind}.json").write_text(to_json(result))
    for name, columns in losses.items():
        print(f"{kind} {name}: lm loss {columns['lm loss'][0]:.6f} -> {columns['lm loss'][-1]:.6f}", flush=True)
    print(f"{kind}: ncclep on engine {facts['engine']}, deterministic {deterministic}", flush=True)
    print(f"{kind}: largest difference {difference}, between two alltoall runs {noise}", flush=True)
    return len(losses) == len(RUNS) and facts["engine"] is not None


def main(argv: list[str]) -> int:
    """Run the parts asked for; 0 if all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for logs and results")
    parser.add_argument("--parts", nargs="+", choices=["local", "tests", "te"], default=["local", "tests"])
    parser.add_argument("--nproc", type=int, default=2, help="ranks of the recipe")
    parser.add_argument("--limit", type=float, default=100, help="seconds for each training run")
    parser.add_argument("--tests-limit", type=float, default=280, help="seconds for the tests")
    parser.add_argument("--total", type=float, default=560, help="seconds for everything")
    parser.add_argument("--commit", help="what the results call the code, where this is no checkout")
    split = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:split])
    options.arguments = argv[split + 1 :]
    options.deadline = time.monotonic() + options.total
    options.out.mkdir(parents=True, exist_ok=True)
    passed = {}
    for part in options.parts:
        if part == "tests":
            limit = min(options.tests_limit, time_left(options))
            status = run(TESTS, options.out / "tests.log", limit, {})
            text = (options.out / "tests.log").read_text()
            print("\n".join(text.splitlines()[-40:]), flush=True)
            passed[part] = status == 0 and re.search(r"\b[1-9]\d* passed", text) is not None  # not all skipped
        else:
            passed[part] = parity(part, options)
    print(", ".join(f"{part}: {'passed' if ok else 'FAILED'}" for part, ok in passed.items()), flush=True)
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
