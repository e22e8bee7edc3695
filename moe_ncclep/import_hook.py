"""Run a function right after a module has been imported, without importing it. Standard library only."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType


def when_imported(name: str, action: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call ``action(module)`` once: now, if module ``name`` is there, else at the end of its first import.

    Returns:
        A function that calls it off.
    """
    if name in sys.modules:
        action(sys.modules[name])
        return lambda: None
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.remove


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, action: Callable[[ModuleType], None]):
        self._name, self._action = name, action

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self._name:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)  # may find another hook of ours for the same module
        if spec is None or spec.loader is None:
            return spec
        execute, action = spec.loader.exec_module, self._action

        def exec_module(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = exec_module
        return spec
