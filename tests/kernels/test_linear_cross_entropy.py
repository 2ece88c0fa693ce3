"""linear_cross_entropy against float64 of F.cross_entropy(F.linear(..)), whatever the chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.numeric import (
    ISAS,
    LARGE,
    assert_accurate,
    assert_bitwise,
    isa,
    poisoned,
    product_noise,
)
from vlmkernels import _native, linear_cross_entropy
from vlmkernels.loss import op
from vlmkernels.loss.reference import linear_cross_entropy_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IGNORE = -100


def make(
    tokens: int, classes: int, hidden: int, dtype: torch.dtype, share: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight with logits of a few units, targets, of which `share` count."""
    x = torch.randn(tokens, hidden).to(dtype)
    weight = (torch.randn(classes, hidden) * 3 * hidden**-0.5).to(dtype)
    targets = torch.randint(0, classes, (tokens,))
    targets[torch.rand(tokens) >= share] = IGNORE
    return x.requires_grad_(), weight.requires_grad_(), targets


def plain(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    reduction: str = "mean",
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Stock torch, all in the dtype of hidden."""
    logits = F.linear(hidden, weight)
    common = dict(ignore_index=ignore_index, label_smoothing=label_smoothing)
    losses = F.cross_entropy(logits, targets, reduction="none", **common)  # type: ignore[arg-type]
    losses = losses + z_loss * logits.logsumexp(1).square() * (targets != ignore_index)
    if reduction == "none":
        return losses
    return losses.sum() / (targets != ignore_index).sum() if reduction == "mean" else losses.sum()


def outputs(
    function: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dout: Tensor,
    **options: Any,
) -> dict[str, Tensor]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = function(hidden, weight, targets, **options)
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight), dout.to(loss.dtype))
    return {"loss": loss.detach(), "dhidden": dhidden, "dweight": dweight}


def compare(
    got: dict[str, Tensor],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dout: Tensor,
    **options: Any,
) -> None:
    """Errors are at most twice those of stock torch in the same dtype. A loss is a few numbers, so
    it may have the roundings of a target's logit, in the dtype, and of itself instead; where logits
    are long sums, a few of them make most of the gradients' errors, which may be theirs."""
    arguments = targets, dout
    theirs = outputs(plain, hidden, weight, *arguments, **options)
    exact = outputs(plain, hidden.double(), weight.double(), *arguments, **options)
    counted = (targets != options.get("ignore_index", IGNORE)).nonzero()[:, 0]
    picked = weight.double()[targets[counted]] * hidden.double()[counted]
    rows = torch.zeros(len(targets), dtype=torch.float64)
    rows[counted] = torch.finfo(hidden.dtype).eps / 2 * picked.sum(1).abs()
    reduction = options.get("reduction", "mean")
    noise = rows if reduction == "none" else rows.norm()
    noise = noise / len(counted) if reduction == "mean" else noise
    noise = noise + 2**-23 * exact["loss"].abs()
    for name in got:
        if name == "loss":
            results = got[name], theirs[name].float(), exact[name]
            assert_accurate(name, *(x.reshape(-1, 1) for x in results), noise.reshape(-1, 1))
        else:
            of_logits = None
            if hidden.shape[1] > 100:
                wide = hidden.double(), weight.double()
                of_logits = gradient_noise(*wide, *arguments, **options)[name]
            assert_accurate(name, got[name], theirs[name], exact[name], of_logits)


def gradient_noise(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dout: Tensor,
    reduction: str = "mean",
    ignore_index: int = IGNORE,
    z_loss: float = 0.0,
    **_: Any,
) -> dict[str, Tensor]:
    """Standard deviations under roundings of random sign in the sums of float32 logits."""
    with torch.no_grad():
        logits = hidden @ weight.T
        counts = (targets != ignore_index).double()
        scale = dout * counts / (counts.sum() if reduction == "mean" else 1)
        factor = 1 + 2 * z_loss * logits.logsumexp(1).abs()  # what p is multiplied by
        p, variance = logits.softmax(1), product_noise(hidden, weight.T).square()
        # Of scale factor p: that of its logit, and those of all logits through their sum.
        variance = variance + (p.square() * variance).sum(1, keepdim=True)
        variance = (scale * factor)[:, None].square() * p.square() * variance
        return {
            "dhidden": (variance @ weight.square()).sqrt(),
            "dweight": (variance.T @ hidden.square()).sqrt(),
        }


#: bytes of a chunk: everything at once; a few rows, six times in 16 bits; there also a few columns
#: of all rows and of a few
CHUNKS = [op.CHUNK_BYTES, 20_000]
CASES = [(dtype, chunk) for dtype in DTYPES for chunk in CHUNKS]
CASES += [(dtype, chunk) for dtype in DTYPES[1:] for chunk in (7000, 1400)]


@pytest.mark.parametrize("dtype, chunk", CASES)
@pytest.mark.parametrize("name", [*ISAS, ""])  # "": the machine's, with its products
def test_against_float64(
    name: str, dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "CHUNK_BYTES", chunk)
    sizes = [(41, 257, 24), (47, 1037, 33)]
    if chunk == CHUNKS[0]:
        sizes.append((450, 400, LARGE // (450 * 400) + 9))
    cases = [("mean", 0.0, 0.0, 1.0), ("sum", 0.1, 1e-2, 0.5), ("none", 0.0, 1e-2, 0.3)]
    with isa(name), poisoned():
        for tokens, classes, hidden in sizes:
            for reduction, smoothing, z_loss, share in [*cases, ("none", 0.2, 0.0, 1.0)]:
                x, weight, targets = make(tokens, classes, hidden, dtype, share)
                targets[0] = classes - 1  # at least one counts
                dout = torch.rand(tokens) + 0.5 if reduction == "none" else torch.ones(())
                options = dict(reduction=reduction, label_smoothing=smoothing, z_loss=z_loss)
                arguments = x, weight, targets, dout
                got = outputs(linear_cross_entropy, *arguments, **options)
                assert got["loss"].dtype == torch.float32
                compare(got, *arguments, **options)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_reference_is_the_documented_meaning(dtype: torch.dtype) -> None:
    x, weight, targets = make(30, 211, 16, dtype, 0.6)
    targets[0] = 0
    options = dict(reduction="none", label_smoothing=0.1, z_loss=1e-2)
    arguments = x, weight, targets, torch.rand(30)
    compare(outputs(linear_cross_entropy_reference, *arguments, **options), *arguments, **options)


def test_an_ignored_class_may_be_any_number() -> None:
    x, weight, targets = make(30, 50, 16, torch.float32)
    targets[3:9] = 7
    arguments = x, weight, targets, torch.ones(())
    compare(outputs(linear_cross_entropy, *arguments, ignore_index=7), *arguments, ignore_index=7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_and_infinite_ones(dtype: torch.dtype) -> None:
    """The statistics rise through tiles; a class may be shut out by -inf."""
    x = torch.ones(3, 1, dtype=dtype)
    logits = torch.linspace(-3e4, 3e4, 5000).to(dtype)[:, None]
    logits[:1500] = -torch.inf
    targets = torch.tensor([4999, 4998, 3000])
    exact = F.cross_entropy(F.linear(x.double(), logits.double()), targets, reduction="none")
    got = linear_cross_entropy(x, logits, targets, reduction="none")
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-6)


def test_no_targets_at_all() -> None:
    """As torch: the mean is NaN, sums are 0, gradients are zeros."""
    for dtype in DTYPES:
        for tokens in (0, 5):
            x, weight, targets = make(tokens, 33, 8, dtype, 0.0)
            for reduction in ("mean", "sum", "none"):
                loss = linear_cross_entropy(x, weight, targets, reduction=reduction)
                expected = F.cross_entropy(F.linear(x, weight), targets, reduction=reduction)
                torch.testing.assert_close(loss, expected.float(), equal_nan=True)
                with poisoned():
                    gradients = torch.autograd.grad(loss.sum(), (x, weight))
                assert_bitwise("dhidden", gradients[0], torch.zeros_like(x))
                assert_bitwise("dweight", gradients[1], torch.zeros_like(weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    x, weight, targets = make(12, 1500, 8, dtype)
    arguments = targets, torch.ones(12)
    clean = outputs(linear_cross_entropy, x, weight, *arguments, reduction="none")
    bad = x.detach().clone()
    bad[4, 3] = torch.nan
    got = outputs(linear_cross_entropy, bad, weight, *arguments, reduction="none")
    others = torch.arange(12) != 4
    for name in ("loss", "dhidden"):
        assert got[name][4].isnan().all()
        assert_bitwise(name, got[name][others], clean[name][others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ISAS)
def test_the_kernel_is_deterministic(name: str, dtype: torch.dtype) -> None:
    """The same bits with any number of threads; columns may come in several calls."""
    logits, targets = torch.randn(9, 5000).to(dtype), torch.randint(0, 5000, (9,))

    def run(threads: int, blocks: list[int]) -> tuple[Tensor, Tensor]:
        torch.set_num_threads(threads)
        stats = torch.zeros(4, 9)
        stats[0] = torch.finfo(torch.float32).min
        chunk = targets, stats, 0, 5000, 0.1, 1e-2
        parts = list(zip(blocks, logits.clone().split(blocks, 1), strict=True))
        first = 0
        for size, part in parts:
            op._cross_entropy(part.contiguous(), slice(first, first + size), None, True, *chunk)
            first += size
        out = logits.clone()
        op._cross_entropy(out, slice(0, 5000), torch.rand(9, generator=generator()), False, *chunk)
        return stats, out

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    with isa(name):
        one, two = run(1, [5000]), run(2, [5000])
        for i in range(2):
            assert_bitwise(f"result {i}", two[i], one[i])
        several = run(2, [2041, 1, 2958])[0]
        torch.testing.assert_close(several, one[0], rtol=1e-6, atol=1e-4)


# ---- what is computed, and in how much memory ----------------------------------------------------


class _Watch(TorchDispatchMode):
    """Products done, and the largest storage that was made, but for those of `result` bytes."""

    def __init__(self, result: int = 0) -> None:
        super().__init__()
        self.products = self.largest = 0
        self.result = result
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, Tensor) and tensor.numel():
                size = tensor.untyped_storage().nbytes()
                self.largest = max(self.largest, 0 if size == self.result else size)
                self.shapes.add(tuple(tensor.shape))
        return out


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_memory(dtype: torch.dtype, main_grad: bool) -> None:
    """Nothing made is larger than 64 MB, whatever the tokens and the vocabulary; the logits here
    would have 430 MB in 16 bits."""
    tokens, classes = 1400, 152_064
    x, weight, targets = make(tokens, classes, 8, dtype)
    into = torch.zeros(classes, 8) if main_grad else None
    scale = torch.ones(tokens)
    watch = _Watch()
    with watch, torch.no_grad():
        settings = IGNORE, 0, classes, classes, 0.0, 0.0, "", True, True
        losses, *_ = op._run(x, weight, targets, scale, None, into, *settings)
    assert len(losses) == tokens and losses.isfinite().all()
    assert watch.largest <= 64 << 20
    assert (tokens, classes) not in watch.shapes
    assert watch.largest > 30 << 20, "the watch sees no chunk"


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_logits_lie_in_the_gradient_of_the_weight(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it nothing made is larger than a chunk; the logits here are as large as it is."""
    monkeypatch.setattr(op, "CHUNK_BYTES", 1 << 20)
    x, weight, targets = make(512, 4096, 512, dtype)
    settings = IGNORE, 0, 4096, 4096, 0.0, 0.0, "", True, True
    watch = _Watch(weight.numel() * weight.itemsize)
    with watch, torch.no_grad():
        op._run(x, weight, targets, torch.ones(512), None, None, *settings)
    assert 1 << 19 <= watch.largest <= 1 << 20
    assert watch.products % 3 == 0


@given(
    st.integers(0, 40_000),
    st.integers(0, 300_000),
    st.integers(1, 9000),
    st.sampled_from([2, 4]),
    st.sampled_from([op.CHUNK_BYTES, op.CUDA_CHUNK_BYTES]),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_plan(
    rows: int,
    classes: int,
    hidden: int,
    item: int,
    largest: int,
    cases: tuple[bool, bool, bool],
) -> None:
    """Chunks fit, are no more than they need be, and cover everything."""
    twice, inside, rounded = cases
    options = {"twice": twice, "inside": inside, "rounded": rounded}
    chunks = op.plan(rows, classes, hidden, item, largest, **options)
    assert [x for part, _ in chunks for x in range(part.start, part.stop)] == list(range(rows))
    part = -(-classes // op.KEPT)
    part = part if part <= op.WHOLE else -(-part // op.WHOLE) * op.WHOLE
    for block, columns in chunks:
        assert columns >= classes or columns <= op.WHOLE or columns % op.WHOLE == 0
        count = block.stop - block.start
        assert count >= 1 and columns >= 1
        assert count * columns * item <= largest
        assert count * hidden * 4 <= largest
    most = largest // (4 * hidden)
    fitting = min(most, largest // (item * max(part, 1)))
    if not twice:
        assert len(chunks) == -(-rows // most)
        return
    if inside and rows > fitting:
        first, columns = chunks.pop(0)
        rows -= first.stop
        assert first.stop == min(rows + first.stop, hidden, most)
        assert first.stop * columns * item <= largest // 2
    by_columns = any(columns < part for _, columns in chunks)
    allowed = op.MOST_ROUNDINGS - (inside and rows > fitting)
    if by_columns:
        assert rounded and rows > (op.MOST_ROUNDINGS - 1) * fitting
        assert len(chunks) == -(-rows // most)
    elif chunks:
        assert len(chunks) == -(-rows // fitting)
        assert not rounded or fitting == most or len(chunks) <= allowed


def products(hidden: bool, weight: bool, chunk: int, **options: Any) -> tuple[int, int]:
    """In the forward and in the backward pass."""
    x, w, targets = make(8, 40, 4, torch.bfloat16)
    x.requires_grad_(hidden)
    w.requires_grad_(weight)
    if options.get("weight_grad"):
        w.main_grad = torch.zeros(40, 4)  # type: ignore[attr-defined]
    counts = []

    def run(*arguments: Any) -> Any:
        with _Watch() as watch:
            out = op._run(*arguments)
        counts.append(watch.products)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "linear_cross_entropy", run)
        patch.setattr(op, "CHUNK_BYTES", chunk)
        loss = linear_cross_entropy(x, w, targets, **options)
        if hidden or weight:
            loss.sum().backward()
    return counts[0], sum(counts[1:])


def test_products_are_no_more_than_needed() -> None:
    """Of 8 rows by 40 columns, with memory for all of them and for less."""
    everything, none, main = 1 << 20, {"reduction": "none"}, {"weight_grad": "main_grad"}
    assert products(True, True, everything) == (3, 0)
    assert products(True, False, everything) == (2, 0)
    assert products(False, True, everything) == (2, 0)
    assert products(False, False, everything) == (1, 0)
    assert products(True, True, everything, **none) == (1, 3)
    assert products(True, True, everything, grad_scale=1.0, **none) == (3, 0)
    assert products(True, True, everything, **main) == (1, 3)
    assert products(True, True, everything, grad_scale=1.0, **main) == (3, 0)
    # 4 rows at a time, and 8 in two blocks.
    assert products(True, True, 160, grad_scale=1.0, **main) == (12, 0)
    assert products(True, True, 320) == (6, 0)
    # The gradient [40, 4] has room for 4 rows: in blocks of 10 columns, then 4 rows in two.
    assert products(True, True, 160) == (4 * 3 + 2 * 3, 0)
    # 2 in blocks of 4 columns; 2 at a time by 8 columns, the last two of 5 blocks not done again.
    assert products(True, True, 36) == (10 * 3 + 3 * (5 + 3 + 2 * 5), 0)
    # Statistics known: all rows by 10 columns.
    assert products(True, True, 320, **none) == (4, 12)


# ---- the incoming gradient -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_incoming_gradients(reduction: str, dtype: torch.dtype) -> None:
    """Known beforehand or not, once or twice: the same gradients."""
    x, weight, targets = make(20, 70, 12, dtype, 0.7)
    targets[0] = 1
    dout = torch.rand(20) + 0.5 if reduction == "none" else torch.tensor(1.7)
    options: dict[str, Any] = dict(reduction=reduction)
    for scale in (None, 1.0, 1.7, dout):
        arguments = x, weight, targets, dout
        got = outputs(linear_cross_entropy, *arguments, grad_scale=scale, **options)
        compare(got, *arguments, **options)
    if reduction != "none":  # what another gradient multiplies: its factor isn't rounded to 16 bits
        at_1, at_17 = (
            outputs(linear_cross_entropy, *arguments[:3], d) for d in (dout / dout, dout)
        )
        for name in ("dhidden", "dweight"):
            assert_bitwise(name, at_17[name], (at_1[name].float() * dout).to(dtype))
    loss = linear_cross_entropy(x, weight, targets, **options)
    first = torch.autograd.grad(loss, (x, weight), dout, retain_graph=True)
    for name, one, two in zip(
        ("dhidden", "dweight"), first, torch.autograd.grad(loss, (x, weight), dout), strict=True
    ):
        assert_bitwise(name, two, one)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 0.25])
def test_main_grad(
    scale: float | None, dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(op, "_PRODUCT_BYTES", 500)
    x, weight, targets = make(30, 211, 12, dtype, 0.8)
    targets[0] = 1
    weight.main_grad = torch.zeros(211, 12)  # type: ignore[attr-defined]
    fired = []
    weight.register_hook(lambda grad: fired.append(grad.is_sparse and grad._nnz() == 0))
    for _ in range(2):  # it adds
        loss = linear_cross_entropy(x, weight, targets, weight_grad="main_grad", grad_scale=scale)
        (loss * 0.25).backward()
    assert fired == [True, True]
    added = {"dweight": weight.main_grad, "dhidden": x.grad}  # type: ignore[attr-defined]
    halves = {name: (value / 2).to(dtype) for name, value in added.items()}
    compare(halves, x.detach(), weight.detach(), targets, torch.tensor(0.25))


def test_main_grad_was_added_for_another_gradient() -> None:
    x, weight, targets = make(5, 9, 4, torch.float32)
    weight.main_grad = torch.zeros(9, 4)  # type: ignore[attr-defined]
    loss = linear_cross_entropy(x, weight, targets, weight_grad="main_grad", grad_scale=1.0)
    with pytest.raises(ValueError, match="gradient of the loss is not grad_scale"):
        (2 * loss).backward()
    loss = linear_cross_entropy(x, weight, targets, weight_grad="main_grad")
    with pytest.raises(ValueError, match="create_graph=True needs weight_grad='dense'"):
        loss.backward(create_graph=True)


def test_a_second_derivative_is_refused() -> None:
    x, weight, targets = make(5, 9, 4, torch.float32)
    loss = linear_cross_entropy(x, weight, targets)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy.* once, not twice"):
        first.square().sum().backward()


# ---- torch.library and torch.compile -------------------------------------------------------------


def test_opcheck() -> None:
    x, weight, targets = (t.detach() for t in make(6, 13, 4, torch.float32, 0.6))
    scale, settings = torch.rand(6), (IGNORE, 0, 13, 13, 0.1, 1e-2, "")
    target = torch.ops.vlmkernels.linear_cross_entropy.default
    stats = target(x, weight, targets, None, None, None, *settings, True, True)[1]
    for arguments in (
        (None, None, None, *settings, True, True),
        (scale, None, None, *settings, True, True),
        (scale, stats, torch.zeros(13, 4), *settings, False, True),
    ):
        torch.library.opcheck(target, (x, weight, targets, *arguments))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compile(reduction: str, dynamic: bool) -> None:
    def model(hidden: Tensor, weight: Tensor, targets: Tensor, grad_scale: Any = None) -> Tensor:
        options = dict(reduction=reduction, grad_scale=grad_scale, weight_grad="main_grad")
        return linear_cross_entropy(hidden * 2, weight, targets, **options) * 3  # type: ignore

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (12, 20):
        x, weight, targets = make(tokens, 31, 8, torch.float32)
        dout = torch.rand(tokens) + 0.5 if reduction == "none" else torch.tensor(0.7)
        got = outputs(compiled, x, weight, targets, dout)
        doubled = 2 * x.detach(), weight, targets, 3 * dout
        got["dhidden"], got["loss"] = got["dhidden"] / 2, got["loss"] / 3
        compare(got, *doubled, reduction=reduction)
    torch._dynamo.reset()


def test_autocast_changes_nothing() -> None:
    """Nor in a backward inside its region, which makes the gradients of single losses."""
    x, weight, targets = make(20, 70, 12, torch.float32)
    for reduction, dout in (("mean", torch.ones(())), ("none", torch.rand(20) + 0.5)):
        options = {"reduction": reduction}
        want = outputs(linear_cross_entropy, x, weight, targets, dout, **options)
        with torch.autocast("cpu", torch.bfloat16):
            got = outputs(linear_cross_entropy, x, weight, targets, dout, **options)
        for name, value in want.items():
            assert torch.equal(got[name], value), name


def test_cuda_function_takes_what_the_launcher_passes() -> None:
    """Without a row there is nothing to launch, so the call works without a GPU as well."""
    if not _native.has_cuda_kernels():
        pytest.skip("vlmkernels was built without CUDA kernels")
    settings = 0, 8, 0, 8, 0.1, 1e-2, True, _native.DTYPES[torch.bfloat16]
    assert _native._C.cross_entropy_cuda(*[0] * 7, *settings, stream=0) is None


# ---- refusals ------------------------------------------------------------------------------------


def test_targets_out_of_range() -> None:
    x, weight, targets = make(9, 13, 4, torch.float32)
    for bad in (13, -1, 1 << 40):
        wrong = targets.clone()
        wrong[2], wrong[6] = IGNORE, bad
        with pytest.raises(ValueError, match=rf"targets\[6\] is {bad}; it must be 0 to 12, or ign"):
            linear_cross_entropy(x, weight, wrong)


def test_wrong_arguments() -> None:
    x, weight, targets = make(9, 13, 4, torch.float32)
    array, learned = x.detach().numpy(), torch.tensor(0.1, requires_grad=True)
    for arguments, options, message in (
        ((array, weight, targets), {}, "hidden is a ndarray; it must be a torch.Tensor"),
        ((x.double(), weight, targets), {}, r"hidden is float64 \[9, 4\] on cpu"),
        ((x[None], weight, targets), {}, r"hidden is float32 \[1, 9, 4\]"),
        ((x.to("meta"), weight, targets), {}, "hidden is on meta; .* runs on the CPU and on CUDA"),
        ((x, None, targets), {}, "weight is a NoneType; it must be a torch.Tensor"),
        ((x, weight.bfloat16(), targets), {}, "weight is bfloat16 .* it must be float32"),
        ((x, weight[:, :3].contiguous(), targets), {}, "weight has rows of 3 elements; .* 4"),
        ((x, weight[::2], targets), {}, "weight is not contiguous; pass weight.contiguous"),
        ((x, weight[:0], targets), {}, "weight has 0 rows and vocab_range is None"),
        (
            (x, weight, numpy.zeros(9, numpy.int64)),
            {},
            "targets is a ndarray; it must be a torch.Tensor",
        ),
        ((x, weight, targets.int()), {}, r"targets is int32 \[9\]"),
        ((x, weight, targets[:8]), {}, "targets has 8 entries; it must have hidden's 9 rows"),
        ((x, weight, targets), {"reduction": "max"}, "reduction is 'max'"),
        ((x, weight, targets), {"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ((x, weight, targets), {"z_loss": None}, "z_loss is None; it must be a number"),
        ((x, weight, targets), {"z_loss": learned}, "z_loss is a tensor that requires a gradient"),
        ((x, weight, targets), {"ignore_index": None}, "ignore_index is None; it must be a whole"),
        ((x, weight, targets), {"z_loss": -1.0}, "z_loss is -1.0"),
        ((x, weight, targets), {"weight_grad": "sparse"}, "weight_grad is 'sparse'"),
        ((x, weight, targets), {"weight_grad": "main_grad"}, "weight.main_grad is a NoneType"),
        ((x, weight, targets), {"grad_scale": 0}, "grad_scale is 0; it must be a finite number"),
        ((x, weight, targets), {"grad_scale": torch.tensor(0.0)}, "grad_scale is 0.0; it must be"),
        ((x[:, :0], weight[:, :0], targets), {}, "its rows must have an element"),
        ((x, weight, targets), {"grad_scale": torch.ones(9)}, r"grad_scale is float32 \[9\]"),
        (
            (x, weight, targets),
            {"vocab_range": (1, 13)},
            r"vocab_range is \(1, 13\); without group",
        ),
        ((x, weight, targets), {"vocab_range": (0, 14)}, r"weight has 13 rows .* \(0, 14\)"),
        *(
            ((x, weight, targets), {"vocab_range": wrong}, "vocab_range is .* two whole numbers")
            for wrong in (5, "ab", (0, 13.0), [(0, 13)])
        ),
        ((x, weight, targets), {"shard": (0, 2)}, r"shard is \(0, 2\) and group None"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            linear_cross_entropy(*arguments, **options)  # type: ignore[arg-type]


def test_numpys_numbers_are_a_range() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, weight, targets = torch.randn(4, 8), torch.randn(9, 8), torch.arange(4)
        wanted = linear_cross_entropy(x, weight, targets)
        group = dist.group.WORLD
        ends = (numpy.int64(0), numpy.int64(9))
        got = linear_cross_entropy(x, weight, targets, group=group, vocab_range=ends)
        torch.testing.assert_close(got, wanted)
        wrong: Any
        for wrong, message in (
            (9, "vocab_range is 9;"),
            ((0, 9.0), r"vocab_range is \(0, 9.0\);"),
            ([(0, 9.0)], r"vocab_range\[0\] is \(0, 9.0\);"),
        ):
            with pytest.raises(ValueError, match=f"{message} it must be two whole numbers"):
                linear_cross_entropy(x, weight, targets, group=group, vocab_range=wrong)
        wrong = 0
        with pytest.raises(ValueError, match="shard is 0; it must be two whole numbers"):
            linear_cross_entropy(x, weight, targets, group=group, vocab_range=ends, shard=wrong)
    finally:
        dist.destroy_process_group()
