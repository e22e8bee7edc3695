"""Our options as Megatron command line flags and as environment variables, both generated from :class:`EPOptions`."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

from moe_ncclep.ep import EPOptions
from moe_ncclep.ep.options import flag_fields

_PREFIX = "ncclep_"
_ENV_PREFIX = "MOE_NCCLEP_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--ncclep-*`` flags to a parser. A flag that is not given leaves the choice to the environment."""
    group = parser.add_argument_group("ncclep token dispatcher")
    for f in flag_fields():
        flag = "--" + (_PREFIX + f.name).replace("_", "-")
        text = f"{f.metadata['help']} (environment: {_ENV_PREFIX}{f.name.upper()})".replace("%", "%%")
        if f.metadata["type"] is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            group.add_argument(flag, type=f.metadata["type"], choices=f.metadata["choices"], default=None, help=text)
    return parser


def options_from_env(environ: Mapping[str, str] = os.environ) -> EPOptions:
    """Options from ``MOE_NCCLEP_ENGINE`` and its like.

    Raises:
        ValueError: naming the variable and its value.
    """
    changes = {}
    for f in flag_fields():
        name = _ENV_PREFIX + f.name.upper()
        if environ.get(name, "") != "":
            changes[f.name] = _parse(name, environ[name], f.metadata["type"])
    options = EPOptions(**changes)
    options.validate()
    return options


def options_from_args(args: Any, fallback: EPOptions) -> EPOptions:
    """Options from parsed Megatron arguments; what was not given comes from ``fallback``."""
    given = {f.name: getattr(args, _PREFIX + f.name, None) for f in flag_fields()}
    options = fallback.replace(**{name: value for name, value in given.items() if value is not None})
    options.validate()
    return options


def current_options() -> EPOptions:
    """Megatron's parsed arguments, where its training loop has any, over the environment, over the defaults."""
    options = options_from_env()
    global_vars = sys.modules.get("megatron.training.global_vars")
    args = getattr(global_vars, "_GLOBAL_ARGS", None)
    return options if args is None else options_from_args(args, options)


def patch_parser(arguments_module: Any) -> None:
    """Let ``megatron.training.arguments`` add our flags whenever it builds its parser. Idempotent."""
    original = arguments_module.add_megatron_arguments
    if getattr(original, "adds_ncclep_flags", False):
        return

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_arguments(original(parser))

    add_megatron_arguments.adds_ncclep_flags = True
    arguments_module.add_megatron_arguments = add_megatron_arguments


def unpatch_parser(arguments_module: Any) -> None:
    """Undo :func:`patch_parser`."""
    if getattr(arguments_module.add_megatron_arguments, "adds_ncclep_flags", False):
        arguments_module.add_megatron_arguments = arguments_module.add_megatron_arguments.__wrapped__


def _parse(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError(f"{name}={text!r} must be one of {', '.join(_TRUE + _FALSE)}")
        return text.lower() in _TRUE
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be of type {kind.__name__}") from None
