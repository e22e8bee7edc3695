"""What is dispatched in a benchmark: sizes of well-known models, and routings more or less even."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ncclep.ep.checks import MAX_EXPERTS, ROW_ALIGNMENT_BYTES
from moe_ncclep.ep.options import PAYLOADS, ROW_FORMATS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUTINGS = ("uniform", "zipf", "hot-rank", "hot-expert")
HOT_RANK_WEIGHT = 2.5
MAX_TOKENS = 2**20


@dataclass(frozen=True)
class Model:
    """Sizes of a model's MoE layers."""

    hidden: int
    experts: int
    top_k: int
    ffn: int


PRESETS = {
    "reference": Model(7168, 64, 8, 2048),
    "mixtral-8x7b": Model(4096, 8, 2, 14336),
    "qwen3-30b-a3b": Model(2048, 128, 8, 768),
    "deepseek-v3": Model(7168, 256, 8, 2048),
    "gpt-oss-120b": Model(2880, 128, 4, 2880),
}
"""From the models' published configurations; ``reference`` is what dispatchers are commonly compared with."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One dispatch of every rank."""

    tokens: int
    """T of each rank."""
    hidden: int
    experts: int
    top_k: int
    dtype: str = "bf16"
    payload: str = "input"
    row_format: str = "input"
    routing: str = "uniform"

    def validate(self, num_ranks: int) -> None:
        """Raise ``ValueError`` naming the first bad value and its limit."""
        choices = (("dtype", DTYPES), ("payload", PAYLOADS), ("row_format", ROW_FORMATS), ("routing", ROUTINGS))
        for name, known in choices:
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; choose one of {', '.join(known)}")
        if not 1 <= self.tokens <= MAX_TOKENS:
            raise ValueError(f"tokens must be between 1 and {MAX_TOKENS}, got {self.tokens}")
        if not 1 <= self.experts <= MAX_EXPERTS:
            raise ValueError(f"experts must be between 1 and {MAX_EXPERTS}, got {self.experts}")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top-k must be between 1 and the number of experts, {self.experts}, got {self.top_k}")
        if self.experts % num_ranks:
            raise ValueError(f"{self.experts} experts cannot be spread evenly over {num_ranks} ranks")
        if self.hidden < 1 or self.row_bytes % ROW_ALIGNMENT_BYTES:
            raise ValueError(
                f"hidden {self.hidden} in {self.dtype} makes rows of {self.row_bytes} bytes; they must be a positive "
                f"multiple of {ROW_ALIGNMENT_BYTES}"
            )
        if self.row_format == "fp8" and self.payload != "fp8":
            raise ValueError(f"row_format 'fp8' needs payload 'fp8', got {self.payload!r}")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the dtype of the tokens."""
        return self.hidden * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype of the tokens."""
        return DTYPES[self.dtype]


def draw_topk(shape: Shape, num_ranks: int, rank: int, seed: int = 0) -> Tensor:
    """``[T, K]`` int64 distinct expert ids of ``rank``'s tokens; the same for the same arguments.

    ``zipf``: probabilities 1/n over the experts in a random order. ``hot-rank``: experts of rank 0 are 2.5 times as
    likely. ``hot-expert``: one expert takes half of the tokens. Experts without replacement by the Gumbel trick.
    """
    common = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(seed * 8191 + rank + 1)
    weights = torch.ones(shape.experts)
    if shape.routing == "zipf":
        weights = 1 / (torch.randperm(shape.experts, generator=common) + 1.0)
    elif shape.routing == "hot-rank":
        weights[: shape.experts // num_ranks] = HOT_RANK_WEIGHT
    uniform = torch.rand(shape.tokens, shape.experts, generator=own).clamp(1e-12, 1 - 1e-7)
    keys = weights.log() - (-uniform.log()).log()
    if shape.routing == "hot-expert":
        hot = int(torch.randint(shape.experts, (), generator=common))
        taken = torch.rand(shape.tokens, generator=own) < 0.5
        keys[:, hot] = torch.where(taken, float("inf"), float("-inf"))
    return keys.topk(shape.top_k, dim=1).indices
