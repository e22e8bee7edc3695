"""What a training job can choose, and the checks made before any rank starts."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_ncclep.ep import EPOptions
    from moe_ncclep.train.machine import Machine

DISPATCHERS = ("ncclep", "alltoall", "allgather", "flex")
ITEM_BYTES = {"float32": 4, "bf16": 2}
VOCABULARY = 256  # bytes
ROW_BYTES_MULTIPLE = 16
CPU_RANKS_PER_CORE = 4


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training job. ``None`` stands for a default that depends on the machine, see :meth:`resolve`."""

    steps: int = 600
    layers: int = 2
    hidden: int = 128
    heads: int = 4
    experts: int = 8
    topk: int = 2
    ffn: int = 256
    """Hidden size of one expert."""
    seq: int = 128
    micro_batch: int = 8
    """Sequences of one rank in one step."""
    lr: float = 3e-3
    """Peak learning rate: linear warm-up, then a cosine down to a tenth."""
    seed: int = 1234
    nproc: int | None = None
    ep: int | None = None
    """Size of an expert-parallel group."""
    dispatcher: str = "ncclep"
    engine: str = "auto"
    payload: str = "input"
    dtype: str | None = None
    aux_loss: float = 0.01
    """Coefficient of the load-balancing loss."""
    eval_every: int = 100
    data: str | None = None
    """File or folder of text. None: the source files of Python's standard library."""
    out: str = "runs/train"
    compare: str | None = None
    """Second dispatcher, trained with the same seeds."""
    recompute: bool = False
    """Recompute the MoE layers in the backward pass."""

    def resolve(self, machine: Machine) -> TrainConfig:
        """Return a copy in which every default that depends on the machine is filled in."""
        on_gpu = machine.device == "cuda"
        nproc = self.nproc if self.nproc is not None else (machine.gpus if on_gpu else 2)
        return dataclasses.replace(
            self,
            nproc=nproc,
            ep=self.ep if self.ep is not None else nproc,
            dtype=self.dtype if self.dtype is not None else ("bf16" if on_gpu else "float32"),
        )

    def dispatchers(self) -> tuple[str, ...]:
        """Dispatchers to train with, in order."""
        return (self.dispatcher,) if self.compare is None else (self.dispatcher, self.compare)

    def ep_options(self) -> EPOptions:
        """The options of the ``ncclep`` dispatcher."""
        from moe_ncclep.ep import EPOptions

        return EPOptions(engine=self.engine, payload=self.payload)

    def tokens_per_step(self) -> int:
        """Tokens that all ranks together see in one step."""
        return self.nproc * self.micro_batch * self.seq

    def validate(self, machine: Machine) -> None:
        """Check a resolved configuration; raise ``ValueError`` naming the first bad value and its limit."""
        self._check_numbers()
        self._check_choices(machine)
        self._check_ranks(machine)
        self._check_shapes()
        _check_out(self.out)

    def _check_numbers(self) -> None:
        for name, low in (
            ("steps", 1),
            ("layers", 1),
            ("hidden", 1),
            ("heads", 1),
            ("experts", 1),
            ("topk", 1),
            ("ffn", 1),
            ("seq", 2),
            ("micro_batch", 1),
            ("nproc", 1),
            ("ep", 1),
            ("eval_every", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value < low:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
        if not 0 < self.lr <= 1:
            raise ValueError(f"--lr must be above 0 and at most 1, got {self.lr}")
        if not 0 <= self.aux_loss <= 1:
            raise ValueError(f"--aux-loss must be between 0 and 1, got {self.aux_loss}")

    def _check_choices(self, machine: Machine) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(ITEM_BYTES)}")
        for dispatcher in self.dispatchers():
            if dispatcher not in DISPATCHERS:
                raise ValueError(f"unknown dispatcher {dispatcher!r}; choose one of {', '.join(DISPATCHERS)}")
            if dispatcher == "flex" and machine.device != "cuda":
                raise ValueError("dispatcher 'flex' needs CUDA GPUs, and this machine has none")
        if self.compare == self.dispatcher:
            raise ValueError(f"--compare {self.compare} is the same dispatcher as --dispatcher {self.dispatcher}")
        self.ep_options().validate()
        if "ncclep" not in self.dispatchers():
            for name, default in (("engine", "auto"), ("payload", "input")):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"--{name} {getattr(self, name)} belongs to dispatcher ncclep, not to {self.dispatcher}"
                    )

    def _check_ranks(self, machine: Machine) -> None:
        if machine.device == "cuda":
            limit, why = machine.gpus, f"this machine has {machine.gpus} GPUs"
        else:
            limit = CPU_RANKS_PER_CORE * machine.cores
            why = f"{CPU_RANKS_PER_CORE} for each of {machine.cores} CPU cores"
        if self.nproc > limit and not machine.joined:
            raise ValueError(f"--nproc {self.nproc} is more than {limit} ranks ({why})")
        if self.nproc % self.ep:
            raise ValueError(f"--nproc {self.nproc} is not divisible by --ep {self.ep}")
        if self.experts % self.ep:
            raise ValueError(f"--experts {self.experts} is not divisible by --ep {self.ep}")

    def _check_shapes(self) -> None:
        if self.topk > self.experts:
            raise ValueError(f"--topk {self.topk} is more than --experts {self.experts}")
        if self.hidden % self.heads:
            raise ValueError(f"--hidden {self.hidden} is not divisible by --heads {self.heads}")
        if self.hidden // self.heads % 2:
            raise ValueError(
                f"--hidden {self.hidden} / --heads {self.heads} = {self.hidden // self.heads} is odd; "
                "rotary position embedding needs an even head size"
            )
        row_bytes = self.hidden * ITEM_BYTES[self.dtype]
        if row_bytes % ROW_BYTES_MULTIPLE:
            raise ValueError(
                f"a row of --hidden {self.hidden} {self.dtype} values has {row_bytes} bytes; "
                f"it must be a multiple of {ROW_BYTES_MULTIPLE}"
            )


def check_megatron() -> None:
    """Raise ``ValueError`` saying how to install megatron-core if it is missing."""
    try:
        found = importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ValueError('megatron-core is not installed; run: pip install "moe-ncclep[megatron]"')


def _check_out(out: str) -> None:
    path = Path(out)
    nearest = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise ValueError(f"--out {out}: {nearest} is a file, not a folder")
    if not os.access(nearest, os.W_OK):
        raise ValueError(f"--out {out}: no permission to write in {nearest}")
