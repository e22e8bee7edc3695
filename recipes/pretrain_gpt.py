"""Pretrain a GPT with Megatron-Core from pip packages alone: no Megatron-LM checkout, no tokenizer, no data download.

torchrun --nproc-per-node 2 -m moe_ncclep.launch recipes/pretrain_gpt.py \\
    --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 \\
    --num-experts 16 --moe-router-topk 2 --expert-model-parallel-size 2 \\
    --micro-batch-size 4 --global-batch-size 8 --train-iters 100 --lr 3e-4 --bf16 \\
    --moe-token-dispatcher-type ncclep

The script knows nothing of the dispatcher. It takes all of Megatron's arguments and two more (``--text-path``,
``--loss-json``), trains on the bytes of text files, and needs megatron-core >= 0.19, whose wheel has
``megatron.training``. ``pretrain_gpt.sh`` beside it holds a small configuration. Without TransformerEngine it runs with
data, expert and pipeline parallelism; tensor and context parallelism need its layers (or apex).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import pathlib
import sysconfig
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.utils import Split
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, pretrain, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import is_last_rank, print_rank_0
from torch import Tensor

VOCAB_SIZE = 256
"""A token is a byte."""

DOCUMENT_END = b"\0"
SUFFIXES = (".py", ".txt", ".md", ".rst")
SHARES = {Split.train: (0.0, 0.9), Split.valid: (0.9, 0.95), Split.test: (0.95, 1.0)}
"""Part of the text that each split reads."""

WITHOUT_TRANSFORMER_ENGINE = {
    "transformer_impl": "local",
    "apply_rope_fusion": False,
    "masked_softmax_fusion": False,
    "no_persist_layer_norm": True,
    # torch compiles these, anew for many numbers of rows
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
}
WITHOUT_APEX = {"gradient_accumulation_fusion": False}


def add_recipe_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this script's flags, and defaults for what is not installed; flags on the command line win."""
    group = parser.add_argument_group("recipe")
    group.add_argument(
        "--text-path",
        nargs="+",
        default=[sysconfig.get_path("stdlib")],
        help=f"text files, or folders of {', '.join(SUFFIXES)} files; default: Python's own standard library",
    )
    group.add_argument("--loss-json", help="write the loss of every iteration to this file")
    parser.set_defaults(
        tokenizer_type="NullTokenizer",
        vocab_size=VOCAB_SIZE,
        create_attention_mask_in_dataloader=False,
        eval_interval=1000,
        eval_iters=10,
    )
    if importlib.util.find_spec("transformer_engine") is None:
        parser.set_defaults(**WITHOUT_TRANSFORMER_ENGINE)
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        parser.set_defaults(**WITHOUT_APEX)
    return parser


def read_text(paths: list[str]) -> np.ndarray:
    """All files as one ``uint8`` array in a fixed order, each followed by a zero byte."""
    files: list[pathlib.Path] = []
    for path in map(pathlib.Path, paths):
        if path.is_file():
            files.append(path)
            continue
        found = (f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
        files += sorted(f for f in found if "site-packages" not in f.relative_to(path).parts)
    if not files:
        raise FileNotFoundError(f"no {', '.join(SUFFIXES)} files in {', '.join(paths)}")
    return np.frombuffer(b"".join(f.read_bytes() + DOCUMENT_END for f in files), dtype=np.uint8)


class ByteDataset(torch.utils.data.Dataset):
    """Windows of a text in random order, a new order in every pass.

    Args:
        text: ``[N]`` uint8.
        split: part of the text to read; also tells Megatron which batch size to use.
        num_samples: length; None for one pass.
        seq_length: tokens of a sample.
        seed: of the order.
    """

    def __init__(self, text: np.ndarray, split: Split, num_samples: int | None, seq_length: int, seed: int):
        first, last = (int(share * text.size) for share in SHARES[split])
        self.split = split
        self._text, self._seq_length, self._seed = text[first:last], seq_length, seed
        self._windows = (self._text.size - 1) // seq_length
        self._num_samples = self._windows if num_samples is None else num_samples
        if self._windows < 1:
            raise ValueError(
                f"{self._text.size} bytes of text for {split.name} are too few for --seq-length {seq_length}"
            )

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Tokens and labels, one byte apart, with the loss mask and positions that Megatron expects."""
        epoch, place = divmod(int(index), self._windows)
        start = int(_order(self._seed, epoch, self._windows)[place]) * self._seq_length
        piece = torch.from_numpy(self._text[start : start + self._seq_length + 1].astype(np.int64))
        return {
            "tokens": piece[:-1],
            "labels": piece[1:],
            "loss_mask": torch.ones(self._seq_length),
            "position_ids": torch.arange(self._seq_length),
        }


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)


def build_datasets(num_samples: tuple[int, int | None, int], vp_stage: int | None = None) -> list[ByteDataset | None]:
    """Training, validation and test data in the numbers that Megatron asks for; None where it wants none."""
    args = get_args()
    text = read_text(args.text_path)
    print_rank_0(f" > {text.size} bytes of text from {', '.join(args.text_path)}")
    return [
        None if number == 0 else ByteDataset(text, split, number, args.seq_length, args.seed)
        for split, number in zip((Split.train, Split.valid, Split.test), num_samples, strict=True)
    ]


def get_batch(data_iterator: Iterator | None) -> dict[str, Tensor | None]:
    """The next micro-batch on this rank's device; ranks without an iterator get it from their tensor-parallel peer."""
    args = get_args()
    batch = {}
    if data_iterator is not None:
        batch = {name: value.cuda(non_blocking=True) for name, value in next(data_iterator).items()}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())


def loss_of(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the masked losses, number of tokens, and both for the report, which averages over the global batch."""
    loss_mask = loss_mask.reshape(-1).float()
    loss = (losses.reshape(-1).float() * loss_mask).sum()
    num_tokens = loss_mask.sum().int()
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(data_iterator: Iterator | None, model: GPTModel) -> tuple[Tensor, Any]:
    """Run the model on one micro-batch; returns its output and the function that makes a loss of it."""
    batch = get_batch(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, functools.partial(loss_of, batch["loss_mask"])


class LossRecorder:
    """Keeps what Megatron only prints, in full precision, on the rank that prints it.

    Args:
        path: JSON file to write.
    """

    def __init__(self, path: str):
        self._path, self._rows = path, []

    def attach(self) -> None:
        """Listen to Megatron's report of every iteration."""
        report = training.training_log

        @functools.wraps(report)
        def training_log(
            loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, flag, skipped, norm, *a, **k
        ):
            if is_last_rank():
                losses = {name: float(value) for name, value in loss_dict.items()}
                self._rows.append(
                    {"iteration": iteration, **losses, "grad norm": None if norm is None else float(norm)}
                )
            return report(
                loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, flag, skipped, norm, *a, **k
            )

        training.training_log = training_log

    def write(self) -> None:
        """Write the file, if this is the rank that listened."""
        if self._rows:
            columns = {name: [row[name] for row in self._rows] for name in self._rows[0]}
            pathlib.Path(self._path).write_text(json.dumps(columns, indent=1) + "\n")


def skip_index_builder() -> None:
    """The wheel brings Megatron's C++ index builder ready-made and no Makefile to build it with."""
    if not os.path.exists(os.path.join(os.path.dirname(dataset_utils.__file__), "Makefile")):
        dataset_utils.compile_helpers = lambda: None


def share_gpus(args: argparse.Namespace) -> None:
    """Spread more ranks than GPUs over the GPUs there are, where NCCL is told to allow it; for tests, not for speed."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and torch.cuda.device_count() > 0:
        args.local_rank %= torch.cuda.device_count()


def main() -> None:
    """Parse, build and train."""
    args = parse_and_validate_args(add_recipe_arguments)
    skip_index_builder()
    share_gpus(args)
    recorder = LossRecorder(args.loss_json) if args.loss_json else None
    if recorder:
        recorder.attach()
    build_datasets.is_distributed = False
    try:
        pretrain(
            pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
            build_datasets,
            ModelType.encoder_or_decoder,
            forward_step,
        )
    finally:
        if recorder:
            recorder.write()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
