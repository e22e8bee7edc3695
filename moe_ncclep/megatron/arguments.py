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
        flag = _flag(f.name)
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
    options = EPOptions()
    for f in flag_fields():
        name = _ENV_PREFIX + f.name.upper()
        text = environ.get(name, "")
        if text != "":
            options = _changed(options, f.name, _parse(name, text, f.metadata["type"]), origin=f"{name}={text!r}")
    return options


def options_from_args(args: Any, fallback: EPOptions) -> EPOptions:
    """Options from parsed Megatron arguments; what was not given comes from ``fallback``.

    Raises:
        ValueError: naming the flag and its value.
    """
    options = fallback
    for f in flag_fields():
        value = getattr(args, _PREFIX + f.name, None)
        if value is not None:
            options = _changed(options, f.name, value, origin=f"{_flag(f.name)} {value}")
    return options


def current_options() -> EPOptions:
    """Megatron's parsed arguments, where its training loop has any, over the environment, over the defaults."""
    return options_from_args(megatron_args(), options_from_env())


def megatron_args() -> Any:
    """The arguments that Megatron's training loop has parsed, or None."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


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


def _flag(field_name: str) -> str:
    return "--" + (_PREFIX + field_name).replace("_", "-")


def _changed(options: EPOptions, field_name: str, value: Any, origin: str) -> EPOptions:
    options = options.replace(**{field_name: value})
    try:
        options.validate()
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from None
    return options


def _parse(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError(f"{name}={text!r} must be one of {', '.join(_TRUE + _FALSE)}")
        return text.lower() in _TRUE
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be of type {kind.__name__}") from None
