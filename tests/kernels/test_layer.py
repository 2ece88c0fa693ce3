"""rms_norm and swiglu_ against float64, beside plain torch, on every instruction set."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from tests.kernels.numeric import assert_accurate, assert_bitwise, isa, sum_noise
from vlmkernels import _native
from vlmkernels.layer import add_rms_norm_, rms_norm, swiglu_

ISAS = [name for name in _native.available_isas() if not name.startswith("amx")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Results = list[Tensor]


def run(op: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor) -> Results:
    leaves = [x.detach().to(upstream.dtype, copy=True).requires_grad_() for x in inputs]
    out = op(leaves[0] * 1.0, *leaves[1:])  # the op may write over its first input
    out.backward(upstream)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def check(
    ours: Callable,
    plain: Callable,
    inputs: list[Tensor],
    upstream: Tensor,
    summed: dict[int, Tensor | None],
) -> None:
    """summed: of each result that is a sum over rows what it adds up [rows, 1, width]; None: the
    gradient of the first input."""
    exact = run(plain, inputs, upstream.double())
    for i, (got, peer, want) in enumerate(
        zip(run(ours, inputs, upstream), run(plain, inputs, upstream), exact, strict=True)
    ):
        noise = None
        if i in summed and want.numel() < 100:  # of few sums plain torch's error is luck
            terms = summed[i]
            terms = exact[1] if terms is None else terms
            noise = sum_noise(terms.double().square().sum((0, 1)), len(terms))
        assert_accurate(f"result {i}", got, peer, want, noise)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def plain_swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    gate, up = (x if bias is None else x + bias).chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(3, 40), (31, 16), (100, 83), (700, 320)])
def test_rms_norm(name: str, dtype: torch.dtype, rows: int, width: int) -> None:
    size = 1.0 if dtype == torch.float16 else 10.0 ** float(torch.randint(-2, 3, ()))
    x, weight = (torch.randn(rows, 1, width) * size).to(dtype), torch.randn(width).to(dtype)
    upstream = torch.randn(rows, 1, width).to(dtype)
    terms = plain_norm(x.double(), torch.ones(width).double()) * upstream
    with isa(name):
        check(lambda x, w: rms_norm(x, w, 1e-6), plain_norm, [x, weight], upstream, {2: terms})


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows, width", [(3, 40), (33, 16), (100, 83), (700, 160)])
def test_swiglu(name: str, dtype: torch.dtype, bias: bool, rows: int, width: int) -> None:
    inputs = [(torch.randn(rows, 1, 2 * width) * 3).to(dtype)]
    if bias:
        inputs.append(torch.randn(2 * width).to(dtype))
    with isa(name):
        check(swiglu_, plain_swiglu, inputs, torch.randn(rows, 1, width).to(dtype), {2: None})


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.cat(add_rms_norm_(x, residual, weight, 1e-6, bias=bias), -1)


def plain_add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    total = x + residual if bias is None else x + bias + residual
    return torch.cat([total, plain_norm(total, weight)], -1)


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows, width", [(3, 40), (33, 16), (100, 83), (700, 160)])
def test_add_rms_norm(name: str, dtype: torch.dtype, bias: bool, rows: int, width: int) -> None:
    x, residual = torch.randn(2, rows, 1, width).to(dtype)
    inputs = [x, residual, torch.randn(width).to(dtype)]
    if bias:
        inputs.append(torch.randn(width).to(dtype))
    upstream = torch.randn(rows, 1, 2 * width).to(dtype)
    total = sum(part.double() for part in (x, residual, *inputs[3:]))
    terms = plain_norm(total, torch.ones(width).double()) * upstream[..., width:]
    with isa(name):
        check(add_norm, plain_add_norm, inputs, upstream, {3: terms, 4: None})


@pytest.mark.parametrize("used", ["sum", "norm", "both"])
def test_gradients_of_a_sum_and_its_norm_are_added(used: str) -> None:
    """Without a residual, in a strided gradient, and where one of the two has none."""
    x, weight = torch.randn(37, 1, 200), torch.randn(200)
    upstream = torch.randn(200, 1, 37).transpose(0, 2)

    def gradients(dtype: torch.dtype, fused: bool) -> list[Tensor]:
        leaf, gain = (t.to(dtype, copy=True).requires_grad_() for t in (x, weight))
        both = (leaf, plain_norm(leaf, gain))
        if fused:
            both = add_rms_norm_(leaf, None, gain, 1e-6)
            assert both[0].data_ptr() == leaf.data_ptr()
        torch.autograd.backward(
            *zip(
                *[
                    (out, upstream.to(dtype))
                    for name, out in zip(("sum", "norm"), both, strict=True)
                    if used in (name, "both")
                ],
                strict=True,
            )
        )
        return [leaf.grad, gain.grad] if used != "sum" else [leaf.grad]  # type: ignore[list-item]

    results = (gradients(torch.float32, True), gradients(torch.float32, False))
    for got, peer, want in zip(*results, gradients(torch.float64, False), strict=True):
        assert_accurate("gradient", got, peer, want)


@pytest.mark.parametrize("learns", [False, True])
def test_a_bias_of_a_sum_alone_learns_once(learns: bool) -> None:
    """Where the norm has no gradient."""
    x, residual, upstream = torch.randn(3, 37, 200)
    bias, weight, before = torch.nn.Parameter(torch.randn(200)), torch.ones(200), torch.randn(200)
    for bias_grad in ("main_grad", "dense"):
        bias.grad, bias.main_grad = None, before.clone()  # type: ignore[attr-defined]
        own = x.clone().requires_grad_(learns) * 1
        into: Any = dict(bias=bias, bias_grad=bias_grad)
        add_rms_norm_(own, residual, weight, 1e-6, **into)[0].backward(upstream)
        added = bias.main_grad - before  # type: ignore[attr-defined]
        if bias_grad == "main_grad":
            assert bias.grad is None
            torch.testing.assert_close(added, upstream.sum(0), rtol=1e-5, atol=1e-5)
        else:
            assert not added.any()
            torch.testing.assert_close(bias.grad, upstream.sum(0), rtol=1e-5, atol=1e-5)


def norm_into(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, 1e-6, weight_grad="main_grad")


def add_norm_into(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    into: Any = {"weight_grad": "main_grad", "bias_grad": "main_grad"}
    return torch.cat(add_rms_norm_(x, residual, weight, 1e-6, bias=bias, **into), -1)


def swiglu_into(x: Tensor, bias: Tensor) -> Tensor:
    return swiglu_(x, bias, bias_grad="main_grad")


# ours, plain torch, shapes of the inputs: parameters have one dimension
INTO: list[tuple[Callable, Callable, list[list[int]]]] = [
    (norm_into, plain_norm, [[90, 40], [40]]),
    (add_norm_into, plain_add_norm, [[90, 40], [90, 40], [40], [40]]),
    (swiglu_into, plain_swiglu, [[90, 80], [80]]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("ours, plain, shapes", INTO)
def test_main_grad(
    ours: Callable, plain: Callable, shapes: list[list[int]], learns: bool, dtype: torch.dtype
) -> None:
    """The float32 sums are added to what main_grad holds, and where the input `learns` no hook of a
    parameter is called."""
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    starts = [torch.randn(shape) for shape in shapes]
    upstream = torch.randn(plain(*inputs).shape).to(dtype)
    nodes: list[Any] = []  # as Megatron keeps them
    called = 0

    def count(*grads: Any) -> None:
        nonlocal called
        called += 1

    def gradients(op: Callable, kind: torch.dtype, into: bool) -> list[Tensor]:
        leaves = [x.to(kind, copy=True).requires_grad_(x.dim() == 1 or learns) for x in inputs]
        found = []
        for leaf, start in zip(leaves, starts, strict=True):
            leaf.main_grad = start.clone()  # type: ignore[attr-defined]
            if into and leaf.dim() == 1:
                nodes.append(leaf.expand_as(leaf).grad_fn.next_functions[0][0])
                nodes[-1].register_hook(count)
        op(leaves[0] * 1.0, *leaves[1:]).backward(upstream.to(kind))
        for leaf, start in zip(leaves, starts, strict=True):
            if leaf.dim() == 1:
                assert into == (leaf.grad is None)
                found.append(leaf.main_grad if into else start + leaf.grad)  # type: ignore[attr-defined]
        return found

    results = gradients(ours, dtype, True), gradients(plain, dtype, False)
    assert (called == 0) == learns
    for got, peer, want in zip(*results, gradients(plain, torch.float64, False), strict=True):
        assert got.dtype == torch.float32
        assert_accurate("main_grad", got, peer, want)


@pytest.mark.parametrize("name", ISAS)
def test_a_gradient_past_the_caches_is_the_same(name: str) -> None:
    """16 MB and more are stored another way."""
    x, upstream = torch.randn(1400, 2 * 1504), torch.randn(1400, 1504)
    assert x.nbytes >= 16 << 20
    with isa(name):
        whole = run(swiglu_, [x], upstream)[1]
        parts = [run(swiglu_, [x[i : i + 700]], upstream[i : i + 700])[1] for i in (0, 700)]
    assert_bitwise("dx", whole, torch.cat(parts))


@pytest.mark.parametrize("name", ISAS)
def test_swiglu_at_the_ends(name: str) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, 88.0, 3e4, 3e38, -20.0, -88.0, -150.0, -3e38])
    x = torch.cat([gate, torch.ones(10)])
    with isa(name):
        got = swiglu_(x.clone())
        torch.testing.assert_close(got, F.silu(gate), rtol=1e-6, atol=1e-30)
        nan = swiglu_(torch.tensor([torch.nan, 1.0, 2.0, 2.0]))
    assert nan[0].isnan() and nan[1] == F.silu(torch.tensor(1.0)) * 2


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    x, weight = torch.randn(500, 96).to(dtype), torch.randn(96).to(dtype)
    both, bias = torch.randn(500, 192).to(dtype), torch.randn(192).to(dtype)
    upstream = torch.randn(500, 96).to(dtype)
    first: list[Tensor] = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        norm = run(lambda x, w: rms_norm(x, w, 1e-6), [x, weight], upstream)
        results = [*norm, *run(swiglu_, [both, bias], upstream)]
        results += run(add_norm, [x, x, weight, weight], torch.cat([upstream, upstream], -1))
        first = first or results
        for i, (got, want) in enumerate(zip(results, first, strict=True)):
            assert_bitwise(f"result {i}, {threads} threads", got, want)


def test_strided_rows_empty_ones_and_frozen_weights() -> None:
    x = torch.randn(7, 2, 3, 8)[:, :, 1]
    weight = torch.randn(8)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), plain_norm(x, weight))
    assert rms_norm(torch.empty(0, 8, requires_grad=True), weight, 1e-6).shape == (0, 8)
    empty = torch.empty(0, 8, requires_grad=True)
    swiglu_(empty * 1.0).sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, 8)
    for rows in (0, 2):  # parameters of no rows get gradients of 0, as the allocator's memory isn't
        gain, bias, both = (torch.randn(n, requires_grad=True) for n in (8, 8, 16))
        for _ in range(3):
            used = [torch.full((n,), 7e7) for n in (8, 16) for _ in range(40)]
            del used
            x = torch.ones(rows, 8, requires_grad=True)
            total, y = add_rms_norm_(x * 1.0, x * 1.0, gain, 1e-6, bias=bias)
            result = y.sum() + total.sum() + rms_norm(x, gain, 1e-6).sum()
            result += swiglu_(torch.ones(rows, 16, requires_grad=True) * 1.0, both).sum()
            for grad in torch.autograd.grad(result, [gain, bias, both]):
                assert bool((grad == 0).all()) == (rows == 0), grad
    leaf = torch.randn(3, 8, requires_grad=True)
    rms_norm(leaf, weight, 1e-6).sum().backward()
    assert leaf.grad is not None and weight.grad is None


def test_what_autograd_can_not_know_is_refused() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    y = rms_norm(x, torch.randn(8), 1e-6)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="vlmkernels.rms_norm_backward has no derivative"):
        dx.sum().backward()
    saved = x * 1.0
    square = saved.square()  # keeps it
    swiglu_(saved, torch.ones(8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


SECOND = {  # of inputs whose data the op keeps in a copy, or writes
    "swiglu_": (lambda x, w: swiglu_(x * 1, w), 8),
    "rms_norm": (lambda x, w: rms_norm(torch.cat([x, x], 1)[:, :8], w, 1e-6), 8),
    "rms_norm, every second weight": (lambda x, w: rms_norm(x, (w * 1)[::2], 1e-6), 16),
    "add_rms_norm_": (lambda x, w: add_rms_norm_(x * 1, x * 2, w, 1e-6)[1], 8),
}


@pytest.mark.parametrize("op", SECOND)
@pytest.mark.parametrize("of", ["x", "w"])
def test_no_second_derivative_is_left_out(op: str, of: str) -> None:
    function, width = SECOND[op]
    x, w = torch.randn(3, 8), torch.randn(width)
    inputs = {"x": x, "w": w}
    scale = torch.ones(inputs[of].shape, requires_grad=True)
    y = function(**{**inputs, of: inputs[of] * scale})
    (first,) = torch.autograd.grad(y.sum(), scale, create_graph=True)
    with pytest.raises(RuntimeError, match="has no derivative: results of vlmkernels"):
        torch.autograd.grad(first.square().sum(), scale, allow_unused=True)


def test_a_residual_in_part_of_xs_memory_is_refused() -> None:
    rows, weight = torch.randn(8, 8), torch.ones(8)
    for apart in range(1, 4):
        for x, residual in ((rows[apart:][:4], rows[:4]), (rows[:4], rows[apart:][:4])):
            with pytest.raises(ValueError, match="residual lies in the memory of x, which is writ"):
                add_rms_norm_(x, residual, weight, 1e-6)
    for x, residual in ((rows[:4], rows[4:]), (rows[4:], rows[:4])):  # side by side
        want = x + residual
        torch.testing.assert_close(add_rms_norm_(x, residual, weight, 1e-6)[0], want)
    want = 2 * rows
    torch.testing.assert_close(add_rms_norm_(rows, rows, weight, 1e-6)[0], want)  # all of it
    both = torch.stack([rows, want])
    torch.testing.assert_close(add_rms_norm_(both[1], both[0], weight, 1e-6)[0], 2 * want)


def test_a_parameter_in_the_memory_of_x_is_refused() -> None:
    rows = torch.randn(5, 8)
    residual, weight = torch.randn(4, 8), torch.ones(8)
    for x, inside in ((rows[:4], rows[2]), (rows[1:], rows.flatten()[5:13])):
        with pytest.raises(ValueError, match="weight lies in the memory of x, which is written"):
            add_rms_norm_(x, residual, inside, 1e-6)
        with pytest.raises(ValueError, match="bias lies in the memory of x, which is written"):
            add_rms_norm_(x, residual, weight, 1e-6, bias=inside)
        with pytest.raises(ValueError, match="bias lies in the memory of x, which is written"):
            swiglu_(x, inside)
    add_rms_norm_(rows[:4], residual, rows[4], 1e-6, bias=rows[4])  # beside it


@pytest.mark.parametrize("autograd", [False, True], ids=["eager autograd", "compiled autograd"])
def test_compiled_code_calls_them_and_adds_to_main_grad(autograd: bool) -> None:
    """As without a compiler, for many sizes."""

    def function(
        x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        s, y = add_rms_norm_(x * 2, residual, gain, 1e-6, weight_grad="main_grad")
        y = y + rms_norm(s, gain, 1e-6, weight_grad="main_grad")
        return swiglu_(torch.cat([y, y], -1), bias, bias_grad="main_grad").square().sum()

    compiler = functools.partial(torch.compile, backend="eager")
    compiled = compiler(function)
    totals = []
    for make in (function, compiled):
        parameters = [torch.nn.Parameter(torch.linspace(0.5, 1.5, n)) for n in (8, 16)]
        for parameter in parameters:
            parameter.main_grad = torch.zeros_like(parameter)
        grads = []
        for rows in range(3, 15):
            x = torch.linspace(-1, 2, rows * 8).view(rows, 8).requires_grad_()
            loss = make(x, x.detach() + 1, *parameters)
            enabled = compiled_autograd._enable(compiler)
            with enabled if autograd and make is compiled else contextlib.nullcontext():
                loss.backward()
            grads.append(x.grad)
        assert all(p.grad is None for p in parameters)
        totals.append([*grads, *(p.main_grad for p in parameters)])
    for i, (got, want) in enumerate(zip(totals[1], totals[0], strict=True)):
        torch.testing.assert_close(got, want, msg=lambda text, i=i: f"tensor {i}: {text}")
    torch._dynamo.reset()


def test_parameters_above_x_are_apart_for_a_compiler_too() -> None:
    """Of sizes that torch has made symbolic."""

    def function(x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        s, y = add_rms_norm_(x, residual, bias.exp(), 1e-6, bias=bias)
        return s + y + swiglu_(x.repeat(1, 2), bias.repeat(2))

    compiled = torch.compile(function, backend="eager")
    for rows in (5, 9, 12):
        memory = torch.randn(rows + 1, 8)  # a row behind x
        residual = torch.randn(rows, 8)
        want = function(memory[:rows].clone(), residual, memory[rows])
        got = compiled(memory[:rows], residual, memory[rows])
        torch.testing.assert_close(got, want)
    torch._dynamo.reset()


def test_other_objects_are_refused() -> None:
    for eps in (None, "1e-6"):
        with pytest.raises(ValueError, match=f"eps is {eps!r}; it must be a number"):
            rms_norm(torch.ones(2, 8), torch.ones(8), eps)  # type: ignore[arg-type]

    x = torch.zeros(3, 8)
    with pytest.raises(TypeError, match="residual is a list; it must be a torch.Tensor"):
        add_rms_norm_(torch.zeros(3, 8), [0.0], torch.zeros(8), 1e-6)  # type: ignore[arg-type]
    absent: Any = None
    for call in (lambda: rms_norm(x, absent, 1e-6), lambda: add_rms_norm_(x, x, absent, 1e-6)):
        with pytest.raises(TypeError, match="weight is a NoneType; it must be a torch.Tensor"):
            call()
    with pytest.raises(TypeError, match="weight is a list; it must be a torch.Tensor"):
        rms_norm(torch.zeros(3, 8), [1.0] * 8, 1e-6)  # type: ignore[arg-type]


BAD = [
    (lambda: rms_norm(torch.zeros(3, 8).double(), torch.zeros(8), 1e-6), "x is float64 [3, 8] on"),
    (lambda: rms_norm(torch.zeros(3, 8, device="meta"), torch.zeros(8), 1e-6), "on meta; rms_norm"),
    (lambda: rms_norm(torch.zeros(3, 8), torch.zeros(9), 1e-6), "weight is float32 [9] on cpu;"),
    (
        lambda: rms_norm(torch.zeros(3, 8), torch.zeros(8).bfloat16(), 1e-6),
        "weight is bfloat16 [8] on cpu; rms_norm of x, float32 [3, 8] on cpu, needs [8] of its",
    ),
    (
        lambda: rms_norm(torch.zeros(3, 8), torch.zeros(8), 1e-6, weight_grad="sum"),  # type: ignore
        "weight_grad is 'sum'; it must be 'dense' or 'main_grad'",
    ),
    (
        lambda: swiglu_(torch.zeros(3, 8), torch.ones(8).requires_grad_(), bias_grad="main_grad"),
        "bias.main_grad is a NoneType; bias_grad='main_grad' needs a contiguous float32 [8] on cpu",
    ),
    (
        lambda: add_rms_norm_(torch.zeros(8, 3).t(), None, torch.zeros(8), 1e-6)[0],
        "x has strides (1, 3); add_rms_norm_ needs a contiguous one",
    ),
    (
        lambda: add_rms_norm_(torch.zeros(3, 8), torch.zeros(2, 8), torch.zeros(8), 1e-6)[0],
        "residual is float32 [2, 8] on cpu; it must be as x, float32 [3, 8] on cpu",
    ),
    (
        lambda: add_rms_norm_(
            *(torch.zeros(3, 8), None, torch.zeros(8)), 1e-6, bias=torch.zeros(8)
        )[0],
        "bias is given without a residual; add_rms_norm_ adds both or nothing",
    ),
    (lambda: swiglu_(torch.zeros(3, 7)), "x has shape [3, 7] and strides (7, 1); swiglu_ needs"),
    (lambda: swiglu_(torch.zeros(8, 3).t()), "x has shape [3, 8] and strides (1, 3); swiglu_"),
    (lambda: swiglu_(torch.zeros(3, 8), torch.zeros(4)), "bias is float32 [4] on cpu; swiglu_ of"),
]


@pytest.mark.parametrize("call, message", BAD, ids=[message[:40] for _, message in BAD])
def test_bad_arguments_are_named(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize("op", ["add_rms_norm_", "swiglu_"])
def test_what_may_not_be_written_is_refused(op: str) -> None:
    def call(x: Tensor) -> Any:
        if op == "swiglu_":
            return swiglu_(x, torch.ones(8))
        return add_rms_norm_(x, torch.ones(4, 8), torch.ones(8), 1e-6)

    leaf = torch.nn.Parameter(torch.zeros(4, 8))
    with torch.inference_mode():
        of_inference = torch.zeros(4, 8)
    for x, what in ((leaf, "a leaf that requires"), (of_inference, "a tensor of inference mode")):
        with pytest.raises(ValueError, match=f"x is {what}.*; pass x.clone()"):
            call(x)
        assert not x.any()
    with torch.no_grad():
        call(leaf)


def test_no_graph_without_the_kernel_is_recorded() -> None:
    x, weight = torch.randn(4, 8), torch.ones(8)
    for record in (lambda f: make_fx(f)(x), lambda f: torch.jit.trace(f, x)):
        for op in (lambda x: rms_norm(x, weight, 1e-6), lambda x: swiglu_(x * 1)):
            with pytest.raises(RuntimeError, match="can't be recorded by make_fx or torch.jit"):
                record(op)
