"""The kernels of the NVLink engine on virtual ranks: bit for bit what the specification says."""

from __future__ import annotations

import pytest
import torch

from moe_ncclep.bench.reference import Reference
from moe_ncclep.ep.nvlink.failure import PeerFailure
from tests.nvlink.checks import Shape, check, make_group, same

pytestmark = pytest.mark.gpu1


@pytest.fixture(autouse=True)
def poisoned():
    """Uninitialised memory holds nan and -1, so that nothing can be right by accident."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "num_tokens",
    [(0, 0), (1, 0), (0, 1), (1, 1), (7, 7), (4095, 4096), (4096, 1), (8192, 8192), (300, 0, 5), (64,) * 4, (33,) * 8],
    ids=str,
)
def test_token_counts(num_tokens):
    check(Shape(num_tokens, hidden=1024, num_experts=24 if len(num_tokens) == 3 else 64, alignment=16))


@pytest.mark.parametrize("hidden", [8, 264, 1024, 2048, 2880, 4096, 7168, 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_hidden_sizes(hidden, dtype):
    check(Shape((130, 257), hidden=hidden, dtype=dtype))


@pytest.mark.parametrize("top_k", [1, 2, 3, 6, 8, 16, 32])
@pytest.mark.parametrize("num_experts", [8, 60, 64, 128, 256, 2048])
def test_experts_and_top_k(top_k, num_experts):
    skew = "uniform" if top_k <= num_experts else "repeated"
    for size in (2, 4) if num_experts % 4 == 0 else (2,):
        check(Shape((100,) * size, hidden=64, top_k=top_k, num_experts=num_experts, skew=skew, drop=0.1))


@pytest.mark.parametrize("alignment", [1, 16, 32, 128])
@pytest.mark.parametrize("skew", ["uniform", "one_expert", "one_rank", "repeated"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_alignment_and_skew(alignment, skew, size):
    experts = 66 if size == 3 else 64
    check(Shape((200,) * size, hidden=256, num_experts=experts, alignment=alignment, skew=skew, drop=0.2))


@pytest.mark.parametrize("drop", [0.5, 1.0])
def test_dropped_pairs(drop):
    check(Shape((50, 60), hidden=256, drop=drop, alignment=16))


@pytest.mark.parametrize("id_dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_id_dtypes(id_dtype):
    check(Shape((50, 60), hidden=256, id_dtype=id_dtype))


@pytest.mark.parametrize("budgets", [(0, 0), (160, 64), (1024, 2048)])
@pytest.mark.parametrize("alignment", [1, 32])
def test_budgets(budgets, alignment):
    check(Shape((100, 90), hidden=256, budgets=budgets, alignment=alignment))


@pytest.mark.parametrize("rows_per_expert", [0, 8, 64])
def test_rows_per_expert(rows_per_expert):
    check(Shape((100, 90), hidden=256, num_experts=16, rows_per_expert=rows_per_expert))


@pytest.mark.parametrize("row_format", ["input", "fp8"])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(("hidden", "dtype"), [(7168, torch.bfloat16), (2880, torch.float16), (272, torch.float32)])
def test_fp8(row_format, power_of_two, hidden, dtype):
    for size in (2, 3):
        shape = Shape((200, 170, 13)[:size], hidden=hidden, dtype=dtype, num_experts=48, payload="fp8", alignment=16,
                      row_format=row_format, power_of_two=power_of_two)  # fmt: skip
        check(shape)


@pytest.mark.parametrize("payload", ["input", "fp8"])
@pytest.mark.parametrize("capacity", [1, 7, 64, 100])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_bounded_staging(payload, capacity, size):
    num_tokens = (200, 64, 199, 1)[:size]
    check(Shape(num_tokens, hidden=512, num_experts=48, capacity=capacity, payload=payload, skew="uniform"))
    check(Shape(num_tokens, hidden=512, num_experts=48, capacity=capacity, payload=payload, skew="one_rank"))
    # Tokens that need no peer among others that do.
    check(Shape(num_tokens, hidden=512, num_experts=48, capacity=capacity, payload=payload, top_k=1, drop=0.3))


@pytest.mark.parametrize("ctas", [2, 3, 8, 16])
def test_num_sms(ctas):
    for payload in ("input", "fp8"):
        shape = Shape((300, 300), hidden=1024, payload=payload, alignment=16)
        check(shape, make_group(shape, ctas_per_rank=ctas))


def test_two_thousand_rounds():
    """Back to back, with changing inputs and two handles under way at any time, combined in either order."""
    shape = Shape((150, 97), hidden=512, alignment=16, drop=0.1)
    group = make_group(shape)
    generator = torch.Generator("cuda").manual_seed(1)
    options = [shape.options(rank) for rank in range(shape.size)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def start():
        x = [torch.randn(t, shape.hidden, generator=generator, device="cuda").bfloat16() for t in shape.num_tokens]
        idx = [shape.topk(t, generator) for t in shape.num_tokens]
        routed = group.route(idx, shape.num_experts, x[0], options)
        rows = [rows for rows, _, _ in group.dispatch(routed, x, None)]
        return x, Reference(idx, shape.num_experts, options), routed, rows

    def finish(x, want, routed, rows):
        nonlocal wrong
        expected = want.rows(x)
        results = [y for y, _ in group.combine(routed, rows, None)]
        for got, right in zip([*rows, *results], [*expected, *want.combine(expected)], strict=True):
            wrong += (got != right).sum()

    for turn in range(1000):
        first, second = start(), start()
        for under_way in (first, second) if turn % 2 else (second, first):
            finish(*under_way)
    group.raise_if_failed()
    assert int(wrong) == 0


def test_more_than_two_billion_values():
    check(Shape((20_000, 20_011), hidden=8192, top_k=16, seed=3))


def test_graph_replays_new_routing():
    shape = Shape((200, 190), hidden=1024, budgets=(2048, 1536), alignment=32)
    group = make_group(shape)
    generator = torch.Generator("cuda").manual_seed(2)
    options = [shape.options(rank) for rank in range(shape.size)]

    def draw():
        return (
            [torch.randn(t, shape.hidden, generator=generator, device="cuda").bfloat16() for t in shape.num_tokens],
            [shape.topk(t, generator) for t in shape.num_tokens],
            [torch.rand(t, shape.top_k, generator=generator, device="cuda") for t in shape.num_tokens],
        )

    x, idx, probs = draw()

    def step():
        routed = group.route(idx, shape.num_experts, x[0], options)
        outputs = group.dispatch(routed, x, probs)
        return routed, outputs, group.combine(routed, [rows for rows, _, _ in outputs], [p for _, _, p in outputs])

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed, outputs, results = step()
    for _ in range(20):
        for static, new in zip((x, idx, probs), draw(), strict=True):
            for old, values in zip(static, new, strict=True):
                old.copy_(values)
        graph.replay()
        torch.cuda.synchronize()
        group.raise_if_failed()
        want = Reference(idx, shape.num_experts, options)
        rows, row_probs = want.rows(x), want.row_probs(probs)
        for rank in range(shape.size):
            same(outputs[rank][0], rows[rank], f"rows of rank {rank}")
            same(outputs[rank][2], row_probs[rank], f"probs of rank {rank}")
            same(results[rank][0], want.combine(rows)[rank], f"result of rank {rank}")
            same(results[rank][1], want.pair_probs(row_probs)[rank], f"gradient of the probs of rank {rank}")
            assert int(routed[rank].plan.int64("dropped")) == int(want.ranks[rank].zones.dropped)


@pytest.mark.parametrize("missing", ["route", "dispatch", "combine"])
def test_a_rank_that_does_not_come(missing):
    """The other ranks give up, say whom they waited for, and leave nan instead of results."""
    shape = Shape((64, 64, 64), hidden=256, num_experts=48)
    group = make_group(shape, timeout_s=0.3)
    generator = torch.Generator("cuda").manual_seed(2)
    idx = [shape.topk(t, generator) for t in shape.num_tokens]
    x = [torch.randn(t, shape.hidden, device="cuda").bfloat16() for t in shape.num_tokens]
    options = [shape.options(rank) for rank in range(shape.size)]
    late = 2

    def all_but_late(work):
        return group.each(lambda rank, endpoint: None if rank == late else work(rank, endpoint))

    if missing == "route":
        calls = [group.call(idx[rank], shape.num_experts, x[rank], options[rank]) for rank in range(shape.size)]
        all_but_late(lambda rank, endpoint: endpoint.start_route(calls[rank]))
        outputs = []
    else:
        routed = group.route(idx, shape.num_experts, x[0], options)
        plans, sizes = [r.plan for r in routed], [r.num_rows for r in routed]
        if missing == "combine":
            rows = [rows for rows, _, _ in group.dispatch(routed, x, None)]
            outputs = all_but_late(
                lambda rank, endpoint: endpoint.combine(plans[rank], rows[rank], None, num_ctas=group.ctas)
            )
        else:
            outputs = all_but_late(
                lambda rank, endpoint: endpoint.dispatch(plans[rank], x[rank], None, sizes[rank], num_ctas=group.ctas)
            )
    torch.cuda.synchronize()
    for rank in (0, 1):
        with pytest.raises(PeerFailure, match=f"waited 0.3 s for rank {late}") as error:
            group.endpoints[rank].raise_if_failed()
        assert "operation" in str(error.value)
        if outputs:
            assert outputs[rank][0].isnan().all()
