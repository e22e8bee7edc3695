"""The Megatron-Core plug-in. Importing it registers the dispatcher type ``ncclep`` and its command line flags.

Megatron itself is not imported: each patch is applied when its module is, or at once if it is there already.


import moe_ncclep.megatron
config = TransformerConfig(..., moe_token_dispatcher_type="ncclep")
"""

from moe_ncclep.megatron.backend import NCCLEPBackend, is_ncclep, options_of
from moe_ncclep.megatron.registration import register, unregister

__all__ = ["NCCLEPBackend", "NCCLEPTokenDispatcher", "is_ncclep", "options_of", "register", "unregister"]

register()


def __getattr__(name: str) -> object:
    if name == "NCCLEPTokenDispatcher":  # imports Megatron's dispatchers, which a launcher need not
        from moe_ncclep.megatron.dispatcher import NCCLEPTokenDispatcher

        return NCCLEPTokenDispatcher
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
