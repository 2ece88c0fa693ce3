"""Mutants of the backward of one kernel for compute capability 9.0."""

from __future__ import annotations

from functools import partial

from .mutant import Mutant

M = partial(Mutant, "sm90-fused")

MUTANTS = [
    M("too many readers of the keys", "sm90-fused-init-resident",
      "ptx::barrier_init(resident_empty(), S::kConsumerWarps + 1);", case="rounds"),
    M("one follower is enough", "sm90-fused-init-ready", "ptx::barrier_init(ready(i), 1);",
      case="tiles"),
    M("half the readers of a stage", "sm90-fused-init-empty",
      "ptx::barrier_init(empty(i), S::kConsumerWarps / 2);", case="many tiles"),
    M("too few writers of a part", "sm90-fused-init-part",
      "ptx::barrier_init(part_full(i), S::kConsumerWarps - 1);", case="many tiles"),
    M("causal queries too few", "sm90-fused-work-first", "p.causal ? tile.first + kTileRows : 0",
      case="causal"),
    M("stages overwritten early", "sm90-fused-producer-wait-empty", case="many tiles"),
    M("first head of the group", "sm90-fused-producer-stream",
      "load_boxes<kDim, S::kStep>(storage.stream(i, ring.stage), stream[i], "
      "storage.full(ring.stage), work.head * work.group, begin + work.first + step * S::kStep);",
      case="groups"),
    M("keys overwritten early", "sm90-fused-producer-wait-resident", case="rounds"),
    M("keys zeroed before they come", "sm90-fused-follower-wait-resident", case="one"),
    M("keys past the segment stay", "sm90-fused-follower-zero-keys", "false", case="neighbours"),
    M("numbers of the tile's end", "sm90-fused-follower-from", "end - all", case="many tiles"),
    M("numbers past the segment", "sm90-fused-follower-high", "from[kWarpSize]",
      case="neighbours"),
    M("numbers overwritten early", "sm90-fused-follower-wait-empty", case="many tiles"),
    M("queries past the segment stay", "sm90-fused-follower-zero", "false", case="neighbours"),
    M("parts of the first head", "sm90-fused-add-place",
      "part_at(p, work.tile, work.head * work.group, work.first)", case="groups"),
    M("a part not waited for", "sm90-fused-add-wait-full", case="one"),
    M("parts added in any order", "sm90-fused-add-wait-turn", case="many tiles", engine="ptx"),
    M("waits while it is its turn", "ptx-wait-count", "now == value", case="one", engine="ptx"),
    M("no fence before a part is added", "sm90-fused-add-fence", case="one"),
    M("parts stored, not added", "sm90-fused-add-if-first", "true", case="tiles"),
    M("a part overwritten early", "sm90-fused-add-wait-read", case="many tiles"),
    M("a part counted before it is there", "sm90-fused-add-wait-written", case="tiles"),
    M("parts not counted", "sm90-fused-add-count", case="tiles"),
    M("rows' numbers swapped", "sm90-fused-x",
      "ptx::exp2_approx(fmaf(x, exponent, -(e % 2 ? lse.x : lse.y)))", case="tiles"),
    M("no causal mask", "sm90-fused-if-causal",
      "false && query < work.tile.first + kConsumer * 64 + 64", case="causal"),
    M("a query's own key masked", "sm90-fused-if-seen",
      "i / 4 * 8 + i % 2 <= seen + i % 4 / 2 * 8", case="causal"),
    M("dV from the queries", "sm90-fused-dv",
      "start_columns<Math, kDim, S::kStep>(dv, probabilities, storage.stream(0, ring.stage));",
      case="tiles"),
    M("dP not finished", "sm90-fused-wait-dp", case="one"),
    M("delta left out of dk and dq", "sm90-fused-ds", "probability * (ds[n * 4 + e] - 0.f)",
      case="one"),
    M("dS of keys past the segment", "sm90-fused-if-length", "false", case="neighbours"),
    M("dS overwritten early", "sm90-fused-ds-empty", case="many tiles"),
    M("dS without a swizzle", "sm90-fused-ds-store",
      "ptx::store_shared(ds_row + r * 8 * 128 + n * 16, differences[n / 2][n % 2 * 2 + r]);",
      case="one"),
    M("no fence after dS", "sm90-fused-ds-fence", case="one"),
    M("dS not waited for", "sm90-fused-ds-full", case="one"),
    M("both warpgroups' dQ of the first columns", "sm90-fused-dq-b",
      "ptx::matrix_descriptor<S::kRowBytes, kChunkBytes, 8 * S::kRowBytes>(keys)",
      case="one"),
    M("dQ added to the step before's", "sm90-fused-dq",
      "ptx::Wgmma<Math, kColumns>::deep(reinterpret_cast<float(&)[kColumns / 2]>(dq), a + n * 128, "
      "b + n * kRowBytes, true);",
      case="many tiles"),
    M("a part written early", "sm90-fused-wait-part", case="many tiles"),
    M("columns of a part exchanged", "sm90-fused-part",
      "ptx::store_shared(to + u * S::kUnitBytes, uint4{__float_as_uint(dq[u * 4 + 1]), "
      "__float_as_uint(dq[u * 4]), __float_as_uint(dq[u * 4 + 2]), "
      "__float_as_uint(dq[u * 4 + 3])});", case="one"),
    M("no fence after a part", "sm90-fused-part-fence", case="one"),
    M("queries not waited for", "sm90-fused-wait-ready", case="tiles"),
    M("first scores not finished", "sm90-fused-wait-first", case="one"),
    M("dK from the next queries", "sm90-fused-dk",
      "start_columns<Math, kDim, S::kStep>(dk, differences, storage.stream(0, ring.stage));",
      case="many tiles"),
    M("dQ not finished", "sm90-fused-wait-dq", case="many tiles"),
    M("scores not finished", "sm90-fused-wait-scores", case="many tiles"),
    M("dK not finished", "sm90-fused-wait-dk", case="many tiles"),
    M("the last dQ not finished", "sm90-fused-wait-last", case="one"),
    M("dk staged over a part", "sm90-fused-wait-parts", case="one"),
    M("dk of the absolute scale", "sm90-fused-store-dk",
      "store_gradient<Math, kDim>(dk, fabsf(p.scale), staging, length, params.dk, token, "
      "work.head, p.rotary);", case="negative"),
    M("dq of the absolute scale", "sm90-fused-store-dq",
      "store_gradient<Math, kDim>(dq, fabsf(p.scale), staging, tile.length - first, params.dq, "
      "tile.begin + first, head, p.rotary);", case="negative"),
    M("a segment's tiles of keys in any order", "tiles-list-tiles-alike", "0", case="many tiles"),
]  # fmt: skip
