"""Make ``moe_token_dispatcher_type="ncclep"`` work in an unmodified Megatron-Core.

Megatron has no plug-in point for dispatchers: ``MoELayer`` compares the type with known names. Three patches, the same
in every version, and all reversible:

1. the configuration field (from which Megatron generates its command line flag) admits ``"ncclep"``;
2. ``TransformerConfig.__post_init__`` turns it into type ``"flex"`` with a :class:`NCCLEPBackend`;
3. the name under which ``MoELayer`` constructs a flex dispatcher constructs ours for such a configuration.

Checkpoints do not depend on the plug-in: their arguments record the type as plain text, and ``--use-checkpoint-args``
leaves ``--moe-token-dispatcher-type`` to the command line, so that a run without the plug-in takes a stock dispatcher.
A pickled configuration object, however, needs this package to be loaded.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moe_ncclep.import_hook import when_imported
from moe_ncclep.megatron.arguments import current_options, patch_parser, unpatch_parser
from moe_ncclep.megatron.backend import DISPATCHER_TYPE, NCCLEPBackend, is_ncclep, options_of
from moe_ncclep.megatron.config_rules import check_config, check_selection, overlaps_shared_experts

__all__ = ["is_ncclep", "options_of", "register", "unregister"]

_FIELD = "moe_token_dispatcher_type"
_undo: list[Callable[[], None]] = []


def register() -> None:
    """Apply the patches, each as soon as its module is imported. Idempotent.

    Configurations made earlier are not affected.
    """
    if not _undo:
        for name, patch in _PATCHES.items():
            _undo.append(when_imported(name, patch))


def unregister() -> None:
    """Take the patches back, in reverse order."""
    while _undo:
        _undo.pop()()


def _patch_config(module: Any) -> None:
    _admit_type(module.TransformerConfig)
    _wrap_post_init(module.TransformerConfig)


def _patch_arguments(module: Any) -> None:
    patch_parser(module)
    _undo.append(lambda: unpatch_parser(module))


def _admit_type(config_class: type) -> None:
    # Subclasses such as MLATransformerConfig share the field object.
    field = config_class.__dataclass_fields__[_FIELD]
    before, annotation = field.type, config_class.__annotations__.get(_FIELD)
    field.type = typing.Literal[(*typing.get_args(before), DISPATCHER_TYPE)]
    config_class.__annotations__[_FIELD] = field.type

    def undo() -> None:
        field.type = before
        config_class.__annotations__[_FIELD] = annotation

    _undo.append(undo)


def _wrap_post_init(config_class: type) -> None:
    original = config_class.__post_init__

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        if self.moe_token_dispatcher_type == DISPATCHER_TYPE:
            self.moe_token_dispatcher_type = "flex"
            if not is_ncclep(self):  # else replace() gave us a backend, and its options count
                self.moe_flex_dispatcher_backend = NCCLEPBackend(current_options())
        if not is_ncclep(self):
            original(self)
            return
        check_selection(self)
        with _only_what_concerns_us(self):
            original(self)
        check_config(self)

    config_class.__post_init__ = post_init

    def undo() -> None:
        config_class.__post_init__ = original

    _undo.append(undo)


@contextmanager
def _only_what_concerns_us(config: Any) -> Iterator[None]:
    """Keep two checks, meant for the backend whose name we bear, from refusing what we can do."""
    backend, overlap = config.moe_flex_dispatcher_backend, config.moe_shared_expert_overlap
    if getattr(config, "moe_expert_rank_capacity_factor", None) is not None:
        # hybridep needs TransformerEngine's op fuser for this, ncclep does not.
        config.moe_flex_dispatcher_backend = NCCLEPBackend(backend.options, name="ncclep")
    if overlaps_shared_experts(config):
        config.moe_shared_expert_overlap = False  # 0.16 allows it for alltoall alone
    try:
        yield
    finally:
        config.moe_flex_dispatcher_backend, config.moe_shared_expert_overlap = backend, overlap


def _replace_flex_dispatcher(moe_layer: Any) -> None:
    stock = moe_layer.MoEFlexTokenDispatcher

    class _Chooses(type(stock)):
        """Makes a name for the stock class, in isinstance and attribute access; constructing it picks the class."""

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not chosen:  # somebody's subclass
                return super().__call__(*args, **kwargs)
            config = kwargs["config"] if "config" in kwargs else args[2] if len(args) > 2 else None
            if not is_ncclep(config):
                return stock(*args, **kwargs)
            from moe_ncclep.megatron.dispatcher import NCCLEPTokenDispatcher

            return NCCLEPTokenDispatcher(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, stock) if cls is chosen else super().__instancecheck__(instance)

    names = {"__doc__": stock.__doc__, "__module__": stock.__module__}
    chosen = moe_layer.MoEFlexTokenDispatcher = _Chooses(stock.__name__, (stock,), names)

    def undo() -> None:
        moe_layer.MoEFlexTokenDispatcher = stock

    _undo.append(undo)


_PATCHES: dict[str, Callable[[Any], None]] = {
    "megatron.core.transformer.transformer_config": _patch_config,
    "megatron.core.transformer.moe.moe_layer": _replace_flex_dispatcher,
    "megatron.training.arguments": _patch_arguments,
}
