"""Run the tests: those without Megatron once, those with it against each version; then a summary per version.

python tools/run_tests.py [DIRECTORY_OF_A_MEGATRON_CORE ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(name: str, marker: str, megatron: Path | None, report: Path) -> tuple[int, dict[str, int]]:
    """One pytest run; returns its exit status and the counts of its report."""
    print(f"\n===== {name} =====", flush=True)
    environment = dict(os.environ)
    if megatron is not None:
        paths = [str(megatron.resolve()), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, f"--junitxml={report}", "--durations=5"]
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    if report.exists():
        suite = ElementTree.parse(report).getroot().find("testsuite")
        failed, skipped = int(suite.get("failures")) + int(suite.get("errors")), int(suite.get("skipped"))
        counts = {"passed": int(suite.get("tests")) - failed - skipped, "failed": failed, "skipped": skipped}
    return status, counts


def main(megatrons: list[str]) -> int:
    """Run everything; 0 if all passed."""
    jobs = [("without Megatron", "not megatron", None)]
    jobs += [(Path(m).name, "megatron", Path(m)) for m in megatrons]
    results = {}
    with tempfile.TemporaryDirectory() as reports:
        for name, marker, megatron in jobs:
            results[name] = run(name, marker, megatron, Path(reports, f"{name}.xml"))
    print("\n===== summary =====")
    for name, (_, counts) in results.items():
        print(f"{name:24s}" + "".join(f"{counts[k]:6d} {k}" for k in counts))
    total = {k: sum(counts[k] for _, counts in results.values()) for k in ("passed", "failed", "skipped")}
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped", flush=True)
    return max(status for status, _ in results.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
