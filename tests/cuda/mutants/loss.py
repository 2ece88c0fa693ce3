"""Mutants of softmax cross entropy, the launcher included."""

from __future__ import annotations

from functools import partial

from .mutant import Mutant

M = partial(Mutant, "loss")

MUTANTS = [
    M("low half twice", "loss-unpack", "Math::low(words[w])", case="row"),
    M("units not aligned", "loss-row-before", "0", case="row"),
    M("elements after taken for units", "loss-row-single",
      "x + i", case="row"),
    M("rest of -inf", "loss-exp-far", "d", case="not numbers"),
    M("product taken for its rest", "loss-exp-rest", "product", case="long row"),
    M("sum not rescaled", "loss-add-sum", "sum *= 1.f;", case="row"),
    M("sum of exponentials as that of logits", "loss-add-logit-sum", "logit_sum += most;",
      case="smoothing"),
    M("half a warp", "loss-of-warp", "kLargest ? fmaxf(x, other) : x + (mask == 16 ? 0.f : other)",
      case="row"),
    M("words of the sum before", "loss-of-block-sync-before", "", case="long row"),
    M("words read too early", "loss-of-block-sync", "", case="row"),
    M("lanes without a warp", "loss-of-block-value", "shared[lane]", case="row"),
    M("first class ignored", "loss-target", "p.targets[row]", case="blocks"),
    M("target of another rank", "loss-here", "target < p.columns", case="few"),
    M("target past the part", "loss-here", "target >= 0", case="few"),
    M("single elements left out", "loss-rest", "thread < logits.before", case="row"),
    M("batches overlap", "loss-stride", "threads", case="long row"),
    M("unit past the row", "loss-load", "ptx::load(logits.unit(i), i <= logits.units)",
      case="long row"),
    M("empty units counted", "loss-if-unit", "false", case="row"),
    M("thread's largest taken for the block's", "loss-sum",
      "of_block<false>(seen.sum, shared)", case="row"),
    M("largest of earlier columns lost", "loss-largest", "of_these", case="blocks"),
    M("sum of logits not added up", "loss-logit-sum", "logits_of_these", case="blocks"),
    M("every block writes a target", "loss-target-logit", "p.target_logit[row] = at_target;",
      case="blocks"),
    M("target's logit read too late", "loss-sync", "", case="blocks"),
    M("no z-loss", "loss-slope", "scale * (1.f / sum)", case="smoothing"),
    M("no smoothing", "loss-even", "scale * 0.f", case="smoothing"),
    M("first batch only", "loss-last", "thread", case="long row"),
    M("units written as read", "loss-store", "*logits.unit(i) = u[k];", case="row"),
    M("single elements not written", "loss-store-rest", "*x = *x;", case="row"),
    M("written over the target", "loss-sync-at-target", "", case="row"),
    M("hit not scaled", "loss-hit", "gradient(at_target) - factors.hit", case="row", canary=True),
    M("fp16 taken for bf16", "loss-if-dtype", "p.dtype != DType::kFloat32", case="smoothing"),
]  # fmt: skip
