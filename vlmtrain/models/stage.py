"""One pipeline stage of a model on megatron-core.

A stage holds a slice of the vision tower, a slice of the language model, or both. Between two
stages one tensor travels (megatron-core sends no more): vision hidden states, language hidden
states, or, where the word embedding sits before the merger, both flattened into one.

S = tokens of the pack, P = patches, h = language width, D = vision width, tp = tensor-parallel
size; sequence parallelism divides S and P by tp.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType, ModelType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vlmkernels import scatter_visual, visual_embedding
from vlmkernels.integrations.megatron import RotaryPackedSeqParams
from vlmtrain.core.batch import EncodedPack, PackedBatch
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec, padded_vocab_size
from vlmtrain.models.common.language import LanguageModel
from vlmtrain.models.common.layers import adapt_mlps, ask_for_gradient, block_submodules, touch
from vlmtrain.models.common.positions import mrope_cos_sin
from vlmtrain.models.common.vision import VisionInputs, VisionTower
from vlmtrain.models.family import family_of


class QwenVLStage(LanguageModule):
    """The part of the model on one stage (pipeline rank and virtual chunk)."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        language: TransformerConfig,
        vision: TransformerConfig,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config=language)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.model_type = ModelType.encoder_or_decoder
        self.spec, self.layout, self.vp_stage = spec, layout, vp_stage
        rank = parallel_state.get_pipeline_model_parallel_rank()
        self.stage = stage = layout.stage(rank, vp_stage)
        self.pre_process = stage == layout.embedding_stage
        self.post_process = stage == layout.stages - 1
        self.share_embeddings_and_output_weights = spec.tie_word_embeddings
        # Embeddings that were looked up before the merger travel with the vision states.
        self.joint_input = layout.embedding_stage < stage <= layout.merger_stage
        self.joint_output = layout.embedding_stage <= stage < layout.merger_stage

        self.vision: VisionTower | None = None
        if stage <= layout.merger_stage and not layout.multiplexed:
            self.vision = family_of(spec).tower(
                vision,
                spec.vision,
                layout.vision_layers[stage],
                first=stage == 0,
                last=stage == layout.merger_stage,
                vp_stage=vp_stage,
                groups=groups,
            )
        self.language_model: LanguageModel | None = None
        if self.pre_process or stage >= layout.merger_stage:
            self.language_model = LanguageModel(
                language,
                block_submodules(language, AttnMaskType.causal, layout.text_layers[stage]),
                padded_vocab_size(spec.vocab_size, layout.tensor),
                spec.max_position_embeddings,
                pre_process=self.pre_process,
                post_process=self.post_process,
                position_embedding_type="none",  # the attention rotates, see _language
                share_embeddings_and_output_weights=spec.tie_word_embeddings,
                scatter_embedding_sequence_parallel=False,
                vp_stage=vp_stage,
                spec=spec,
            )
            adapt_mlps(self.language_model.decoder)
            # The merger's stage hands the decoder its input; later ones receive it.
            self.language_model.decoder.pre_process = stage == layout.merger_stage
        self.input_tensor: Tensor | None = None
        self.learns_before = True  # whether an earlier stage has something to train
        self._zeros: Tensor | None = None

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        if self.language_model is None:
            return None
        return self.language_model.shared_embedding_or_output_weight()

    def forward(self, batch: PackedBatch, *, logits: bool = False) -> Tensor:
        """Returns the tensor to send on, or on the last stage the sum of the losses, [].

        With `logits` the last stage returns [1, S, padded vocabulary / tp] instead.
        """
        received = self.input_tensor
        if received is not None and not self.learns_before:
            received = self._cut(received)
        if self.layout.multiplexed and self.stage == 0:
            return self._language(batch, self._embed_encoded(batch), logits)
        if self.vision is None:
            assert self.language_model is not None and received is not None
            decoder = self.language_model.decoder
            decoder.set_input_tensor(ask_for_gradient(decoder, received))
            return self._language(batch, None, logits)

        shards = self.layout.tensor if self.layout.sequence else 1
        inputs = VisionInputs.from_grid(
            batch.grid_thw, self.spec.vision, shards=shards, device=batch.input_ids.device
        )
        index = inputs.visual_index(batch.visual_index)
        words: Tensor | None = None
        if self.stage == 0:
            hidden = batch.pixel_values
        elif self.joint_input:
            assert received is not None
            hidden, words = self._split(received, inputs.num_patches // shards, batch, shards)
        else:
            assert received is not None
            hidden = received
        visual = self.vision(hidden, inputs)

        if not self.vision.last:
            if self.stage == self.layout.embedding_stage:
                words = self._word_rows(batch, index)
            if not self.joint_output:
                return visual
            assert words is not None
            # Not a view: Megatron frees what it has sent, which a view would not allow.
            return torch.cat([visual.reshape(1, 1, -1), words.reshape(1, 1, -1)], dim=-1)
        if self.joint_input:
            assert words is not None
            embeddings = self._place(words, visual, index)
        else:
            embeddings = self._embed(batch, visual, index)
        return self._language(batch, embeddings.unsqueeze(1), logits)

    def _embed_encoded(self, batch: PackedBatch) -> Tensor:
        """Embeddings [S or S/tp, 1, h] with the rows that parallel/multiplex.py has encoded."""
        assert isinstance(batch, EncodedPack) and batch.visual_rows is not None
        # The index holds this rank's part of them alone.
        return self._summed(self._lookup(batch, batch.visual_rows, batch.visual_index)).unsqueeze(1)

    def _embed(self, batch: PackedBatch, visual: Tensor, index: Tensor) -> Tensor:
        """Embeddings [S or S/tp, h]. Under tensor parallelism each rank writes the rows of its part
        of the table and the visual rows of its part of the sequence, and all are added up."""
        if self.layout.tensor == 1:
            return self._lookup(batch, visual, index)
        shard = (parallel_state.get_tensor_model_parallel_rank(), self.layout.tensor)
        return self._summed(self._lookup(batch, visual, index, contribute=shard))

    def _cut(self, received: Tensor) -> Tensor:
        """`received` without a backward pass into it. Megatron sends its gradient back all the
        same, and an earlier stage waits for one: it gets zeros that cost nothing to compute."""
        if received.requires_grad:
            if self._zeros is None or self._zeros.numel() < received.numel():
                self._zeros = torch.zeros_like(received).view(-1)
            received.grad = self._zeros[: received.numel()].view(received.shape)
        return received.detach()

    def _table(self) -> Tensor:
        assert self.language_model is not None
        return self.language_model.embedding.word_embeddings.weight

    def _lookup(
        self,
        batch: PackedBatch,
        visual: Tensor | None,
        index: Tensor,
        contribute: tuple[int, int] | None = None,
    ) -> Tensor:
        """What this rank's part of the table has, [S, h]."""
        assert self.language_model is not None
        words = self.language_model.embedding.word_embeddings
        touch(words)
        vocab_range = (words.vocab_start_index, words.vocab_end_index)
        return visual_embedding(
            batch.input_ids,
            words.weight,
            visual,
            index,
            vocab_range=vocab_range if self.layout.tensor > 1 else None,
            contribute=contribute,
            allow_unused=True,  # the tower's padding
            # Megatron's wrapper gives a parameter a main_grad: then no gradient of the table's size
            # is made, and none is added to another.
            weight_grad="main_grad" if hasattr(words.weight, "main_grad") else "dense",
        )

    def _summed(self, rows: Tensor) -> Tensor:
        """Partial rows [S, h] added up over the tensor-parallel group, [S or S/tp, h]."""
        if self.layout.tensor == 1:
            return rows
        if self.layout.sequence:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(rows)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(rows)

    def _word_rows(self, batch: PackedBatch, index: Tensor) -> Tensor:
        """Word embeddings [S or S/tp, h], zero at visual positions."""
        return self._summed(self._lookup(batch, None, index))

    def _place(self, words: Tensor, visual: Tensor, index: Tensor) -> Tensor:
        """Write the visual rows into embeddings [S or S/tp, h] that another stage has looked up."""
        if not self.layout.sequence:
            return scatter_visual(words, visual, index, allow_unused=True)  # the tower's padding
        # Each rank uses only its own positions' rows: their gradients are summed over the group.
        visual = tensor_parallel.copy_to_tensor_model_parallel_region(visual)
        shard = (parallel_state.get_tensor_model_parallel_rank(), self.layout.tensor)
        return scatter_visual(words, visual, index, shard=shard)

    def _split(
        self, received: Tensor, patches: int, batch: PackedBatch, shards: int
    ) -> tuple[Tensor, Tensor]:
        width, tokens = self.spec.vision.hidden_size, batch.input_ids.shape[0] // shards
        flat = received.view(-1)
        vision = flat[: patches * width].view(patches, 1, width)
        return vision, flat[patches * width :].view(tokens, self.spec.hidden_size)

    def _language(self, batch: PackedBatch, embeddings: Tensor | None, logits: bool) -> Tensor:
        assert self.language_model is not None
        cos, sin = mrope_cos_sin(batch.position_ids, self.spec)
        packed = RotaryPackedSeqParams(
            qkv_format="sbhd",
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_kv=batch.cu_seqlens,
            max_seqlen_q=batch.max_seqlen,
            rotary_cos=cos,
            rotary_sin=sin,
        )
        if embeddings is not None:
            embeddings = ask_for_gradient(self.language_model.decoder, embeddings)
        return self.language_model(
            batch.input_ids[None],
            batch.position_ids[:, None],
            None,
            decoder_input=embeddings,
            labels=batch.labels if self.post_process and not logits else None,
            packed_seq_params=packed,
        )

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self.vision is not None:
            state.update(self.vision.sharded_state_dict(prefix + "vision.", (), metadata))
        if self.language_model is not None:
            state.update(
                self.language_model.sharded_state_dict(prefix + "language_model.", (), metadata)
            )
        return state
