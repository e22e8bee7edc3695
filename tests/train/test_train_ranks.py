"""Starting and supervising ranks, with ranks that do nothing but what the test asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_ncclep.train.ranks import RankFailure, run_ranks

MODULE = "tests.train.toy_rank"


@pytest.fixture(autouse=True)
def importable_here(monkeypatch):
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]))


def run(tmp_path, nproc=2, **job):
    events = []
    result = run_ranks(MODULE, {"folder": str(tmp_path), **job}, nproc, "cpu", 2, tmp_path, events.append)
    return result, events


def pids(folder: Path, count: int) -> list[int]:
    """Process ids that the toy ranks wrote down, once all have."""
    deadline = time.monotonic() + 20
    while len(files := list(folder.glob("*.pid"))) < count or any(not f.read_text() for f in files):
        assert time.monotonic() < deadline, "ranks did not start"
        time.sleep(0.02)
    return [int(f.read_text()) for f in files]


def assert_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 5
    while alive := [p for p in processes if Path(f"/proc/{p}").exists()]:
        assert time.monotonic() < deadline, f"processes {alive} are left"
        time.sleep(0.05)


def test_events_and_result_of_rank_0(tmp_path):
    result, events = run(tmp_path)
    assert result == {"event": "result", "run": {"rank": "0", "world": "2", "threads": "1", "long": "x" * 100_000}}
    assert events == [{"event": "step", "step": i} for i in range(3)]
    assert (tmp_path / "rank1.log").read_text() == "output of rank 1\n"
    assert_gone(pids(tmp_path, 2))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 1 failed: ValueError: what went wrong"),
        ("exit", r"rank 1 failed with exit code 3\n  output of rank 1\n"),
        ("kill", "rank 1 was killed by SIGKILL"),
        ("return", "rank 0 ended without a result"),
        ("hang", "rank 1 failed: ValueError: what went wrong"),
    ],
)
def test_a_failed_rank_ends_the_others(tmp_path, how, message):
    began = time.monotonic()
    with pytest.raises(RankFailure, match=message):
        run(tmp_path, bad_rank=1 if how != "return" else 0, how=how)
    assert time.monotonic() - began < 10
    assert_gone(pids(tmp_path, 2))


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path):
    with pytest.raises(RankFailure, match="rank 1 was killed"):
        run(tmp_path, bad_rank=1, how="kill", ignore_sigterm=True)
    assert_gone(pids(tmp_path, 2))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a process to its parent")
def test_ranks_die_with_their_parent(tmp_path):
    code = (
        "import sys, pathlib\nfrom moe_ncclep.train.ranks import run_ranks\n"
        f"run_ranks({MODULE!r}, {{'folder': {str(tmp_path)!r}, 'bad_rank': 5, 'how': 'wait'}}, 2, 'cpu', 2, "
        f"pathlib.Path({str(tmp_path)!r}), print)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    ranks = pids(tmp_path, 2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert_gone(ranks)
