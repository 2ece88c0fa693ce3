"""Mutants of RMSNorm, SwiGLU and rotary embedding, the launchers included."""

from __future__ import annotations

from functools import partial

from .mutant import Mutant

M = partial(Mutant, "layer")

MUTANTS = [
    M("low half twice", "layer-unpack", "v[0] = v[1] = Math::low(word);", case="norm"),
    M("past the row", "layer-norm-on", "true", case="norm"),
    M("bias left out", "layer-norm-bias", case="norm, bias"),
    M("sum normalized before it is rounded", "layer-norm-rounded", case="norm, residual"),
    M("sum taken for the mean", "layer-norm-mean",
      "of_block<false>(squares, reinterpret_cast<float*>(shared))",
      case="norm"),
    M("last row's gradient of the weight", "layer-norm-sums", "sums[k].v[e] = product;",
      case="norm"),
    M("first gradient twice", "layer-sums-second", "first",
      case="norm, bias"),
    M("last row's gradient of the bias", "layer-norm-bias-sums",
      "bias_sums[k].v[e] = dx.v[e];", case="norm, bias"),
    M("sum of dots taken for the mean", "layer-norm-dots",
      "of_block<false>(dots, reinterpret_cast<float*>(shared))", case="norm"),
    M("gradient beside the norm left out", "layer-norm-ds", "false",
      case="norm, residual"),
    M("the same row again", "layer-norm-next", "false", case="norm"),
    M("first part only", "layer-sums-part", "part < warps", case="norm"),
    M("sums read too early", "layer-sums-sync", case="norm"),
    M("main_grad overwritten", "layer-sums-adds", "static_cast<float*>(of.total)[column] = sum;",
      case="norm, residual"),
    M("sigmoid of the size", "layer-sigmoid", "1.f / (1.f + e)", case="swiglu"),
    M("gate twice", "layer-swiglu-up", "gate", case="swiglu"),
    M("bias not rounded into the sum", "layer-swiglu-rounded", case="swiglu, bias"),
    M("rows of dy side by side", "layer-swiglu-dy",
      "row * (p.width / Elements<Type, Unit>::kCount) + i",
      case="swiglu, rows apart"),
    M("past the last row", "layer-swiglu-rows", "false", case="swiglu"),
    M("more than the row", "layer-swiglu-padding", "true", case="swiglu, padded"),
    M("derivative of silu without its second part", "layer-swiglu-dgate",
      "d.gate.v[e] = ds * of.up.v[e];", case="swiglu"),
    M("half a gradient", "layer-swiglu-dup", case="swiglu"),
    M("past the last unit", "layer-swiglu-units", "false", case="swiglu, bias"),
    M("the first row's gradient again", "layer-swiglu-next",
      "load_dy<Type, Unit>(p, begin, i, true)", case="swiglu, bias"),
    M("past the part's last row", "layer-swiglu-end", "false", case="swiglu, bias"),
    M("gradient of gate alone", "layer-swiglu-sums", "gate_sums.add(d.gate);",
      case="swiglu, bias"),
    M("angles not rounded", "layer-rotary-rounded", "of", case="rotary"),
    M("past the last token", "layer-rotary-tokens", "false", case="rotary"),
    M("second half without the first", "layer-rotary-second", "b.v[e]", case="rotary"),
    M("conjugate always", "layer-rotary-sign", "-sin.v[e]", case="rotary"),
]  # fmt: skip
