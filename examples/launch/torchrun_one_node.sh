#!/usr/bin/env bash
# Train on the GPUs of this machine, or, where there is none, on its CPU with gloo.
#
#   MODEL=~/Qwen2.5-VL-7B DATA=data.json OUTPUT=run1 ./torchrun_one_node.sh --parallel.tensor 2
#
# NPROC     processes (default: one a GPU, or one where there is no GPU)
# Arguments are passed on to `vlmtrain train`. Run it again to continue from the last checkpoint.
set -euo pipefail
: "${MODEL:?a Hugging Face folder}" "${DATA:?conversations, comma-separated}" "${OUTPUT:?a folder}"

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
NPROC=${NPROC:-$((gpus > 0 ? gpus : 1))}
threads=$(($(nproc) / NPROC))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
export PYTHONSAFEPATH=1 # the installed vlmtrain, also in a clone's folder (Python 3.11 and later)

exec torchrun --standalone --nproc-per-node "$NPROC" -m vlmtrain.cli train \
  --model "$MODEL" --data "$DATA" --output "$OUTPUT" \
  --checkpoint.every "${CHECKPOINT_EVERY:-500}" --checkpoint.resume latest "$@"
