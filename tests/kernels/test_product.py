"""mm of vlmkernels.product against float64, beside torch's product, on every instruction set."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.kernels.numeric import (
    ISAS,
    assert_accurate,
    assert_bitwise,
    isa,
    poisoned,
    product_noise,
)
from vlmkernels import _native, product

Strides = tuple[bool, bool]
#: Instruction set and dtype of each kernel of this machine.
KERNELS = [
    (name, dtype)
    for name in _native.available_isas()
    for dtype in (torch.float32, torch.bfloat16)
    if (name, dtype) != ("avx512_bf16", torch.float32)  # avx512's
]


def make(
    rows: int, columns: int, depth: int, transposed: Strides, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """a [rows, depth] and b [depth, columns], each the transpose of a dense one if `transposed`;
    else rows lie apart, by an even number of elements or an odd one."""
    if transposed[0]:
        a = torch.randn(depth, rows).to(dtype).t()
    else:
        apart = int(torch.randint(3, 5, ()))
        a = torch.randn(rows, depth + apart).to(dtype)[:, 1 : depth + 1]
    if transposed[1]:
        return a, torch.randn(columns, depth).to(dtype).t()
    return a, torch.randn(depth, columns + 5).to(dtype)[:, 2:-3]


def check(a: Tensor, b: Tensor, kind: str) -> None:
    """kind: what is added."""
    added = torch.randn(a.shape[0], b.shape[1] + 3)[:, 1:-2]  # rows lie apart
    added, bias = added if kind == "add" else added.to(a.dtype), torch.randn(b.shape[1]).to(a.dtype)
    exact, plain = a.double() @ b.double(), torch.mm(a, b)
    if kind == "bias":
        got = product.product(a, b, bias=bias)
        exact, plain = exact + bias.double(), plain + bias
    elif kind == "add":
        exact, plain = exact + added.double(), plain + added
        got = product.product(a, b, out=added, add=True)
        assert got is added
    elif kind == "out":
        got = product.product(a, b, out=added)
    else:
        got = product.product(a, b)
        assert got.is_contiguous()
    assert_accurate(kind or "a b", got, plain, exact, product_noise(a, b))


CASES = [(dtype, t) for dtype in product.TYPES for t in (False, True)]
KINDS = ["", "out", "bias", "add"]


@pytest.mark.parametrize("name, dtype", KERNELS)
@pytest.mark.parametrize("transposed", [(False, True), (False, False), (True, False), (True, True)])
@pytest.mark.parametrize("rows, columns, depth", [(390, 4100, 70), (203, 77, 1201), (7, 130, 801)])
def test_accuracy(
    name: str, dtype: torch.dtype, transposed: Strides, rows: int, columns: int, depth: int
) -> None:
    with isa(name), poisoned():
        for kind in KINDS:
            check(*make(rows, columns, depth, transposed, dtype), kind)


@pytest.mark.parametrize("name, dtype", KERNELS)
@pytest.mark.parametrize(
    "rows, depth, transposed",
    [(250, 3201, (False, True)), (90, 6401, (True, False)), (700, 1700, (False, False))],
)
def test_columns_divided(
    name: str, dtype: torch.dtype, rows: int, depth: int, transposed: Strides
) -> None:
    """Each thread packs its own columns, with AVX2 of 250 and 90 rows; of rows that aren't read
    where they lie, all or some panels of the depth at a time."""
    torch.set_num_threads(2)
    with isa(name), poisoned():
        for kind in KINDS:
            check(*make(rows, 601, depth, transposed, dtype), kind)


#: In float32 with AVX-512 nothing of these is packed: several regions of several panels, one of
#: each, and less than a tile.
IN_PLACE = [(500, 272, 700), (130, 640, 250), (61, 16, 257)]
#: Of many rows, and of a weight's gradient, each thread packs for itself: several strips of
#: columns, some of several panels, and several blocks of rows.
RANGES = [
    (2000, 1100, 1700, (False, True)),
    (2000, 77, 90, (False, True)),
    (300, 700, 1700, (True, False)),
    (190, 30, 601, (True, False)),
]


@pytest.mark.parametrize("name, dtype", KERNELS)
@pytest.mark.parametrize(
    "rows, columns, depth, transposed",
    [(*sizes, (t, False)) for sizes in IN_PLACE for t in (False, True)] + RANGES,
)
def test_threads_share_nothing(
    name: str, dtype: torch.dtype, rows: int, columns: int, depth: int, transposed: Strides
) -> None:
    torch.set_num_threads(3)
    with isa(name), poisoned():
        for kind in KINDS:
            check(*make(rows, columns, depth, transposed, dtype), kind)


@pytest.mark.parametrize("name, dtype", KERNELS)
def test_panels_are_packed_a_few_at_once(name: str, dtype: torch.dtype) -> None:
    """More of them than 12 MB hold, so in two rounds, and their blocks by three threads."""
    torch.set_num_threads(3)
    with isa(name), poisoned():
        check(*make(800, 2100, 2900, (True, True), dtype), "add")


@pytest.mark.parametrize("name", [name for name, dtype in KERNELS if dtype == torch.bfloat16])
@pytest.mark.parametrize("rows, columns", [(300, 130), (300, 700)])
def test_rows_of_bf16_any_number_of_elements_apart(name: str, rows: int, columns: int) -> None:
    """An even one and they are read where they lie, nothing behind them; an odd one, or of odd
    depth, and they are packed."""
    torch.set_num_threads(2)
    for depth in (1700, 1699):
        values, b = make(rows, columns, depth, (False, False), torch.bfloat16)
        with isa(name), poisoned():
            first, *others = (
                product.product(
                    torch.full((rows, depth + apart), torch.nan)
                    .bfloat16()[:, 1 : depth + 1]
                    .copy_(values),
                    b,
                )
                for apart in (4, 3, 6)
            )
        assert first.isfinite().all()
        for other in others:
            assert_bitwise(name, other, first)


def check_past_the_caches(columns: int, dtype: torch.dtype) -> None:
    """Written to the last column and no further, with the bits of results that don't lie in whole
    lines."""
    a, b = make(1010, columns, 70, (False, True), dtype)
    exact, plain = a.double() @ b.double(), torch.mm(a, b)
    lines, apart = (torch.full((1010, stride), torch.nan, dtype=dtype) for stride in (2112, 2113))
    for out in (lines, apart):
        product.product(a, b, out=out[:, :columns])
    assert_accurate("a b", lines[:, :columns], plain, exact, product_noise(a, b))
    assert_bitwise("a b", lines[:, :columns], apart[:, :columns])
    assert lines[:, columns:].isnan().all()


@pytest.mark.parametrize("name, dtype", KERNELS)
@pytest.mark.parametrize("columns", [2080, 2091])
def test_results_past_the_caches(name: str, dtype: torch.dtype, columns: int) -> None:
    """From 4 MB in whole lines on, by tiles."""
    with isa(name), poisoned():
        check_past_the_caches(columns, dtype)


@pytest.mark.parametrize("name", [name for name, dtype in KERNELS if dtype == torch.float32])
@pytest.mark.parametrize("transposed", [(False, True), (True, False)])
def test_error_does_not_grow_with_the_depth(name: str, transposed: Strides) -> None:
    """At any depth the relative error is that of 384 products added one to the other, each sum
    rounded to float32: it goes as the root of their number. The allowed 1.2 lies between what 8
    such parts add to it (1.01) and one sum of 768 (1.41)."""

    def relative_error(got: Tensor, a: Tensor, b: Tensor) -> float:
        exact = a.double() @ b.double()
        return ((got - exact).norm() / exact.norm()).item()

    a, b = make(150, 140, 384, transposed)
    chain = torch.zeros(150, 140)
    for k in range(384):
        chain = torch.addcmul(chain.double(), a[:, k, None].double(), b[k].double()).float()
    allowed = 1.2 * relative_error(chain, a, b)
    with isa(name):
        for depth in (384, 768, 3072):
            a, b = make(150, 140, depth, transposed)
            assert relative_error(product.product(a, b), a, b) <= allowed


@pytest.mark.parametrize("name, dtype", KERNELS)
def test_rows_in_one_place(name: str, dtype: torch.dtype) -> None:
    a, b = make(1, 140, 90, (False, False), dtype)
    with isa(name), poisoned():
        check(a.expand(300, 90), b, "")


@settings(max_examples=60)
@given(
    kernel=st.sampled_from(KERNELS),
    rows=st.integers(1, 220),
    columns=st.integers(1, 150),
    depth=st.integers(1, 900),
    transposed=st.tuples(st.booleans(), st.booleans()),
    kind=st.sampled_from(KINDS),
    number=st.integers(0, 2**31 - 1),
)
def test_any_shape(
    kernel: tuple[str, torch.dtype],
    rows: int,
    columns: int,
    depth: int,
    transposed: Strides,
    kind: str,
    number: int,
) -> None:
    torch.manual_seed(number)
    with isa(kernel[0]), poisoned():
        check(*make(rows, columns, depth, transposed, kernel[1]), kind)


def check_all_of_a_number() -> None:
    """A float32 number times one is itself, but for a rounding where parts are added; on the left
    the largest ones too."""
    largest = torch.finfo(torch.float32).max
    signs = torch.randint(2, (70, 96)) * 2 - 1
    numbers = signs * (1 + torch.rand(70, 96)) * torch.randint(-100, 127, (70, 96)).float().exp2()
    numbers[3, :5] = torch.tensor([largest, -largest, 2.0**-108, 0.0, torch.pi])
    one = torch.eye(96)
    torch.testing.assert_close(product.product(numbers, one), numbers, rtol=2**-23, atol=0)
    got = product.product(one, numbers[4:].t())
    torch.testing.assert_close(got, numbers[4:].t(), rtol=2**-23, atol=0)


@pytest.mark.parametrize("name", [name for name, dtype in KERNELS if dtype == torch.float32])
def test_float32_takes_all_of_a_number(name: str) -> None:
    with isa(name):
        check_all_of_a_number()


@pytest.mark.parametrize("name, dtype", KERNELS)
@pytest.mark.parametrize(
    "rows, columns, depth, transposed",
    [(400, 333, 3201, (False, True)), (250, 1100, 3201, (False, True))]
    + [(400, 1100, 3200, (False, True)), (2000, 600, 900, (False, True))]
    + [(500, 272, 700, (True, False)), (500, 272, 700, (False, False))],
)
def test_any_threads_give_the_same_bits(
    name: str, dtype: torch.dtype, rows: int, columns: int, depth: int, transposed: Strides
) -> None:
    """With AVX-512 1,100 columns are divided among up to four threads, rows among seven; 2,000 rows
    are ranges of up to three, in bf16 500 of seven."""
    a, b = make(rows, columns, depth, transposed, dtype)
    total = torch.randn(rows, columns)

    def results() -> list[Tensor]:
        return [product.product(a, b), product.product(a, b, out=total.clone(), add=True)]

    with isa(name):
        torch.set_num_threads(1)
        first = results()
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            for got, want in zip(results(), first, strict=True):
                assert_bitwise(f"{threads} threads", got, want)


@pytest.mark.parametrize("name", [name for name in _native.available_isas() if "amx" not in name])
def test_many_rows_of_bf16_are_summed_in_parts(name: str) -> None:
    """Sums of a depth of several panels lie in memory of a bounded size."""
    with isa(name), poisoned():
        check(*make(30_000, 200, 800, (False, True), torch.bfloat16), "bias")


def test_nan_and_inf_stay_in_their_rows_and_columns() -> None:
    a, b = make(200, 200, 200, (False, False))
    a[3, 5], b[7, 11] = torch.nan, torch.inf
    wrong = torch.zeros(200, 200, dtype=torch.bool)
    wrong[3], wrong[:, 11] = True, True
    assert torch.equal(~product.product(a, b).isfinite(), wrong)


def close(got: Tensor, want: Tensor, rtol: float = 0) -> None:
    """Sums of at most 400 products in float32, however they are ordered."""
    torch.testing.assert_close(got, want, atol=1e-4, rtol=rtol)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a processor where ours is the faster one; grows by one with each product of ours."""
    calls: list[int] = []
    kernel = product.product

    def counted(*args: Tensor, **kw: Any) -> Tensor:
        calls.append(1)
        return kernel(*args, **kw)

    work = {torch.float32: range(1 << 25, sys.maxsize)}
    monkeypatch.setattr(
        product, "our_work", lambda isa, dtype, transposed: work.get(dtype, range(0))
    )
    monkeypatch.setattr(product, "product", counted)
    return calls


def test_mm_takes_ours_for_all_that_it_reads(ours: list[int]) -> None:
    a, b = make(400, 310, 320, (False, True))
    total, bias = torch.randn(400, 310), torch.randn(310)
    close(product.mm(a, b), a @ b)
    close(product.mm(a, b, bias=bias), a @ b + bias)
    before, version = total.clone(), total._version
    close(product.mm(a, b, out=total, add=True), before + a @ b)
    assert total._version == version + 1
    with torch.inference_mode():
        close(product.mm(a, b, out=torch.empty(400, 310)), a @ b)
    both, square = torch.randn(2, 400, 400), torch.randn(400, 400)
    close(product.mm(both[0], square, out=both[1]), both[0] @ square)
    assert len(ours) == 5


def test_ours_alone_refuses_what_does_not_fit() -> None:
    for (rows, depth), (inner, columns) in (
        ((4, 0), (0, 3)),
        ((0, 4), (4, 3)),
        ((4, 5), (5, 0)),
        ((4, 5), (6, 3)),
    ):
        with pytest.raises(ValueError, match=r"M, K and N at least 1"):
            product.product(torch.ones(rows, depth), torch.ones(inner, columns))
    with pytest.raises(ValueError, match=r"b bfloat16 \[4, 4\]"):
        product.product(torch.ones(4, 4), torch.ones(4, 4).bfloat16())


def test_mm_leaves_the_rest_to_torch(ours: list[int]) -> None:
    a, b = make(400, 310, 320, (False, True))
    cases = {
        "few rows": (a[:63], b, None),
        "little work": (a[:330], b, None),
        "float64": (a.double(), b.double(), None),
        "no stride of 1": (torch.randn(400, 640)[:, ::2], b, None),
        "a column of out at a time": (a, b, torch.empty(310, 400).t()),
    }
    for x, y, out in cases.values():
        want = x @ y
        close(product.mm(x, y, out=out), want)
    with FlopCounterMode(display=False) as counter:
        product.mm(a, b)
    assert counter.get_total_flops() == 2 * 400 * 310 * 320
    a.requires_grad_()
    product.mm(a, b).sum().backward()
    assert a.grad is not None
    torch.set_float32_matmul_precision("medium")
    try:
        product.mm(a.detach(), b)
    finally:
        torch.set_float32_matmul_precision("highest")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        product.mm(a.detach(), b[:-1])
    with pytest.raises(RuntimeError):
        product.mm(a.detach(), b, bias=torch.zeros(3))
    memory, square = torch.randn(801 * 400), torch.randn(400, 400)
    left, out = memory[: 400 * 400].view(400, 400), memory[399 * 400 : 799 * 400].view(400, 400)
    for x, y in ((left, square), (square, left)):  # out's first row is the last of a, of b
        product.mm(x, y, out=out)
    out = torch.randn(400, 310)
    want = a.detach() @ b + out[200]
    close(product.mm(a.detach(), b, bias=out[200], out=out), want)
    with pytest.raises(RuntimeError, match="out=... arguments"):
        product.mm(a.detach(), b, out=torch.nn.Parameter(torch.empty(400, 310)))
    with pytest.raises(ValueError, match="add needs out, and no bias"):
        product.mm(a.detach(), b, add=True)
    assert ours == []


def test_ours_is_taken_where_it_is_faster() -> None:
    bf16, both = {(torch.bfloat16, t) for t in (False, True)}, set(CASES)
    known = {"generic": set(), "amx_bf16": both}
    on_amd = both if _native._C.is_amd() else bf16
    known |= dict.fromkeys(("avx2", "avx512", "avx512_bf16"), on_amd)
    for name in _native.available_isas():
        ours = {case for case in CASES if product.our_work(name, *case)}
        assert ours == known.get(name, set()), name
    of_bf16 = [product.our_work("amx_bf16", torch.bfloat16, t) for t in (False, True)]
    assert [1 << 28 in work for work in of_bf16] == [False, True]
    large = product.large_result_is_ours("amx_bf16", torch.bfloat16, 1007, 3584, 640)
    assert large and not product.large_result_is_ours("amx_bf16", torch.float32, 1007, 3584, 640)
    assert not product.large_result_is_ours("amx_bf16", torch.bfloat16, 2048, 1536, 8960)


@pytest.mark.parametrize("name", [name for name in ISAS if name in ("avx2", "avx512")])
def test_small_bf16_products_in_float32_are_ours(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    kernel = product.product
    monkeypatch.setattr(product, "product", lambda *a, **k: calls.append(1) or kernel(*a, **k))
    least = {"avx2": 4, "avx512": 8}[name]
    a, b = (torch.randn(8, 128).bfloat16(), torch.randn(128, 64).bfloat16())
    with isa(name):
        got = product.mm(a[:least], b)
        product.mm(a[: least - 1], b)  # torch's, as what follows
        product.mm(a[:least, : 480 // least], b[: 480 // least])
    close(got.float(), (a[:least].double() @ b.double()).bfloat16().float(), rtol=2**-7)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ISAS)
def test_bf16_in_float32_takes_all_of_a_number(name: str) -> None:
    """The smallest and the largest too."""
    tiny, largest = 2.0**-133, torch.finfo(torch.bfloat16).max
    numbers = torch.tensor([[tiny, -largest, 1.5, 0.0]]).bfloat16().t()
    with isa(name):
        got = product.product(numbers, torch.ones(1, 3).bfloat16())
    assert_bitwise(name, got, numbers.expand(4, 3))
