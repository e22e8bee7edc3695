"""Skips with reasons, and a header and summary that name the Megatron version under test."""

from __future__ import annotations

import importlib.metadata

import pytest

from tests.gpu.machine import RANKS_OF_MARKER, why_not


def _megatron_version() -> str | None:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


MEGATRON = _megatron_version()


def pytest_report_header() -> str:
    return f"megatron-core: {MEGATRON or 'not installed'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if MEGATRON is None:
        skip = pytest.mark.skip(reason="megatron-core is not installed")
        for item in items:
            if "megatron" in item.keywords:
                item.add_marker(skip)
    for item in items:
        for marker in RANKS_OF_MARKER:
            reason = why_not(marker) if item.get_closest_marker(marker) else None
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter) -> None:
    passed = terminalreporter.stats.get("passed", [])
    ours = sum("megatron" in report.keywords for report in passed)
    terminalreporter.write_line(f"megatron-core {MEGATRON}: {ours} tests with it passed, {len(passed) - ours} without")
