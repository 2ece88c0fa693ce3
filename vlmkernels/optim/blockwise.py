"""8-bit moments of Adam, one float32 scale per 256 elements, in plain torch.

Method: "8-bit Optimizers via Block-wise Quantization", Dettmers et al. 2022
(https://arxiv.org/abs/2110.02861). csrc/cpu/adam/dynamic_tree.inl describes the codes and does the
same in every step of CPUAdam; here it is for state that is loaded, for tests and as documentation.

Elements are taken in memory order; a tensor's last block may be short.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
_SMALLEST = 2.0**-120  # a block below it is all zero: its inverse would overflow


def num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _bits(signed: bool) -> int:
    return 7 if signed else 8


def _values(signed: bool, device: torch.device) -> Tensor:
    """float32 [256]: what each code stands for, before the block's scale."""
    bits = _bits(signed)
    code = torch.arange(1 << bits, dtype=torch.float64, device="cpu")
    power = 2.0 ** code.clamp_min(1).log2().floor()
    value = 10.0 ** (power.log2() - bits + 1) * (0.1 + 0.9 * (code - power + 0.5) / power)
    value[0], value[-1] = 0, 1
    return (torch.cat([value, -value]) if signed else value).float().to(device)


def quantize(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes uint8, x's shape and strides, and scales float32 [blocks], of a dense float32 tensor.

    Raises:
        ValueError: signed is False and an element is negative.
    """
    if not signed and bool((x < 0).any()):
        raise ValueError("x has negative elements; unsigned codes hold none: pass signed=True")
    bits = _bits(signed)
    codes = torch.empty_like(x, dtype=torch.uint8)
    flat = x.as_strided((x.numel(),), (1,)).float()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1) if len(blocks) else blocks.new_zeros(0)
    scales = scales.masked_fill(scales < _SMALLEST, 0).masked_fill(
        ~blocks.isfinite().all(1), torch.nan
    )
    y = blocks.abs() * torch.where(scales == 0, 0, 1 / scales)[:, None]
    powers = 2.0 ** torch.arange(bits, dtype=torch.float64, device="cpu")
    decades = 10.0 ** torch.arange(bits - 1, -1, -1, dtype=torch.float64, device="cpu")
    edges, slopes = (0.1 / decades).float().to(x.device), (decades * powers / 0.9).float()
    i = (torch.bucketize(y, edges, right=True) - 1).clamp_min(0)
    power, slopes = powers.float().to(x.device)[i], slopes.to(x.device)
    ninth = torch.tensor(1 / 9, dtype=torch.float32, device=x.device)
    j = (y * slopes[i] - power * ninth).clamp_min(0)
    code = (power + torch.minimum(j, power - 0.5)).nan_to_num(0).to(torch.uint8)
    if signed:
        code = torch.where(y >= edges[0], code, 0) | (blocks.signbit().to(torch.uint8) << 7)
    else:
        code = torch.where(blocks > 0, code, 0)
    codes.as_strided((x.numel(),), (1,)).copy_(code.view(-1)[: len(flat)])
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """float32, the codes' shape and strides. A block with a NaN scale is NaN."""
    out = torch.empty_like(codes, dtype=torch.float32)
    flat = _values(signed, codes.device)[codes.as_strided((codes.numel(),), (1,)).long()]
    flat = flat * scales.repeat_interleave(BLOCK)[: len(flat)]
    out.as_strided((codes.numel(),), (1,)).copy_(flat)
    return out
