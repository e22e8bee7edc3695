"""The FP8 payload: its arithmetic, and that every engine and every rank rounds alike."""

from __future__ import annotations

import pytest
import torch

from moe_ncclep.ep import EPOptions, Routing, combine, dispatch, fp8
from tests.ep.cases import Case, check_on_rank
from tests.ranks import pool


def test_round_trip_error_is_that_of_e4m3():
    torch.manual_seed(0)
    x = torch.randn(64, 384) * torch.logspace(-6, 6, 64).unsqueeze(1)
    y = fp8.unpack(fp8.pack(x), 384, torch.float32)
    largest = x.view(64, 3, 128).abs().amax(2).repeat_interleave(128, 1)
    assert ((x - y).abs() <= torch.maximum(x.abs() / 16, largest / 448 / 2**7)).all()


def test_exact_values():
    x = torch.zeros(3, 128)
    x[0, :3] = torch.tensor([448.0, -224.0, 1.0])
    x[1] = 7.0
    values, scales = fp8.quantize(x)
    assert scales.flatten().tolist() == [1.0, 7.0 / 448, 1.0]
    assert torch.equal(fp8.dequantize(values, scales, torch.float32), x)


@pytest.mark.parametrize("hidden", [8, 128, 136, 7168])
def test_bytes_on_the_wire(hidden):
    packed = fp8.pack(torch.randn(5, hidden))
    assert packed.shape == (5, fp8.row_bytes(hidden))
    assert fp8.row_bytes(7168) == 7168 + 4 * 56


def test_short_block_does_not_see_its_padding():
    x = torch.full((1, 136), 3.0)
    assert torch.equal(fp8.unpack(fp8.pack(x), 136, torch.float32), x)


def test_nan_and_inf_stay_visible_and_tiny_blocks_survive():
    x = torch.zeros(3, 128)
    x[0, 0], x[1, 0], x[2, 0] = float("nan"), float("inf"), 1e-44
    y = fp8.unpack(fp8.pack(x), 128, torch.float32)
    assert y[0].isnan().any()
    assert y[1].isnan().any()
    assert y[2].isfinite().all()


def _dispatch_fp8(num_tokens: tuple[int, ...]) -> None:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(5)
    xs = [torch.randn(t, 256, generator=g, dtype=torch.float32).bfloat16() for t in num_tokens]
    grads = [torch.randn(t, 256, generator=g, dtype=torch.float32).bfloat16() for t in num_tokens]
    rounded = [fp8.unpack(fp8.pack(x), 256, torch.bfloat16) for x in xs]
    idx = torch.arange(num_tokens[rank]).unsqueeze(1) % size
    x = xs[rank].clone().requires_grad_()
    out = dispatch(x, Routing(idx, None, size), options=EPOptions(payload="fp8"))
    want = torch.cat([r[rank::size] for r in rounded])
    assert torch.equal(out.rows, want)  # rows that stayed on the rank are rounded too
    rows = out.rows.detach().requires_grad_()
    y = combine(rows, out.handle)
    assert torch.equal(y, rounded[rank])  # the sums travel unquantised
    y.backward(grads[rank])
    assert torch.equal(rows.grad, torch.cat([fp8.unpack(fp8.pack(d), 256, torch.bfloat16)[rank::size] for d in grads]))
    out.rows.backward(rows.grad)
    assert x.grad.abs().sum() > 0
    assert out.handle.traffic.payload_row_bytes == 256 + 8


def test_every_row_is_rounded_once_wherever_it_goes():
    pool(1).run(_dispatch_fp8, (4,))
    pool(2).run(_dispatch_fp8, (5, 4))


@pytest.mark.parametrize("num_tokens", [(0, 0), (3, 0), (0, 2), (6, 4)], ids=str)
@pytest.mark.parametrize("hidden", [8, 200, 256])
def test_against_the_oracle_with_idle_ranks(num_tokens, hidden):
    case = Case(num_tokens, top_k=3, hidden=hidden, dtype=torch.bfloat16, drop=0.2, alignment=4, payload="fp8")
    pool(2).run(check_on_rank, case)
    pool(2).run(check_on_rank, Case(num_tokens, hidden=hidden, skew="one_rank", payload="fp8", budgets=(4, 4)))
