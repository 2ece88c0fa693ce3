"""varlen_attention beside every way that stock torch has of attending within segments,
vision_attention beside the same ways after a rotation of q and k, and qkv_attention, causal, beside
stock torch's ways of attending within packed samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import ceilings
from benchmarks.harness import FAULT_FREE, Comparison, Context, Row, compare, difference, say
from vlmkernels import VisionLayout, _native, varlen_attention, vision_attention
from vlmkernels.attention.api import qkv_attention
from vlmkernels.attention.select import WINDOW_LENGTHS, keeping
from vlmkernels.rotary import rotate

HEADS, HEAD_DIM = 16, 80

#: Qwen2-VL's tower sees whole images, Qwen2.5-VL's mostly windows of 64 patches.
IMAGES = [256, 400, 576, 784, 1024, 1024, 1156, 1296]
IMAGES += [1600, 1764, 2048, 2304, 2704, 3136, 3600, 4096]
SHAPES: dict[str, list[int]] = {
    "256 windows of 64": [64] * 256,
    "272 ragged windows of 12 to 64": [64] * 240 + [16] * 15 + [48] * 16 + [12],
    "1,024 tokens": [1024],
    "16 mixed images, 256 to 4,096 tokens": IMAGES,
}
QUICK_SHAPES: dict[str, list[int]] = {
    "256 tokens": [256],
    "4 images, 64 to 256 tokens": [64, 100, 144, 256],
    "16 windows of 64": [64] * 16,
    "20 ragged windows of 12 to 64": [64] * 15 + [16] * 2 + [48] * 2 + [12],
}
CUDA_SHAPES: dict[str, list[int]] = {
    "1,024 windows of 64": [64] * 1024,
    "8 images of 4,096": [4096] * 8,
    "16 mixed images, 256 to 4,096 tokens": IMAGES,
    "an image of 8,192 among 64 of 256": [256] * 32 + [8192] + [256] * 32,
}

#: (windows, dtype, backward) -> bar of the ratio; the same for the share of the ceiling.
BARS = {
    (False, "float32", False): 2.2,
    (False, "float32", True): 2.2,
    (False, "bfloat16", False): 2.5,
    (False, "bfloat16", True): 2.0,
    (True, "float32", False): 2.5,
    (True, "float32", True): 2.2,
    (True, "bfloat16", False): 3.5,
    (True, "bfloat16", True): 3.2,
}
CEILING_BARS = {(False, "float32", False): 85.0, (False, "float32", True): 85.0}
if ceilings.on_amx():  # torch's products run there too
    BARS |= {(False, "bfloat16", False): 1.3, (False, "bfloat16", True): 1.5}
    BARS |= {(True, "bfloat16", False): 3.0, (True, "bfloat16", True): 3.0}
    CEILING_BARS |= {(False, "bfloat16", False): 45.0, (False, "bfloat16", True): 45.0}
#: The same of vision_attention in windows, on AMX in bf16: backward -> bar.
VISION_BARS = {False: 6.0, True: 5.0}

#: Name -> grid of the images, patches; window_size makes Qwen2.5-VL's windows of it.
GRIDS: dict[str, list[list[int]]] = {
    "4 images of 4,096 patches in windows of 64": [[1, 64, 64]] * 4,
    "ragged windows of 10 images, 16,360 patches": [[1, 40, 40]] * 9 + [[1, 20, 98]],
}
CUDA_GRIDS = {"16 images of 4,096 patches in windows of 64": [[1, 64, 64]] * 16}
CUDA_FRAMES = {"16 images of 4,096 patches": [[1, 64, 64]] * 16}
QUICK_GRIDS = {"2 images of 256 patches in windows of 64": [[1, 16, 16]] * 2}

#: Samples of a pack, and a layer of Qwen2.5-VL-3B's language model that sees them.
SAMPLES, QUICK_SAMPLES = [716, 563, 286, 228, 181, 64], [70, 60, 30]
LANGUAGE_HEADS, LANGUAGE_KV_HEADS, LANGUAGE_HEAD_DIM = 16, 2, 128

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _batched(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]  # [L, H, D] -> [1, H, L, D]


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of [.., L, D], as transformers has it."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * HEAD_DIM**-0.5
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype), v)


def _eager_in_one_dtype(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The least passes over the scores that stock torch can make: q scaled, not they, no copy of
    them in float32. In 16 bits the scaled q is rounded, and probabilities are before their sum's
    gradient is taken."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    if mask is not None:
        scores.masked_fill_(mask, -torch.inf)
    return torch.matmul(torch.softmax(scores, -1), v)


def peers(lengths: list[int], device: str, compiled: bool) -> dict[str, Attend]:
    """Name -> function of q, k, v [T, H, D]. Index tensors are made here, outside the timing."""
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], device=device)
    tokens, max_seqlen = int(cu_seqlens[-1]), max(lengths)
    segment = torch.repeat_interleave(
        torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device)
    )

    def looped(attend: Attend) -> Attend:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
            out = [attend(*map(_batched, part)) for part in parts]
            return torch.cat([o[0].transpose(0, 1) for o in out])

        return run

    groups: dict[int, list[Tensor]] = defaultdict(list)
    for start, length in zip(cu_seqlens.tolist(), lengths, strict=False):
        groups[length].append(torch.arange(start, start + length, device=device))
    rows = {length: torch.cat(parts) for length, parts in groups.items()}

    def grouped(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Attend:
        """Segments of one length as one batch [n, H, L, D]."""

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if len(rows) == 1:
                batch = [x.view(-1, max_seqlen, HEADS, HEAD_DIM).transpose(1, 2) for x in (q, k, v)]
                return attend(*batch).transpose(1, 2).reshape(tokens, HEADS, HEAD_DIM)
            out = []
            for length, index in rows.items():
                batch = [
                    x.index_select(0, index).view(-1, length, HEADS, HEAD_DIM).transpose(1, 2)
                    for x in (q, k, v)
                ]
                out.append(attend(*batch).transpose(1, 2).reshape(-1, HEADS, HEAD_DIM))
            whole = torch.cat(list(rows.values()))
            return torch.empty_like(q).index_copy(0, whole, torch.cat(out))

        return run

    def nested(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        jagged = [
            torch.nested.nested_tensor_from_jagged(
                x, cu_seqlens, min_seqlen=min(lengths), max_seqlen=max_seqlen
            ).transpose(1, 2)
            for x in (q, k, v)
        ]
        return F.scaled_dot_product_attention(*jagged).transpose(1, 2).values()

    ways: dict[str, Attend] = {
        "SDPA": F.scaled_dot_product_attention,
        "eager": _eager,
        "eager in one dtype": _eager_in_one_dtype,
    }
    found: dict[str, Attend] = {f"{name} per segment": looped(way) for name, way in ways.items()}
    if len(rows) == 1 or 2 * len(rows) <= len(lengths):  # else it is the same, and copies
        found |= {f"{name} per length": grouped(way) for name, way in ways.items()}
    found["nested tensor"] = nested
    if compiled:
        found["flex attention"] = _flex(segment, tokens, device)
    if device == "cuda":
        found |= _cuda_peers(cu_seqlens.int(), max_seqlen)
    return found


def _compiled(context: Context) -> bool:
    return context.compiled and not context.quick


def _flex(segment: Tensor, tokens: int, device: str) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Of another comparison's shapes and dtype a fourth would be run uncompiled, with all scores.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention)
    masks: list = []

    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return segment[i] == segment[j]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not masks:  # made at the first call, which is not timed
            masks.append(create_block_mask(same, None, None, tokens, tokens, device=device))
        out = compiled(_batched(q), _batched(k), _batched(v), block_mask=masks[0])
        return out[0].transpose(0, 1)

    return run


def _cuda_peers(cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Attend]:
    def torch_varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)

    def flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)

    return {"torch.nn.attention.varlen": torch_varlen, "flash-attn": flash_attn}


def _flops(products: float, backward: bool, keeps: bool = False) -> float:
    """Of two products forward and five backward, four where probabilities are kept, of so many
    multiply-adds each; the softmax is not counted."""
    return 2.0 * products * (2 + (4 if keeps else 5) * backward)


def _keeps(dtype: torch.dtype, longest: int) -> bool:
    return keeping("cpu", longest, torch.empty(0, HEAD_DIM, dtype=dtype).requires_grad_()) != "cpu"


def _close(dtype: torch.dtype) -> Callable[[list[Tensor], list[Tensor]], str | None]:
    """The same function at all?"""
    return partial(difference, allowed=1e-3 if dtype == torch.float32 else 3e-2)


def _call(
    attend: Callable[..., Tensor], inputs: tuple[Tensor, ...], dout: Tensor | None
) -> list[Tensor]:
    """The output, and the gradients of the inputs where there is one of the output."""
    if dout is None:
        with torch.no_grad():
            return [attend(*inputs)]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def comparison(
    shape: str, lengths: list[int], dtype: torch.dtype, backward: bool, context: Context
) -> Comparison:
    """One row: forward, or forward and backward, over segments of these lengths."""
    tokens, device = sum(lengths), context.device
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(tokens, HEADS, HEAD_DIM, generator=generator, device=device).to(dtype)
        for _ in range(4)
    )
    if backward:
        for x in (q, k, v):
            x.requires_grad_()
    grad = dout if backward else None
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    max_seqlen = max(lengths)
    kernel = None  # on CUDA ours, also where flash-attn is installed and would be chosen
    if device == "cuda":
        kernel = "window" if max_seqlen <= WINDOW_LENGTHS[HEAD_DIM] else "tiled"

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, cu_seqlens, max_seqlen=max_seqlen, backend=kernel)

    keeps = backward and device == "cpu" and _keeps(dtype, max_seqlen)
    flops = _flops(HEADS * HEAD_DIM * sum(n * n for n in lengths), backward, keeps)
    windows = max_seqlen <= 64
    if device == "cuda" and windows:  # bound by memory there: q, k, v, out and their gradients
        traffic = q.numel() * q.element_size() * (4 + (8 if backward else 0))
        limits = ceilings.copy(traffic, context)
    else:
        limits = ceilings.arithmetic(flops, dtype, context)
    found, skipped = peers(lengths, device, _compiled(context)), {}
    # A nested tensor is padded to the longest segment; its scores are held twice, in float32.
    padded = 8 * len(lengths) * HEADS * max_seqlen**2 / 1e9
    if device == "cpu" and padded > 6:
        del found["nested tensor"]
        skipped["nested tensor"] = f"it pads all segments, {padded:.0f} GB of scores"
    calls: dict[str, Callable[[], list[Tensor]]] = {
        name: partial(_call, attend, (q, k, v), grad) for name, attend in found.items()
    }
    if kernel == "tiled" and torch.cuda.get_device_capability(device) == (9, 0):

        def by(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return varlen_attention(q, k, v, cu_seqlens, max_seqlen=max_seqlen, backend=backend)

        calls["ours by mma.sync"] = partial(_call, partial(by, "sm80"), (q, k, v), grad)
        if backward:
            one = partial(by, "sm90-fused")
            calls["ours, backward of one kernel"] = partial(_call, one, (q, k, v), grad)
    key = (windows, str(dtype)[6:], backward)
    barred = device == "cpu" and context.has_bars
    return Comparison(
        op="attention, forward + backward" if backward else "attention, forward",
        shape=f"{shape} x {HEADS} heads x {HEAD_DIM}",
        dtype=str(dtype)[6:],
        ours=partial(_call, ours, (q, k, v), grad),
        peers=calls,
        skipped=skipped,
        ceilings=limits,
        check=_close(dtype),
        bar=BARS.get(key) if barred else None,
        ceiling_bar=CEILING_BARS.get(key) if barred else None,
    )


def vision_comparison(
    shape: str,
    grid: list[list[int]],
    dtype: torch.dtype,
    backward: bool,
    context: Context,
    window: bool = True,
) -> Comparison:
    """From the fused projection [P, 3, H, D] to the output, rows in window order, as a tower has
    them. The peers rotate q and k in float32, as transformers does, and then attend."""
    layout = VisionLayout.from_grid(grid, window_size=112).in_window_order().to(context.device)
    cu_seqlens = layout.cu_window_seqlens if window else layout.cu_seqlens
    assert cu_seqlens is not None
    lengths = cu_seqlens.diff().tolist()
    generator = torch.Generator(context.device).manual_seed(0)
    qkv, dout = (
        torch.randn(
            layout.num_patches, *sizes, HEAD_DIM, generator=generator, device=context.device
        ).to(dtype)
        for sizes in ((3, HEADS), (HEADS,))
    )
    qkv.requires_grad_(backward)
    table = layout.rotary_table(HEAD_DIM)

    def call(attend: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return _call(attend, (qkv,), dout if backward else None)

    def rotated(attend: Attend, qkv: Tensor) -> Tensor:
        q, k, v = qkv.unbind(1)
        return attend(rotate(q, table), rotate(k, table), v.contiguous())

    on_tiles = context.device == "cpu" and dtype == torch.bfloat16 and ceilings.on_amx()
    barred = on_tiles and window and context.has_bars
    keeps = backward and context.device == "cpu" and _keeps(dtype, max(lengths))
    flops = _flops(HEADS * HEAD_DIM * sum(n * n for n in lengths), backward, keeps)
    if context.device == "cuda" and window:  # bound by memory: qkv, out, their gradients; the table
        traffic = dout.numel() * dout.element_size() * (4 + (8 if backward else 0))
        limits = ceilings.copy(traffic + table.nbytes * (2 if backward else 1), context)
    else:
        limits = ceilings.arithmetic(flops, dtype, context)
    return Comparison(
        op=f"vision attention, forward{' + backward' if backward else ''}",
        shape=f"{shape}, qkv [P, 3, {HEADS}, {HEAD_DIM}]",
        dtype=str(dtype)[6:],
        ours=partial(call, lambda x: vision_attention(x, layout, window=window)),
        peers={
            f"rotation, {name}": partial(call, partial(rotated, attend))
            for name, attend in peers(lengths, context.device, compiled=False).items()
            if name != "nested tensor"  # nor flex attention: never the fastest on windows
        },
        ceilings=limits,
        check=_close(dtype),
        bar=VISION_BARS[backward] if barred else None,
    )


def language_comparison(
    lengths: list[int], dtype: torch.dtype, backward: bool, context: Context
) -> Comparison:
    """From Megatron's fused projection [T, Hkv, H / Hkv + 2, D] to the output, causal. The peers
    rotate q and k by transformers' function, in their own dtype, and then attend."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb

    tokens, dim = sum(lengths), LANGUAGE_HEAD_DIM
    heads, kv_heads = LANGUAGE_HEADS, LANGUAGE_KV_HEADS
    generator = torch.Generator().manual_seed(0)
    sizes = (kv_heads, heads // kv_heads + 2, dim)
    qkv = torch.randn(tokens, *sizes, generator=generator).to(dtype)
    dout = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
    qkv.requires_grad_(backward)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    position = torch.cat([torch.arange(n) for n in lengths])
    angles = position[:, None] * 1e6 ** (-torch.arange(dim // 2) * 2 / dim)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    cos, sin = (torch.cat([x, x], -1).to(dtype) for x in (angles.cos(), angles.sin()))
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (segment[:, None] == segment) & torch.ones(tokens, tokens, dtype=torch.bool).tril()

    def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )

    def per_sample(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        out = [sdpa(_batched(a), _batched(b), _batched(c), None) for a, b, c in parts]
        return torch.cat([o[0].transpose(0, 1) for o in out])

    later = {n: torch.ones(n, n, dtype=torch.bool).triu(1) for n in set(lengths)}

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = []
        for part in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            a, b, c = (x.transpose(0, 1).unflatten(0, (kv_heads, -1)) for x in part)
            o = _eager_in_one_dtype(a, b, c, later[a.shape[2]])
            out.append(o.flatten(0, 1).transpose(0, 1))
        return torch.cat(out)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(_batched(q), _batched(k), _batched(v), mask)[0].transpose(0, 1)

    def call(attend: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return _call(attend, (qkv,), dout if backward else None)

    def rotated(attend: Attend, qkv: Tensor) -> Tensor:
        q, k, v = qkv[:, :, :-2].reshape(tokens, heads, dim), qkv[:, :, -2], qkv[:, :, -1]
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return attend(q, k, v)

    pairs = sum(n * (n + 1) / 2 for n in lengths)
    flops = _flops(heads * dim * pairs, backward)
    return Comparison(
        op=f"causal attention, forward{' + backward' if backward else ''}",
        shape=f"{len(lengths)} samples of {min(lengths)} to {max(lengths)} tokens, "
        f"qkv [T, {', '.join(map(str, sizes))}]",
        dtype=str(dtype)[6:],
        ours=partial(call, lambda x: qkv_attention(x, table, cu_seqlens, causal=True)),
        peers={
            f"rotation, {name}": partial(call, partial(rotated, attend))
            for name, attend in (
                ("SDPA per sample", per_sample),
                ("SDPA, mask", masked),
                ("eager in one dtype per sample", eager),
            )
        },
        ceilings=ceilings.arithmetic(flops, dtype, context),
        check=_close(dtype),
    )


WINDOWS, FRAMES, PACKED = "vision windows", "vision frames", "packed samples"


def parts(context: Context) -> list[str]:
    """A process each: fault-free, a process keeps what a peer has once needed, here over 10 GB."""
    found = [part for part in (WINDOWS, FRAMES) if _grids(part, context)]
    if context.device == "cpu" and context.memory == FAULT_FREE:
        found.append(PACKED)
    return found + [*_shapes(context)]


def _grids(part: str, context: Context) -> dict[str, list[list[int]]]:
    if context.quick:
        return QUICK_GRIDS if part == WINDOWS else {}
    if context.device == "cuda":
        return CUDA_GRIDS if part == WINDOWS else CUDA_FRAMES
    return GRIDS if part == WINDOWS else {}


def _shapes(context: Context) -> dict[str, list[int]]:
    if context.device == "cuda":
        return CUDA_SHAPES
    shapes = QUICK_SHAPES if context.quick else SHAPES
    # Long segments are bound by arithmetic: page faults are measured on the windows only.
    long = context.memory == FAULT_FREE
    return {name: lengths for name, lengths in shapes.items() if long or max(lengths) <= 64}


def rows(context: Context) -> Iterator[Row]:
    """Forward and forward + backward, fp32 and bf16 (bf16 on a GPU)."""
    dtypes = [torch.float32, torch.bfloat16]
    if context.device == "cuda":
        if not hasattr(_native._C, "window_forward_cuda"):
            say("attention on CUDA skipped: vlmkernels was built without CUDA")
            return
        dtypes = [torch.bfloat16]
    kinds = [(dtype, backward) for dtype in dtypes for backward in (False, True)]
    for part in [context.part] if context.part else parts(context):
        if part in (WINDOWS, FRAMES):
            for shape, grid in _grids(part, context).items():
                for kind in kinds:
                    arguments = (shape, grid, *kind, context, part == WINDOWS)
                    yield compare(vision_comparison(*arguments), context)
        elif part == PACKED:
            samples = QUICK_SAMPLES if context.quick else SAMPLES
            for kind in kinds:
                yield compare(language_comparison(samples, *kind, context), context)
        else:
            for kind in kinds:
                yield compare(comparison(part, _shapes(context)[part], *kind, context), context)
