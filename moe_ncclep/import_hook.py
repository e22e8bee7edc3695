"""Run a function right after a module has been imported, without importing it. Standard library only."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

Action = Callable[[ModuleType], None]

_finders: dict[str, _Finder] = {}


def when_imported(name: str, action: Action) -> Callable[[], None]:
    """Call ``action(module)`` once: now, if module ``name`` is there, else at the end of its first import.

    A failed import may be repeated: the action waits for one that succeeds. If the action fails, so does the import.

    Returns:
        A function that calls it off.

    Raises:
        RuntimeError: if the module is just being imported and nothing waited for it before: its end cannot be seen.
    """
    finder = _finders.get(name)
    if name in sys.modules and (finder is None or not finder.loading):
        module = sys.modules[name]
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            raise RuntimeError(f"{name} is being imported right now; come before it or after it")
        action(module)
        return lambda: None
    if finder is None:
        finder = _finders[name] = _Finder(name)
        sys.meta_path.insert(0, finder)
    finder.actions.append(action)
    return lambda: finder.call_off(action)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loader that the other finders find for one module."""

    def __init__(self, name: str):
        self.name = name
        self.actions: list[Action] = []
        self.loading = False
        self._asking_others = False

    def call_off(self, action: Action) -> None:
        if action in self.actions:
            self.actions.remove(action)
        if not self.actions:
            self._retire()

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name or self._asking_others:
            return None
        self._asking_others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking_others = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if module.__name__ != self.name:  # some finders have one loader for all their modules
                execute(module)
                return
            self.loading = True
            try:
                execute(module)
                for action in self.actions:  # an action may add to them
                    action(module)
            finally:
                self.loading = False
            self._retire()

        # Looking for a spec is not importing: the finder stays until the module has been executed.
        spec.loader.exec_module = exec_module
        return spec

    def _retire(self) -> None:
        self.actions.clear()
        if _finders.get(self.name) is self:
            del _finders[self.name]
            sys.meta_path.remove(self)
