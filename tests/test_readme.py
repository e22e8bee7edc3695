"""What the README promises can be checked."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from moe_ncclep.ep.checks import MAX_EXPERTS, MAX_TOP_K

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_measured_parts_come_from_the_results():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import readme_tables
    finally:
        sys.path.remove(str(ROOT / "tools"))
    assert readme_tables.fill(README) == README, "run: python tools/readme_tables.py"


def test_it_is_short():
    assert README.count("\n") < 250


def test_paths_exist():
    named = re.findall(r"`((?:moe_ncclep|recipes|tests|tools|csrc)/[\w./]*)`", README)
    named += re.findall(r"\]\(([\w./]+)\)", README)
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_its_two_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert commands == ["train", "test"]
    assert all(re.search(rf"^{command}:", makefile, re.MULTILINE) for command in commands)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_limits_are_those_of_the_code():
    assert f"E up to {MAX_EXPERTS}" in README
    assert re.search(rf"K up\s+to {MAX_TOP_K}", README)
