"""The arithmetic of ``csrc/layout.h`` and ``csrc/schedule.h``, and what the library offers the host of it."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_int32, c_int64, c_uint32, c_uint64

from moe_ncclep.ep.nvlink.structs import Workspace
from tests.nvlink.native import compile_shared

REGIONS = {
    "control": "sizeof(Control)",
    "counts": "8 * kMaxCtas * w->counts_columns()",
    "failure": "sizeof(Failure)",
    "arrivals": "8 * int64_t(w->num_ranks)",
    "credits": "8 * int64_t(w->num_ranks)",
    "headers": "2 * w->num_ranks * int64_t(8 * kTaggedHeaderWords)",
    "routing": "2 * w->num_ranks * w->routing_bytes",
    "flags": "2 * w->num_ranks * 8 * w->num_flags",
    "staging": "2 * w->num_ranks * w->staging_bytes",
}
"""Regions of a buffer in order of address, and the bytes that each must have."""
PARTS = {
    "header": ("headers", "8 * kTaggedHeaderWords"),
    "routing": ("routing", "w->routing_bytes"),
    "flags": ("flags", "8 * w->num_flags"),
    "staging": ("staging", "w->staging_bytes"),
}
"""What has a part for each parity and source, the region it lies in, and the bytes of a part."""

_STARTS = ", ".join(f"w->{name}()" for name in REGIONS)
_SIZES = ", ".join(f"int64_t({size})" for size in REGIONS.values())
_PART_STARTS = ", ".join(f"w->{name}_of(parity, source)" for name in PARTS)
_PART_SIZES = ", ".join(f"int64_t({size})" for _, size in PARTS.values())

_SOURCE = f"""
#include "schedule.h"
using namespace ncclep;

extern "C" {{
void regions(const Workspace* w, int64_t* starts, int64_t* sizes) {{
  const int64_t s[] = {{{_STARTS}}}, b[] = {{{_SIZES}}};
  for (int i = 0; i < {len(REGIONS)}; ++i) starts[i] = s[i], sizes[i] = b[i];
}}
void parts(const Workspace* w, int parity, int source, int64_t* starts, int64_t* sizes) {{
  const int64_t s[] = {{{_PART_STARTS}}}, b[] = {{{_PART_SIZES}}};
  for (int i = 0; i < {len(PARTS)}; ++i) starts[i] = s[i], sizes[i] = b[i];
}}
int64_t ncclep_workspace_bytes(const Workspace* w) {{ return w->total_bytes(); }}
int64_t ncclep_slot_bytes(int64_t row_bytes, int, int top_k, int) {{ return slot_bytes(row_bytes, top_k); }}
int ncclep_num_segments(int64_t row_bytes) {{ return num_segments(row_bytes); }}
int ncclep_segment_vectors(int64_t row_bytes) {{ return segment_vectors(row_bytes); }}
int64_t ncclep_capacity(const Workspace* w, int64_t row_bytes, int64_t slot) {{ return w->capacity(row_bytes, slot); }}
uint64_t tagged(uint64_t epoch, uint32_t value) {{ return make_tagged(epoch, value); }}
int is_this(uint64_t word, uint64_t epoch) {{ return is_tagged(word, epoch); }}
uint64_t stamp(uint64_t epoch, uint64_t round) {{ return make_stamp(epoch, round); }}
void span(int64_t total, int worker, int workers, int* out) {{
  const Span s = even_span(total, worker, workers);
  out[0] = s.begin, out[1] = s.end;
}}
// All units of one worker, [?, 3]; returns how many. Writes no more than `room`.
int64_t walk(const int32_t* starts, uint32_t ranks, uint32_t rounds, uint32_t skip, uint32_t worker, uint32_t workers,
             uint32_t units, int* out, int64_t room) {{
  ItemWalk walk{{starts, ranks, rounds, skip, worker, workers, units}};
  int64_t n = 0;
  for (int source, item, unit; walk.next(source, item, unit); ++n)
    if (n < room) out[3 * n] = source, out[3 * n + 1] = item, out[3 * n + 2] = unit;
  return n;
}}
}}
"""
_workspace, _int64s, _ints = POINTER(Workspace), POINTER(c_int64), POINTER(c_int32)
_SIGNATURES = {
    "regions": (None, (_workspace, _int64s, _int64s)),
    "parts": (None, (_workspace, c_int32, c_int32, _int64s, _int64s)),
    "ncclep_workspace_bytes": (c_int64, (_workspace,)),
    "ncclep_slot_bytes": (c_int64, (c_int64, c_int32, c_int32, c_int32)),
    "ncclep_num_segments": (c_int32, (c_int64,)),
    "ncclep_segment_vectors": (c_int32, (c_int64,)),
    "ncclep_capacity": (c_int64, (_workspace, c_int64, c_int64)),
    "stamp": (c_uint64, (c_uint64, c_uint64)),
    "tagged": (c_uint64, (c_uint64, c_uint32)),
    "is_this": (c_int32, (c_uint64, c_uint64)),
    "span": (None, (c_int64, c_int32, c_int32, _ints)),
    "walk": (c_int64, (_ints, c_uint32, c_uint32, c_uint32, c_uint32, c_uint32, c_uint32, _ints, c_int64)),
}


@functools.cache
def load() -> ctypes.CDLL:
    """The shared arithmetic, compiled for the CPU."""
    library = compile_shared(_SOURCE)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def regions(workspace: Workspace) -> dict[str, tuple[int, int]]:
    """Begin and end of every region."""
    starts, sizes = (c_int64 * len(REGIONS))(), (c_int64 * len(REGIONS))()
    load().regions(workspace, starts, sizes)
    return {name: (start, start + size) for name, start, size in zip(REGIONS, starts, sizes, strict=True)}


def parts(workspace: Workspace, parity: int, source: int) -> dict[str, tuple[int, int]]:
    """Begin and end of every part of (``parity``, ``source``)."""
    starts, sizes = (c_int64 * len(PARTS))(), (c_int64 * len(PARTS))()
    load().parts(workspace, parity, source, starts, sizes)
    return {name: (start, start + size) for name, start, size in zip(PARTS, starts, sizes, strict=True)}


def walk(starts: list[list[int]], skip: int, worker: int, workers: int, units: int) -> list[tuple[int, int, int]]:
    """(source, item, unit) that ``worker`` visits, in order. ``starts`` is [R, rounds + 1]."""
    flat = [bound for bounds in starts for bound in bounds]
    room = sum(bounds[-1] - bounds[0] for bounds in starts) * units + 1
    out = (c_int32 * (3 * room))()
    n = load().walk(
        (c_int32 * len(flat))(*flat), len(starts), len(starts[0]) - 1, skip, worker, workers, units, out, room
    )
    assert n <= room, f"worker {worker} of {workers} visits {n} units, there are {room - 1}"
    return list(zip(out[0 : 3 * n : 3], out[1 : 3 * n : 3], out[2 : 3 * n : 3], strict=True))


def span(total: int, worker: int, workers: int) -> tuple[int, int]:
    """``even_span``."""
    out = (c_int32 * 2)()
    load().span(total, worker, workers, out)
    return out[0], out[1]
