"""Which kernel serves a call of attention: one pure function, asked on every device.

    cpu         ours, csrc/cpu: every dtype, head_dim up to 256, any length
    window      ours, CUDA: a segment's keys whole in the shared memory of one thread block
    sm80        ours, CUDA: FlashAttention-2, tiles of 128 by mma.sync, segments of any length
    sm90        ours, CUDA: FlashAttention-3, wgmma and TMA, compute capability 9.0
    flash-attn  the package of that name
    sdpa        torch's scaled_dot_product_attention, one segment after another
    composed    rotation and permutation in torch, then varlen_attention

The torch ops get the answer as an argument, so that forward and backward run the same kernel.
`python -m vlmkernels.info` prints `table` for the machine at hand.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vlmkernels._native import has_cuda_kernels

#: Of varlen_attention, in order of preference. flash-attn comes before our kernels of long
#: segments, because it has been measured on GPUs and they have not.
VARLEN: tuple[str, ...] = ("cpu", "window", "flash-attn", "sm90", "sm80", "sdpa")
#: Of vision_attention: all but "composed" rotate q and k themselves. flash-attn doesn't, and a
#: rotation in torch moves 48 bytes for each element of q and k, which takes an A100 longer than
#: attention to frames of up to 3,700 patches at the full rate of its tensor cores
#: (docs/attention-cuda.md).
VISION: tuple[str, ...] = ("cpu", "window", "sm90", "sm80", "composed")
#: "tiled" is sm90 or sm80, whichever the GPU has.
BACKENDS = (*VARLEN, "tiled")

#: Longest segment that the window kernels hold in shared memory, by head_dim of its instances.
WINDOW_LENGTHS = {64: 128, 80: 128, 96: 128, 128: 64}
#: What every kernel of ours takes at most.
MAX_HEAD_DIM = 256
#: Instances of sm80 and sm90.
TILED_HEAD_DIMS = (64, 72, 80, 96, 128)


@dataclass(frozen=True)
class Machine:
    """What the choice depends on besides the call."""

    device: str  # type of the tensors' device
    capability: tuple[int, int] = (0, 0)  # of the GPU
    cuda_kernels: bool = True  # vlmkernels was built with CUDA kernels
    flash_attn: bool = False  # flash-attn is installed


@functools.cache
def flash_attn() -> Callable[..., Any] | None:
    """flash-attn's function, if it is installed."""
    try:
        from flash_attn import flash_attn_varlen_func  # optional
    except ImportError:
        return None
    return flash_attn_varlen_func


@functools.cache
def _machine(device: torch.device) -> Machine:
    if device.type != "cuda":
        return Machine(device.type)
    capability = torch.cuda.get_device_capability(device)
    return Machine("cuda", capability, has_cuda_kernels(), flash_attn() is not None)


@torch.compiler.assume_constant_result
def machine_of(device: torch.device) -> Machine:
    """The machine of tensors on this device; looked up once."""
    return _machine(device)


def select(
    machine: Machine,
    dtype: torch.dtype,
    head_dim: int,
    max_seqlen: int | None,
    *,
    vision: bool = False,
    permuted: bool = False,
    strides: Iterable[int] = (),
    backend: str | None = None,
) -> str:
    """The kernel of a call of varlen_attention, one of VARLEN, or vision_attention, one of VISION.

    Args:
        max_seqlen: tokens of the longest segment; on CUDA varlen_attention must know it, and
            vision_attention is composed without.
        permuted: vision_attention reads its patches through a window order.
        strides: in elements, of the tokens and heads of q, k and v, as far as sm90 reads them
            in place.
        backend: one of BACKENDS, the only one to be considered.

    Raises:
        ValueError: the backend asked for can't serve, and why.
    """
    if backend is None:
        candidates = VISION if vision else VARLEN
    elif backend == "tiled":
        candidates = ("sm90", "sm80")
    elif backend in VARLEN:
        candidates = (backend,)
    else:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    reason: tuple[Any, ...] = ()
    for kernel in candidates:
        reason = obstacle(kernel, machine, dtype, head_dim, max_seqlen, permuted, strides)
        if not reason:
            return kernel
    raise ValueError(f"backend {backend!r} can't be used: {reason[0].format(*reason[1:])}")


def obstacle(
    kernel: str,
    machine: Machine,
    dtype: torch.dtype,
    head_dim: int,
    max_seqlen: int | None,
    permuted: bool = False,
    strides: Iterable[int] = (),
) -> tuple[Any, ...]:
    """Why this kernel can't serve such a call: nothing, or a text and the values to format it with
    (not formatted here: torch.compile can't format a length that varies)."""
    if kernel in ("sdpa", "composed"):
        return ()
    if kernel == "cpu":
        here = machine.device in ("cpu", "meta")
        return () if here else ("it runs on the CPU, the tensors are on {}", machine.device)
    if machine.device != "cuda":
        return ("it runs on CUDA, the tensors are on {}", machine.device)
    if kernel == "flash-attn":
        if dtype == torch.float32:
            return ("it takes bfloat16 and float16",)
        return () if machine.flash_attn else ("flash-attn is not installed",)
    if not machine.cuda_kernels:
        return ("vlmkernels was built without CUDA kernels",)
    if dtype == torch.float32:
        return ("it takes bfloat16 and float16",)
    head_dims = tuple(WINDOW_LENGTHS) if kernel == "window" else TILED_HEAD_DIMS
    if head_dim not in head_dims:
        return ("head_dim is {}, it has {}", head_dim, ", ".join(map(str, head_dims)))
    if max_seqlen is None:
        return ("max_seqlen is not known",)
    if kernel == "window":
        limit = WINDOW_LENGTHS[head_dim]
        if max_seqlen > limit:
            text = "the longest segment has {} tokens, it takes {} at head_dim {}"
            return (text, max_seqlen, limit, head_dim)
    elif permuted:
        return ("it takes patches in the order of their segments, these are permuted",)
    if kernel == "sm90" and machine.capability != (9, 0) or machine.capability < (8, 0):
        needed = "9.0" if kernel == "sm90" else "8.0"
        return ("it needs compute capability {}, this is {}.{}", needed, *machine.capability)
    # A TMA tensor map has positive strides (an expanded tensor's are 0) of less than 2^40 bytes.
    if kernel == "sm90" and not all(0 < stride < 1 << 39 for stride in strides):
        return ("strides are {}, TMA takes positive ones below 2^39", strides)
    return ()


def table(machine: Machine) -> Iterator[str]:
    """What `select` answers on a machine with a GPU, then why kernels are off."""
    for vision, dtype in itertools.product((False, True), (torch.bfloat16, torch.float32)):
        head_dims: dict[str, list[str]] = {}  # by answer
        for head_dim in (*TILED_HEAD_DIMS, None):
            limit = WINDOW_LENGTHS.get(head_dim or 0, 128)
            short, long = (
                select(machine, dtype, head_dim or MAX_HEAD_DIM, length, vision=vision)
                for length in (limit, limit + 1)
            )
            answer = short if short == long else f"{short} up to {limit}, {long} above"
            head_dims.setdefault(answer, []).append(str(head_dim or "others"))
        op, kind = "vision_attention" if vision else "varlen_attention", str(dtype)[6:]
        for answer, dims in head_dims.items():
            where = f", head_dim {', '.join(dims)}" if len(head_dims) > 1 else ""
            yield f"{op}, {kind}{where}: {answer}"
    for kernel in ("window", "flash-attn", "sm90", "sm80"):
        if reason := obstacle(kernel, machine, torch.bfloat16, 80, 128):
            yield f"{kernel}: off, {reason[0].format(*reason[1:])}"
