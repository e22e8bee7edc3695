"""One rank's end of a set of communication buffers: launches the kernels, and reads what they report.

Knows nothing of process groups: several endpoints on one GPU make a group of virtual ranks, which is how the kernels
are tested and timed without a second GPU.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ncclep.ep import fp8
from moe_ncclep.ep.nvlink import library as native
from moe_ncclep.ep.nvlink import structs
from moe_ncclep.ep.nvlink.failure import PeerFailure, describe
from moe_ncclep.ep.nvlink.plan import PlanShape, RoutePlan
from moe_ncclep.ep.options import EPOptions

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Payloads the kernels move. Their position is their code."""

_ROUTE_CTAS = 64


@dataclass(frozen=True, kw_only=True)
class RouteCall:
    """Arguments of one exchange of the routing."""

    topk_idx: Tensor
    """``[T, K]`` integer, contiguous."""
    num_experts: int
    hidden: int
    dtype: torch.dtype
    fp8: bool
    alignment: int
    budget: int | None
    rows_per_expert: int | None
    header: list[int]
    """Words to publish; the other fields say where in it the kernel finds what."""
    refused_word: int
    needs_grad_word: int
    tokens_word: int
    agreed_words: tuple[int, int]
    num_ctas: int

    @property
    def exact(self) -> bool:
        """Whether the host has to know the number of rows."""
        return self.budget is None and self.rows_per_expert is None


@dataclass(frozen=True)
class RouteReport:
    """What the ranks told each other, read once on the host."""

    verdict: int
    max_tokens: int
    needs_grad: bool
    remote_tokens: int
    remote_pairs: int
    counts: Tensor
    """``[L]`` int64 on the host: pairs of each local expert."""


class Endpoint:
    """One rank of ``size`` with a communication buffer.

    Args:
        library: the compiled kernels.
        workspace: sizes of every rank's buffer.
        buffer: this rank's, ``[workspace_bytes]`` uint8, zeroed when no rank used it yet.
        peers: ``[size]`` int64, addresses of all ranks' buffers.
        plan_tokens: tokens of each rank that plans have room for.

    Attributes:
        timeout_s: seconds until a wait in a kernel gives up.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        workspace: structs.Workspace,
        buffer: Tensor,
        peers: Tensor,
        rank: int,
        plan_tokens: int,
    ):
        self.library, self.workspace, self.rank, self.plan_tokens = library, workspace, rank, plan_tokens
        self.buffer, self.device = buffer, buffer.device
        self._peers = (ctypes.c_uint64 * structs.MAX_RANKS)(*peers.tolist())
        self.size = workspace.num_ranks
        self.timeout_s = EPOptions().timeout_s
        self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        # The caching host allocator hands out memory that the device can write.
        self._report_memory = torch.zeros(ctypes.sizeof(structs.Report), dtype=torch.uint8, pin_memory=True)
        self._report = structs.Report.from_address(self._report_memory.data_ptr())
        self._sequence = 0
        self._last: tuple[torch.cuda.Stream, bool] | None = None

    # ---- the three operations

    def plan_shape(self, call: RouteCall) -> PlanShape:
        """Sizes of the plan of ``call``; the same on every rank but for T."""
        num_tokens, top_k = call.topk_idx.shape
        row_bytes = call.hidden * call.dtype.itemsize
        slot = self.library.ncclep_slot_bytes(row_bytes, call.hidden, top_k, call.fp8)
        plan_tokens = min(self.plan_tokens, self.workspace.routing_bytes // (4 * top_k))
        return PlanShape(
            num_ranks=self.size,
            num_tokens=num_tokens,
            top_k=top_k,
            num_local_experts=call.num_experts // self.size,
            plan_tokens=plan_tokens,
            capacity=min(self.library.ncclep_capacity(self.workspace, row_bytes, slot), plan_tokens),
        )

    def start_route(self, call: RouteCall) -> tuple[RoutePlan, int]:
        """Launch the exchange; returns the plan being filled, and the number of the report (0 for none)."""
        shape = self.plan_shape(call)
        plan = RoutePlan(shape, self.device)
        if call.exact:
            self._sequence += 1
        params = structs.RouteParams(
            op=self._operation(min(call.num_ctas, _ROUTE_CTAS)),
            plan=plan.struct,
            topk_idx=call.topk_idx.data_ptr(),
            alignment=call.alignment,
            budget=-1 if call.budget is None else call.budget,
            rows_per_expert=-1 if call.rows_per_expert is None else call.rows_per_expert,
            sequence=self._sequence if call.exact else 0,
            id_bytes=call.topk_idx.element_size(),
            num_experts=call.num_experts,
            plan_tokens=shape.plan_tokens,
            refused_word=call.refused_word,
            needs_grad_word=call.needs_grad_word,
            tokens_word=call.tokens_word,
            agreed_begin=call.agreed_words[0],
            agreed_end=call.agreed_words[1],
        )
        params.header[: len(call.header)] = call.header
        self._launch("route", self.library.ncclep_route, params)
        return plan, params.sequence

    def read_report(self, sequence: int, num_local_experts: int) -> RouteReport:
        """Wait for the report of an exchange with exact sizes: the one host synchronisation of a dispatch.

        Raises:
            PeerFailure: if some rank did not come.
        """
        report = self._report
        # Kernels give up by themselves; the host only has to outlast all of them.
        patience_ns = int((2 * self.timeout_s + 60) * 1e9)
        status = self.library.ncclep_wait_report(ctypes.addressof(report), sequence, patience_ns)
        if status == 2:
            raise PeerFailure(f"rank {self.rank}: the exchange of the routing did not end; is the GPU still working?")
        if status == 1 or report.verdict == structs.FAILED:
            torch.cuda.synchronize(self.device)
            self.raise_if_failed()
        return RouteReport(
            verdict=report.verdict,
            max_tokens=report.max_tokens,
            needs_grad=bool(report.needs_grad),
            remote_tokens=report.remote_tokens,
            remote_pairs=report.remote_pairs,
            counts=torch.tensor(report.counts[:num_local_experts], dtype=torch.int64),
        )

    def dispatch(
        self,
        plan: RoutePlan,
        x: Tensor,
        probs: Tensor | None,
        num_rows: int,
        *,
        payload_fp8: bool = False,
        rows_fp8: bool = False,
        power_of_two: bool = False,
        num_ctas: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Send ``x`` ``[T, H]`` and ``probs`` ``[T, K]`` float32: rows ``[N, H]``, their scales, probs ``[N]``."""
        x, probs, hidden = _aligned(x), None if probs is None else probs.contiguous(), x.shape[1]
        rows = x.new_empty(num_rows, hidden, dtype=torch.float8_e4m3fn if rows_fp8 else x.dtype)
        scales = x.new_empty(num_rows, fp8.num_blocks(hidden), dtype=torch.float32) if rows_fp8 else None
        row_probs = None if probs is None else probs.new_empty(num_rows)
        params = structs.DispatchParams(
            op=self._operation(num_ctas),
            plan=plan.for_rows(num_rows),
            x=x.data_ptr(),
            probs=_address(probs, plan),
            rows=rows.data_ptr(),
            scales=_address(scales, plan),
            row_probs=_address(row_probs, plan),
            row_bytes=hidden * x.element_size(),
            hidden=hidden,
            dtype=DTYPES.index(x.dtype),
            fp8=payload_fp8,
            power_of_two=power_of_two,
            send_ctas=_send_ctas(num_ctas, rows_fp8),
        )
        kernel = self.library.ncclep_dispatch_fp8 if payload_fp8 else self.library.ncclep_dispatch
        self._launch("dispatch", kernel, params, plan)
        return rows, scales, row_probs

    def combine(
        self, plan: RoutePlan, rows: Tensor, row_probs: Tensor | None, *, num_ctas: int
    ) -> tuple[Tensor, Tensor | None]:
        """Sum ``rows`` ``[N, H]`` at their tokens ``[T, H]``; ``row_probs`` ``[N]`` float32 go to ``[T, K]``."""
        rows, row_probs = _aligned(rows), None if row_probs is None else row_probs.contiguous()
        num_tokens, top_k = plan.shape.num_tokens, plan.shape.top_k
        y = rows.new_empty(num_tokens, rows.shape[1])
        pair_probs = None if row_probs is None else row_probs.new_empty(num_tokens, top_k)
        params = structs.CombineParams(
            op=self._operation(num_ctas),
            plan=plan.for_rows(rows.shape[0]),
            rows=rows.data_ptr(),
            row_probs=_address(row_probs, plan),
            y=y.data_ptr(),
            pair_probs=_address(pair_probs, plan),
            row_bytes=rows.shape[1] * rows.element_size(),
            dtype=DTYPES.index(rows.dtype),
        )
        self._launch("combine", self.library.ncclep_combine, params, plan)
        return y, pair_probs

    # ---- state

    @property
    def failed(self) -> bool:
        """Whether a kernel of this rank, or a peer, gave up. Reads host memory only."""
        return self._report.failure.code != 0

    def raise_if_failed(self) -> None:
        """Raise :class:`PeerFailure` if a kernel of this rank, or a peer, gave up."""
        if self.failed:
            raise PeerFailure(describe(self.failure, self.timeout_s))

    @property
    def failure(self) -> structs.Failure:
        """The failure record, on the host."""
        return self._report.failure

    def last_headers(self) -> Tensor:
        """``[size, HEADER_WORDS]`` int64 on the host: what all ranks published in this rank's latest exchange.

        Raises:
            PeerFailure: if some rank did not.
        """
        torch.cuda.synchronize(self.device)
        start = self.library.ncclep_offset(self.workspace, 1)
        halves = self.buffer[start : start + 8 * 2 * self.size * 2 * structs.HEADER_WORDS].view(torch.int64)
        deadline = time.monotonic() + self.timeout_s
        while True:
            headers, missing = latest_headers(halves.cpu().view(2, self.size, structs.HEADER_WORDS, 2), self.rank)
            if not missing:
                return headers
            if time.monotonic() > deadline:  # the kernel has waited for the words it needs; the rest was on its way
                raise PeerFailure(f"rank {self.rank}: the routing of rank {missing[0]} did not arrive completely")
            time.sleep(0.001)

    # ---- launching

    def _operation(self, num_ctas: int) -> structs.Operation:
        return structs.Operation(
            workspace=self.workspace,
            peers=self._peers,
            report=self._report_memory.data_ptr(),
            timeout_ns=int(self.timeout_s * 1e9),
            rank=self.rank,
            num_ctas=num_ctas,
        )

    def _launch(self, what: str, kernel, params: ctypes.Structure, plan: RoutePlan | None = None) -> None:
        stream = torch.cuda.current_stream(self.device)
        self._follow(stream)
        if plan is not None:
            plan.memory.record_stream(stream)
        native.check(self.library, kernel(params, stream.cuda_stream), what)

    def _follow(self, stream: torch.cuda.Stream) -> None:
        """Order this operation behind the previous one, also if that ran on another stream."""
        capturing = torch.cuda.is_current_stream_capturing()
        if self._last is not None:
            last, was_capturing = self._last
            # A capture is ordered against everything else by whoever replays it.
            if last != stream and capturing == was_capturing:
                stream.wait_event(last.record_event())
        self._last = (stream, capturing)


def latest_headers(halves: Tensor, rank: int) -> tuple[Tensor, list[int]]:
    """Headers of the latest exchange that ``rank`` took part in, and the ranks of which some word is missing.

    Args:
        halves: ``[2, R, HEADER_WORDS, 2]`` int64, for both parities: the halves of each word, the epoch above them.
    """
    epochs, values = halves >> 32 & 0xFFFFFFFF, halves & 0xFFFFFFFF
    mine = epochs[:, rank, 0, 0]
    latest = int(mine.argmax())
    arrived = (epochs[latest] == mine[latest]).all(dim=2).all(dim=1)
    words = values[latest, :, :, 0] | values[latest, :, :, 1] << 32
    return words, torch.nonzero(~arrived).flatten().tolist()


def _aligned(rows: Tensor) -> Tensor:
    """``rows`` contiguous and at a multiple of 16 bytes, as bulk copies need them."""
    rows = rows.contiguous()
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()


def _send_ctas(num_ctas: int, rows_fp8: bool) -> int:
    """Thread blocks that only send, as measured best on an H200: the fewer there are, the more they are needed to place
    rows; FP8 rows take half as long to place, but no less to quantise."""
    share = 0.4 if rows_fp8 else 1 / 3 if num_ctas > 24 else 1 / 4
    return max(1, int(num_ctas * share))


def _address(tensor: Tensor | None, plan: RoutePlan) -> int | None:
    """None for no tensor. An empty tensor has no address, but it is not none: any will do."""
    return None if tensor is None else tensor.data_ptr() or plan.memory.data_ptr()
