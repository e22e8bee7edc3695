#!/usr/bin/env bash
# Pretrain a small mixture-of-experts GPT on the sources of Python's standard library.
#
#   recipes/pretrain_gpt.sh                                      two ranks, dispatcher ncclep
#   DISPATCHER=alltoall recipes/pretrain_gpt.sh                  the same with Megatron's own dispatcher
#   NPROC=8 recipes/pretrain_gpt.sh --train-iters 1000 --loss-json losses.json
#
# Arguments go to Megatron after the ones below and win over them. Environment variables:
#   DISPATCHER   value of --moe-token-dispatcher-type           (ncclep)
#   NPROC        ranks, one per GPU                             (2)
#   EP           expert-parallel size, must divide NPROC        (NPROC)
#   DTYPE        bf16, fp16 or fp32                             (bf16)
#   TE           1: TransformerEngine's layers and grouped GEMM (0)
#   PYTHON       interpreter                                    (python3)
#   MASTER_PORT  TCP port of the first rank                     (29500)
#   LAUNCHER     module that runs the script                    (moe_ncclep.launch)
set -euo pipefail

DISPATCHER=${DISPATCHER:-ncclep}
NPROC=${NPROC:-2}
EP=${EP:-$NPROC}
DTYPE=${DTYPE:-bf16}
TE=${TE:-0}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Megatron wants its kernels to start in the order of their launches.
export CUDA_DEVICE_MAX_CONNECTIONS=1

model=(
  --num-layers 4 --hidden-size 512 --num-attention-heads 8
  --seq-length 512 --max-position-embeddings 512
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
experts=(
  --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 1024
  --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
  --moe-router-dtype fp32 # probabilities and their gradients are not rounded to 16 bits on the way
  --expert-model-parallel-size "$EP"
  --moe-token-dispatcher-type "$DISPATCHER"
)
training=(
  --train-iters 100 --micro-batch-size 4 --global-batch-size $((4 * NPROC)) --seed 1234
  --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
  --eval-iters 0 --log-interval 10
)
if [ "$DTYPE" != fp32 ]; then
  training+=("--$DTYPE")
fi
if [ "$TE" = 1 ]; then
  layers=(--transformer-impl transformer_engine --moe-grouped-gemm)
else
  # Plain PyTorch layers. These fusions need TransformerEngine or apex, or are compiled for every number of rows anew.
  layers=(
    --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion
    --no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
  )
  # Megatron compiles some of them at the start nevertheless.
  export TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE:-1}
fi

exec "${PYTHON:-python3}" -m torch.distributed.run --nproc-per-node "$NPROC" --master-port "${MASTER_PORT:-29500}" \
  -m "${LAUNCHER:-moe_ncclep.launch}" "$here/pretrain_gpt.py" \
  "${model[@]}" "${experts[@]}" "${training[@]}" "${layers[@]}" "$@"
