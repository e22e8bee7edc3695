"""Everything a caller can choose, declared once.

Fields with ``flag=True`` in their metadata are deployment choices: they also become Megatron command line flags
(``--ncclep-engine`` for ``engine``) and environment variables (``MOE_NCCLEP_ENGINE``). The others belong to one call.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

ENGINES = ("auto", "local", "collective", "nvlink")
PAYLOADS = ("input", "fp8")
ROW_FORMATS = ("input", "fp8")
MAX_ALIGNMENT = 4096
MAX_ROWS = 2**40
"""Rows of a budget or of an expert: products with E and bytes of a row stay within 64 bits."""
MAX_SMS = 2**16
MAX_BUFFER_MIB = 2**20
MAX_TOKENS = 2**24
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 86_400


def _flag(default: Any, help: str, *, type: type = str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"flag": True, "help": help, "type": type, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class EPOptions:
    """Options of :func:`moe_ncclep.ep.dispatch`; equal on every rank of the group, except ``budget``,
    ``timeout_s`` and ``nvtx``.

    Nothing is checked at construction: :meth:`validate` runs inside ``dispatch``, where a bad value on one rank is
    reported as the same ``ValueError`` on all of them instead of leaving the others waiting.
    """

    engine: str = _flag(
        "auto", "engine that moves the tokens; auto takes the best that every rank has", choices=ENGINES
    )
    payload: str = _flag(
        "input",
        "wire format of dispatch and of the backward of combine: input (the dtype of the tokens) or fp8 "
        "(E4M3, one float32 scale per 1x128 block)",
        choices=PAYLOADS,
    )
    fp8_power_of_two: bool = _flag(False, "round the scales of an fp8 payload up to powers of two", type=bool)
    num_sms: int | None = _flag(
        None,
        "SMs a GPU engine may occupy; default: chosen by the engine. Engines without own kernels ignore it",
        type=int,
    )
    timeout_s: float = _flag(
        300.0,
        "seconds a GPU engine waits for another rank inside a kernel before it gives up with an error",
        type=float,
    )
    buffer_mib: int | None = _flag(
        None,
        "upper bound of a GPU engine's communication buffer, in MiB per group; default: chosen by the engine",
        type=int,
    )
    max_tokens: int | None = _flag(
        None,
        "tokens per rank that a GPU engine sets memory aside for ahead; default: from the first dispatch",
        type=int,
    )
    nvtx: bool = _flag(True, "NVTX ranges around each phase (only where CUDA is initialised)", type=bool)

    alignment: int = 1
    """Rows of each expert are padded with zero rows to a multiple of this."""
    budget: int | None = None
    """Fixed number of output rows of this rank; what does not fit is dropped, counted and reported. None: exact."""
    rows_per_expert: int | None = None
    """Fixed number of rows of every local expert (drop-and-pad layout). Excludes ``budget``."""
    row_format: str = "input"
    """What the experts get: rows in the dtype of the tokens (``"input"``), or E4M3 rows with their scales as they
    travelled (``"fp8"``, with that payload only). Gradients always arrive in the dtype of the tokens."""

    @property
    def fixed_sizes(self) -> bool:
        """Whether the number of output rows is chosen by the caller instead of counted."""
        return self.budget is not None or self.rows_per_expert is not None

    def validate(self) -> None:
        """Raise ``ValueError`` naming the first bad value and its limit."""
        for name, choices in (("engine", ENGINES), ("payload", PAYLOADS), ("row_format", ROW_FORMATS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        for name in ("fp8_power_of_two", "nvtx"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.timeout_s, (int, float)) or isinstance(self.timeout_s, bool):
            raise ValueError(f"timeout_s must be a number, got {self.timeout_s!r}")
        if not MIN_TIMEOUT_S <= self.timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s must be between {MIN_TIMEOUT_S} and {MAX_TIMEOUT_S}, got {self.timeout_s}")
        for name, low, high in (
            ("num_sms", 1, MAX_SMS),
            ("buffer_mib", 1, MAX_BUFFER_MIB),
            ("max_tokens", 1, MAX_TOKENS),
            ("alignment", 1, MAX_ALIGNMENT),
            ("budget", 0, MAX_ROWS),
            ("rows_per_expert", 0, MAX_ROWS),
        ):
            value = getattr(self, name)
            if value is None and name != "alignment":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be an integer, got {value!r}")
            if not low <= value <= high:
                raise ValueError(f"{name} must be between {low} and {high}, got {value}")
        if self.row_format == "fp8" and self.payload != "fp8":
            raise ValueError(
                f"row_format 'fp8' delivers rows as they travelled: it needs payload 'fp8', got {self.payload!r}"
            )
        if self.budget is not None and self.rows_per_expert is not None:
            raise ValueError(
                f"budget ({self.budget}) and rows_per_expert ({self.rows_per_expert}) exclude each other: "
                "rows_per_expert already fixes the number of rows"
            )
        if self.rows_per_expert is not None and self.rows_per_expert % self.alignment:
            raise ValueError(f"rows_per_expert {self.rows_per_expert} is not a multiple of alignment {self.alignment}")

    def replace(self, **changes: Any) -> EPOptions:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def flag_fields() -> tuple[dataclasses.Field, ...]:
    """Fields that become command line flags and environment variables, in order of declaration."""
    return tuple(f for f in dataclasses.fields(EPOptions) if f.metadata.get("flag"))
