"""Weight gradients added to main_grad by the product itself."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.numeric import assert_accurate
from vlmtrain.models import weight_gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulates(dtype: torch.dtype) -> None:
    # 64 results or more: over fewer, plain torch's error is luck.
    tokens, inputs, outputs = torch.randint(8, 60, (3,)).tolist()
    x, grad = torch.randn(tokens, inputs, dtype=dtype), torch.randn(tokens, outputs, dtype=dtype)
    before = torch.randn(outputs, inputs)
    main_grad = before.clone()
    weight_gradients.wgrad_gemm_accum_fp32(x, grad, main_grad)
    assert_accurate(
        "main_grad",
        main_grad,
        before + (grad.t() @ x).float(),
        before + grad.double().t() @ x.double(),
    )


def test_half_precision_buffer() -> None:
    x, grad = torch.randn(33, 20).bfloat16(), torch.randn(33, 12).bfloat16()
    before = torch.randn(12, 20).bfloat16()
    main_grad = before.clone()
    weight_gradients.wgrad_gemm_accum_fp16(x, grad, main_grad)
    exact = before.double() + grad.double().t() @ x.double()
    assert_accurate("main_grad", main_grad, before + grad.t() @ x, exact)


def test_megatron_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megatron-core linear adds to main_grad and leaves no gradient of its own to add again."""
    from megatron.core.tensor_parallel import layers

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    weight_gradients.enable()
    weight_gradients.enable()
    weight = torch.nn.Parameter(torch.randn(5, 7))
    weight.main_grad = torch.ones(5, 7)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    x = torch.randn(3, 1, 7, requires_grad=True)
    upstream = torch.randn(3, 1, 5)
    layers.linear_with_grad_accumulation_and_async_allreduce(
        x, weight, None, True, False, False
    ).backward(upstream)
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    want = 1 + upstream.view(3, 5).t().double() @ x.detach().view(3, 7).double()
    torch.testing.assert_close(weight.main_grad.double(), want, rtol=1e-5, atol=1e-5)  # type: ignore[attr-defined]
