#!/bin/sh
# One node of the run with your own Megatron-LM or MindSpeed-LLM script, the plugin beside it:
#   MASTER_ADDR=node0 NODE_RANK=0 SCRIPT=/path/pretrain_gpt.py recipes/moe_505b/pretrain.sh \
#       --data-path /data/tokens --tokenizer-type NullTokenizer --save /shared/moe_505b --load /shared/moe_505b
# Further arguments go to the script. SIZE=small: the divided model, which a CPU trains.
set -eu
HERE=$(CDPATH= cd -- "$(dirname -- "$(readlink -f -- "$0")")" && pwd)
: "${MASTER_ADDR:?set MASTER_ADDR to the first node}" "${NODE_RANK:?set NODE_RANK, 0 on the first node}"
: "${SCRIPT:?set SCRIPT to the path of your pretrain_gpt.py}"
. "$HERE/environment.sh"

case "${SIZE:-full}" in
small)
    sizes="--num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 448 --seq-length 128
        --max-position-embeddings 128 --vocab-size 255 --make-vocab-size-divisible-by 64
        --q-lora-rank 40 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
        --num-experts 16 --moe-layer-freq ([0]*1+[1]*3) --moe-ffn-hidden-size 48
        --moe-shared-expert-intermediate-size 48 --moe-router-topk 4 --expert-model-parallel-size 2
        --micro-batch-size 4 --global-batch-size 16 --train-iters 60 --lr-warmup-fraction 0.1 --lr 0.01 --min-lr 0.001
        --log-interval 10 --eval-interval 30 --eval-iters 4
        --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion --no-persist-layer-norm
        --attention-backend unfused --num-workers 0"
    ;;
full)
    sizes="--num-layers 50 --hidden-size 5120 --num-attention-heads 64 --ffn-hidden-size 18432 --seq-length 4096
        --max-position-embeddings 4096 --vocab-size 151552 --make-vocab-size-divisible-by 128
        --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
        --num-experts 384 --moe-layer-freq ([0]*3+[1]*47) --moe-ffn-hidden-size 1792
        --moe-shared-expert-intermediate-size 1792 --moe-router-topk 8 --expert-model-parallel-size 8
        --micro-batch-size 1 --global-batch-size 1536 --train-iters 100000 --lr-warmup-iters 2000 --lr 2.6e-4
        --min-lr 2.6e-5 --log-interval 10 --eval-interval 500 --eval-iters 10 --save-interval 500
        --bf16 --moe-grouped-gemm"
    ;;
*)
    echo "SIZE=$SIZE: choose full, or small for the divided model" >&2
    exit 2
    ;;
esac

set -f  # the layers' pattern is no pattern of files
# shellcheck disable=SC2086
exec torchrun --nnodes "$NODES" --nproc-per-node "$DEVICES" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    -m hp_muon_plugin.run "$SCRIPT" $sizes \
    --multi-latent-attention --qk-layernorm --position-embedding-type rope --normalization RMSNorm --swiglu \
    --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 2e-4 --moe-token-dispatcher-type alltoall \
    --weight-decay 0.1 --clip-grad 1.0 --lr-decay-style cosine --split 90,10,0 --ckpt-format torch_dist \
    --hp-dp hp_hsdp --hp-fsdp-replicas 2 --hp-muon-momentum 0.95 --hp-muon-qk-clip 100 \
    --hp-muon-comm-dtype bfloat16 "$@"
