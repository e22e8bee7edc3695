"""Small GPT models in the workers: whole-model gradients, and one layer driven by the 1F1B schedule's pieces."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.megatron.layers import EXPERTS, HIDDEN, init_parallel, make_config

VOCAB, LENGTH = 64, 16


def make_gpt(config: Any, *, mtp: bool = False) -> torch.nn.Module:
    """GPTModel of MoE layers with the same weights for every dispatcher."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    extra = {}
    if mtp:
        extra["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    torch.manual_seed(7)
    with sequence_parallel_torch_norm():
        return GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCAB,
            max_sequence_length=LENGTH,
            position_embedding_type="rope",
            **extra,
        )


@contextmanager
def sequence_parallel_torch_norm() -> Iterator[None]:
    """Let torch's LayerNorm into sequence parallel layers: it misses an all-reduce of its own gradients, the same for
    every dispatcher, which is all that a comparison needs. Without TransformerEngine there is no other norm."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def new(cls, config, *args, **kwargs):
        plain = copy.copy(config)
        plain.sequence_parallel = False
        return original(cls, plain, *args, **kwargs)

    WrappedTorchNorm.__new__ = new
    try:
        yield
    finally:
        WrappedTorchNorm.__new__ = original


def causal_mask() -> Tensor:
    return torch.triu(torch.ones(1, 1, LENGTH, LENGTH), 1).bool()


def gpt_gradients(dispatcher: str, ep: int, tp: int, changes: dict[str, Any], mtp: bool) -> dict[str, Tensor]:
    init_parallel(ep, tp)
    model = make_gpt(make_config(dispatcher, ep, tp, num_layers=2, init_method_std=0.2, **changes), mtp=mtp)
    torch.manual_seed(50 + dist.get_rank() // tp)
    ids = torch.randint(0, VOCAB, (2, LENGTH))
    loss = model(ids, torch.arange(LENGTH).expand(2, -1), causal_mask(), labels=ids.roll(-1, 1)).mean()
    loss.backward()
    result = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if dispatcher == "ncclep":
        layers = [m for m in model.modules() if type(m).__name__ == "MoELayer"]
        assert len(layers) == (3 if mtp else 2)
        assert all(type(layer.token_dispatcher).__name__ == "NCCLEPTokenDispatcher" for layer in layers)
        assert not [key for key in model.sharded_state_dict() if "dispatch" in key]
    return {"loss": loss.detach(), **result}


def compare_gpt(ep: int, tp: int = 1, changes: dict[str, Any] | None = None, mtp: bool = False) -> dict[str, float]:
    """Difference to alltoall of the loss and of each gradient, relative to the tensor's largest value."""
    stock, ours = (gpt_gradients(d, ep, tp, changes or {}, mtp) for d in ("alltoall", "ncclep"))
    assert stock.keys() == ours.keys()
    assert len(stock) > 10
    return {n: float((ours[n] - stock[n]).abs().max() / stock[n].abs().max().clamp(min=1e-9)) for n in stock}


class _State:
    """A bag of attributes, as the schedule's layer and chunk states are."""


def schedule_1f1b(dispatcher: str, ep: int, free: bool | None, changes: dict[str, Any]) -> dict[str, float]:
    """Drive one layer through the 1F1B callables; differences to an ordinary forward and backward of the same layer.

    Args:
        dispatcher: type in the configuration.
        ep: expert parallel size.
        free: None for Megatron's real policy on which inputs are freed; True frees all of them, as for an unknown type.
        changes: to the configuration.
    """
    from megatron.core.models.gpt import fine_grained_callables
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    try:
        from megatron.core.models.common.utils import should_free_input

        more_args = (EXPERTS // ep,)
    except ImportError:  # 0.16
        should_free_input, more_args = fine_grained_callables.should_free_input, ()

    init_parallel(ep)
    config = make_config(dispatcher, ep, init_method_std=0.2, **changes)
    model = make_gpt(config)
    layer = model.decoder.layers[0]
    layer.backward_dw_wrapper, layer.init_backward_dw_wrapper = None, lambda: None
    torch.manual_seed(50 + dist.get_rank())
    inputs = torch.randn(LENGTH, 2, HIDDEN)

    x = inputs.clone().requires_grad_()
    y, _ = layer(x, attention_mask=causal_mask())
    y.square().sum().backward()
    want = {"output": y.detach(), "input.grad": x.grad.clone()}
    want.update({n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None})
    layer.zero_grad()

    chunk, layer_state = _State(), _State()
    chunk.model, chunk.attention_mask = model, causal_mask()
    for name in (
        "rotary_pos_emb",
        "rotary_pos_cos",
        "rotary_pos_sin",
        "packed_seq_params",
        "sequence_len_offset",
        "padding_mask",
    ):
        setattr(chunk, name, None)

    class Node(ScheduleNode):
        """A node of the schedule, reduced to what the callables touch."""

        def __init__(self, name: str, function: Any):
            freed = should_free_input(name, True, config, *more_args) if free is None else free
            super().__init__(
                lambda *args: function(self, *args),
                torch.cuda.current_stream(),
                torch.cuda.Event(),
                self.run_backward,
                free_input=freed and name not in ("attn", "pre_dispatch_computation"),
                name=name,
            )
            self.layer_state, self.chunk_state = layer_state, chunk
            self.detached, self.before_detached = (), ()
            self.is_mtp, self.is_last_layer = False, False

        def detach(self, tensor: Tensor) -> Tensor:
            copy = tensor.detach()
            copy.requires_grad = tensor.requires_grad
            self.before_detached += (tensor,)
            self.detached += (copy,)
            return copy

        def run_backward(self, outputs, grads):
            grads = grads + tuple(tensor.grad for tensor in self.detached)
            self.default_backward_func(outputs + self.before_detached, grads)
            return grads

    functions, _ = fine_grained_callables.build_transformer_layer_callables(layer)
    names = ("attn", "moe_dispatch", "mlp", "moe_combine")
    nodes = [Node(name, function) for name, function in zip(names, functions, strict=False)]
    x = inputs.clone().requires_grad_()
    value = x
    for node in nodes:
        value = node.forward(value)
    grad = 2 * value.detach()
    output = value.detach().clone()
    for node in reversed(nodes):
        grad = node.backward(grad)
    got = {"output": output, "input.grad": grad}
    got.update({n: p.grad for n, p in layer.named_parameters() if p.grad is not None})
    assert got.keys() == want.keys()
    return {n: float((got[n] - want[n]).abs().max()) for n in want}
