"""The layout of a communication buffer, and the structs that C++ and Python share."""

from __future__ import annotations

import ctypes
import inspect
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_ncclep.ep.nvlink import endpoint, failure, sizing, structs
from moe_ncclep.ep.nvlink.structs import Workspace
from tests.nvlink import shared
from tests.nvlink.native import compile_shared
from tests.nvlink.toolchain import needs_gxx

pytestmark = needs_gxx
MANY = settings(deadline=None, max_examples=200, derandomize=True)
LARGEST = Workspace(72, 2048 // 72, 2**24 * 64, 2**24 * 65536, 2**24 * 4)
"""72 ranks with 2^24 tokens each of 64 KiB rows."""

workspaces = st.builds(
    Workspace,
    st.integers(1, 72),
    st.integers(1, 2048),
    st.integers(0, 2**31),
    st.integers(0, 2**41),
    st.integers(0, 2**27),
)
row_bytes = st.integers(1, 2**20).map(lambda vectors: 16 * vectors)  # up to 16 MiB


# ---- regions


@MANY
@given(workspaces)
@example(LARGEST)
@example(Workspace(1, 1, 0, 0, 0))
def test_regions_are_aligned_and_disjoint_and_the_buffer_holds_them(workspace):
    found = list(shared.regions(workspace).values())
    assert found[0][0] == 0
    for (start, end), (following, _) in pairwise([*found, (shared.load().ncclep_workspace_bytes(workspace), 0)]):
        assert start % 128 == following % 128 == 0
        assert start <= end <= following < end + 128, "no overlap, no hole"


@MANY
@given(workspaces, st.integers(0, 71), st.integers(0, 71))
@example(LARGEST, 0, 71)
def test_parts_lie_side_by_side_in_their_region(workspace, one, other):
    ranks = workspace.num_ranks
    regions = shared.regions(workspace)
    of = {
        (parity, source): shared.parts(workspace, parity, source)
        for parity in (0, 1)
        for source in {0, one % ranks, other % ranks, ranks - 1}
    }
    in_order = sorted(of)
    for name, (region, _) in shared.PARTS.items():
        assert of[0, 0][name][0] == regions[region][0], f"the first {name} begins with its region"
        assert of[1, ranks - 1][name][1] == regions[region][1], f"the last {name} ends with its region"
        for earlier, later in pairwise(in_order):
            assert of[earlier][name][1] <= of[later][name][0], f"{name} of {earlier} and {later} overlap"
        length = of[0, 0][name][1] - of[0, 0][name][0]
        for parity, source in in_order:
            assert of[parity, source][name][0] == regions[region][0] + (parity * ranks + source) * length


def test_large_buffers_need_64_bits():
    """Every size by hand, in exact arithmetic."""
    sizes = [2 * 72 * 1024, 2 * 72 * LARGEST.routing_bytes, 2 * 72 * 8 * LARGEST.num_flags]
    sizes.append(2 * 72 * LARGEST.staging_bytes)
    found = shared.regions(LARGEST)
    assert [end - start for start, end in list(found.values())[5:]] == sizes
    assert found["counts"][1] - found["counts"][0] == 8 * 256 * 64  # 28 experts and five tallies in 64 columns
    assert found["staging"][0] == found["headers"][0] + sum(sizes[:-1])
    assert shared.load().ncclep_workspace_bytes(LARGEST) == found["headers"][0] + sum(sizes) > 2**47


@pytest.mark.parametrize(("experts", "columns"), [(1, 32), (27, 32), (28, 64), (2048, 2080)])
def test_columns_of_the_counting_scratch(experts, columns):
    start, end = shared.regions(Workspace(1, experts, 0, 0, 0))["counts"]
    assert end - start == 8 * structs.MAX_CTAS * columns
    assert columns >= experts + 5, "five tallies beside the experts"


# ---- capacity, rows, stamps


@MANY
@given(workspaces, row_bytes, st.integers(1, 32))
@example(LARGEST, 65536, 8)
def test_capacity_is_the_most_that_fits(workspace, row, top_k):
    native = shared.load()
    slot, segments = native.ncclep_slot_bytes(row, 0, top_k, 0), native.ncclep_num_segments(row)
    assert row + 4 * top_k <= slot < row + 4 * top_k + 16
    assert slot % 16 == 0

    def fits(tokens: int) -> bool:
        return tokens * slot <= workspace.staging_bytes and tokens * segments <= workspace.num_flags

    capacity = native.ncclep_capacity(workspace, row, slot)
    assert capacity >= 0
    assert fits(capacity)
    assert not fits(capacity + 1)


@MANY
@given(workspaces, row_bytes, row_bytes, st.integers(0, 2**30), st.integers(0, 2**20))
def test_capacity_grows_with_the_buffer_and_shrinks_with_the_row(workspace, one, other, more_bytes, more_flags):
    native = shared.load()

    def capacity(w: Workspace, row: int) -> int:
        return native.ncclep_capacity(w, row, native.ncclep_slot_bytes(row, 0, 8, 0))

    larger = Workspace.from_buffer_copy(workspace)
    larger.staging_bytes += more_bytes
    larger.num_flags += more_flags
    small, large = sorted((one, other))
    assert capacity(workspace, small) <= capacity(larger, small)
    assert capacity(workspace, large) <= capacity(workspace, small)


@MANY
@given(row_bytes)
@example(16)
@example(16384)
@example(16400)
@example(2**24)
def test_segments_cover_a_row(row):
    native = shared.load()
    segments, length = native.ncclep_num_segments(row), native.ncclep_segment_vectors(row)
    assert segments == -(-row // 16384)
    assert 0 < length <= 1024
    last = row // 16 - (segments - 1) * length
    assert 0 < last <= length, "all full but the last, which is not empty"


counters = st.tuples(st.integers(0, 2**40), st.integers(0, 2**16 - 1))


def test_a_tagged_word_holds_a_value_and_is_known_by_its_epoch():
    library = shared.load()
    for epoch in (1, 2, 2**32 - 1):
        for value in (0, 1, 2**31, 2**32 - 1):
            word = library.tagged(epoch, value)
            assert word & 0xFFFFFFFF == value
            assert library.is_this(word, epoch)
            assert not any(library.is_this(word, other) for other in (epoch - 1, epoch - 2, epoch + 2))
    assert not library.is_this(0, 1), "nothing has arrived in a new buffer"


def halves(epochs, values):
    """The words of a header region of both parities, as the route kernel writes them."""
    tag = shared.load().tagged
    words = [
        [[tag(epoch, value & 0xFFFFFFFF), tag(epoch, value >> 32 & 0xFFFFFFFF)] for value in header]
        for row, of in zip(epochs, values, strict=True)
        for epoch, header in zip(row, of, strict=True)
    ]
    signed = [[[half - 2**64 if half >= 2**63 else half for half in word] for word in header] for header in words]
    return torch.tensor(signed, dtype=torch.int64).view(2, len(epochs[0]), -1, 2)


HEADERS = [[1, -1, 2**62 + 7], [-(2**63), 2**32, 0xFFFFFFFF]]
OLDER = [[5, 5, 5], [6, 6, 6]]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("epoch", [8, 2**31 + 8])
def test_the_host_reads_the_headers_of_the_latest_exchange(rank, epoch):
    words, missing = endpoint.latest_headers(halves([[epoch] * 2, [epoch - 3] * 2], [HEADERS, OLDER]), rank)
    assert words.tolist() == HEADERS
    assert missing == []
    words, missing = endpoint.latest_headers(halves([[epoch - 3] * 2, [epoch] * 2], [OLDER, HEADERS]), rank)
    assert words.tolist() == HEADERS


def test_the_host_sees_which_header_is_not_complete():
    some = halves([[8, 8], [5, 5]], [HEADERS, OLDER])
    some[0, 1, 2, 1] = 6 << 32  # the last half has not arrived
    assert endpoint.latest_headers(some, 0)[1] == [1]
    assert endpoint.latest_headers(halves([[8, 6], [5, 5]], [HEADERS, OLDER]), 0)[1] == [1]


@MANY
@given(counters, counters)
@example((1, 2**16 - 1), (2, 0))
def test_stamps_order_like_epoch_and_round(one, other):
    stamp = shared.load().stamp
    assert (stamp(*one) < stamp(*other)) == (one < other)
    assert (stamp(*one) == stamp(*other)) == (one == other)


def test_the_grant_of_the_round_after_the_last_is_within_its_epoch():
    assert shared.load().stamp(7, sizing.MAX_ROUNDS) < shared.load().stamp(8, 0)


# ---- structs and constants

STRUCTS = [cls for _, cls in inspect.getmembers(structs, inspect.isclass) if issubclass(cls, ctypes.Structure)]


def numbers_of(expressions: list[str]) -> list[int]:
    listed = ", ".join(f"int64_t({expression})" for expression in expressions)
    native = compile_shared(
        '#include <cstddef>\n#include "params.h"\nusing namespace ncclep;\n'
        f'extern "C" int64_t number(int i) {{ const int64_t all[] = {{{listed}}}; return all[i]; }}\n'
    )
    native.number.restype = ctypes.c_int64
    return [native.number(i) for i in range(len(expressions))]


def test_every_struct_of_the_headers_has_a_mirror():
    """Those that cross to the host; ``Span`` and ``ItemWalk`` do not."""
    assert {cls.__name__ for cls in STRUCTS} == {
        "CombineParams", "Control", "DispatchParams", "Failure", "Operation", "Plan", "Report", "RouteParams",
        "Workspace",
    }  # fmt: skip
    assert set(structs.IN_ORDER) == set(STRUCTS) - {structs.Failure}


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda cls: cls.__name__)
def test_structs_are_the_same_on_both_sides(struct):
    name = struct.__name__
    fields = [field for field, _ in struct._fields_]
    member = [f"(({name}*)nullptr)->{field}" for field in fields]
    theirs = numbers_of(
        [f"sizeof({name})", f"alignof({name})"]
        + [f"offsetof({name}, {field})" for field in fields]
        + [f"sizeof({expression})" for expression in member]
    )
    ours = [ctypes.sizeof(struct), ctypes.alignment(struct)]
    ours += [getattr(struct, field).offset for field in fields]
    ours += [getattr(struct, field).size for field in fields]
    assert theirs == ours
    holes = ctypes.sizeof(struct) - sum(getattr(struct, field).size for field in fields)
    assert holes == 0, "a hole may hide a field that only one side has"


def test_constants_are_the_same_on_both_sides():
    twins = {
        "kMaxRanks": structs.MAX_RANKS,
        "kMaxTopK": structs.MAX_TOP_K,
        "kMaxExperts": structs.MAX_EXPERTS,
        "kMaxCtas": structs.MAX_CTAS,
        "kHeaderWords": structs.HEADER_WORDS,
        "kTaggedHeaderWords": 2 * structs.HEADER_WORDS,
        "kVerdictAgreed": structs.AGREED,
        "kVerdictComplaint": structs.COMPLAINT,
        "kVerdictGrow": structs.GROW,
        "kVerdictFailure": structs.FAILED,
        "kTimeout": failure._KIND_TIMEOUT,
        "kDisagreement": failure._KIND_DISAGREEMENT,
        "kTooManyTokens": failure._KIND_TOO_MANY_TOKENS,
        "kRoundBits": failure._ROUND_BITS,
        "(1 << kRoundBits) - 1": sizing.MAX_ROUNDS,
        "kFloat32": endpoint.DTYPES.index(endpoint.torch.float32),
        "kBFloat16": endpoint.DTYPES.index(endpoint.torch.bfloat16),
        "kFloat16": endpoint.DTYPES.index(endpoint.torch.float16),
    }
    assert dict(zip(twins, numbers_of(list(twins)), strict=True)) == twins


def test_phases_have_a_text_each():
    names = ["kWaitCredit", "kWaitRouting", "kWaitGrid", "kWaitRows", "kWaitPartials", "kWaitDrain"]
    assert numbers_of(names) == list(failure._PHASES)
    assert numbers_of(["kWaitRows", "kWaitPartials", "kWaitDrain"]) == list(failure._STAMPED)
