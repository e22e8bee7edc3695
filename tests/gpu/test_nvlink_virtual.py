"""The kernels of the NVLink engine on virtual ranks: bit for bit what the specification says."""

from __future__ import annotations

import pytest
import torch

from tests.nvlink.checks import Shape, check, make_group

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


@pytest.mark.parametrize("ctas", [2, 3, 8, 16])
def test_num_sms(ctas):
    for payload in ("input", "fp8"):
        shape = Shape((300, 300), hidden=1024, payload=payload, alignment=16)
        check(shape, make_group(shape, ctas_per_rank=ctas))


def test_many_rounds():
    shape = Shape((300, 200), hidden=512, alignment=16)
    check(shape, rounds=100)
