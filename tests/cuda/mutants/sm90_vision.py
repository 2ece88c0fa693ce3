"""Mutants of vision_attention's kernels for compute capability 9.0."""

from __future__ import annotations

from functools import partial

from .mutant import Mutant

M = partial(Mutant, "sm90-vision")

MUTANTS = [
    M("keys for queries", "sm90-vision-rotate-queries",
      "rotate_cuda(p, p.k, queries, stream)", case="two tiles, ragged"),
    M("keys rotated over queries", "sm90-vision-rotate-keys",
      "rotate_cuda(p, p.k, queries, stream)", case="two tiles, ragged"),
    M("queries not rotated", "sm90-vision-forward-q", case="two tiles, ragged"),
    M("keys not rotated", "sm90-vision-forward-k", case="two tiles, ragged"),
    M("queries not rotated, backward", "sm90-vision-backward-q", case="two tiles, ragged"),
    M("keys not rotated, backward", "sm90-vision-backward-k", case="two tiles, ragged"),
    M("dk not rotated back", "sm90-bwd-dkdv-store-dk",
      "store_gradient<Math, kDim>(dk, p.scale, staging, length, params.dk, token, work.head, "
      "nullptr);", case="two tiles, ragged"),
    M("dk back by the first key's angles", "sm90-bwd-dkdv-store-dk",
      "store_gradient<Math, kDim>(dk, p.scale, staging, length, params.dk, token, work.head, "
      "p.rotary - int64_t{first} * kDim);", case="two tiles, ragged"),
    M("dq not rotated back", "sm90-bwd-dq-store",
      "store_gradient<Math, kDim>(dq, p.scale, staging, work.tile.length - first, params.dq, "
      "work.tile.begin + first, work.head, nullptr);", case="two tiles, ragged"),
    M("dq back by the first query's angles", "sm90-bwd-dq-store",
      "store_gradient<Math, kDim>(dq, p.scale, staging, work.tile.length - first, params.dq, "
      "work.tile.begin + first, work.head, p.rotary - int64_t{first} * kDim);",
      case="two tiles, ragged"),
    M("spare lanes rotate too", "tiles-apply-if-index", "kAll % kThreads != 0 && false",
      case="two tiles, ragged"),
]  # fmt: skip
