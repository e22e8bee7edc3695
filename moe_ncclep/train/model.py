"""A byte-level GPT with mixture-of-experts layers, built from Megatron-Core without TransformerEngine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from moe_ncclep.ep import Traffic
from moe_ncclep.train.config import VOCABULARY, TrainConfig
from moe_ncclep.train.optim import is_expert

INIT_STD = 0.02
_RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")
_LOCAL_EXPERTS = "experts.local_experts."


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """What the experts of one layer on this rank received in one forward pass."""

    rows: list[int]
    """Rows of each local expert."""
    traffic: Traffic | None
    """What this rank sent; None where the dispatcher does not count it."""


class ByteGPT:
    """The model of one rank: forward pass, gradients reduced over the right groups, and the load of its experts.

    Args:
        config: resolved configuration; ``config.dispatcher`` moves the tokens.
        device: where parameters live. ``torch.distributed`` and Megatron's parallel state must be initialised.
    """

    def __init__(self, config: TrainConfig, device: torch.device):
        self.config, self.device = config, device
        self.megatron_config = megatron_config(config)
        gpt = GPTModel(
            config=self.megatron_config,
            transformer_layer_spec=get_gpt_decoder_block_spec(self.megatron_config, use_transformer_engine=False),
            vocab_size=VOCABULARY,
            max_sequence_length=config.seq,
            position_embedding_type="rope",
        )
        initialise(gpt, config)
        gpt.to(device)
        self.moe_layers = [layer.mlp for layer in gpt.decoder.layers]
        module = Float16Module(self.megatron_config, gpt) if config.dtype == "bf16" else gpt
        # Dense gradients are averaged over all ranks, expert gradients over the ranks that hold the same experts; both
        # are accumulated and reduced in float32, in one coalesced buffer each.
        self.ddp = DistributedDataParallel(
            self.megatron_config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
            module,
        )
        self._positions = torch.arange(config.seq, device=device)
        self._mask = torch.ones(1, 1, config.seq, config.seq, dtype=torch.bool, device=device).triu(1)

    def losses(self, windows: Tensor) -> Tensor:
        """Cross entropy of every next byte.

        Args:
            windows: ``[sequences, seq + 1]`` int64 on the device of the model.

        Returns:
            ``[sequences, seq]`` float32, nats.
        """
        ids, labels = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        return self.ddp(ids, self._positions.expand_as(ids), self._mask, labels=labels).float()

    def parameters(self) -> list[nn.Parameter]:
        """Parameters of this rank; their reduced gradients are in ``main_grad`` (float32)."""
        return [p for p in self.ddp.parameters() if p.requires_grad]

    def count_parameters(self) -> int:
        """Parameters of the whole model, the experts of all expert-parallel ranks included."""
        dense = sum(p.numel() for p in self.parameters() if not is_expert(p))
        return dense + self.config.ep * sum(p.numel() for p in self.parameters() if is_expert(p))

    def watch(self) -> Callable[[], list[LayerLoad]]:
        """Watch the experts in the next forward pass; the returned function ends the watch and tells what they got."""
        loads: list[LayerLoad] = []

        def note(layer: nn.Module) -> Callable[[nn.Module, tuple], None]:
            def before_experts(_experts: nn.Module, args: tuple) -> None:
                rows = torch.as_tensor(args[1]).tolist()
                traffic = None
                if self.config.dispatcher == "ncclep":
                    traffic = layer.token_dispatcher.traffic
                loads.append(LayerLoad(rows=rows, traffic=traffic))

            return before_experts

        hooks = [layer.experts.register_forward_pre_hook(note(layer)) for layer in self.moe_layers]

        def finish() -> list[LayerLoad]:
            for hook in hooks:
                hook.remove()
            return loads[: len(self.moe_layers)]  # recompute calls the experts a second time

        return finish

    def ep_group(self) -> dist.ProcessGroup:
        """The group over which the dispatchers move tokens; ``config.ep`` ranks."""
        return self.moe_layers[0].token_dispatcher.tp_ep_group


def megatron_config(config: TrainConfig) -> TransformerConfig:
    """Megatron's configuration for ours; fused kernels that need TransformerEngine or apex are off."""
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    dispatcher = {"moe_token_dispatcher_type": config.dispatcher}
    if config.dispatcher == "ncclep":
        from moe_ncclep.megatron import NCCLEPBackend

        dispatcher["moe_flex_dispatcher_backend"] = NCCLEPBackend(config.ep_options())
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]} if config.recompute else {}
    return TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        num_moe_experts=config.experts,
        moe_router_topk=config.topk,
        # With one expert a softmax over the chosen scores is constant: the router would never learn.
        moe_router_pre_softmax=config.topk == 1,
        moe_ffn_hidden_size=config.ffn,
        moe_aux_loss_coeff=config.aux_loss,
        moe_router_load_balancing_type="aux_loss" if config.aux_loss > 0 else "none",
        moe_router_dtype="fp32" if config.dtype == "bf16" else None,
        expert_model_parallel_size=config.ep,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=config.dtype == "bf16",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **dispatcher,
        **recompute,
    )


@torch.no_grad()
def initialise(model: nn.Module, config: TrainConfig) -> None:
    """Draw every weight matrix from a generator of its own, seeded by its name and the global index of its expert.

    Megatron's initialisation on the CPU would give every rank the same experts. This one gives the same model for
    every number of ranks, so that their losses can be compared.
    """
    first_expert = parallel_state.get_expert_model_parallel_rank() * (config.experts // config.ep)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue  # norms keep their ones and zeros
        if _LOCAL_EXPERTS in name:
            head, tail = name.split(_LOCAL_EXPERTS)
            index, rest = tail.split(".", 1)
            name = f"{head}experts.{int(index) + first_expert}.{rest}"
        seed = hashlib.sha256(f"{config.seed} {name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
        std = INIT_STD / math.sqrt(2 * config.layers) if name.endswith(_RESIDUAL_OUTPUTS) else INIT_STD
        parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
