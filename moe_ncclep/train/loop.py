"""What every rank runs: the training loop itself."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from moe_ncclep.ep import choose_engine, close_engine
from moe_ncclep.train.config import TrainConfig
from moe_ncclep.train.data import Corpus

if TYPE_CHECKING:
    from moe_ncclep.train.model import ByteGPT, LayerLoad

Emit = Callable[[dict], None]
WARMUP_STEPS = 3
"""Steps left out of tokens per second."""


def train(config: TrainConfig, corpus: Corpus, device: torch.device, emit: Emit) -> dict:
    """Train one model on the ranks of the default process group. Collective.

    Args:
        config: resolved configuration, equal on all ranks; ``config.dispatcher`` is used, ``config.compare`` is not.
        corpus: the text, equal on all ranks.
        device: this rank's device.
        emit: called on rank 0 with events: ``start`` (engine, reason), ``step`` (step, loss, tokens_per_s) and ``eval``
            (step, loss). Steps count from 1.

    Returns:
        The record of the run for the metrics, the same on all ranks except the times.

    Raises:
        ValueError: if ranks differ in configuration or text, or the engine asked for cannot be used.
        FloatingPointError: if the loss is not finite.
    """
    _check_agreement(config, corpus)
    with _megatron(config):
        from moe_ncclep.train.model import ByteGPT

        return _Run(ByteGPT(config, device), config, corpus, device, emit).run()


class _Run:
    """State of one training."""

    def __init__(self, model: ByteGPT, config: TrainConfig, corpus: Corpus, device: torch.device, emit: Emit):
        from moe_ncclep.train.optim import Optimizer

        self.config, self.corpus, self.device, self.model = config, corpus, device, model
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.emit: Emit = emit if self.rank == 0 else lambda event: None
        self.ep_group = model.ep_group()
        self.optimizer = Optimizer(model.parameters(), config.lr, config.steps, self.ep_group)
        windows = corpus.eval_windows(self.rank, self.world, config.seq)
        self.eval_windows = torch.from_numpy(windows).to(device)

    def run(self) -> dict:
        """Train to the end and return the record."""
        config, model = self.config, self.model
        engine, reason = self.engine()
        self.emit({"event": "start", "engine": engine, "reason": reason, "parameters": model.count_parameters()})
        losses, grad_norms, seconds, evals = [], [], [], []
        loads: list[LayerLoad] = []
        for step in range(config.steps):
            last = step + 1 == config.steps
            finish_watch = model.watch() if last else None
            began = time.perf_counter()
            loss, norm = self.step(step)
            seconds.append(time.perf_counter() - began)
            if finish_watch is not None:
                loads = finish_watch()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise FloatingPointError(
                    f"loss {loss}, gradient norm {norm} in step {step + 1}; a smaller --lr than {config.lr} may help"
                )
            losses.append(loss)
            grad_norms.append(norm)
            rate = config.tokens_per_step() / seconds[-1]
            self.emit({"event": "step", "step": step + 1, "loss": loss, "tokens_per_s": rate})
            if last or (step + 1) % config.eval_every == 0:
                evals.append({"step": step + 1, "loss": self.evaluate()})
                self.emit({"event": "eval", **evals[-1]})
        if config.dispatcher == "ncclep":
            close_engine(self.ep_group)
        timed = seconds[WARMUP_STEPS:] or seconds
        return {
            "dispatcher": config.dispatcher,
            "engine": engine,
            "engine_reason": reason,
            "parameters": model.count_parameters(),
            "train_loss": losses,
            "gradient_norm": grad_norms,
            "eval_loss": evals,
            "final_train_loss": losses[-1],
            "final_eval_loss": evals[-1]["loss"],
            "step_seconds": seconds,
            "tokens_per_second": config.tokens_per_step() * len(timed) / sum(timed),
            **self.last_step(loads),
        }

    def step(self, step: int) -> tuple[float, float]:
        """One update; returns the mean loss over all ranks in nats, and the gradient norm."""
        config = self.config
        windows = self.corpus.batch(step, self.rank, self.world, config.micro_batch, config.seq, config.seed)
        self.model.ddp.zero_grad_buffer()
        loss = self.model.losses(torch.from_numpy(windows).to(self.device)).mean()
        loss.backward()
        self.model.ddp.finish_grad_sync()
        norm = self.optimizer.step(step)
        return self.mean(loss.detach()), norm

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the held-out windows of all ranks, in nats."""
        self.model.ddp.eval()
        batches = self.eval_windows.split(self.config.micro_batch)
        total = sum(self.model.losses(batch).double().sum() for batch in batches)
        self.model.ddp.train()
        return self.mean(total / (len(self.eval_windows) * self.config.seq))

    def mean(self, value: torch.Tensor) -> float:
        """Mean of a scalar over all ranks; each holds as many tokens."""
        value = value.double()
        dist.all_reduce(value)
        return float(value) / self.world

    def engine(self) -> tuple[str, str]:
        """Name of what moves the tokens, and why it was taken."""
        if self.config.dispatcher != "ncclep":
            return self.config.dispatcher, "Megatron's own dispatcher, asked for"
        choice = choose_engine(self.ep_group, self.config.ep_options())
        return choice.engine.name, choice.reason

    def last_step(self, loads: list[LayerLoad]) -> dict:
        """Load of the experts and bytes on the wire, summed over all ranks; ``loads`` holds this rank's layers.

        Returns:
            ``tokens_per_expert`` ``[layers][experts]``; ``wire`` with the payload bytes that all forward dispatches of
            the step sent to other ranks, and what an all-to-all without de-duplication would have sent, or None.
        """
        config = self.config
        mine = {
            "rows": [load.rows for load in loads],
            "sent": [(t.dispatch_bytes, t.alltoall_bytes) for load in loads if (t := load.traffic) is not None],
        }
        ranks: list = [None] * self.world
        dist.all_gather_object(ranks, mine)
        rows = [[0] * config.experts for _ in range(config.layers)]
        local = config.experts // config.ep
        for rank, other in enumerate(ranks):
            first = rank % config.ep * local  # Megatron numbers expert-parallel ranks innermost
            for layer, counts in enumerate(other["rows"]):
                for expert, count in enumerate(counts, start=first):
                    rows[layer][expert] += count
        sent = [pair for other in ranks for pair in other["sent"]]
        wire = {"dispatch_bytes": sum(s[0] for s in sent), "alltoall_bytes": sum(s[1] for s in sent)} if sent else None
        return {"last_step": {"tokens_per_expert": rows, "wire": wire}}


def _check_agreement(config: TrainConfig, corpus: Corpus) -> None:
    """Raise the same ``ValueError`` on all ranks if they were started with different settings or different text."""
    settings = dataclasses.asdict(config)
    mine = {
        "settings": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        "text": corpus.digest(),
    }
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    for rank, other in enumerate(ranks):
        for what in mine:
            if other[what] != ranks[0][what]:
                raise ValueError(f"ranks disagree on the {what}: rank {rank} and rank 0 differ")


@contextmanager
def _megatron(config: TrainConfig) -> Iterator[None]:
    """Megatron's global state for one training, and its end: a later training in this process starts afresh."""
    from moe_ncclep.megatron.cpu import apply_cpu_shim

    apply_cpu_shim()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    torch.manual_seed(config.seed)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=config.ep)
    model_parallel_cuda_manual_seed(config.seed)
    # The router adds its loss to that of the micro-batch; DDP averages over ranks, as it does for the main loss.
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
