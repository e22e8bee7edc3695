"""Mixture-of-Experts token dispatch for Megatron-Core and plain PyTorch.

* :mod:`moe_ncclep.ep`: dispatch and combine on torch tensors; knows nothing of Megatron.
* :mod:`moe_ncclep.megatron`: importing it makes ``moe_token_dispatcher_type="ncclep"`` work.
* ``python -m moe_ncclep``: the command line.
"""

__version__ = "0.1.0"
