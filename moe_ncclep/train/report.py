"""The files and the summary that a training job leaves behind."""

from __future__ import annotations

import json
import math
from pathlib import Path

from moe_ncclep.train.config import TrainConfig

LN2 = math.log(2)


def compare(runs: list[dict], config: TrainConfig, device: str) -> dict | None:
    """Largest difference between the losses of two runs, and what to expect of it; None for a single run."""
    if len(runs) < 2:
        return None
    first, second = runs
    exact, why = expectation(config, device)
    evals = zip(first["eval_loss"], second["eval_loss"], strict=True)
    return {
        "dispatchers": [first["dispatcher"], second["dispatcher"]],
        "max_abs_train_loss_difference": _largest(zip(first["train_loss"], second["train_loss"], strict=True)),
        "max_abs_eval_loss_difference": _largest((a["loss"], b["loss"]) for a, b in evals),
        "exact_expected": exact,
        "expected": why,
    }


def expectation(config: TrainConfig, device: str) -> tuple[bool, str]:
    """Whether the two dispatchers must agree bit for bit in this setting, and why."""
    if config.payload != "input":
        return False, f"small differences: payload {config.payload} quantises the tokens on the wire"
    if config.dtype != "float32":
        return False, f"rounding differences: sums in {config.dtype} depend on their order"
    if config.topk > 2:
        return (
            False,
            f"rounding differences: with k = {config.topk} the expert outputs of a token are added in another order",
        )
    if device != "cpu":
        return False, "rounding differences: atomic additions on the GPU have no fixed order"
    if "allgather" in config.dispatchers():
        return False, "rounding differences: allgather reduces over ranks in an order of its own"
    return True, f"exactly 0: in float32 with k = {config.topk} a sum has one order"


def _largest(pairs) -> float:
    return max(abs(a - b) for a, b in pairs)


def write_metrics(metrics: dict, folder: Path) -> Path:
    """Write ``metrics.json`` and return its path."""
    path = folder / "metrics.json"
    path.write_text(json.dumps(metrics, indent=1, allow_nan=False) + "\n")
    return path


def write_plot(metrics: dict, folder: Path) -> Path:
    """Draw the losses of every run and the byte-frequency loss into ``loss.png`` and return its path."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, run in enumerate(metrics["runs"]):
        color, dashed = f"C{index}", "-" if index == 0 else "--"
        losses = run["train_loss"]
        axes.plot(
            range(1, len(losses) + 1),
            losses,
            dashed,
            color=color,
            alpha=0.6,
            linewidth=1,
            label=f"{run['dispatcher']}, training",
        )
        evals = run["eval_loss"]
        axes.plot(
            [e["step"] for e in evals],
            [e["loss"] for e in evals],
            "o" if index == 0 else "x",
            linestyle=dashed,
            color=color,
            markersize=5 if index == 0 else 8,
            label=f"{run['dispatcher']}, held out",
        )
    entropy = metrics["data"]["byte_frequency_nats"]
    axes.axhline(entropy, color="grey", linestyle=":", label=f"byte frequencies alone: {entropy:.2f}")
    config = metrics["config"]
    axes.set(
        xlabel="step",
        ylabel="loss (nats per byte)",
        title=f"{config['layers']} layers, hidden {config['hidden']}, {config['experts']} experts, "
        f"top {config['topk']}, {config['nproc']} ranks, EP {config['ep']}, {config['dtype']}",
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    return path


def summary(metrics: dict, files: list[Path]) -> list[tuple[str, str]]:
    """What to tell the user at the end: pairs of a label and a line of text."""
    lines = []
    for run in metrics["runs"]:
        lines.append((run["dispatcher"], f"engine {run['engine']}: {run['engine_reason']}"))
        nats = run["final_eval_loss"]
        lines.append(
            (
                "",
                f"final loss {run['final_train_loss']:.4f} nats, held out {nats:.4f} nats "
                f"({nats / LN2:.3f} bits per byte), {run['tokens_per_second']:,.0f} tokens/s",
            )
        )
        last = run["last_step"]
        loads = [max(layer) / (sum(layer) / len(layer)) for layer in last["tokens_per_expert"]]
        text = f"last step: busiest expert {max(loads):.2f} x the mean load"
        if last["wire"] is not None:
            sent, plain = last["wire"]["dispatch_bytes"], last["wire"]["alltoall_bytes"]
            text += f"; dispatch sent {sent:,} bytes to other ranks, an all-to-all of every pair would send {plain:,}"
        lines.append(("", text))
    data = metrics["data"]
    lines.append(
        (
            "byte frequencies",
            f"{data['byte_frequency_nats']:.4f} nats ({data['byte_frequency_bits']:.3f} bits per byte): "
            "the held-out loss of the best model that ignores context",
        )
    )
    comparison = metrics["comparison"]
    if comparison is not None:
        lines.append(
            (
                "difference",
                f"largest |{' - '.join(comparison['dispatchers'])}| over all steps: "
                f"{comparison['max_abs_train_loss_difference']:.3g} in training, "
                f"{comparison['max_abs_eval_loss_difference']:.3g} held out; expected: {comparison['expected']}",
            )
        )
        if comparison["exact_expected"] and comparison["max_abs_train_loss_difference"] > 0:
            lines.append(("", "the losses should have been equal: please report this with metrics.json"))
    lines.append(("files", ", ".join(str(f) for f in files)))
    return lines
