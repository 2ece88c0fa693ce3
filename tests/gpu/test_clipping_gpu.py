"""What gradients are clipped with on a real GPU, for `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)

clip_grads = pytest.importorskip("megatron.core.optimizer.clip_grads")
megatron_utils = pytest.importorskip("megatron.core.utils")


def test_norm_and_scale_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlmtrain.core import clipping

    replaceable = megatron_utils.local_multi_tensor_l2_norm, clipping._norm
    if clip_grads.l2_norm_impl not in replaceable:
        pytest.skip("transformer-engine or apex is installed, and clips")
    for name in ("l2_norm_impl", "multi_tensor_scale_impl"):  # to be put back behind the test
        monkeypatch.setattr(clip_grads, name, getattr(clip_grads, name))
    clipping.install()
    assert clip_grads.l2_norm_impl is clipping._norm
    grads = [torch.randn(n, device="cuda") for n in torch.randint(1, 99_999, (40,)).tolist()]
    exact = torch.cat(grads).double().norm()
    expected = [g * 0.3 for g in grads]
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm, _ = clip_grads.l2_norm_impl(1, None, [grads], False)
        clip_grads.multi_tensor_scale_impl(1, None, [grads, grads], 0.3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Sums of threads, of blocks and of tensors: some eight roundings of float32.
    assert abs(float(norm) / float(exact) - 1) <= 1e-6
    for got, want in zip(grads, expected, strict=True):
        assert torch.equal(got, want)
