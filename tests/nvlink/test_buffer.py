"""When a communication buffer is replaced, and by what; memory and endpoint are stand-ins."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_ncclep.ep.nvlink import buffer as module
from moe_ncclep.ep.nvlink.buffer import CommunicationBuffer
from tests.nvlink import shared
from tests.nvlink.test_sizing import capacity, make, size
from tests.nvlink.toolchain import needs_gxx

pytestmark = needs_gxx
SMALL = make(8, 1024, 8, 2048, 256)
BOUNDED = make(8, 16384, 8, 16384, 256)


@pytest.fixture
def made(monkeypatch) -> list:
    """Sizes of the buffers made; -1 for one closed by all, -2 by this rank alone."""
    made = []

    def allocate(num_bytes: int, group) -> SimpleNamespace:
        made.append(num_bytes)
        return SimpleNamespace(local=None, peers=None, close=lambda collective: made.append(-1 if collective else -2))

    def endpoint(library, workspace, local, peers, rank, plan_tokens) -> SimpleNamespace:
        return SimpleNamespace(workspace=workspace, plan_tokens=plan_tokens, failed=False)

    monkeypatch.setattr(module.memory, "allocate", allocate)
    monkeypatch.setattr(module, "Endpoint", endpoint)
    monkeypatch.setattr(module, "gather_objects", lambda group, wish: wish if isinstance(wish, list) else [wish])
    return made


def a_buffer(demand) -> CommunicationBuffer:
    buffer = CommunicationBuffer(shared.load(), 0)
    buffer.set_up(None, demand)
    return buffer


def test_set_up_serves_all_ranks(made):
    buffer = a_buffer([SMALL, replace(SMALL, max_tokens=4096)])
    assert buffer.endpoint.plan_tokens == 4096
    assert capacity(buffer.endpoint.workspace, SMALL) == 4096
    assert made == [size(buffer.endpoint.workspace)]


def test_set_up_with_a_complaint_of_any_rank(made):
    with pytest.raises(ValueError, match=r"^rank 1: no tokens$"):
        a_buffer([SMALL, "no tokens"])
    assert made == []


def test_growing_replaces_the_buffer_once(made):
    buffer = a_buffer(SMALL)
    more = replace(SMALL, max_tokens=2048)
    assert buffer.grow(None, more)
    assert made == [made[0], -1, size(more.workspace(shared.load()))]
    assert made[2] > made[0]
    assert not buffer.grow(None, more)
    assert not buffer.grow(None, SMALL)
    assert len(made) == 3
    assert buffer.endpoint.plan_tokens == 2048


def test_a_bounded_buffer_takes_no_staging_from_older_handles(made):
    buffer = a_buffer(BOUNDED)
    before = capacity(buffer.endpoint.workspace, BOUNDED)
    assert before < BOUNDED.max_tokens
    assert buffer.grow(None, replace(BOUNDED, max_tokens=32768))
    assert capacity(buffer.endpoint.workspace, BOUNDED) >= before
    assert made[2] - made[0] == 2 * 8 * 4 * 8 * 16384, "the routing of 16384 tokens more, no less staging"
    assert not buffer.grow(None, replace(BOUNDED, max_tokens=32768))


def test_no_growth_behind_the_back_of_a_graph(made, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    buffer = a_buffer(SMALL)
    buffer.note_capture()
    assert not buffer.grow(None, SMALL)
    with pytest.raises(ValueError, match="2048 tokens of 2048 bytes need a larger communication buffer"):
        buffer.grow(None, replace(SMALL, max_tokens=2048))
    assert len(made) == 1


@pytest.mark.parametrize(("failed", "closed"), [(False, -1), (True, -2)])
def test_close(made, failed, closed):
    buffer = a_buffer(SMALL)
    buffer.endpoint.failed = failed
    buffer.close()
    buffer.close()
    assert made[1:] == [closed]
    assert buffer.endpoint is None
