"""Megatron's models on machines without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.megatron.configs import VERSION, run_code

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing beside a GPU"),
]


def test_what_torch_answers_with_the_shim():
    code = """
import torch
from moe_ncclep.megatron.cpu import apply_cpu_shim
before = torch.cuda.current_device
print(apply_cpu_shim(), apply_cpu_shim())
patched = torch.cuda.Stream
apply_cpu_shim()
assert torch.cuda.Stream is patched
assert torch.cuda.current_device is not before
assert not torch.cuda.is_available()
print(torch.empty(1, device=torch.cuda.current_device()).device, torch.cuda.device_count())

stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
with torch.cuda.stream(stream):
    event.record(stream)
    stream.wait_event(event), stream.wait_stream(torch.cuda.current_stream()), event.wait(), event.synchronize()
    torch.ones(2).record_stream(stream)
torch.cuda.synchronize(), stream.synchronize()
print(stream.query(), event.query(), event.elapsed_time(stream.record_event()), stream.record_event(event) is event)
print(torch.cuda.is_current_stream_capturing())

torch.cuda.manual_seed(5)
state = torch.cuda.get_rng_state()
drawn = torch.rand(3)
torch.cuda.set_rng_state(state)
print(torch.equal(drawn, torch.rand(3)), torch.cuda.initial_seed())
"""
    assert run_code(code).splitlines() == ["True True", "cpu 0", "True True 0.0 True", "False", "True 5"]


def test_beside_a_gpu_it_changes_nothing():
    code = """
import torch
from moe_ncclep.megatron.cpu import apply_cpu_shim
torch.cuda.is_available = lambda: True
before = dict(vars(torch.cuda))
print(apply_cpu_shim(), dict(vars(torch.cuda)) == before)
"""
    assert run_code(code) == "False True"


@pytest.mark.parametrize("recompute", [False, True])
def test_a_gpt_model_trains_on_one_process(recompute):
    """Dropout, so that recomputation must restore the generator to get the same gradients."""
    code = f"""
import torch
from moe_ncclep.megatron.cpu import apply_cpu_shim
apply_cpu_shim()
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()

def gradients(dispatcher, **changes):
    model_parallel_cuda_manual_seed(123)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_moe_experts=4, moe_ffn_hidden_size=64,
        moe_router_topk=2, moe_token_dispatcher_type=dispatcher, use_cpu_initialization=True, hidden_dropout=0.1,
        attention_dropout=0.1, bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, add_bias_linear=False, **changes)
    model = GPTModel(config, get_gpt_layer_local_spec(num_experts=4), vocab_size=64, max_sequence_length=16)
    tokens = torch.arange(32).view(2, 16)
    torch.manual_seed(2)
    loss = model(tokens, torch.arange(16).expand(2, 16), None, labels=tokens).mean()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]

full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
expected, expected_grads = gradients("alltoall")
loss, grads = gradients("ncclep", **(full if {recompute} else {{}}))
print(loss == expected, bool(loss > 0), len(grads) > 10)
print(all((a is None and b is None) or torch.equal(a, b) for a, b in zip(grads, expected_grads)))
"""
    assert run_code(code).splitlines()[-2:] == ["tensor(True) True True", "True"]


@pytest.mark.skipif(VERSION < (0, 19), reason="0.16 schedules no kernels of Triton's")
def test_schedules_can_be_imported_without_triton():
    code = """
import importlib.util
from moe_ncclep.megatron.cpu import apply_cpu_shim
apply_cpu_shim()
import megatron.core.pipeline_parallel.schedules
print("triton" in sys.modules, importlib.util.find_spec("triton") is None)
"""
    loaded, missing = run_code(code).split()
    assert loaded == "False" or missing == "False", "nothing pretends to be Triton"
