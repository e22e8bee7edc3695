"""How a Megatron configuration carries our dispatcher and its options."""

from __future__ import annotations

from typing import Any

from moe_ncclep.ep import EPOptions

DISPATCHER_TYPE = "ncclep"
"""Value of ``moe_token_dispatcher_type`` and of ``--moe-token-dispatcher-type``."""


class NCCLEPBackend(str):
    """Value of ``moe_flex_dispatcher_backend`` that means this package, and carries its options.

    To every comparison in Megatron it is the string ``"hybridep"``: a fused dispatcher that pads for the experts and
    whose tensors must not be freed after the forward pass, which is what we are. ``isinstance`` tells the difference.
    As a value of the field it survives copy, pickle and ``dataclasses.replace``, which a marker attribute would not.

    Args:
        options: deployment options of the dispatcher.
        name: what comparisons see.
    """

    options: EPOptions

    def __new__(cls, options: EPOptions | None = None, name: str = "hybridep") -> NCCLEPBackend:
        """See the class."""
        self = super().__new__(cls, name)
        self.options = options or EPOptions()
        return self

    def __reduce__(self) -> tuple:
        return type(self), (self.options, str(self))

    def __repr__(self) -> str:
        return f"NCCLEPBackend({self.options!r})"


def is_ncclep(config: Any) -> bool:
    """Whether a transformer configuration selects this package's dispatcher."""
    backend = getattr(config, "moe_flex_dispatcher_backend", None)
    # The backend stays behind when replace() chooses another type.
    return isinstance(backend, NCCLEPBackend) and config.moe_token_dispatcher_type in ("flex", DISPATCHER_TYPE)


def options_of(config: Any) -> EPOptions:
    """Options that the configuration carries.

    Raises:
        ValueError: if the configuration does not select this dispatcher.
    """
    if not is_ncclep(config):
        raise ValueError(
            f"moe_token_dispatcher_type={config.moe_token_dispatcher_type!r} is not {DISPATCHER_TYPE!r}, "
            "or moe_ncclep.megatron was imported after the configuration was made"
        )
    return config.moe_flex_dispatcher_backend.options
