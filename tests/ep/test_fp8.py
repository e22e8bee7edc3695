"""The FP8 payload: its arithmetic, and that every engine and every rank rounds alike."""

from __future__ import annotations

import numpy as np
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
    assert values.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.float32
    assert scales.flatten().tolist() == [1.0, 7.0 / 448, 1.0]
    assert torch.equal(fp8.dequantize(values, scales, torch.float32), x)


def test_values_are_products_with_a_rounded_reciprocal():
    """What a kernel computes: one division a block for the scale, one for its reciprocal, then products."""
    x = (torch.randn(50, 128, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    values, scales = fp8.quantize(x)
    for row, row_values, scale in zip(x.float().numpy(), values.float().numpy(), scales[:, 0].numpy(), strict=True):
        assert scale == abs(row).max() / np.float32(448)
        products = row * (np.float32(1) / scale)
        assert products.dtype == np.float32
        assert (row_values == torch.from_numpy(products).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()).all()


def test_exact_values_with_a_power_of_two():
    x = torch.zeros(5, 128)
    x[0, :3] = torch.tensor([448.0, -224.0, 1.0])  # scale 1 is one already
    x[1, :2] = torch.tensor([449.0, -3.0])
    x[2] = 7.0
    x[3, 0] = torch.nextafter(torch.tensor(448.0), torch.tensor(449.0))
    values, scales = fp8.quantize(x, power_of_two=True)
    assert scales.flatten().tolist() == [1.0, 2.0, 1 / 64, 2.0, 1.0]
    assert values.float()[:, :3].tolist() == [[448, -224, 1], [224, -1.5, 0], [448] * 3, [224, 0, 0], [0, 0, 0]]
    assert torch.equal(fp8.pack(x, power_of_two=True), _packed(values, scales))


def _packed(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], 1)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_range_of_scales(power_of_two):
    """From the smallest to the largest float32, and around every power of two times 448."""
    powers = torch.logspace(-149, 127, 277, base=2, dtype=torch.float64).float()
    edges = (torch.logspace(-140, 118, 259, base=2, dtype=torch.float64) * 448).float()
    near = [torch.nextafter(edges, torch.tensor(to)) for to in (0.0, float("inf"))]
    largest = torch.cat([powers, edges, *near, torch.tensor([torch.finfo(torch.float32).max])])
    assert largest.isfinite().all()
    values, scales = fp8.quantize(largest.unsqueeze(1), power_of_two=power_of_two)
    scale = scales[:, 0].double()
    assert (scale >= torch.finfo(torch.float32).tiny).all()
    assert scales.isfinite().all()
    assert values.float().isfinite().all()
    ratio = largest.double() / scale
    normal = scale > torch.finfo(torch.float32).tiny
    if power_of_two:
        assert (torch.frexp(scale).mantissa == 0.5).all()
        assert (ratio <= 448).all()
        assert (ratio[normal] > 224).all()
    else:
        assert (ratio <= 448 * (1 + 2**-23)).all()  # the clamp takes what the rounding of the scale leaves over
        assert (values[normal].float() == 448).all()


def test_power_of_two_scales_are_the_plain_ones_rounded_up():
    x = torch.randn(64, 384) * torch.logspace(-30, 30, 64).unsqueeze(1)
    plain, rounded = fp8.quantize(x)[1], fp8.quantize(x, power_of_two=True)[1]
    assert torch.equal(rounded, torch.exp2(plain.log2().ceil()))


@pytest.mark.parametrize("hidden", [8, 128, 136, 7168])
def test_bytes_on_the_wire(hidden):
    packed = fp8.pack(torch.randn(5, hidden))
    assert packed.shape == (5, fp8.row_bytes(hidden))
    assert fp8.row_bytes(7168) == 7168 + 4 * 56


def test_short_block_does_not_see_its_padding():
    x = torch.full((1, 136), 3.0)
    assert torch.equal(fp8.unpack(fp8.pack(x), 136, torch.float32), x)


def test_one_row_whose_scales_lie_between_two_float32():
    x = torch.tensor([[448.0, -2.0]], dtype=torch.float64)
    assert torch.equal(fp8.unpack(fp8.pack(x), 2, torch.float64), x)


@pytest.mark.parametrize("hidden", [128, 200])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_block_with_nan_or_inf_comes_back_as_nan(bad, power_of_two, hidden):
    x = torch.ones(2, 256)[:, :hidden]
    x[0, 3] = bad
    values, scales = fp8.quantize(x, power_of_two=power_of_two)
    assert str(scales[0, 0].item()) == ("nan" if bad != bad else "inf")
    y = fp8.dequantize(values, scales, torch.float32)
    assert y[0, :128].isnan().all()
    assert torch.equal(y[0, 128:], x[0, 128:])  # the other block and the other row know nothing of it
    assert torch.equal(y[1], x[1])


@pytest.mark.parametrize("power_of_two", [False, True])
def test_subnormals_and_zeros(power_of_two):
    tiny = torch.finfo(torch.float32).tiny
    x = torch.zeros(4, 128)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = 1e-44, tiny / 2, -448 * tiny, -0.0
    values, scales = fp8.quantize(x, power_of_two=power_of_two)
    assert scales.flatten().tolist() == [tiny, tiny, tiny, 1.0]
    assert values.float()[:, 0].tolist() == [0.0, 0.5, -448.0, 0.0]
    y = fp8.dequantize(values, scales, torch.float32)
    assert torch.equal(y[1:], x[1:])
    assert not y[0].any()


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
