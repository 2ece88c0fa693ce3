"""What gradients are clipped with beside megatron-core's own stand-ins for apex."""

from __future__ import annotations

import pytest
import torch

from vlmtrain.core import device


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_clipping_gpu.py is for it")
@pytest.mark.parametrize("in_place", [False, True])
def test_norm_and_scale_are_megatrons(in_place: bool) -> None:
    device.setup()
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    sources = [torch.randn(n) for n in torch.randint(1, 9999, (5,)).tolist()]
    want = [torch.empty_like(x) for x in sources]
    utils.local_multi_tensor_scale(1, None, [sources, want], 0.3)
    half = [x.to(torch.bfloat16) for x in sources]  # not what our kernel is asked for
    norm = utils.local_multi_tensor_l2_norm(1, None, [half], False)[0]
    assert torch.equal(clip_grads.l2_norm_impl(1, None, [half], False)[0], norm)
    norm = clip_grads.l2_norm_impl(1, None, [sources], False)[0]
    exact = torch.cat(sources).double().norm()
    assert norm.shape == (1,) and abs(float(norm) / float(exact) - 1) <= 2**-24  # rounded once
    targets = sources if in_place else [torch.zeros_like(x) for x in sources]
    clip_grads.multi_tensor_scale_impl(1, None, [sources, targets], 0.3)
    for mine, theirs in zip(targets, want, strict=True):
        assert torch.equal(mine, theirs)
