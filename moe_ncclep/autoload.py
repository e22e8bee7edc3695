"""Registration by environment variable: ``MOE_NCCLEP=1 torchrun pretrain_gpt.py ...``, the script unchanged.

The package installs a ``.pth`` line that imports this module at interpreter start if ``MOE_NCCLEP`` is set. It only
leaves notes for the import of three Megatron modules; torch is not loaded before they are.
"""

from __future__ import annotations

import os

from moe_ncclep.import_hook import when_imported

_OFF = ("", "0", "false", "no", "off")


def wanted() -> bool:
    """Whether ``MOE_NCCLEP`` asks for registration."""
    return os.environ.get("MOE_NCCLEP", "").lower() not in _OFF


def _register(module: object) -> None:
    import moe_ncclep.megatron  # noqa: F401


if wanted():
    # Any of them may come first. Importing moe_ncclep.megatron again is free.
    for _name in (
        "megatron.core.transformer.transformer_config",
        "megatron.core.transformer.moe.moe_layer",
        "megatron.training.arguments",
    ):
        when_imported(_name, _register)
