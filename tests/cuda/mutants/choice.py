"""Mutants of the choice between the tiled kernels, and of vision_attention's for 9.0."""

from __future__ import annotations

from functools import partial

from .mutant import Mutant

M = partial(Mutant, "choice")
V = partial(Mutant, "sm90-vision")

MUTANTS = [
    # ---- choice
    M("a stride of 0", "choice-fits",
      "size == 1 || (stride >= 0 && stride % 8 == 0 && stride < int64_t{1} << 39)", case="choice"),
    M("a stride of 8 bytes", "choice-fits",
      "size == 1 || (stride > 0 && stride % 4 == 0 && stride < int64_t{1} << 39)", case="choice"),
    M("any stride", "choice-fits", "size == 1 || (stride > 0 && stride % 8 == 0 && true)",
      case="choice"),
    M("one head must have a stride", "choice-fits",
      "(stride > 0 && stride % 8 == 0 && stride < int64_t{1} << 39)", case="choice"),
    M("any address", "choice-address",
      "0 == 0 && fits(tokens, x.token_stride) && fits(heads, x.head_stride)", case="choice"),
    M("any GPU", "choice-takes",
      "true && describes(p.q, p.tokens, p.heads) && describes(p.k, p.tokens, p.kv_heads) && "
      "describes(p.v, p.tokens, p.kv_heads)", case="choice"),
    M("values not looked at", "choice-takes",
      "capability == 90 && describes(p.q, p.tokens, p.heads) && describes(p.k, p.tokens, "
      "p.kv_heads) && true", case="choice"),
    M("dout not looked at", "choice-takes-gradients",
      "hopper_takes(p.forward, capability) && true", case="choice"),
    # ---- sm90-vision
    V("keys for queries", "choice-rotate-queries",
      "flash_vision_turn_cuda(p, p.k, queries, stream)", case="two tiles, ragged"),
    V("keys rotated over queries", "choice-rotate-keys",
      "flash_vision_turn_cuda(p, p.k, queries, stream)", case="two tiles, ragged"),
    V("queries not rotated", "choice-forward-q", case="two tiles, ragged"),
    V("keys not rotated", "choice-forward-k", case="two tiles, ragged"),
    V("workspace not needed", "choice-forward-takes", "!hopper_takes(turned, capability)",
      case="no workspace"),
    V("workspace not used", "choice-forward-takes", "p.rotated_q == nullptr || true",
      case="two tiles, ragged"),
    V("queries not rotated, backward", "choice-backward-q", case="two tiles, ragged"),
    V("keys not rotated, backward", "choice-backward-k", case="two tiles, ragged"),
    V("workspace not needed, backward", "choice-backward-takes",
      "!hopper_takes_gradients(turned, capability)", case="no workspace"),
    V("workspace not used, backward", "choice-backward-takes",
      "f.rotated_q == nullptr || true", case="two tiles, ragged"),
    V("dk not rotated back", "sm90-bwd-dkdv-if-rotary", "false", case="two tiles, ragged"),
    V("dk back by the first key's angles", "sm90-bwd-dkdv-store-rotated",
      "store_rows_back<Math, kDim>(blocks_of<kDim>(dk), factor, staging, length, p.rotary, "
      "work.tile.begin, rows_of(to_dk, token, work.head), to_dk.token_stride);",
      case="two tiles, ragged"),
    V("dq not rotated back", "sm90-bwd-dq-if-rotary", "false", case="two tiles, ragged"),
    V("dq back by the first query's angles", "sm90-bwd-dq-store-rotated",
      "store_rows_back<Math, kDim>(blocks_of<kDim>(dq), factor, staging, length, p.rotary, "
      "work.tile.begin, rows_of(to, token, work.head), to.token_stride);",
      case="two tiles, ragged"),
    V("spare lanes rotate too", "tiles-apply-if-index", "kAll % kWarpSize != 0 && false",
      case="two tiles, ragged"),
]  # fmt: skip
