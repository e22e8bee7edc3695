"""The loop itself, on gloo ranks: the same training for every number of ranks, and errors that reach all of them."""

from __future__ import annotations

import pytest

from tests.ranks import RankError, pool

pytestmark = pytest.mark.megatron

TEXT_BYTES = 2**17  # enough for the same held-out windows on any number of ranks
SMALL = {
    "steps": 5,
    "eval_every": 5,
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "experts": 4,
    "ffn": 32,
    "seq": 32,
    "lr": 0.01,
    "aux_loss": 0.0,  # it is a mean over the tokens of one rank, so it depends on the number of ranks
    "dtype": "float32",
}


def setup() -> None:
    import warnings

    warnings.filterwarnings("ignore")


def train_here(world: int, ep: int, settings: dict, of_rank: dict[int, dict] | None = None) -> dict:
    import torch
    import torch.distributed as dist

    from moe_ncclep.train.config import TrainConfig
    from moe_ncclep.train.data import load_corpus
    from moe_ncclep.train.loop import train

    mine = (of_rank or {}).get(dist.get_rank(), {})
    config = TrainConfig(nproc=world, ep=ep, **{**SMALL, "micro_batch": 4 // world, **settings, **mine})
    return train(config, load_corpus(None, max_bytes=TEXT_BYTES), torch.device("cpu"), lambda event: None)


def run(world: int, ep: int, settings: dict | None = None, of_rank: dict[int, dict] | None = None) -> dict:
    records = pool(world, setup).run(train_here, world, ep, settings or {}, of_rank)
    for record in records[1:]:
        assert record["train_loss"] == records[0]["train_loss"]
    return records[0]


@pytest.fixture(scope="module")
def alone() -> dict:
    """The reference: one rank with the whole batch."""
    return run(1, 1)


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("dispatcher", ["ncclep", "alltoall"])
def test_two_ranks_train_like_one(alone, ep, dispatcher):
    two = run(2, ep, {"dispatcher": dispatcher})
    assert two["train_loss"] == pytest.approx(alone["train_loss"], abs=2e-5)
    assert two["gradient_norm"] == pytest.approx(alone["gradient_norm"], rel=1e-3)
    assert two["final_eval_loss"] == pytest.approx(alone["final_eval_loss"], abs=2e-5)
    assert two["parameters"] == alone["parameters"]


def test_same_seed_same_losses_and_another_seed_others():
    first, again, other = run(2, 2), run(2, 2), run(2, 2, {"seed": 7})
    for what in ("train_loss", "gradient_norm", "eval_loss", "last_step"):
        assert again[what] == first[what]
    assert other["train_loss"] != first["train_loss"]


def test_recompute_changes_nothing():
    settings = {"aux_loss": 0.01}
    assert run(2, 2, {**settings, "recompute": True})["train_loss"] == run(2, 2, settings)["train_loss"]


def test_auxiliary_loss_reaches_the_router(alone):
    balanced = run(1, 1, {"aux_loss": 1.0})
    assert balanced["train_loss"][0] == alone["train_loss"][0]  # reported without it
    assert balanced["train_loss"][-1] != alone["train_loss"][-1]


def test_bf16_follows_float32():
    low = run(2, 2, {"dtype": "bf16"})
    assert low["train_loss"] == pytest.approx(run(2, 2)["train_loss"], abs=0.02)


def test_load_and_wire_bytes_of_the_last_step():
    record = run(2, 2)
    tokens = 4 * SMALL["seq"]
    load, wire = record["last_step"]["tokens_per_expert"], record["last_step"]["wire"]
    assert [sum(layer) for layer in load] == [2 * tokens] * SMALL["layers"]
    row = SMALL["hidden"] * 4
    assert 0 < wire["dispatch_bytes"] <= wire["alltoall_bytes"]
    assert wire["dispatch_bytes"] <= SMALL["layers"] * tokens * row
    assert run(2, 2, {"dispatcher": "alltoall"})["last_step"]["wire"] is None


def test_differing_settings_are_an_error_on_every_rank():
    outcomes = pool(2, setup).outcomes(train_here, 2, 2, {}, {1: {"seed": 5}})
    assert [(ok, value[:2]) for ok, value in outcomes] == [
        (False, ("ValueError", "ranks disagree on the settings: rank 1 and rank 0 differ"))
    ] * 2


def test_an_engine_that_cannot_work_is_an_error_that_says_why():
    with pytest.raises(RankError, match="engine local cannot be used: needs a group of 1 rank, this one has 2"):
        run(2, 2, {"engine": "local"})
    assert run(2, 2)["engine"] == "collective"  # and the ranks can go on
