"""The NVLink engine in processes of its own, over a process group, bit for bit against the oracle.

The ranks may share a GPU (NCCL >= 2.30.7). They are then time-sliced, so that every wait for a peer costs milliseconds:
right, but slow.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings

from moe_ncclep.ep import EPOptions, Routing, close_engine, combine, dispatch
from moe_ncclep.ep.engines.select import choose_engine
from moe_ncclep.ep.nvlink.failure import PeerFailure
from tests.ep.cases import SKEWS, Case, check_on_rank, make_inputs
from tests.ep.oracle import expected_combine, expected_dispatch
from tests.ep.test_contract import cases
from tests.ep.test_errors import DISAGREEMENTS, LOCAL_MISTAKES, bad_then_good
from tests.nvlink.checks import supported
from tests.nvlink.test_engine import LIMITS, MIXED, OTHER_TEXT, beyond_a_limit
from tests.ranks import _pools, free_port, pool

FEW = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
TOKENS = {2: (7, 4), 4: (5, 0, 9, 2)}
BUDGETS = {2: (16, 8), 4: (16, 8, 0, 24)}
EACH_WORLD = pytest.mark.parametrize(
    "world", [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
)
OPTIONS = EPOptions(engine="nvlink", timeout_s=40)


def _clean() -> None:
    close_engine(dist.group.WORLD)


def ranks(world: int, fn, *args, **kwargs) -> list:
    return pool(world, device="cuda").run(fn, *args, **kwargs)


@pytest.fixture(autouse=True, scope="module")
def _no_engine_of_other_tests():
    """Each module finds the pools without an engine, and leaves them so."""
    used = [world for world in (2, 4) if (world, None, "cuda") in _pools]
    for world in used:
        ranks(world, _clean)
    yield
    for world in (2, 4):
        if (world, None, "cuda") in _pools:
            ranks(world, _clean)


def run(world: int, case: Case) -> None:
    ranks(world, check_on_rank, replace(case, engine="nvlink"), device="cuda", keep_engine=True)


@pytest.mark.gpu2
@FEW
@given(case=cases(2, engine="nvlink"))
def test_any_case_on_two_ranks(case: Case):
    run(2, supported(case))


@pytest.mark.gpu4
@FEW
@given(case=cases(4, engine="nvlink"))
def test_any_case_on_four_ranks(case: Case):
    run(4, supported(case))


@EACH_WORLD
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("skew", SKEWS)
def test_uneven_ranks(world, dtype, skew):
    run(world, Case(TOKENS[world], top_k=3, hidden=64, dtype=dtype, skew=skew, drop=0.3))


@EACH_WORLD
def test_budget_and_fixed_rows(world):
    run(world, Case(TOKENS[world], top_k=4, dtype=torch.bfloat16, alignment=8, budgets=BUDGETS[world]))
    run(world, Case(TOKENS[world], top_k=4, dtype=torch.bfloat16, rows_per_expert=4))


@EACH_WORLD
@pytest.mark.parametrize("row_format", ["input", "fp8"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_payload(world, row_format, power_of_two):
    case = Case(TOKENS[world], top_k=3, hidden=272, payload="fp8", alignment=8, row_format=row_format)
    for dtype in (torch.bfloat16, torch.float32):
        run(world, replace(case, dtype=dtype, fp8_power_of_two=power_of_two))


@EACH_WORLD
def test_the_buffer_grows(world):
    """With more tokens, more experts a token, wider rows, and shrinks never."""
    run(world, Case((3,) * world, hidden=64, dtype=torch.bfloat16))
    run(world, Case((700,) + (5,) * (world - 1), hidden=64, dtype=torch.bfloat16))
    run(world, Case((300,) * world, num_local=8, top_k=8, hidden=1024, dtype=torch.bfloat16))
    run(world, Case((9,) * world, num_local=8, top_k=16, hidden=7168, dtype=torch.bfloat16))
    run(world, Case((3,) * world, hidden=64, dtype=torch.bfloat16))


def _bounded() -> list[int]:
    """A small buffer, so that a dispatch takes several rounds; returns the rounds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    case = Case((120,) * world, num_local=4, top_k=4, hidden=4096, dtype=torch.bfloat16, seed=5)
    options = replace(OPTIONS, buffer_mib=8)
    close_engine(dist.group.WORLD)
    inputs = make_inputs(case)
    want = expected_dispatch(inputs.x, inputs.idx, inputs.probs, case.num_experts)
    routing = Routing(inputs.idx[rank].cuda(), inputs.probs[rank].cuda(), case.num_experts)
    out = dispatch(inputs.x[rank].cuda(), routing, options=options)
    assert torch.equal(out.rows.cpu(), want[rank].rows)
    y = combine(out.rows, out.handle)
    assert torch.equal(y.cpu(), expected_combine(want, [e.rows for e in want], list(case.num_tokens))[rank])
    close_engine(dist.group.WORLD)
    return out.handle.plan.shape.num_rounds


@EACH_WORLD
def test_a_bounded_buffer_takes_rounds(world):
    rounds = ranks(world, _bounded)
    assert rounds == [rounds[0]] * world
    assert rounds[0] > 1


@pytest.mark.gpu2
@pytest.mark.parametrize("kind", LOCAL_MISTAKES)
def test_a_mistake_of_one_rank_is_raised_on_all(kind):
    texts = ranks(2, bad_then_good, 1, kind, "cuda", engine="nvlink")
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"rank 1: {LOCAL_MISTAKES[kind]}")


@pytest.mark.gpu2
@pytest.mark.parametrize("kind", [kind for kind in DISAGREEMENTS if kind not in (*MIXED, *OTHER_TEXT)])
def test_ranks_that_disagree_are_named(kind):
    assert ranks(2, bad_then_good, 1, kind, "cuda", engine="nvlink") == [DISAGREEMENTS[kind]] * 2


def _refused_at_first(kind: str) -> str:
    close_engine(dist.group.WORLD)
    return bad_then_good(1, kind, "cuda", engine="nvlink")


@pytest.mark.gpu2
@pytest.mark.parametrize("kind", ["row bytes", "id too high", "hidden"])
def test_the_first_call_of_all_is_wrong(kind):
    texts = ranks(2, _refused_at_first, kind)
    assert texts[0] == texts[1]
    assert texts[0] == DISAGREEMENTS.get(kind, texts[0])
    assert texts[0].startswith("r")


@pytest.mark.gpu2
@pytest.mark.parametrize(("changes", "text"), LIMITS.values(), ids=LIMITS)
def test_limits_of_the_engine(changes, text):
    texts = ranks(2, beyond_a_limit, "cuda", **changes)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"rank 0: {text}")


def _misaligned_and_strided() -> None:
    """Inputs as autograd may hand them over: not contiguous, or off the 16 bytes that bulk copies need."""
    rank, world = dist.get_rank(), dist.get_world_size()
    case = Case((6,) * world, hidden=64, dtype=torch.bfloat16)
    inputs = make_inputs(case)
    want = expected_dispatch(inputs.x, inputs.idx, inputs.probs, case.num_experts)
    routing = Routing(inputs.idx[rank].cuda(), inputs.probs[rank].cuda(), case.num_experts)
    x = inputs.x[rank].cuda()
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x)
    strided = x.t().contiguous().t()
    ids = Routing(inputs.idx[rank].cuda().t().contiguous().t(), routing.probs, case.num_experts)
    for tokens, which in ((shifted, routing), (strided, routing), (x, ids)):
        out = dispatch(tokens, which, options=OPTIONS)
        assert torch.equal(out.rows.cpu(), want[rank].rows)
        rows = torch.empty(out.rows.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(out.rows).copy_(out.rows)
        y = combine(rows, out.handle)
        assert torch.equal(y.cpu(), expected_combine(want, [e.rows for e in want], list(case.num_tokens))[rank])


@pytest.mark.gpu2
def test_misaligned_and_strided_inputs():
    ranks(2, _misaligned_and_strided)


def _out_of_order() -> None:
    """Two handles under way, combined in either order, on two streams, one of them used twice."""
    rank, world = dist.get_rank(), dist.get_world_size()
    side = torch.cuda.Stream()
    pending = []
    for seed in (1, 2):
        case = Case((40, 33, 1, 17)[:world], num_local=4, top_k=3, hidden=256, dtype=torch.bfloat16, seed=seed)
        inputs = make_inputs(case)
        routing = Routing(inputs.idx[rank].cuda(), inputs.probs[rank].cuda(), case.num_experts)
        want = expected_dispatch(inputs.x, inputs.idx, inputs.probs, case.num_experts)
        x = inputs.x[rank].cuda()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if seed == 2 else torch.cuda.current_stream()):
            out = dispatch(x, routing, options=OPTIONS)
            again = dispatch(x, routing, handle=out.handle, options=OPTIONS)
        pending.append((case, want, out, again))
    torch.cuda.current_stream().wait_stream(side)
    for case, want, out, again in reversed(pending):
        assert torch.equal(out.rows.cpu(), want[rank].rows)
        assert torch.equal(again.rows.cpu(), want[rank].rows)
        right = expected_combine(want, [e.rows for e in want], list(case.num_tokens))[rank]
        assert torch.equal(combine(out.rows, out.handle).cpu(), right)
        assert torch.equal(combine(again.rows, out.handle).cpu(), right)


@EACH_WORLD
def test_handles_out_of_order_and_on_other_streams(world):
    ranks(world, _out_of_order)


def _graph() -> None:
    """Capture route, dispatch, combine and both backward passes once; replay with new routing."""
    rank, world = dist.get_rank(), dist.get_world_size()
    options = replace(OPTIONS, rows_per_expert=16)
    shapes = Case((24, 17, 5, 9)[:world], num_local=4, top_k=3, hidden=256, dtype=torch.bfloat16, rows_per_expert=16)
    inputs = make_inputs(shapes)
    x = inputs.x[rank].cuda().requires_grad_()
    idx, probs = inputs.idx[rank].cuda(), inputs.probs[rank].cuda().requires_grad_()
    weight = inputs.grad_y[rank].cuda()

    def step():
        out = dispatch(x, Routing(idx, probs, shapes.num_experts), options=options)
        y = combine(out.rows * 2, out.handle)
        grads = torch.autograd.grad((y * weight).sum() + (out.probs * 3).sum(), (x, probs))
        return out, y, grads

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, y, grads = step()
    for seed in range(3, 6):
        inputs = make_inputs(replace(shapes, seed=seed))
        with torch.no_grad():
            for static, new in zip(
                (x, idx, probs, weight), (inputs.x, inputs.idx, inputs.probs, inputs.grad_y), strict=True
            ):
                static.copy_(new[rank])
        graph.replay()
        torch.cuda.synchronize()
        want = expected_dispatch(inputs.x, inputs.idx, inputs.probs, shapes.num_experts, rows_per_expert=16)
        assert torch.equal(out.rows.detach().cpu(), want[rank].rows)
        assert torch.equal(out.probs.detach().cpu(), want[rank].probs)
        assert int(out.dropped) == want[rank].dropped
        doubled = [e.rows * 2 for e in want]
        assert torch.equal(y.detach().cpu(), expected_combine(want, doubled, list(shapes.num_tokens))[rank])
        back = expected_dispatch(inputs.grad_y, inputs.idx, inputs.probs, shapes.num_experts, rows_per_expert=16)
        doubled = [e.rows * 2 for e in back]
        assert torch.equal(grads[0].cpu(), expected_combine(want, doubled, list(shapes.num_tokens))[rank])
        assert set(grads[1].unique().tolist()) <= {0.0, 3.0}
    close_engine(dist.group.WORLD)


@EACH_WORLD
def test_cuda_graph_replays_new_routing(world):
    ranks(world, _graph)


def _close_and_create() -> list[float]:
    free = []
    for _ in range(6):
        check_on_rank(Case((64,) * dist.get_world_size(), hidden=2048, engine="nvlink"), device="cuda")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        dist.barrier()  # the ranks may share a GPU: what another one still holds would count
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0] / 2**20)
        dist.barrier()
    return free


@pytest.mark.gpu2
def test_closing_gives_the_memory_back():
    for free in ranks(2, _close_and_create):
        assert free[-1] > free[1] - 16, f"free MiB after each close: {free}"


def _two_groups() -> None:
    rank = dist.get_rank()
    close_engine(dist.group.WORLD)
    groups = [dist.new_group([0, 1]), dist.new_group([1, 0])]
    outputs = []
    for seed, group in enumerate(groups):
        case = Case((20, 30), hidden=128, dtype=torch.bfloat16, seed=seed)
        inputs = make_inputs(case)
        routing = Routing(inputs.idx[rank].cuda(), inputs.probs[rank].cuda(), case.num_experts)
        want = expected_dispatch(inputs.x, inputs.idx, inputs.probs, case.num_experts)
        outputs.append((dispatch(inputs.x[rank].cuda(), routing, group, OPTIONS), want, case))
    for out, want, case in outputs:
        assert torch.equal(out.rows.cpu(), want[rank].rows)
        right = expected_combine(want, [e.rows for e in want], list(case.num_tokens))[rank]
        assert torch.equal(combine(out.rows, out.handle).cpu(), right)
    for group in groups:
        close_engine(group)
        dist.destroy_process_group(group)


@pytest.mark.gpu2
def test_two_groups_at_once():
    ranks(2, _two_groups)


def _serve_dying(rank: int, port: int, how: str, results) -> None:
    """Rank 1 does not come to the third dispatch: because it is late, or because it is dead."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", rank=rank, world_size=2)
    x = torch.ones(32, 128, dtype=torch.bfloat16, device="cuda")
    routing = Routing(torch.arange(64, device="cuda").view(32, 2) % 4, None, 4)
    options = EPOptions(engine="nvlink", timeout_s=3)
    for _ in range(2):
        out = dispatch(x, routing, options=options)
        combine(out.rows, out.handle)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        if how == "killed":
            os._exit(1)
        time.sleep(20)
        os._exit(0)
    start = time.monotonic()
    texts = []
    try:
        dispatch(x, routing, options=options)
    except PeerFailure as error:
        texts.append(str(error))
    waited = time.monotonic() - start
    try:
        dispatch(x, routing, options=options)  # still refused, at once
    except PeerFailure as error:
        texts.append(str(error))
    close_engine(dist.group.WORLD)
    results.put((texts, waited, time.monotonic() - start))
    results.close()
    results.join_thread()
    os._exit(0)


@pytest.mark.gpu2
@pytest.mark.parametrize("how", ["late", "killed"])
def test_a_peer_that_does_not_come_is_named(how):
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    processes = [context.Process(target=_serve_dying, args=(rank, port, how, results)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        texts, waited, total = results.get(timeout=55)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert len(texts) == 2, texts
    assert texts[0] == texts[1]
    assert texts[0].startswith("rank 0 waited 3 s for rank 1 to "), texts
    assert "expected operation" in texts[0]
    assert 2.5 < waited < 15, f"waited {waited:.1f} s"
    assert total < 25, f"{total:.1f} s until everything was closed"


def _picked() -> tuple[str, str]:
    close_engine(dist.group.WORLD)
    choice = choose_engine(dist.group.WORLD, EPOptions())
    close_engine(dist.group.WORLD)
    return choice.engine.name, choice.reason


@pytest.mark.gpu2
def test_auto_prefers_it_where_every_rank_has_a_gpu():
    for name, reason in ranks(2, _picked):
        assert name == ("nvlink" if torch.cuda.device_count() > 1 else "collective"), reason
