"""torch's fused AdamW in Megatron's optimizer on a real GPU, for `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)

from tests.optim.test_fused import check  # noqa: E402


def test_same_results() -> None:
    check("cuda")
