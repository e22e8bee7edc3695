"""The engine of a group: chosen once, by all ranks together, with a reason."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass

import torch.distributed as dist

from moe_ncclep.ep.agreement import first_reason, gather_objects
from moe_ncclep.ep.engines.base import Engine
from moe_ncclep.ep.engines.collective import CollectiveEngine
from moe_ncclep.ep.engines.local import LocalEngine
from moe_ncclep.ep.engines.nvlink import NVLinkEngine
from moe_ncclep.ep.options import ENGINES, EPOptions

logger = logging.getLogger(__name__)

_BEST_FIRST: tuple[type[Engine], ...] = (LocalEngine, NVLinkEngine, CollectiveEngine)


@dataclass(frozen=True)
class EngineChoice:
    """The engine of a group, what was asked for, and why it was taken."""

    engine: Engine
    requested: str
    reason: str


_choices: weakref.WeakKeyDictionary[dist.ProcessGroup, EngineChoice] = weakref.WeakKeyDictionary()
_alone: dict[str, EngineChoice] = {}


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """``group``, or the default group, or None in a process without torch.distributed."""
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def choose_engine(group: dist.ProcessGroup | None, options: EPOptions) -> EngineChoice:
    """Return the engine of ``group``; the first call for a group is collective and decides for good.

    Raises:
        ValueError: on every rank, if the ranks ask for different engines, or the engine asked for cannot work on some
            rank (the text says where and what is missing). A later call with another wish is refused on every rank too.
            On this rank alone, if it is not a member of ``group`` or the group has been destroyed.
    """
    group = resolve_group(group)
    if group is None:
        return _choose_alone(options)
    if dist.get_rank(group) < 0:
        raise ValueError("this rank is not a member of the group")
    choice = _choices.get(group)
    if choice is None:
        choice = _choices[group] = _decide(group, options)
        if choice.engine.rank == 0:
            logger.info("engine %s for a group of %d: %s", choice.engine.name, choice.engine.size, choice.reason)
    elif choice.requested != options.engine:
        choice.engine.refuse(
            f"engine {options.engine!r} asked for, but this group already uses {choice.engine.name!r} "
            f"(asked for as {choice.requested!r}); call close_engine first"
        )
    return choice


def close_engine(group: dist.ProcessGroup | None = None) -> None:
    """Free the engine of ``group``; the next dispatch chooses anew. Collective."""
    group = resolve_group(group)
    if group is None:
        _alone.clear()
        return
    choice = _choices.pop(group, None)
    if choice is not None:
        choice.engine.close()


def _choose_alone(options: EPOptions) -> EngineChoice:
    if options.engine not in _alone:
        _alone[options.engine] = _pick(None, gather_objects(None, _report(None, options)))
    return _alone[options.engine]


def _decide(group: dist.ProcessGroup, options: EPOptions) -> EngineChoice:
    return _pick(group, gather_objects(group, _report(group, options)))


def _report(group: dist.ProcessGroup | None, options: EPOptions) -> dict:
    return {"requested": options.engine, "unavailable": {cls.name: cls.unavailable(group) for cls in _BEST_FIRST}}


def _pick(group: dist.ProcessGroup | None, reports: list[dict]) -> EngineChoice:
    """Decide from the reports of all ranks and joint probes; every rank gets the same answer or the same error."""
    requested = reports[0]["requested"]
    for rank, report in enumerate(reports):
        if report["requested"] not in ENGINES:
            raise ValueError(f"rank {rank}: unknown engine {report['requested']!r}; choose one of {', '.join(ENGINES)}")
        if report["requested"] != requested:
            raise ValueError(f"ranks disagree on engine: {requested} on rank 0, {report['requested']} on rank {rank}")
    if requested != "auto":
        cls = next(cls for cls in _BEST_FIRST if cls.name == requested)
        obstacle = _obstacle(cls, group, reports, asked_for=True)
        if obstacle is not None:
            raise ValueError(f"engine {requested} cannot be used: {obstacle}")
        return EngineChoice(cls(group), requested, "asked for")
    passed_over = []
    for cls in _BEST_FIRST:
        obstacle = _obstacle(cls, group, reports, asked_for=False)
        if obstacle is None:
            reason = "; ".join(passed_over) if passed_over else "best of all, and every rank can use it"
            return EngineChoice(cls(group), requested, reason)
        passed_over.append(f"{cls.name} {obstacle}")
    raise ValueError(f"no engine can serve this group: {'; '.join(passed_over)}")


def _obstacle(
    cls: type[Engine], group: dist.ProcessGroup | None, reports: list[dict], *, asked_for: bool
) -> str | None:
    """Why the engine is ruled out, the same on every rank. Collective if no rank has reported a reason."""
    reason = first_reason([report["unavailable"][cls.name] for report in reports])
    return reason if reason is not None else first_reason(gather_objects(group, _probe(cls, group, asked_for)))


def _probe(cls: type[Engine], group: dist.ProcessGroup | None, asked_for: bool) -> str | None:
    try:
        return cls.probe(group, asked_for)
    except Exception as error:  # whatever it is, the other ranks are already waiting
        return f"{type(error).__name__}: {error}"
