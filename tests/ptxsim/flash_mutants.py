"""Planted bugs in tiled attention: each changes one thing, and must be noticed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .attention_cases import Case, WindowKernels
from .flash_build import BACKWARD, FORWARD, PRIMITIVES, ROWS, SHARED, VISION, Change
from .flash_cases import FlashKernels, check_flash
from .ptxtypes import SimError
from .vision_cases import check_tiled

#: What a mutant is run on: segment lengths, query heads, key/value heads, causal, scale, shift.
SHAPES = {
    "ragged": ([150], 1, 1, False, 0.125, 0.0),
    "two segments": ([5, 131], 1, 1, False, 0.125, 0.0),
    "empty segments": ([0, 5, 0], 1, 1, False, 0.125, 0.0),
    "causal": ([140], 1, 1, True, -0.3, 0.0),
    "group": ([30], 4, 2, False, 0.125, 0.0),
    "low": ([40], 4, 2, False, 0.12, 4.0),
}


@dataclass
class Mutant:
    """A change, the shape that shows it, and whether make test plants it."""

    name: str
    file: str
    text: str
    new: str
    shape: str = "ragged"
    quick: bool = False

    @property
    def change(self) -> Change:
        return self.file, self.text, self.new

    def killed_by(self, kernels: FlashKernels, rng: np.random.Generator, dim: int = 80) -> str:
        """What notices it, or nothing."""
        lengths, heads, kv_heads, causal, scale, shift = SHAPES[self.shape]
        case = Case(
            rng, list(lengths), heads, kv_heads, dim, causal=causal, scale=scale, shift=shift
        )
        in_forward = self.file == FORWARD
        try:
            check_flash(kernels, case, backward=not in_forward)
        except (SimError, AssertionError) as error:
            return str(error).splitlines()[0][:150]
        return ""


LANDED = "ptx::wait_copies<0>();\n"
WAIT = (
    f"{LANDED}    __syncthreads();  // this block of keys is here, and nobody reads the one before "
    "any more\n"
)
QUERIES_WAIT = (
    f"{LANDED}    __syncthreads();  // these queries are here, and nobody reads the ones before "
    "any more\n"
)

MUTANTS = [
    # ---- the forward
    Mutant("not waited for", FORWARD, WAIT, "__syncthreads();\n"),
    Mutant("no barrier", FORWARD, WAIT, "ptx::wait_copies<0>();\n", quick=True),
    Mutant("next keys to the same buffer", FORWARD, "(stage ^ 1) * 2", "stage * 2", quick=True),
    Mutant("next keys are the first", FORWARD, "keys + next * p.k", "keys + 0 * p.k"),
    Mutant("next values are the first", FORWARD, "values + next * p.v", "values + 0 * p.v"),
    Mutant("always the first buffer", FORWARD, "stages + stage * 2 *", "stages + 0 * 2 *"),
    Mutant("keys past the segment", FORWARD, "next > tile.length ||", "", quick=True),
    Mutant("mask one key too late", SHARED, "min(mine + 1, length)", "min(mine + 2, length)",
           "causal"),
    Mutant("no causal mask", FORWARD, "(p.causal && next > first + 1)", "false", "causal"),
    Mutant("causal warps leave too early", FORWARD, "key >= first + S::kBlocks * 16)",
           "key >= first)", "causal"),
    Mutant("causal tiles end too early", FORWARD, "tile.first + kTileRows) : tile.length",
           "tile.first + 1) : tile.length", "causal"),
    Mutant("second column unmasked", SHARED, "if (n * 8 + 1 >= seen)", "if (n * 8 >= seen)",
           "two segments"),
    Mutant("sums not corrected", FORWARD, "sum[m][r] * correction + part", "sum[m][r] + part",
           quick=True),
    Mutant("results not corrected", FORWARD, "out[m][n][r * 2] *= correction;", ""),
    Mutant("maximum forgotten", FORWARD, "float highest = top[m][r];", "float highest = -3e38f;"),
    Mutant("maximum over half a row", FORWARD,
           "highest = fmaxf(highest, ptx::exchange(highest, 2));", ""),
    Mutant("sum over half a row", FORWARD, "sum[m][r] += ptx::exchange(sum[m][r], 2);", ""),
    Mutant("statistics of the wrong head", FORWARD, "head * p.tokens + tile.begin + query",
           "kv_head * p.tokens + tile.begin + query", "group"),
    Mutant("wrong key head", FORWARD,
           "head / (heads / static_cast<unsigned>(p.kv_heads))",
           "head % static_cast<unsigned>(p.kv_heads)", "group"),
    Mutant("negative scale", FORWARD, "key == 0 && p.scale < 0.f", "false", "causal", quick=True),
    Mutant("second step of values", FORWARD, "n * 8 * kPitch<kDim>);", "0);"),
    # ---- the backward
    Mutant("keys: not waited for", BACKWARD, QUERIES_WAIT, "__syncthreads();\n"),
    Mutant("keys: no barrier", BACKWARD, QUERIES_WAIT, "ptx::wait_copies<0>();\n"),
    Mutant("queries: no barrier", BACKWARD, WAIT, "ptx::wait_copies<0>();\n", quick=True),
    Mutant("keys: one buffer", BACKWARD, "(i + 1) % 2 *", "i % 2 *"),
    Mutant("first head of the group only", BACKWARD, "kv_head * group + head, query);",
           "kv_head * group, query);", "group", quick=True),
    Mutant("last head left out", BACKWARD, "i < steps * group;", "i < steps * (group - 1) + 0;",
           "group"),
    Mutant("next head starts anywhere", BACKWARD, "query = first_query;\n", "", "group"),
    Mutant("causal: queries from the start", BACKWARD, "p.causal && now_query + c < first",
           "false && now_query + c < first", "causal"),
    Mutant("causal: off by one", BACKWARD, "if (key > column)", "if (key >= column)", "causal",
           quick=True),
    Mutant("causal: queries skipped", BACKWARD, "now_query + c + S::kChunk <= first)",
           "now_query + c <= first)", "causal"),
    Mutant("delta left out of dk", BACKWARD, "(ds[m][n][e] - (e % 2 ? delta.y : delta.x))",
           "ds[m][n][e]", quick=True),
    Mutant("delta left out of dq", BACKWARD, "(ds[m][n][e] - delta[m][e / 2])", "ds[m][n][e]"),
    Mutant("neighbours' row sums", BACKWARD, "e % 2 ? log_sum.y : log_sum.x",
           "e % 2 ? log_sum.x : log_sum.y"),
    Mutant("dk unscaled", BACKWARD, "factor[m][0] = factor[m][1] = p.scale;\n    one",
           "factor[m][0] = factor[m][1] = 1.f;\n    one"),
    Mutant("dk's sign", BACKWARD, "i == 0 && p.scale < 0.f", "false", "causal"),
    Mutant("dq's sign", BACKWARD, "key == 0 && p.scale < 0.f", "false", "causal"),
    Mutant("dq: keys past the segment", BACKWARD, "after > tile.length ||", "", "low", quick=True),
    Mutant("dq: no causal mask", BACKWARD, "(p.causal && after > first + 1)", "false", "causal"),
    Mutant("dq: always the first buffer", BACKWARD, "stages + stage * 2 *", "stages + 0 * 2 *"),
    Mutant("dk, dv: queries of the first chunk", BACKWARD, "queries = now + c * kPitch<kDim>,",
           "queries = now,"),
    Mutant("dq: wrong key head", BACKWARD, "head / (heads / static_cast<unsigned>(p.kv_heads))",
           "head % static_cast<unsigned>(p.kv_heads)", "group"),
    Mutant("sums of half a row", BACKWARD, "sum += ptx::exchange(sum, 2);", "", quick=True),
    Mutant("maximum not put back", BACKWARD, "p.row_max[at] * exponent_of(p.scale) +", "", "low"),
    Mutant("natural logarithm's factor", BACKWARD, "ptx::log2_approx(p.row_sum[at])",
           "0.693f * ptx::log2_approx(p.row_sum[at])"),
    Mutant("numbers past the segment taken", BACKWARD,
           "from + (row < left ? row : 0),\n                         row < left);",
           "from + row,\n                         true);"),
    # ---- both
    Mutant("rows read past the segment", SHARED,
           "source, row + i < length);", "source, true);", quick=True),
    Mutant("store past the segment", SHARED, "const bool inside = row < length;\n    ptx::store(",
           "const bool inside = row <= length;\n    ptx::store("),
    Mutant("operand halves swapped", SHARED,
           "a[m][1] = Math::pack(c[m][n][2], c[m][n][3]);\n    a[m][2] =",
           "a[m][2] = Math::pack(c[m][n][2], c[m][n][3]);\n    a[m][1] ="),
    Mutant("natural exponent", SHARED, "* 1.44269504f, 1e-30f)", ", 1e-30f)"),
    Mutant("threads left over copy too", SHARED, "kThreads % kUnits != 0 && row >= kStep",
           "false"),
    Mutant("rows past the tile are copied", SHARED, "i + kStep <= kRows || row + i < kRows",
           "true"),
    Mutant("rows copied twice", SHARED, "source += kStep * stride;", "source += kStep * 0;"),
    Mutant("second block's rows", SHARED, "a_lane + m * 16 * kPitch<kDim> + d * 32",
           "a_lane + d * 32"),
    Mutant("shortest tiles first", SHARED, "bucket = work < kBuckets ? kBuckets - work : 0",
           "bucket = work < kBuckets ? work : 0", "two segments", quick=True),
    Mutant("lists of keys as of queries", SHARED, "of_keys ? tiles - i : i + 1", "i + 1", "causal"),
    Mutant("partial tiles forgotten", SHARED, "(length + kTileRows - 1) / kTileRows",
           "length / kTileRows"),
    Mutant("the list's end unwritten", SHARED, "i = used + threadIdx.x; i < total",
           "i = used + threadIdx.x; i < used", "empty segments"),
    Mutant("scan without its own", SHARED, "before -= sum;", "", "two segments"),
    Mutant("transposed or not", PRIMITIVES, "m8n8.x4.trans.shared", "m8n8.x4.shared"),
    Mutant("one group too few", PRIMITIVES, '"n"(kPending)', '"n"(kPending + 1)'),
]  # fmt: skip

#: Where half a row is no multiple of 16 bytes.
VISION_DIM = 72

#: Of what vision_attention adds. tests/emulation/mutants.py has more.
VISION_MUTANTS = [
    Mutant("words swapped as they are read", PRIMITIVES, 'ld.shared.v2.b32 {%0, %1}',
           'ld.shared.v2.b32 {%1, %0}'),
    Mutant("words swapped as they are stored", PRIMITIVES, 'st.shared.v2.b32 [%0], {%1, %2}',
           'st.shared.v2.b32 [%0], {%2, %1}'),
    Mutant("8 columns at a time", ROWS, "kDim % 16 == 0 ? 8 : 4", "8"),
    Mutant("turned the other way", ROWS, "y1[e] = x1[e] * c - x2[e] * s",
           "y1[e] = x1[e] * c + x2[e] * s"),
    Mutant("sign of the back turn", ROWS, "kBack ? -__uint_as_float", "kBack ? __uint_as_float"),
    Mutant("cosines for sines", ROWS, "at + kDim / 8 + i", "at + i"),
    Mutant("wrong half", SHARED, "ptx::load_shared(at + kDim, b)",
           "ptx::load_shared(at + kDim + 8, b)"),
    Mutant("angles of another token", SHARED, "(table, token + row, index",
           "(table, token + row / 2, index"),
    Mutant("dq not turned back", BACKWARD,
           "store_rows_back<Math, kDim>(sum, factor, my_queries, tile.length - first, p.rotary, "
           "token,", "store_rows<Math, kDim>(sum, factor, my_queries, tile.length - first,"),
    Mutant("dk not turned back", BACKWARD,
           "store_rows_back<Math, kDim>(dk, factor, my_keys, tile.length - first, p.rotary, token,",
           "store_rows<Math, kDim>(dk, factor, my_keys, tile.length - first,"),
    Mutant("queries not awaited", FORWARD, "ptx::wait_copies<1>();", ""),
    Mutant("no group of their own", FORWARD,
           "if constexpr (Rows::kVision) ptx::commit_copies();", ""),
    Mutant("no group of their own, keys", BACKWARD,
           "if constexpr (Rows::kVision) ptx::commit_copies();\n  copy_tile<kDim, kTileRows, "
           "S::kThreads>(values", "copy_tile<kDim, kTileRows, S::kThreads>(values"),
    Mutant("keys turned twice", VISION, "turn.template apply<Math, false>(a[h], b[h]);",
           "turn.template apply<Math, false>(a[h], b[h]);\n"
           "    turn.template apply<Math, false>(a[h], b[h]);"),
    Mutant("heads past the last", VISION,
           "inside && head + h < p.heads;\n    turn.template", "inside;\n    turn.template"),
    Mutant("threads left over turn too", VISION, "row < S::kTokens && token", "token"),
]  # fmt: skip


def vision_killed_by(kernels: WindowKernels, rng: np.random.Generator) -> str:
    """What notices a mutant of vision_attention, or nothing."""
    try:
        check_tiled(kernels, rng, [3, 135], 1, VISION_DIM)
    except (SimError, AssertionError) as error:
        return str(error).splitlines()[0][:150]
    return ""
