"""Actions after imports, on throw-away modules."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys

import pytest

from moe_ncclep.import_hook import _finders, when_imported


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes modules that can be imported for the length of a test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before, finders = set(sys.modules), list(sys.meta_path)

    def write(name: str, code: str = "value = 1\n") -> str:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        importlib.invalidate_caches()
        return name

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]
    assert sys.meta_path == finders, "a finder was left behind"
    assert {n: f for n, f in _finders.items() if n.startswith("hooked_")} == {}


def test_waits_for_the_end_of_the_first_import(modules):
    name, seen = modules("hooked_once", "value = 1\nvalue = 2\n"), []
    when_imported(name, lambda module: seen.append(module.value))
    assert seen == []
    assert name not in sys.modules
    importlib.import_module(name)
    importlib.import_module(name)
    assert seen == [2]


def test_acts_at_once_on_an_imported_module(modules):
    module, seen = importlib.import_module(modules("hooked_late")), []
    cancel = when_imported("hooked_late", seen.append)
    assert seen == [module]
    cancel()
    assert seen == [module]


def test_submodules(modules):
    modules("hooked_package.__init__", "from hooked_package import inner\nvalue = inner.value\n")
    modules("hooked_package.inner", "value = 3\n")
    seen = []
    when_imported("hooked_package.inner", lambda module: setattr(module, "value", 4))
    when_imported("hooked_package", lambda module: seen.append(module.value))
    importlib.import_module("hooked_package.inner")
    assert seen == [4]


def test_several_actions_run_in_order_and_one_can_be_called_off(modules):
    name, seen = modules("hooked_often"), []
    when_imported(name, lambda module: seen.append("first"))
    cancel = when_imported(name, lambda module: seen.append("second"))
    when_imported(name, lambda module: seen.append("third"))
    cancel()
    importlib.import_module(name)
    assert seen == ["first", "third"]


def test_called_off_altogether(modules):
    name, seen = modules("hooked_not"), []
    when_imported(name, seen.append)()
    assert name not in _finders
    importlib.import_module(name)
    assert seen == []


def test_looking_for_a_module_does_not_use_the_hook_up(modules):
    name, seen = modules("hooked_probed"), []
    when_imported(name, lambda module: seen.append(module.__name__))
    assert importlib.util.find_spec(name).origin.endswith("hooked_probed.py")
    assert seen == []
    importlib.import_module(name)
    assert seen == [name]


def test_a_failed_import_can_be_repeated(modules):
    name, seen = modules("hooked_broken", "import sys\nif not hasattr(sys, 'mended'): raise OSError('broken')\n"), []
    when_imported(name, seen.append)
    with pytest.raises(OSError, match="broken"):
        importlib.import_module(name)
    assert seen == []
    sys.mended = True
    try:
        module = importlib.import_module(name)
    finally:
        del sys.mended
    assert seen == [module]


def test_a_module_that_does_not_exist(modules):
    cancel = when_imported("hooked_missing", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="hooked_missing"):
        importlib.import_module("hooked_missing")
    assert importlib.util.find_spec("hooked_missing") is None
    cancel()


def test_a_failing_action_fails_the_import(modules):
    name = modules("hooked_unfit")

    def refuse(module):
        raise ValueError("cannot patch this version")

    cancel = when_imported(name, refuse)
    with pytest.raises(ValueError, match="cannot patch this version"):
        importlib.import_module(name)
    assert name not in sys.modules
    cancel()
    importlib.import_module(name)


def test_an_action_may_ask_for_another_on_the_same_module(modules):
    """So does activation by environment: its action registers, and registration waits for the module it runs on."""
    name, seen = modules("hooked_nested"), []
    when_imported(name, lambda module: when_imported(name, lambda module: seen.append(module.value)))
    importlib.import_module(name)
    assert seen == [1]


def test_a_module_that_is_being_imported(modules):
    """The end of a running import can be seen only by those who came before it."""
    code = "from moe_ncclep.import_hook import when_imported\nseen = []\nwhen_imported(__name__, {})\nvalue = 1\n"
    watched = modules("hooked_watched", code.format("lambda module: seen.append(module.value)"))
    when_imported(watched, lambda module: None)
    assert importlib.import_module(watched).seen == [1]
    unwatched = modules("hooked_unwatched", code.format("print"))
    with pytest.raises(RuntimeError, match="hooked_unwatched is being imported right now"):
        importlib.import_module(unwatched)


def test_a_loader_shared_with_other_modules(modules, monkeypatch):
    class OneLoader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path=None, target=None):
            return importlib.util.spec_from_loader(name, self) if name in ("hooked_shared", "hooked_beside") else None

        def exec_module(self, module):
            module.value = 1

    monkeypatch.setattr(sys, "meta_path", [OneLoader(), *sys.meta_path])
    seen = []
    when_imported("hooked_shared", lambda module: seen.append(module.__name__))
    importlib.util.find_spec("hooked_shared")
    importlib.import_module("hooked_beside")
    assert seen == []
    importlib.import_module("hooked_shared")
    assert seen == ["hooked_shared"]
    monkeypatch.undo()
