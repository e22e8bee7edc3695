"""Expert parallelism on torch tensors: dispatch, combine, and the engines that move the tokens.

routing = Routing(topk_idx, probs, num_experts)
out = dispatch(x, routing, group)
y = combine(experts(out.rows, out.probs, out.tokens_per_expert), out.handle)
"""

from moe_ncclep.ep.api import combine, dispatch
from moe_ncclep.ep.engines.select import EngineChoice, choose_engine, close_engine
from moe_ncclep.ep.handle import DispatchHandle, DispatchOutput, Traffic
from moe_ncclep.ep.options import EPOptions
from moe_ncclep.ep.routing import Routing

__all__ = [
    "DispatchHandle",
    "DispatchOutput",
    "EPOptions",
    "EngineChoice",
    "Routing",
    "Traffic",
    "choose_engine",
    "close_engine",
    "combine",
    "dispatch",
]
