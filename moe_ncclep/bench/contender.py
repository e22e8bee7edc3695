"""What ``bench`` asks of everything that it times against each other between real processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor


class Contender(ABC):
    """Route, dispatch and combine of one implementation, without autograd."""

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def route(self, topk_idx: Tensor, x: Tensor, probs: Tensor) -> Any:
        """Exchange the routing; returns what the other calls take as ``plan``."""

    @abstractmethod
    def dispatch(self, plan: Any, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Rows ``[N, H]`` by (expert, source rank, token) and their probs ``[N]``."""

    @abstractmethod
    def combine(self, plan: Any, rows: Tensor, row_probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens ``[T, H]`` and the gradient of the probs ``[T, K]``."""

    @abstractmethod
    def wire_bytes(self, plan: Any) -> int:
        """Bytes of rows that leave this rank in dispatch."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Free what the contender holds. Collective."""
