#!/bin/sh
# One node of the run with our own trainer. Start it on every node:
#   MASTER_ADDR=node0 NODE_RANK=0 recipes/moe_505b/launch.sh data.path=/data/tokens checkpoint.save=/shared/moe_505b
# Further arguments are Hydra overrides. On this machine's CPU, four ranks of the divided model:
#   CONFIG=small NODES=1 DEVICES=4 MASTER_ADDR=127.0.0.1 NODE_RANK=0 recipes/moe_505b/launch.sh
set -eu
HERE=$(CDPATH= cd -- "$(dirname -- "$(readlink -f -- "$0")")" && pwd)
: "${MASTER_ADDR:?set MASTER_ADDR to the first node}" "${NODE_RANK:?set NODE_RANK, 0 on the first node}"
. "$HERE/environment.sh"
exec torchrun --nnodes "$NODES" --nproc-per-node "$DEVICES" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    -m hp_muon_plugin.cli.main train --config-dir "$HERE" --config-name "${CONFIG:-moe_505b}" "$@"
