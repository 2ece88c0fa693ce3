#!/usr/bin/env bash
# Train on several machines: start this once on every machine, with the same settings but NODE_RANK.
#
#   NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MODEL=... DATA=... OUTPUT=... ./torchrun_multi_node.sh
#
# NODES, NODE_RANK   number of machines; this one's number, from 0
# MASTER_ADDR        address of machine 0, where MASTER_PORT (default 29400) must be free and open
# NPROC              processes on this machine (default: one a GPU), the same everywhere
# MODEL, DATA and OUTPUT must be the same files on all machines (a shared file system).
set -euo pipefail
: "${NODES:?number of machines}" "${NODE_RANK:?0 to NODES - 1}" "${MASTER_ADDR:?of machine 0}"
: "${MODEL:?a Hugging Face folder}" "${DATA:?conversations, comma-separated}" "${OUTPUT:?a folder}"

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
NPROC=${NPROC:-$((gpus > 0 ? gpus : 1))}
threads=$(($(nproc) / NPROC))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
export PYTHONSAFEPATH=1 # the installed vlmtrain, also in a clone's folder (Python 3.11 and later)

exec torchrun --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC" \
  --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29400}" -m vlmtrain.cli train \
  --model "$MODEL" --data "$DATA" --output "$OUTPUT" \
  --checkpoint.every "${CHECKPOINT_EVERY:-500}" --checkpoint.resume latest "$@"
