"""Which kernel serves a call of attention: one pure function, asked on every device.

    cpu         ours, csrc/cpu: every dtype, head_dim up to 256, any length
    cpu-kept    the same for segments of at most 64 tokens where a gradient will be asked for: the
                backward takes the probabilities from the forward (`keeping`)
    window      ours, CUDA: a segment's keys whole in the shared memory of one thread block
    sm80        ours, CUDA: FlashAttention-2, tiles of 128 by mma.sync, segments of any length
    sm90        ours, CUDA: FlashAttention-3, wgmma and TMA, compute capability 9.0
    sm90-fused  the same with a backward of one kernel, where that was faster: head_dim 72, segments
                of 64 tokens or more on average
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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vlmkernels._native import _C, DTYPES, cuda_archs, learning

#: Of varlen_attention, in order of preference. On an H200 sm90 took 0.4 to 0.7 times as long as
#: FlashAttention-2 (torch's, the same code as flash-attn's); sm80 has not met its own GPUs.
VARLEN: tuple[str, ...] = ("cpu", "window", "sm90-fused", "sm90", "flash-attn", "sm80", "sdpa")
#: Of vision_attention: all but "composed" rotate q and k themselves. flash-attn doesn't, and a
#: rotation in torch moves 48 bytes for each element of q and k, which takes an A100 longer than
#: attention to frames of up to 3,700 patches at the full rate of its tensor cores
#: (docs/attention-cuda.md).
VISION: tuple[str, ...] = ("cpu", "window", "sm90-fused", "sm90", "sm80", "composed")
#: Those for the CPU.
CPU = ("cpu", "cpu-kept")
#: Tokens of the longest segment of cpu-kept, which keeps a probability a row and head for each.
KEPT_TOKENS: int = _C.KEPT_TOKENS
#: Those for compute capability 9.0.
SM90 = ("sm90", "sm90-fused")
#: Where sm90-fused is taken without being asked for: on an H200 its backward took 0.87 to 0.96
#: times as long as sm90's there, 0.98 to 3 times at other sizes.
FUSED_HEAD_DIMS = (72,)
#: "tiled" is the one of sm90-fused, sm90 and sm80 that the GPU would get without flash-attn.
TILED = ("sm90-fused", "sm90", "sm80")
BACKENDS = (*VARLEN, "tiled")

#: Bytes of shared memory that a thread block needs, the forward's or the backward's (benchmarks/
#: static.json): of the window kernels' instances by head_dim and longest segment, of sm80's by
#: head_dim. sm90's instances are for one GPU, which has what they need.
WINDOW_SHARED = {
    64: {64: 47104, 128: 110592},
    80: {64: 55296, 128: 126976},
    96: {64: 63488, 128: 143360},
    128: {64: 79872},
}
SM80_SHARED = {64: 74752, 72: 74752, 80: 68096, 96: 80384, 128: 104960}
#: Longest segment of the window kernels, by head_dim; shorter on GPUs with less shared memory.
WINDOW_LENGTHS = {head_dim: max(shared) for head_dim, shared in WINDOW_SHARED.items()}
#: Instances of sm80 and sm90.
TILED_HEAD_DIMS = tuple(SM80_SHARED)
#: What every kernel of ours takes at most.
MAX_HEAD_DIM = 256

#: Bytes of shared memory that a thread block may have, by compute capability (CUDA C++ Programming
#: Guide): what `python -m vlmkernels.info` shows of GPUs that aren't there.
SHARED_OF_BLOCK = {
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (12, 0): 99 << 10,
}


@dataclass(frozen=True)
class Machine:
    """What the choice depends on besides the call."""

    device: str  # type of the tensors' device
    capability: tuple[int, int] = (0, 0)  # of the GPU
    shared_memory: int = 0  # bytes that a thread block may have
    archs: tuple[str, ...] = ()  # that vlmkernels was built for; the first one's PTX too
    flash_attn: bool = False  # flash-attn is installed
    processors: int = 132  # of the GPU
    has_code: bool = field(init=False, compare=False)  # that the GPU runs
    is_hopper: bool = field(init=False, compare=False)  # compute capability 9.0

    def __post_init__(self) -> None:  # here, since torch.compile doesn't follow it
        runs = [_runs(arch, self.capability, i == 0) for i, arch in enumerate(self.archs)]
        object.__setattr__(self, "has_code", any(runs))
        object.__setattr__(self, "is_hopper", self.capability == (9, 0))


def _runs(arch: str, capability: tuple[int, int], by_ptx: bool) -> bool:
    """Whether a GPU runs what was compiled for an architecture: "80" runs on 8.x from 8.0 on, its
    PTX on all that came later; "90a" on 9.0 alone; "100f" on 10.x."""
    built_for = divmod(int(arch.rstrip("af")), 10)
    if arch.endswith("a"):
        return capability == built_for
    same_family = by_ptx and not arch.endswith("f") or capability[0] == built_for[0]
    return same_family and capability >= built_for


@functools.cache
def flash_attn() -> Callable[..., Any] | None:
    """flash-attn's function, if it is installed and can be imported."""
    try:
        from flash_attn import flash_attn_varlen_func  # optional
    except Exception:  # built for another torch or CUDA, it raises many an error
        return None
    return flash_attn_varlen_func


@functools.cache
def _machine(device: torch.device) -> Machine:
    if device.type != "cuda":
        return Machine(device.type)
    gpu = torch.cuda.get_device_properties(device)
    shared = gpu.shared_memory_per_block_optin
    capability, has_flash = (gpu.major, gpu.minor), flash_attn() is not None
    return Machine("cuda", capability, shared, cuda_archs(), has_flash, gpu.multi_processor_count)


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
    short: bool = False,
    strides: Iterable[int] = (),
    backend: str | None = None,
) -> str:
    """The kernel of a call of varlen_attention, one of VARLEN, or vision_attention, one of VISION.

    Args:
        max_seqlen: tokens of the longest segment; on CUDA varlen_attention must know it, and
            vision_attention is composed without.
        permuted: vision_attention reads its patches through a window order.
        short: segments have fewer than DQ_ROWS tokens on average: sm90-fused keeps float32 sums of
            dq for as many of each.
        strides: in elements, of the tokens and heads of q, k and v, as far as sm90 reads them
            in place.
        backend: one of BACKENDS, the only one to be considered.

    Raises:
        ValueError: the backend asked for can't serve, and why.
    """
    if backend is None:
        candidates = VISION if vision else VARLEN
    elif backend == "tiled":
        candidates = TILED
    elif backend in BACKENDS:
        candidates = (backend,)
    else:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    reason: tuple[Any, ...] = ()
    for kernel in candidates:
        if kernel == "sm90-fused" and backend != kernel:
            if short or head_dim not in FUSED_HEAD_DIMS:
                continue
        reason = obstacle(kernel, machine, dtype, head_dim, max_seqlen, permuted, strides)
        if not reason:
            return kernel
    raise ValueError(f"backend {backend!r} can't be used: {reason[0].format(*reason[1:])}")


def keeping(kernel: str, max_seqlen: int | None, *inputs: Tensor) -> str:
    """Of the kernel cpu cpu-kept, where the backward has more to gain from a row's probabilities
    than they cost: no more of them than the row has elements. inputs: all that may learn."""
    head_dim, dtype = inputs[0].shape[-1:].numel(), inputs[0].dtype
    if kernel != "cpu" or max_seqlen is None or not max_seqlen <= KEPT_TOKENS <= head_dim:
        return kernel
    learns = learning() and any(x.requires_grad for x in inputs)
    if not learns or dtype not in DTYPES or not kept_floats(dtype):
        return kernel
    # torch.jit.trace compares with a call in which nothing learns.
    traced = not torch.compiler.is_compiling() and torch.jit.is_tracing()
    return kernel if traced else "cpu-kept"


@torch.compiler.assume_constant_result
def kept_floats(dtype: torch.dtype) -> int:
    """What cpu-kept keeps of a row and head: 64 probabilities, in bf16 where the forward multiplies
    them in bf16; 0 where short segments are multiplied on AMX's tiles, which keep none."""
    return _C.attention_kept_floats(DTYPES[dtype])


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
        if not machine.flash_attn:
            return ("flash-attn is not installed or fails to import",)
        if machine.capability < (8, 0):
            return ("it needs compute capability 8.0, this is {}.{}", *machine.capability)
        return ()
    if not machine.archs:
        return ("vlmkernels was built without CUDA kernels",)
    if dtype == torch.float32:
        return ("it takes bfloat16 and float16",)
    instances = WINDOW_SHARED if kernel == "window" else SM80_SHARED
    if head_dim not in instances:
        return ("head_dim is {}, it has {}", head_dim, ", ".join(map(str, instances)))
    if kernel == "sm90-fused" and dtype != torch.bfloat16:
        return ("it takes bfloat16",)
    if max_seqlen is None:
        return ("max_seqlen is not known",)
    if kernel in SM90 and not machine.is_hopper or machine.capability < (8, 0):
        needed = "9.0" if kernel in SM90 else "8.0"
        return ("it needs compute capability {}, this is {}.{}", needed, *machine.capability)
    if not machine.has_code or kernel in SM90 and "90a" not in machine.archs:
        archs = ", ".join(machine.archs)
        return ("vlmkernels was built for {}, this is {}.{}", archs, *machine.capability)
    if kernel == "window":
        limit = window_length(machine, head_dim)
        if max_seqlen > limit:
            text = "the longest segment has {} tokens, it takes {} at head_dim {}"
            text += " on this GPU" if limit < WINDOW_LENGTHS[head_dim] else ""
            return (text, max_seqlen, limit, head_dim)
    elif permuted:
        return ("it takes patches in the order of their segments, these are permuted",)
    if kernel == "sm80" and SM80_SHARED[head_dim] > machine.shared_memory:
        text = "at head_dim {} it needs {} bytes of shared memory a thread block, this GPU has {}"
        return (text, head_dim, SM80_SHARED[head_dim], machine.shared_memory)
    # A TMA tensor map has positive strides (an expanded tensor's are 0) of less than 2^40 bytes.
    if kernel in SM90 and not all(0 < stride < 1 << 39 for stride in strides):
        return ("strides are {}, TMA takes positive ones below 2^39", strides)
    return ()


def window_length(machine: Machine, head_dim: int) -> int:
    """The longest segment that the window kernels take on this machine."""
    longest = 0
    for length, shared in WINDOW_SHARED.get(head_dim, {}).items():
        longest = length if shared <= machine.shared_memory else longest
    return longest


def table(machine: Machine) -> Iterator[str]:
    """What `select` answers on a machine with a GPU, then why kernels are off."""
    for vision, dtype in itertools.product((False, True), (torch.bfloat16, torch.float32)):
        head_dims: dict[str, list[str]] = {}  # by answer
        for head_dim in (*TILED_HEAD_DIMS, None):
            limit = window_length(machine, head_dim or 0)
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
        if reason := obstacle(kernel, machine, torch.bfloat16, 80, 64):
            yield f"{kernel}: off, {reason[0].split(', this is')[0].format(*reason[1:])}"
