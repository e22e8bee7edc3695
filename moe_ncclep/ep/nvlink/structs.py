"""The kernels' argument structs (``csrc/params.h``, ``csrc/layout.h``) for ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p

MAX_RANKS = 72
MAX_TOP_K = 32
MAX_EXPERTS = 2048
MAX_CTAS = 256
HEADER_WORDS = 64

AGREED, COMPLAINT, GROW, FAILED = range(4)
"""What a route kernel reports."""


class Workspace(ctypes.Structure):
    """Sizes of a rank's communication buffer."""

    _fields_ = (
        ("num_ranks", c_int32),
        ("num_local_experts", c_int32),
        ("routing_bytes", c_int64),
        ("staging_bytes", c_int64),
        ("num_flags", c_int64),
    )


class Operation(ctypes.Structure):
    """What every kernel needs."""

    _fields_ = (
        ("workspace", Workspace),
        ("peers", c_uint64 * MAX_RANKS),
        ("report", c_void_p),
        ("timeout_ns", c_uint64),
        ("rank", c_int32),
        ("num_ctas", c_int32),
    )


class Plan(ctypes.Structure):
    """Addresses and sizes of a routing's index tensors."""

    _fields_ = (
        ("item_token", c_void_p),
        ("item_rows", c_void_p),
        ("item_columns", c_void_p),
        ("item_starts", c_void_p),
        ("token_ranks", c_void_p),
        ("pair_ranks", c_void_p),
        ("token_item", c_void_p),
        ("zone_starts", c_void_p),
        ("zone_sizes", c_void_p),
        ("zone_valid", c_void_p),
        ("dropped", c_void_p),
        ("num_rows", c_int64),
        ("num_tokens", c_int32),
        ("top_k", c_int32),
        ("num_local_experts", c_int32),
        ("capacity", c_int32),
        ("num_rounds", c_int32),
        ("padding", c_int32),
    )


class RouteParams(ctypes.Structure):
    """Arguments of the route kernel."""

    _fields_ = (
        ("op", Operation),
        ("plan", Plan),
        ("topk_idx", c_void_p),
        ("header", c_int64 * HEADER_WORDS),
        ("alignment", c_int64),
        ("budget", c_int64),
        ("rows_per_expert", c_int64),
        ("sequence", c_uint64),
        ("id_bytes", c_int32),
        ("num_experts", c_int32),
        ("plan_tokens", c_int32),
        ("refused_word", c_int32),
        ("needs_grad_word", c_int32),
        ("tokens_word", c_int32),
        ("agreed_begin", c_int32),
        ("agreed_end", c_int32),
    )


class DispatchParams(ctypes.Structure):
    """Arguments of the dispatch kernels."""

    _fields_ = (
        ("op", Operation),
        ("plan", Plan),
        ("x", c_void_p),
        ("probs", c_void_p),
        ("rows", c_void_p),
        ("scales", c_void_p),
        ("row_probs", c_void_p),
        ("row_bytes", c_int64),
        ("hidden", c_int32),
        ("dtype", c_int32),
        ("fp8", c_int32),
        ("power_of_two", c_int32),
        ("send_ctas", c_int32),
        ("padding", c_int32),
    )


class CombineParams(ctypes.Structure):
    """Arguments of the combine kernel."""

    _fields_ = (
        ("op", Operation),
        ("plan", Plan),
        ("rows", c_void_p),
        ("row_probs", c_void_p),
        ("y", c_void_p),
        ("pair_probs", c_void_p),
        ("row_bytes", c_int64),
        ("dtype", c_int32),
        ("padding", c_int32),
    )


class Failure(ctypes.Structure):
    """Why a rank gave up waiting; ``code`` 0 if none did."""

    _fields_ = (("code", c_uint64), ("expected", c_uint64), ("seen", c_uint64))


class Report(ctypes.Structure):
    """What the route kernel tells the host."""

    _fields_ = (
        ("sequence", c_uint64),
        ("verdict", c_int64),
        ("max_tokens", c_int64),
        ("needs_grad", c_int64),
        ("remote_tokens", c_int64),
        ("remote_pairs", c_int64),
        ("failure", Failure),
        ("counts", c_int64 * MAX_EXPERTS),
    )


class Control(ctypes.Structure):
    """State of a rank between operations, at the start of its buffer."""

    _fields_ = (
        ("epoch", c_uint64),
        ("finished_ctas", c_uint32),
        ("drained", c_uint32 * MAX_RANKS),
        ("padding", c_uint32),
    )


IN_ORDER = (Workspace, Operation, Plan, RouteParams, DispatchParams, CombineParams, Report, Control)
"""As ``ncclep_sizeof`` numbers them."""

_pointer = ctypes.POINTER
SIGNATURES = {
    "ncclep_route": (c_int32, (_pointer(RouteParams), c_void_p)),
    "ncclep_dispatch": (c_int32, (_pointer(DispatchParams), c_void_p)),
    "ncclep_dispatch_fp8": (c_int32, (_pointer(DispatchParams), c_void_p)),
    "ncclep_combine": (c_int32, (_pointer(CombineParams), c_void_p)),
    "ncclep_workspace_bytes": (c_int64, (_pointer(Workspace),)),
    "ncclep_slot_bytes": (c_int64, (c_int64, c_int32, c_int32, c_int32)),
    "ncclep_num_segments": (c_int32, (c_int64,)),
    "ncclep_capacity": (c_int64, (_pointer(Workspace), c_int64, c_int64)),
    "ncclep_offset": (c_int64, (_pointer(Workspace), c_int32)),
    "ncclep_sizeof": (c_int64, (c_int32,)),
    "ncclep_wait_report": (c_int32, (c_void_p, c_uint64, c_uint64)),
    "ncclep_fp8_fits": (c_int32, (c_int32, c_int32, c_int64, c_int32)),
    "ncclep_error_string": (c_char_p, (c_int32,)),
}
"""Result and argument types of the library's functions."""
