"""The recipe: its data, and Megatron's own training loop from the shell script to the losses, on CPU and gloo."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import free_port, pool

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--distributed-backend",
    "gloo",
    "--num-layers",
    "2",
    "--hidden-size",
    "64",
    "--moe-ffn-hidden-size",
    "64",
    "--num-experts",
    "8",
    "--seq-length",
    "32",
    "--max-position-embeddings",
    "32",
    "--train-iters",
    "4",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "8",
    "--deterministic-mode",
    "--logging-level",
    "20",
]


def _has_training_loop() -> bool:
    try:
        return importlib.util.find_spec("megatron.training") is not None
    except ImportError:
        return False


pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not _has_training_loop(), reason="this megatron-core wheel has no megatron.training"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there is no GPU"),
]


def _setup() -> None:
    from tests.megatron.pretrain_cpu_shim import apply

    apply()


def _train(dispatcher: str, dtype: str, folder: Path) -> tuple[dict[str, list], str]:
    """Losses and log of the recipe on two ranks."""
    path = folder / f"{dispatcher}.json"
    environment = os.environ | {
        "DISPATCHER": dispatcher,
        "DTYPE": dtype,
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "MASTER_PORT": str(free_port()),
        "LAUNCHER": "tests.megatron.pretrain_cpu_shim",
    }
    done = subprocess.run(
        ["bash", "recipes/pretrain_gpt.sh", *SMALL, "--text-path", "moe_ncclep", "--loss-json", str(path)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return json.loads(path.read_text()), done.stdout


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.timeout(520)
def test_losses_equal_those_of_alltoall(dtype, tmp_path):
    ours, log = _train("ncclep", dtype, tmp_path)
    theirs, other_log = _train("alltoall", dtype, tmp_path)
    assert "engine collective for a group of 2" in log
    assert "engine collective" not in other_log
    assert ours["iteration"] == [1, 2, 3, 4]
    assert ours["lm loss"][-1] < ours["lm loss"][0]
    assert ours == theirs  # losses and gradient norms, every bit


def _recipe():
    spec = importlib.util.spec_from_file_location("pretrain_gpt", ROOT / "recipes" / "pretrain_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check_text(folder: str) -> None:
    recipe = _recipe()
    path = Path(folder)
    (path / "deep" / "site-packages").mkdir(parents=True)
    for name, content in {"b.py": "bb", "a.md": "a", "c.bin": "no", "deep/d.txt": "dd"}.items():
        (path / name).write_text(content)
    (path / "deep" / "site-packages" / "e.py").write_text("no")
    assert recipe.read_text([folder]).tobytes() == b"a\0bb\0dd\0"
    assert recipe.read_text([str(path / "c.bin"), folder]).tobytes() == b"no\0a\0bb\0dd\0"
    with pytest.raises(FileNotFoundError, match=r"no \.py, \.txt, \.md, \.rst files in .*site-packages/none"):
        recipe.read_text([str(path / "deep" / "site-packages" / "none")])


def test_text_is_read_in_a_fixed_order(tmp_path):
    pool(1, _setup).run(_check_text, str(tmp_path))


def _check_dataset() -> None:
    import numpy as np

    recipe = _recipe()
    text = np.arange(1000, dtype=np.int64).astype(np.uint8)
    train, valid = (recipe.ByteDataset(text, split, 40, 32, seed=7) for split in list(recipe.SHARES)[:2])
    assert len(train) == 40
    assert len(recipe.ByteDataset(text, train.split, None, 32, seed=7)) == 899 // 32
    starts = []
    for index in range(28):
        sample = train[index]
        assert {name: tuple(value.shape) for name, value in sample.items()} == dict.fromkeys(sample, (32,))
        assert torch.equal(sample["labels"], (sample["tokens"] + 1) % 256)
        starts.append(int(sample["tokens"][0]))
    assert sorted(starts) == sorted(n * 32 % 256 for n in range(28))  # every window once
    assert [int(train[index]["tokens"][0]) for index in range(28, 40)] != starts[:12]  # another order in the next pass
    assert torch.equal(train[3]["tokens"], recipe.ByteDataset(text, train.split, 40, 32, seed=7)[3]["tokens"])
    assert int(valid[0]["tokens"][0]) == 900 % 256
    with pytest.raises(ValueError, match="50 bytes of text for valid are too few for --seq-length 64"):
        recipe.ByteDataset(text, valid.split, 4, 64, seed=7)


def test_dataset_visits_every_window():
    pool(1, _setup).run(_check_dataset)


def _check_loss() -> None:
    recipe = _recipe()
    losses, mask = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    loss, num_tokens, report = recipe.loss_of(mask, losses.requires_grad_())
    loss.backward()
    assert (float(loss), int(num_tokens), report["lm loss"].tolist()) == (11.0, 3, [11.0, 3.0])
    assert torch.equal(losses.grad, mask)


def test_loss_is_a_sum_over_the_masked_tokens():
    pool(1, _setup).run(_check_loss)
