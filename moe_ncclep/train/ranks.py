"""Start the ranks of a job on this machine, listen to them, and never leave one behind."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO

POLL_S = 0.05
GRACE_S = 2.0
"""After SIGTERM, before SIGKILL."""
SETTLE_S = 0.5
"""After the first death, to see which rank died of its own: the others only notice that it is gone."""
STORE_TIMEOUT = timedelta(minutes=10)
LOG_LINES = 15


class RankFailure(RuntimeError):
    """A rank ended before its work was done. The text says which, how, and where its output is."""


@dataclass
class _Rank:
    index: int
    process: subprocess.Popen
    events: IO[bytes]
    log: Path
    error: str | None = None
    buffer: bytes = field(default=b"", repr=False)

    def read(self) -> list[dict] | None:
        """Events that have arrived, None at the end; an incomplete last line is kept for the next call."""
        received = os.read(self.events.fileno(), 1 << 16)
        *lines, self.buffer = (self.buffer + received).split(b"\n")
        return [json.loads(line) for line in lines] if received else None

    def failed(self) -> bool:
        """Whether this rank has reported an error or ended badly; one that only hangs while it ends counts too."""
        return self.error is not None or self.process.poll() not in (None, 0)

    def describe(self) -> str:
        """How this rank ended."""
        code = self.process.poll()
        if self.error is not None:
            how = f"failed: {self.error}"
        elif code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        elif not code:
            how = "ended without a result"
        else:
            how = f"failed with exit code {code}"
        text = f"rank {self.index} {how}"
        if self.error is None and code and code > 0:
            lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            text += "".join(f"\n  {line}" for line in lines)
        return f"{text}\n(output of rank {self.index}: {self.log})"


def run_ranks(
    module: str, job: dict, nproc: int, device: str, cores: int, log_folder: Path, on_event: Callable[[dict], None]
) -> dict:
    """Run ``python -m module`` as ``nproc`` ranks and return the ``result`` event of rank 0.

    Each rank gets a ticket as JSON in its only argument (the job and where to join), the environment variables of
    torchrun, and a pipe for events, one JSON object a line. Its output goes to ``log_folder``. Ranks die with this
    process, whatever ends it.

    Args:
        module: module that is run as a rank.
        job: passed through to the ranks; must be JSON.
        nproc: number of ranks.
        device: ``cpu`` or ``cuda``.
        cores: CPU cores to share among the ranks.
        log_folder: existing folder for ``rank0.log`` and so on.
        on_event: called with every event of rank 0 except ``result``.

    Raises:
        RankFailure: as soon as one rank has died; the others are ended first.
    """
    import torch.distributed as dist

    # The store lives here and takes a free port by itself: no port is chosen first and bound later.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
    threads = max(1, cores // nproc)
    ranks: list[_Rank] = []
    try:
        for index in range(nproc):
            ranks.append(_start(module, job, index, nproc, store.port, device, threads, log_folder))
        return _listen(ranks, on_event)
    finally:
        _stop(ranks)


def _start(
    module: str, job: dict, index: int, nproc: int, port: int, device: str, threads: int, log_folder: Path
) -> _Rank:
    read_end, write_end = os.pipe()
    ticket = {
        "job": job,
        "events_fd": write_end,
        "parent": os.getpid(),
        "store_port": port,
        "device": device,
        "threads": threads,
    }
    environment = dict(
        os.environ,
        RANK=str(index),
        LOCAL_RANK=str(index),
        WORLD_SIZE=str(nproc),
        LOCAL_WORLD_SIZE=str(nproc),
        OMP_NUM_THREADS=str(threads),
    )
    if sys.platform == "linux":  # gloo would look up the host name, which need not resolve
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    log = log_folder / f"rank{index}.log"
    try:
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(ticket)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[write_end],
                start_new_session=True,  # Ctrl-C reaches this process only, which then ends the ranks in order
            )
    finally:
        os.close(write_end)
    return _Rank(index, process, os.fdopen(read_end, "rb", buffering=0), log)


def _listen(ranks: list[_Rank], on_event: Callable[[dict], None]) -> dict:
    """Serve events until every rank has ended well, or one has not."""
    result: dict | None = None
    first_failure: float | None = None
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.events, selectors.EVENT_READ, rank)
        while True:
            if not selector.get_map():
                time.sleep(POLL_S)
            for key, _ in selector.select(POLL_S) if selector.get_map() else ():
                rank: _Rank = key.data
                received = rank.read()
                if received is None:
                    selector.unregister(rank.events)
                for event in received or ():
                    if event["event"] == "error":
                        rank.error = event["text"]
                    elif event["event"] == "result":
                        result = event
                    elif rank.index == 0:
                        on_event(event)
            if any(rank.failed() for rank in ranks):
                first_failure = first_failure or time.monotonic()
                if time.monotonic() - first_failure >= SETTLE_S or all(rank.failed() for rank in ranks):
                    raise RankFailure(_cause(ranks).describe())
            elif not selector.get_map() and all(rank.process.poll() == 0 for rank in ranks):
                if result is None:
                    raise RankFailure(ranks[0].describe())
                return result


def _cause(ranks: list[_Rank]) -> _Rank:
    """The dead rank that most likely brought down the others: killed first, then one with an error of its own."""

    def likelihood(rank: _Rank) -> int:
        if not rank.failed():
            return 0
        if (rank.process.poll() or 0) < 0:
            return 4
        if rank.error is None:
            return 3
        # A lost peer shows as a RuntimeError of the transport.
        return 1 if rank.error.startswith(("RuntimeError", "DistBackendError", "DistNetworkError")) else 2

    return max(ranks, key=likelihood)


def _stop(ranks: list[_Rank]) -> None:
    """End every rank that still runs, with what it started, and reap it."""
    for rank in ranks:
        _signal(rank, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(rank, signal.SIGKILL)
            rank.process.wait()
        rank.events.close()


def _signal(rank: _Rank, number: signal.Signals) -> None:
    if rank.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, number)
