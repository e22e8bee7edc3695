"""Expert parallelism on torch tensors: dispatch, combine, and the engines that move the tokens."""

from moe_ncclep.ep.options import EPOptions

__all__ = ["EPOptions"]
