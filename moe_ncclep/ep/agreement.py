"""The header that precedes every dispatch: counts, and the agreement of all ranks that the call is sound.

One all-gather of a fixed number of words, whatever is wrong on this rank, so that a mistake becomes the same
``ValueError`` on every rank and never a hang. It carries what the counts exchange would have carried anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ncclep.ep.checks import MAX_EXPERTS, PAYLOAD_DTYPES
from moe_ncclep.ep.options import ENGINES, PAYLOADS, ROW_FORMATS, EPOptions
from moe_ncclep.ep.routing import Routing, describe_bad_ids

# torch 2.13 renamed it and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_OK, _REFUSED = 0, 1
_NONE = -1
_MESSAGE_BYTES = 256
_AGREED = (
    "num_experts",
    "top_k",
    "hidden size",
    "dtype of the tokens",
    "dtype of the probs",
    "alignment",
    "rows_per_expert",
    "whether sizes are fixed (budget or rows_per_expert)",
    "payload",
    "fp8_power_of_two",
    "row_format",
    "engine",
    "num_sms",
    "buffer_mib",
    "max_tokens",
    "device of the tokens",
)
DEVICES = ("cpu", "cuda")
"""Kinds of devices that tokens may be on. Their position is their code on the wire."""


def _number_or_none(code: int) -> str:
    return "none" if code == _NONE else str(code)


_DECODE = {
    "dtype of the tokens": lambda code: str(PAYLOAD_DTYPES[code]),
    "dtype of the probs": lambda code: "none" if code == _NONE else str(PAYLOAD_DTYPES[code]),
    "rows_per_expert": _number_or_none,
    "whether sizes are fixed (budget or rows_per_expert)": lambda code: "fixed" if code else "exact",
    "payload": lambda code: PAYLOADS[code],
    "fp8_power_of_two": lambda code: str(bool(code)),
    "row_format": lambda code: ROW_FORMATS[code],
    "engine": lambda code: ENGINES[code],
    "num_sms": _number_or_none,
    "buffer_mib": _number_or_none,
    "max_tokens": _number_or_none,
    "device of the tokens": lambda code: DEVICES[code],
}
# Layout of a header, in int64 words: status, lowest id, highest id, needs_grad, agreed values, message,
# tokens for each rank [R], pairs for each expert [MAX_EXPERTS].
STATUS, _LOWEST, _HIGHEST, NEEDS_GRAD, VALUES = range(5)
TEXT = VALUES + len(_AGREED)
_COUNTS = TEXT + _MESSAGE_BYTES // 8


def gather_objects(group: dist.ProcessGroup | None, mine: Any) -> list[Any]:
    """``mine`` of every rank, over any backend; also a barrier of the hosts. Just ``[mine]`` without a group."""
    if group is None:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def first_reason(reasons: list[str | None]) -> str | None:
    """The first rank's that has one, with the rank if there are several; None if all are None."""
    for rank, reason in enumerate(reasons):
        if reason is not None:
            return reason if len(reasons) == 1 else f"{reason} (rank {rank})"
    return None


@dataclass(frozen=True)
class Counts:
    """What every rank sends, on the host.

    ``tokens[s][d]``: distinct tokens from rank s to rank d. ``pairs`` ``[R, E]`` int64: pairs of rank s for expert e.
    ``needs_grad``: whether any rank's tokens or probs need a gradient.
    """

    tokens: list[list[int]]
    pairs: Tensor
    needs_grad: bool


def _code(value: int | None) -> int:
    return _NONE if value is None else value


def agreed_values(x: Tensor, routing: Routing, options: EPOptions) -> list[int]:
    """The numbers that must be equal on all ranks, in the order of the header. Valid for checked arguments only."""
    probs = routing.carried_probs()
    return [
        routing.num_experts,
        routing.topk_idx.shape[1],
        x.shape[1],
        PAYLOAD_DTYPES.index(x.dtype),
        _NONE if probs is None else PAYLOAD_DTYPES.index(probs.dtype),
        options.alignment,
        _code(options.rows_per_expert),
        int(options.fixed_sizes),
        PAYLOADS.index(options.payload),
        int(options.fp8_power_of_two),
        ROW_FORMATS.index(options.row_format),
        ENGINES.index(options.engine),
        _code(options.num_sms),
        _code(options.buffer_mib),
        _code(options.max_tokens),
        DEVICES.index(x.device.type),
    ]


def header_words(*, problem: str | None = None, values: list[int] | None = None, needs_grad: bool = False) -> list[int]:
    """The words of a header before its counts, without the extremes of the ids."""
    text = (problem or "").encode(errors="backslashreplace")[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    message = torch.frombuffer(bytearray(text), dtype=torch.int64).tolist()
    if problem is not None:
        return [_REFUSED, _NONE, _NONE, 0, *[0] * len(_AGREED), *message]
    return [_OK, _NONE, _NONE, int(needs_grad), *values, *message]


def make_header(
    group_size: int,
    device: torch.device,
    *,
    problem: str | None = None,
    values: list[int] | None = None,
    needs_grad: bool = False,
    topk_idx: Tensor | None = None,
    tokens_per_rank: Tensor | None = None,
    pairs_per_expert: Tensor | None = None,
) -> Tensor:
    """Build this rank's header on ``device``: either a ``problem``, or everything else."""
    header = torch.zeros(_COUNTS + group_size + MAX_EXPERTS, dtype=torch.int64)
    header[:_COUNTS] = torch.tensor(header_words(problem=problem, values=values, needs_grad=needs_grad))
    header = header.to(device)
    if problem is not None:
        return header
    if topk_idx.numel():
        header[_LOWEST], header[_HIGHEST] = torch.aminmax(topk_idx)
    header[_COUNTS : _COUNTS + group_size] = tokens_per_rank
    header[_COUNTS + group_size : _COUNTS + group_size + pairs_per_expert.numel()] = pairs_per_expert
    return header


def exchange(header: Tensor, group: dist.ProcessGroup) -> Counts:
    """Gather all headers (the only host sync of a dispatch) and agree.

    Raises:
        ValueError: on every rank of the group, with the same text, if any rank refused, routed to an expert that does
            not exist, or differs from rank 0 in a value that must be equal.
    """
    size = dist.get_world_size(group)
    gathered = header.new_empty(size * header.numel())
    _all_gather(gathered, header, group=group)
    headers = gathered.cpu().view(size, -1)
    problem = complaint(headers)
    if problem is not None:
        raise ValueError(problem)
    num_experts = int(headers[0, VALUES])
    tokens, pairs = headers[:, _COUNTS:].split([size, MAX_EXPERTS], dim=1)
    return Counts(tokens.tolist(), pairs[:, :num_experts], bool(headers[:, NEEDS_GRAD].any()))


def complaint(headers: Tensor, extremes: list[tuple[int, int]] | None = None) -> str | None:
    """What is wrong with a call, the same on every rank; None if nothing is.

    Args:
        headers: ``[R, >= words before the counts]`` int64 on the host, of all ranks.
        extremes: lowest and highest expert id of each rank, if the headers do not hold them.
    """
    for rank, header in enumerate(headers):
        if header[STATUS] == _REFUSED:
            text = header[TEXT:_COUNTS].contiguous().view(torch.uint8).numpy().tobytes()
            return f"rank {rank}: {text.rstrip(bytes(1)).decode(errors='ignore')}"
    agreed = headers[:, VALUES:TEXT].tolist()
    for rank, values in enumerate(agreed):
        for name, mine, first in zip(_AGREED, values, agreed[0], strict=True):
            if mine != first:
                show = _DECODE.get(name, str)
                return f"ranks disagree on {name}: {show(first)} on rank 0, {show(mine)} on rank {rank}"
    for rank, (lowest, highest) in enumerate(extremes or headers[:, _LOWEST:NEEDS_GRAD].tolist()):
        problem = describe_bad_ids(lowest, highest, agreed[0][0])
        if problem is not None:
            return f"rank {rank}: {problem}"
    return None
