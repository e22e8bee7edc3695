"""High-throughput dispatch and combine between GPUs that reach each other's memory, with kernels of our own.

Rows cross the wire once per destination rank and are placed in their final rows while others are still under way; no
barrier, no phase that all ranks wait for. See ``csrc/``.
"""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ncclep.ep import agreement
from moe_ncclep.ep.checks import check_dispatch
from moe_ncclep.ep.engines.base import Engine
from moe_ncclep.ep.handle import DispatchHandle, Traffic
from moe_ncclep.ep.nvlink import build, library, memory, structs
from moe_ncclep.ep.nvlink.buffer import CommunicationBuffer
from moe_ncclep.ep.nvlink.domain import describe_device, domain_problem
from moe_ncclep.ep.nvlink.endpoint import DTYPES, Endpoint, RouteCall, RouteReport
from moe_ncclep.ep.nvlink.failure import is_disagreement
from moe_ncclep.ep.nvlink.plan import RoutePlan
from moe_ncclep.ep.nvlink.sizing import Demand, tokens_to_set_aside
from moe_ncclep.ep.options import EPOptions
from moe_ncclep.ep.placement import Zones
from moe_ncclep.ep.routing import Routing

_WORDS = {
    "refused_word": agreement.STATUS,
    "needs_grad_word": agreement.NEEDS_GRAD,
    "agreed_words": (agreement.VALUES, agreement.TEXT),
    "tokens_word": structs.HEADER_WORDS - 1,
}
"""Where the route kernel finds what in a header."""
_MAX_ROWS = 2**31 - 1
_MIN_CTAS = 2
_OTHERWISE = "engine 'collective' can do that"


class NVLinkEngine(Engine):
    """Own kernels over symmetric memory. With a budget or ``rows_per_expert`` it never waits for the device, so CUDA
    graphs can capture it: ids out of range then count as dropped, a call that differs between ranks raises at the next
    call, and memory cannot grow beyond what the first dispatch or ``max_tokens`` asked for.

    The first dispatch sets up one communication buffer for the group (:mod:`moe_ncclep.ep.nvlink.sizing` says how
    large), which all layers share and :func:`~moe_ncclep.ep.close_engine` frees. Operations run on the current stream;
    on another stream than the one before, behind it.

    Probs of any dtype travel in float32.

    A rank that waits for another longer than ``timeout_s`` gives up: results become nan, and the next call (with exact
    sizes: this one) raises :class:`~moe_ncclep.ep.nvlink.failure.PeerFailure` on every surviving rank.
    """

    name = "nvlink"
    _device_type = "cuda"

    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__(group)
        memory.together(group, library.load if self.rank == 0 else lambda: None)  # compiles; the others find the result
        self._library = memory.together(group, library.load)
        self._buffer = CommunicationBuffer(self._library, self.rank)

    @classmethod
    def unavailable(cls, group: dist.ProcessGroup | None) -> str | None:
        """Needs CUDA GPUs from Hopper on, a compiler or compiled kernels, and a provider of symmetric memory."""
        if group is None:
            return "torch.distributed is not initialised"
        size = dist.get_world_size(group)
        if not 2 <= size <= structs.MAX_RANKS:
            return f"needs a group of 2 to {structs.MAX_RANKS} ranks, this one has {size}"
        if not torch.cuda.is_available():
            return "needs CUDA GPUs"
        major, minor = torch.cuda.get_device_capability()
        if major < 9:
            return f"needs compute capability 9.0 or higher, this GPU has {major}.{minor}"
        return build.missing_toolchain() or memory.missing_providers()

    @classmethod
    def probe(cls, group: dist.ProcessGroup, asked_for: bool) -> str | None:
        """Whether all ranks reach each other."""
        return domain_problem(agreement.gather_objects(group, describe_device()), asked_for)

    # ---- the contract

    def route(self, x: Tensor, routing: Routing, options: EPOptions) -> DispatchHandle:
        """See :meth:`Engine.route`."""
        self._raise_if_failed()
        if _capturing():
            self._check_capture(options)
        try:
            self._check(x, routing, options)
            topk_idx = routing.topk_idx.contiguous()
            words = agreement.header_words(
                values=agreement.agreed_values(x, routing, options), needs_grad=routing.needs_grad(x)
            )
        except ValueError as error:
            self.refuse(str(error))
        except Exception as error:  # whatever it is, the other ranks are already waiting
            self.refuse(f"{type(error).__name__}: {error}")
        if self._endpoint is None:
            tokens = tokens_to_set_aside(x.shape[0], options.max_tokens)
            self._buffer.set_up(self.group, self._demand(x, routing, options, tokens))
        elif options.fixed_sizes:
            self._make_room(x, routing, options)
        self._endpoint.timeout_s = options.timeout_s
        while True:
            call = self._call(topk_idx, routing.num_experts, x, options, words)
            plan, sequence = self._endpoint.start_route(call)
            if not call.exact:
                return self._handle(x, routing, options, plan, None)
            report = self._endpoint.read_report(sequence, routing.num_experts // self.size)
            if report.verdict == structs.COMPLAINT:
                self._explain(topk_idx)
            too_small = report.verdict == structs.GROW or not plan.shape.usable
            if too_small or report.max_tokens > plan.shape.capacity:
                tokens = tokens_to_set_aside(report.max_tokens, options.max_tokens)
                grown = self._buffer.grow(self.group, self._demand(x, routing, options, tokens))
                if grown or too_small:
                    continue
            return self._handle(x, routing, options, plan, report)

    def dispatch(
        self, handle: DispatchHandle, x: Tensor, probs: Tensor | None, *, row_format: str = "input"
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See :meth:`Engine.dispatch`."""
        options = handle.options
        self._raise_if_failed()
        rows, scales, row_probs = self._endpoint.dispatch(
            handle.plan,
            x,
            None if probs is None else probs.float(),
            handle.num_rows,
            payload_fp8=options.payload == "fp8",
            rows_fp8=row_format == "fp8",
            power_of_two=options.fp8_power_of_two,
            num_ctas=self._num_ctas(options),
        )
        return rows, scales, None if probs is None else row_probs.to(probs.dtype)

    def combine(self, handle: DispatchHandle, rows: Tensor, row_probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Engine.combine`."""
        self._raise_if_failed()
        wide = None if row_probs is None else row_probs.float()
        y, pair_probs = self._endpoint.combine(handle.plan, rows, wide, num_ctas=self._num_ctas(handle.options))
        return y, None if row_probs is None else pair_probs.to(row_probs.dtype)

    def refuse(self, problem: str) -> None:
        """Publish an error in place of a routing; raises ``ValueError`` on every rank. In a capture, which the other
        ranks need not be in, on this one alone."""
        if _capturing():
            raise ValueError(problem)
        if self._endpoint is None:
            self._buffer.set_up(self.group, problem)  # raises
        nothing = torch.empty(0, 1, dtype=torch.int32, device=self._endpoint.device)
        call = RouteCall(
            topk_idx=nothing,
            num_experts=self.size,
            hidden=8,
            dtype=torch.bfloat16,
            fp8=False,
            alignment=1,
            budget=None,
            rows_per_expert=None,
            header=self._with_tokens(agreement.header_words(problem=problem), 0),
            num_ctas=_MIN_CTAS,
            **_WORDS,
        )
        _, sequence = self._endpoint.start_route(call)
        self._endpoint.read_report(sequence, 1)
        self._explain(nothing)

    def close(self) -> None:
        """Free the communication buffer. Collective, unless a rank has failed."""
        self._buffer.close()

    # ---- one exchange

    @property
    def _endpoint(self) -> Endpoint | None:
        return self._buffer.endpoint

    def _raise_if_failed(self) -> None:
        endpoint = self._endpoint
        if endpoint is None or not endpoint.failed:
            return
        if is_disagreement(endpoint.failure):
            complaint = agreement.complaint(endpoint.last_headers())
            raise ValueError(f"an earlier call was wrong: {complaint or 'the ranks did not make the same call'}")
        endpoint.raise_if_failed()

    def _explain(self, topk_idx: Tensor) -> NoReturn:
        """Raise what all ranks complain about in the latest exchange; every rank comes here."""
        headers = self._endpoint.last_headers()
        complaint = agreement.complaint(headers)
        if complaint is None:  # then some expert id is wrong, which only its rank can name
            mine = (int(topk_idx.min()), int(topk_idx.max())) if topk_idx.numel() else (-1, -1)
            complaint = agreement.complaint(headers, agreement.gather_objects(self.group, mine))
        raise ValueError(complaint or "the ranks did not make the same call")

    def _check_capture(self, options: EPOptions) -> None:
        if self._endpoint is None:
            raise ValueError("dispatch once before the capture: this sets up memory, which a CUDA graph cannot do")
        if not options.fixed_sizes:
            raise ValueError(
                "a CUDA graph cannot capture a dispatch with exact sizes, for which the host reads the number of rows: "
                "set budget or rows_per_expert"
            )
        self._buffer.note_capture()

    def _check(self, x: Tensor, routing: Routing, options: EPOptions) -> None:
        check_dispatch(x, routing, self.size, options)
        if x.device.type != self._device_type:
            raise ValueError(f"engine {self.name} moves tokens on CUDA devices, these are on {x.device}")
        if x.dtype not in DTYPES:
            raise ValueError(
                f"engine {self.name} moves {', '.join(map(str, DTYPES))} tokens, got {x.dtype}; {_OTHERWISE}"
            )
        top_k = routing.topk_idx.shape[1]
        if top_k > structs.MAX_TOP_K:
            raise ValueError(
                f"top-k {top_k} is over the limit of {structs.MAX_TOP_K} of engine {self.name}; {_OTHERWISE}"
            )
        rows = options.rows_per_expert
        fixed = options.budget if rows is None else rows * (routing.num_experts // self.size)
        if fixed is not None and fixed > _MAX_ROWS:
            raise ValueError(f"{fixed} rows are over the limit of {_MAX_ROWS} of engine {self.name}")
        if options.num_sms is not None and options.num_sms < _MIN_CTAS:
            raise ValueError(f"num_sms must be at least {_MIN_CTAS} for engine {self.name}, got {options.num_sms}")
        if options.payload == "fp8":
            self._check_fp8(x, top_k, options)

    def _check_fp8(self, x: Tensor, top_k: int, options: EPOptions) -> None:
        hidden, row_bytes = x.shape[1], x.shape[1] * x.element_size()
        if options.row_format == "fp8" and hidden % 16:
            raise ValueError(
                f"FP8 rows of engine {self.name} need a hidden size that is a multiple of 16, got {hidden}"
            )
        if not self._library.ncclep_fp8_fits(hidden, top_k, row_bytes, True):
            raise ValueError(
                f"a row of {hidden} {x.dtype} values is too large for the FP8 payload of engine {self.name}: it must "
                "fit into the shared memory of an SM twice, quantised and restored"
            )

    def _call(self, topk_idx: Tensor, num_experts: int, x: Tensor, options: EPOptions, words: list[int]) -> RouteCall:
        return RouteCall(
            topk_idx=topk_idx,
            num_experts=num_experts,
            hidden=x.shape[1],
            dtype=x.dtype,
            fp8=options.payload == "fp8",
            alignment=options.alignment,
            budget=options.budget,
            rows_per_expert=options.rows_per_expert,
            header=self._with_tokens(words, topk_idx.shape[0]),
            num_ctas=self._num_ctas(options),
            **_WORDS,
        )

    def _make_room(self, x: Tensor, routing: Routing, options: EPOptions) -> None:
        """Without an exchange that the host could wait for: grow for what all ranks see alike, the shape of a row.
        Only this rank sees that it has more tokens than memory was set aside for."""
        tokens = self._buffer.demand.max_tokens
        if x.shape[0] > tokens:
            problem = (
                f"{x.shape[0]} tokens, but memory was set aside for {tokens}; with fixed sizes it cannot grow: set "
                "max_tokens, or make the first dispatch the largest"
            )
            self.refuse(problem)
        self._buffer.grow(self.group, self._demand(x, routing, options, tokens))

    def _handle(
        self, x: Tensor, routing: Routing, options: EPOptions, plan: RoutePlan, report: RouteReport | None
    ) -> DispatchHandle:
        if report is not None:
            zones = Zones.from_counts(report.counts, options)
            num_rows, sizes, valid = zones.num_rows, zones.sizes, zones.valid
            if num_rows > _MAX_ROWS:  # the same on no other rank, but nothing is under way yet
                raise ValueError(f"{num_rows} received rows are over the limit of {_MAX_ROWS}")
            needs_grad = report.needs_grad
            traffic = Traffic.of(x, options, report.remote_tokens, report.remote_pairs)
        else:
            num_local = routing.num_experts // self.size
            valid, traffic = plan.int64("zone_valid"), None
            needs_grad = torch.is_grad_enabled()  # whether a peer needs it is not known here
            if options.rows_per_expert is not None:
                num_rows = options.rows_per_expert * num_local
                sizes = torch.full((num_local,), options.rows_per_expert)
            else:
                num_rows, sizes = options.budget, plan.int64("zone_sizes")
        return DispatchHandle(
            engine=self,
            options=options,
            num_tokens=x.shape[0],
            top_k=routing.topk_idx.shape[1],
            hidden=x.shape[1],
            dtype=x.dtype,
            num_experts=routing.num_experts,
            num_rows=num_rows,
            tokens_per_expert=sizes,
            valid_per_expert=valid,
            dropped=plan.int64("dropped")[0],
            needs_grad=needs_grad,
            traffic=traffic,
            plan=plan,
        )

    def _num_ctas(self, options: EPOptions) -> int:
        available = self._endpoint.num_sms
        return available if options.num_sms is None else min(options.num_sms, available)

    def _with_tokens(self, words: list[int], num_tokens: int) -> list[int]:
        return [*words, *[0] * (structs.HEADER_WORDS - 1 - len(words)), num_tokens]

    def _demand(self, x: Tensor, routing: Routing, options: EPOptions, max_tokens: int) -> Demand:
        return Demand.of(
            self._library,
            num_ranks=self.size,
            max_tokens=max_tokens,
            top_k=routing.topk_idx.shape[1],
            hidden=x.shape[1],
            row_bytes=x.shape[1] * x.element_size(),
            fp8=options.payload == "fp8",
            buffer_mib=options.buffer_mib,
        )


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
