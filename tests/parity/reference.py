"""Random-weight models of every family, hand-made samples, and what transformers says of them.

Nothing here uses vlmtrain's data code or kernels: sequences, labels and packs are laid out by
hand, so that they are an independent reference.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vlmtrain.core.batch import PackedBatch

IMAGE, VIDEO, START, END, PAD = 5, 6, 7, 8, 0
EXPERTS = 8
VOCAB = 211  # not a multiple of 128: the table is padded in Megatron
TEXT_LENGTHS = ((9, 17), (30,), (5, 6, 7), (12, 21))
CLIP = 0.7
# eps is as large as an element of a clipped gradient, or Adam would not see by how much it was
# clipped.
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-3, 0.05


def make_model(family: str, *, vision_heads: int = 3, tied: bool = False, seed: int = 0) -> Any:
    """A float32 transformers model; odd sizes on purpose. A `family` that ends with " balanced" has
    a load-balancing loss.

    Raises:
        ValueError: there is no small model of that family.
    """
    import transformers

    family, _, balanced = family.partition(" ")
    width = 16 * vision_heads
    text = dict(
        num_hidden_layers=4,
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=108,
        vocab_size=VOCAB,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        rope_parameters=dict(rope_type="default", mrope_section=[2, 3, 3], rope_theta=1e6),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=PAD,
        tie_word_embeddings=tied,
    )
    ids = dict(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=tied,
    )
    if family == "qwen2_vl":
        config = transformers.Qwen2VLConfig(
            text_config=text,
            vision_config=dict(depth=4, embed_dim=width, hidden_size=96, num_heads=vision_heads),
            **ids,
        )
        cls = transformers.Qwen2VLForConditionalGeneration
    elif family in ("qwen3_vl", "qwen3_vl_moe"):
        # More and fewer positions than the grids of the samples have.
        vision = dict(depth=4, hidden_size=width, num_heads=vision_heads, intermediate_size=68)
        vision |= dict(out_hidden_size=96, patch_size=14, num_position_embeddings=49)
        rope = dict(rope_type="default", mrope_section=[6, 3, 3], rope_theta=1e6)
        kind = "Qwen3VLMoe" if family == "qwen3_vl_moe" else "Qwen3VL"
        text |= dict(head_dim=24, rope_parameters=rope)
        if family == "qwen3_vl_moe":
            text |= dict(num_experts=EXPERTS, num_experts_per_tok=3, moe_intermediate_size=24)
            text |= dict(output_router_logits=bool(balanced), router_aux_loss_coef=0.5)
        config = getattr(transformers, kind + "Config")(
            text_config=text,
            vision_config=vision | dict(deepstack_visual_indexes=[0, 2, 3]),
            **ids,
        )
        cls = getattr(transformers, kind + "ForConditionalGeneration")
    elif family == "qwen2_5_vl":
        config = transformers.Qwen2_5_VLConfig(
            text_config=text,
            vision_config=dict(
                depth=4,
                hidden_size=width,
                num_heads=vision_heads,
                intermediate_size=68,
                out_hidden_size=96,
                fullatt_block_indexes=[1, 3],
                window_size=112,
                tokens_per_second=2,
            ),
            **ids,
        )
        cls = transformers.Qwen2_5_VLForConditionalGeneration
    else:
        raise ValueError(f"there is no small model of the family {family!r}")
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = cls(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms start at 1 and biases at 0: give them something to do
                parameter.normal_(1.0 if "norm" in name and "weight" in name else 0.0, 0.1)
            elif parameter.dim() == 2 or ".experts." in name:
                parameter.normal_(0.0, 0.06)
        if family == "qwen3_vl_moe":
            _settle_routing(model.model)
    return model


def _settle_routing(model: Any) -> None:
    """Let the first columns of each word's embedding, which nothing else writes to, choose its
    experts: where two of them scored all but the same, rounding would choose, and another loss
    would not be an error."""
    text, visual = model.language_model, model.visual
    scores = 0.4 * torch.rand(VOCAB + 1, EXPERTS).argsort(1)
    text.embed_tokens.weight[:, :EXPERTS] = scores[:-1]
    for layer in text.layers:
        layer.self_attn.o_proj.weight[:EXPERTS] = 0.0
        layer.mlp.experts.down_proj[:, :EXPERTS] = 0.0
        layer.mlp.gate.weight.mul_(0.2)[:, :EXPERTS] = torch.eye(EXPERTS)
    for merger in (visual.merger, *visual.deepstack_merger_list):
        merger.linear_fc2.weight[:EXPERTS] = 0.0
        merger.linear_fc2.bias[:EXPERTS] = scores[-1] if merger is visual.merger else 0.0


@dataclass
class Sample:
    input_ids: torch.Tensor  # [S]
    labels: torch.Tensor  # [S], shifted
    position_ids: torch.Tensor  # [3, S]
    media: list[tuple[str, tuple[int, int, int], torch.Tensor]] = field(default_factory=list)
    loss_weights: torch.Tensor | None = None  # [S], float32


def make_sample(parts: list[Any], generator: torch.Generator, learn: int) -> Sample:
    """parts: ints (that many text tokens) and ("image" | "video", (t, h, w)); the loss is on the
    last `learn` tokens. Positions by the rule of the Qwen2-VL paper, section 2.1."""
    ids: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    media = []
    following = 0

    def add_text(tokens: torch.Tensor) -> None:
        nonlocal following
        ids.append(tokens)
        positions.append((torch.arange(len(tokens)) + following).expand(3, -1))
        following += len(tokens)

    for part in parts:
        if isinstance(part, int):
            add_text(torch.randint(10, VOCAB, (part,), generator=generator))
            continue
        kind, (t, h, w) = part
        add_text(torch.tensor([START]))
        mh, mw = h // 2, w // 2
        ids.append(torch.full((t * mh * mw,), IMAGE if kind == "image" else VIDEO))
        grid = torch.stack(
            torch.meshgrid(torch.arange(t), torch.arange(mh), torch.arange(mw), indexing="ij")
        ).view(3, -1)
        positions.append(grid + following)
        following += max(t, mh, mw)
        add_text(torch.tensor([END]))
        media.append((kind, (t, h, w), torch.randn(t * h * w, 1176, generator=generator)))
    input_ids = torch.cat(ids)
    labels = torch.full_like(input_ids, -100)
    labels[-learn - 1 : -1] = input_ids[-learn:]
    return Sample(input_ids, labels, torch.cat(positions, 1), media)


def make_samples(seed: int) -> list[list[Sample]]:
    """Four packs: images (two in one sample, ragged), text only, a video of 3 frames, mixed."""
    g = torch.Generator().manual_seed(seed)
    a = make_sample([3, ("image", (1, 4, 6)), 9], g, learn=6)
    b = make_sample([2, ("image", (1, 6, 4)), 4, ("image", (1, 12, 18)), 7], g, learn=5)
    c = make_sample([17], g, learn=9)
    d = make_sample([5, ("video", (2, 4, 10)), 8], g, learn=8)  # 3 frames: the last is repeated
    e = make_sample([4, ("image", (1, 2, 2)), 3, ("video", (2, 6, 2)), 11], g, learn=7)
    f = make_sample([6], g, learn=3)
    return [[a, b], [c], [d], [e, f]]


def make_stream(stream: str, seed: int, step: int) -> list[list[Sample]]:
    """Four packs of one optimizer step, of different lengths.

    mixed: `make_samples`, the packs turned by one place a step, so that the one without images is
    first, in the middle and last, on this data-parallel rank or on another; the third step has one
    small image in all, so that ranks remain without. weighted: the same, and each token's loss has
    a factor. image: images in each pack. text: none.
    """
    if stream == "weighted":
        packs = make_stream("mixed", seed, step)
        for sample in itertools.chain.from_iterable(packs):
            sample.loss_weights = 0.5 + torch.arange(len(sample.labels)) % 7 * 0.3
        return packs
    packs = make_samples(seed + step)
    g = torch.Generator().manual_seed(seed + step + 1000)
    text = [[make_sample([n], g, learn=n // 2) for n in row] for row in TEXT_LENGTHS]
    if stream == "text":
        return text
    if stream == "mixed" and step == 2:
        text[1] = [make_sample([4, ("image", (1, 4, 2)), 9], g, learn=6)]
        return text
    if stream == "mixed":
        turn = step % len(packs)
        return packs[turn:] + packs[:turn]
    return [
        packs[0],
        [make_sample([4, ("image", (1, 6, 10)), 5], g, learn=4)],
        [make_sample([2, ("image", (1, 2, 8)), 3, ("image", (1, 8, 2)), 9], g, learn=7)],
        [make_sample([("image", (1, 4, 4)), 8], g, learn=5), make_sample([7], g, learn=6)],
    ]


def pack(samples: list[Sample], length: int) -> PackedBatch:
    """Concatenate samples and pad the tail, by hand."""
    ids = torch.cat([s.input_ids for s in samples])
    tail = length - len(ids)
    assert tail >= 0
    lengths = torch.tensor([0] + [len(s.input_ids) for s in samples] + ([tail] if tail else []))
    ids = torch.cat([ids, torch.full((tail,), PAD)])
    labels = torch.cat([s.labels for s in samples] + [torch.full((tail,), -100)])
    positions = torch.cat(
        [s.position_ids for s in samples] + [torch.arange(tail).expand(3, -1)], dim=1
    )
    visual = (ids == IMAGE) | (ids == VIDEO)
    index = torch.where(visual, visual.cumsum(0) - 1, -1).to(torch.int32)
    media = [m for s in samples for m in s.media]
    return PackedBatch(
        input_ids=ids,
        labels=labels,
        position_ids=positions,
        cu_seqlens=lengths.cumsum(0).to(torch.int32),
        visual_index=index,
        pixel_values=torch.cat([torch.zeros(0, 1176)] + [m[2] for m in media]),
        grid_thw=torch.tensor([m[1] for m in media], dtype=torch.int64).view(-1, 3),
        sample_ids=[str(i) for i in range(len(samples))],
        target_tokens=int((labels >= 0).sum()),
        image_tokens=int(visual.sum()),
        pad_tokens=tail,
        loss_weights=_weights(samples, tail),
    )


def _weights(samples: list[Sample], tail: int) -> torch.Tensor | None:
    weights = [s.loss_weights for s in samples if s.loss_weights is not None]
    return torch.cat([*weights, torch.ones(tail)]) if weights else None


def without_pixels(batch: PackedBatch, kept: tuple[bool, ...] | None = None) -> PackedBatch:
    """What a rank gets that decodes the media in `kept` only, or none."""
    here = torch.zeros(len(batch.grid_thw), dtype=torch.bool)
    if kept is not None:
        here = torch.tensor(kept, dtype=torch.bool)
    pixels = batch.pixel_values[here.repeat_interleave(batch.grid_thw.prod(1))]
    return replace(batch, pixel_values=pixels, has_pixels=kept)


def pack_length(packs: list[list[Sample]]) -> int:
    longest = max(sum(len(s.input_ids) for s in p) for p in packs)
    return longest + -longest % 4 + 4  # always a padded tail; a multiple of 4 for TP + SP


def reference_logits(model: Any, sample: Sample) -> torch.Tensor:
    """transformers' logits [S, vocab] of one sample, alone in its batch."""
    return reference_outputs(model, sample).logits[0]


def reference_outputs(model: Any, sample: Sample) -> Any:
    inputs: dict[str, Any] = {}
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        chosen = [m for m in sample.media if m[0] == kind]
        if chosen:
            inputs[pixels] = torch.cat([m[2] for m in chosen]).to(model.dtype)
            inputs[grid] = torch.tensor([m[1] for m in chosen])
    return model(
        input_ids=sample.input_ids[None],
        position_ids=sample.position_ids[:, None],
        use_cache=False,
        **inputs,
    )


def reference_loss(model: Any, packs: list[list[Sample]], heldout: bool = False) -> torch.Tensor:
    """Mean over the target tokens of all packs: of the cross entropy, times a token's weight, and
    unless `heldout` of the load-balancing loss that transformers adds to that of a batch with a
    pack's samples."""
    total, count = torch.zeros(()), 0
    for samples in packs:
        targets = sum(int((s.labels >= 0).sum()) for s in samples)
        outputs = [reference_outputs(model, s) for s in samples]
        for out, s in zip(outputs, samples, strict=True):
            loss = torch.nn.functional.cross_entropy(
                out.logits[0].float(), s.labels, reduction="none", ignore_index=-100
            )
            total = total + (loss if s.loss_weights is None else loss * s.loss_weights).sum()
        if getattr(outputs[0], "router_logits", None) and not heldout:
            total = total + targets * reference_balance(model, outputs)
        count += targets
    return total / count


def reference_balance(model: Any, outputs: list[Any]) -> torch.Tensor:
    """transformers' load-balancing loss of several outputs together, times its coefficient."""
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

    text = model.config.text_config
    layers = zip(*(out.router_logits for out in outputs), strict=True)
    logits = tuple(torch.cat(layer) for layer in layers)
    loss = load_balancing_loss_func(logits, text.num_experts, text.num_experts_per_tok)
    return text.router_aux_loss_coef * loss


def reference_gradients(model: Any, packs: list[list[Sample]]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    reference_loss(model, packs).backward()
    return {
        n: as_released(n, torch.zeros_like(p) if p.grad is None else p.grad.clone())
        for n, p in model.named_parameters()
    }


def part_lr(name: str, depth: int, rates: dict[str, float]) -> float:
    """The learning rate of a Hugging Face parameter, as BEiT and ms-swift group them."""
    if "visual." not in name:
        return LR
    if "merger" in name:
        return rates.get("merger_lr", LR)
    layer = int(name.split(".blocks.")[1].split(".")[0]) + 1 if ".blocks." in name else 0
    scale = rates.get("vision_layer_decay", 1.0) ** (depth + 1 - layer)
    return rates.get("vision_lr", LR) * scale


def reference_training(
    model: Any, steps: list[list[list[Sample]]], rates: dict[str, float] | None = None
) -> list[float]:
    """Losses of a plain loop with torch.optim.AdamW and gradient clipping; changes `model`."""
    named, depth = list(model.parameters()), model.config.vision_config.depth
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p],
                "weight_decay": DECAY if p.dim() > 1 else 0.0,
                "lr": part_lr(name, depth, rates or {}),
            }
            for name, p in model.named_parameters()
        ],
        betas=BETAS,
        eps=EPS,
    )
    losses = []
    for packs in steps:
        optimizer.zero_grad()
        loss = reference_loss(model, packs)
        loss.backward()
        for p in named:  # nothing but weight decay moves what a step has not used
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        torch.nn.utils.clip_grad_norm_(named, CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def as_released(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """transformers 5 has experts transposed, and so writes those of a model of its own making."""
    return tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor


def save_model(model: Any, folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    if model.config.model_type == "qwen3_vl_moe":
        path = folder / "model.safetensors"
        tensors = {name: as_released(name, t) for name, t in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    return folder
