"""Write the measured parts of README.md from the results under ``recipes/results``.

    python tools/readme_tables.py            rewrite README.md
    python tools/readme_tables.py --check    exit 1 if it differs

A part stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from moe_ncclep.ep.options import flag_fields
from moe_ncclep.train import report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "recipes" / "results"


def train() -> str:
    """What the main job printed."""
    metrics = json.loads((RESULTS / "train_cpu.json").read_text())
    lines = report.summary(metrics, [])[:-1]  # the last one names files of that run
    width = max(len(label) for label, _ in lines)
    body = "\n".join(f"{label:<{width}}  {text}" for label, text in lines)
    return f"```text\n{body}\n```\n\n![loss over steps](recipes/results/train_cpu.png)"


def pretrain() -> str:
    """Losses of Megatron's own training loop with both dispatchers."""
    rows = [
        "| layers, experts | first loss | last: `alltoall` | last: `ncclep` | largest difference | hardware |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for path in sorted(RESULTS.glob("pretrain_*.json")):
        result = json.loads(path.read_text())
        ours, theirs = (result["losses"][name]["lm loss"] for name in ("ncclep", "alltoall"))
        hardware = result["hardware"]
        shared = " sharing it" if hardware["ranks_share_gpus"] else ""
        gpus = f"{len(hardware['gpus'])} x {hardware['gpus'][0].split(',')[0]}"
        layers = {
            "local": "plain PyTorch",
            "transformer_engine": f"TransformerEngine {result['versions']['transformer-engine']}, grouped GEMM",
        }
        rows.append(
            f"| {layers[result['config']['transformer_impl']]} | {theirs[0]:.6f} | {theirs[-1]:.6f} | {ours[-1]:.6f} | "
            f"{result['largest_difference']['ncclep and alltoall']['lm loss']:g} in {len(ours)} iterations | "
            f"{gpus}, {hardware['ranks']} ranks{shared}, bf16, engine {result['engine']} |"
        )
    return "\n".join(rows)


def flags() -> str:
    """The options that are flags."""
    rows = ["| flag | environment | meaning |", "|---|---|---|"]
    for f in flag_fields():
        name = f.name.replace("_", "-")
        flag = f"--[no-]ncclep-{name}" if f.metadata["type"] is bool else f"--ncclep-{name}"
        rows.append(f"| `{flag}` | `MOE_NCCLEP_{f.name.upper()}` | {f.metadata['help']} |")
    return "\n".join(rows)


PARTS: dict[str, Callable[[], str]] = {"train": train, "pretrain": pretrain, "flags": flags}


def fill(text: str) -> str:
    """``text`` with every part replaced by what the results say now."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        head, _, rest = text.partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"README.md has no part {name}")
        text = f"{head}{begin}{part()}\n{end}{tail}"
    return text


def main(arguments: list[str]) -> int:
    """Rewrite or check; returns the exit status."""
    readme = ROOT / "README.md"
    before = readme.read_text()
    after = fill(before)
    if arguments == ["--check"]:
        return int(before != after)
    readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
