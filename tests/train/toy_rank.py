"""A rank for the tests of supervision: writes down its process id, then behaves or misbehaves as its job says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from moe_ncclep.train.rank import die_with


def main() -> int:
    ticket = json.loads(sys.argv[1])
    die_with(ticket["parent"])
    job, rank = ticket["job"], int(os.environ["RANK"])
    if job.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(job["folder"], f"{rank}.pid").write_text(str(os.getpid()))
    print(f"output of rank {rank}", flush=True)
    with os.fdopen(ticket["events_fd"], "w", buffering=1) as pipe:

        def emit(event: dict) -> None:
            pipe.write(json.dumps(event) + "\n")

        if "how" not in job:
            for step in range(3):
                emit({"event": "step", "step": step})
            if rank == 0:
                run = {"rank": str(rank), "world": os.environ["WORLD_SIZE"], "threads": os.environ["OMP_NUM_THREADS"]}
                emit({"event": "result", "run": {**run, "long": "x" * 100_000}})
            return 0
        while len(list(Path(job["folder"]).glob("*.pid"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.02)
        if rank == job["bad_rank"]:
            if job["how"] in ("raise", "hang"):
                emit({"event": "error", "text": "ValueError: what went wrong"})
            if job["how"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if job["how"] != "hang":
                return {"raise": 1, "exit": 3, "return": 0}[job["how"]]
        if job["how"] == "return":
            return 0
        time.sleep(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
