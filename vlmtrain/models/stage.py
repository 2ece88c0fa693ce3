"""One pipeline stage of a model on megatron-core.

A stage holds a slice of the vision tower, a slice of the language model, or both. message.py says
what travels between two of them.

S = tokens of the pack, P = patches, h = language width, D = vision width, tp = tensor-parallel
size; sequence parallelism divides S and P by tp.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType, ModelType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vlmkernels import add_visual_, scatter_visual, visual_embedding
from vlmkernels._native import to_device
from vlmkernels.integrations.megatron import RotaryPackedSeqParams
from vlmtrain.core.batch import EncodedPack, PackedBatch
from vlmtrain.core.layout import Layout
from vlmtrain.core.spec import ModelSpec, padded_vocab_size
from vlmtrain.models import message
from vlmtrain.models.common.balance import Routing, aux_loss
from vlmtrain.models.common.language import LanguageModel
from vlmtrain.models.common.layers import (
    LossRows,
    adapt,
    ask_for_gradient,
    block_submodules,
    touch,
)
from vlmtrain.models.common.positions import mrope_table
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
            adapt(self.language_model.decoder)
            # The merger's stage hands the decoder its input; later ones receive it.
            self.language_model.decoder.pre_process = stage == layout.merger_stage
        self.input_tensor: Tensor | None = None
        self.learns_before = True  # whether an earlier stage has something to train
        self.tower_learns_before = True  # and in what the tower's hidden states have passed
        self._zeros: Tensor | None = None

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        if self.language_model is None:
            return None
        return self.language_model.shared_embedding_or_output_weight()

    def forward(self, batch: PackedBatch, *, logits: bool = False) -> Tensor:
        """Returns the tensor to send on, or on the last stage the sum of the losses, [].

        With a load-balancing loss the last stage returns [2]: the sum with what it adds in
        training, and the loss itself times the target tokens. With `logits` it returns [1, S,
        padded vocabulary / tp] instead.
        """
        part, parts = self._part
        shape = {"tokens": batch.length // parts, "patches": 0}
        first, shape["rows"] = batch.visual_rows(part, parts)
        inputs: VisionInputs | None = None
        if self.vision is not None:
            inputs = VisionInputs.from_grid(
                batch.grid_thw, self.spec.vision, shards=parts, device=batch.input_ids.device
            )
            shape["patches"] = inputs.num_patches // parts
        arrived = self._receive(shape)
        routing = self._routing(batch, arrived)
        numbers = self._carried(self.stage - 1)
        features = dict(zip(numbers, arrived[len(arrived) - len(numbers) :], strict=True))

        embeddings: Tensor | None = None
        if self.layout.multiplexed and self.stage == 0:
            embeddings, features = self._embed_encoded(batch)
        elif self.vision is not None:
            assert inputs is not None
            index = inputs.visual_index(batch.visual_index)
            hidden = arrived[0] if arrived else batch.pixel_values
            if not self.tower_learns_before:
                hidden = hidden.detach()
            visual, made = self.vision(hidden, inputs)
            for number, rows in made.items():
                features[number] = self._of_part(rows, first, shape["rows"])
            words = arrived[1].squeeze(1) if self.joint_input else None
            if not self.vision.last:
                if self.stage == self.layout.embedding_stage:
                    words = self._word_rows(batch, index)
                return self._send([visual, words] if words is not None else [visual], features)
            if words is not None:
                embeddings = self._scatter_rows(words, visual, index)
            else:
                embeddings = self._embed(batch, visual, index)
        else:
            assert self.language_model is not None
            decoder = self.language_model.decoder
            decoder.set_input_tensor(ask_for_gradient(decoder, arrived[0]))
        output = self._language(batch, embeddings, features, first, routing, logits)
        if not self.post_process:
            return self._send([output], features, routing)
        if routing is None or logits:
            return output
        balance = batch.target_tokens * aux_loss(routing, batch, self.spec, self.layout.sequence)
        factor = self.spec.router_aux_loss_coef if self.training else 0.0
        return torch.stack((output + factor * balance, balance.detach()))

    @property
    def _part(self) -> tuple[int, int]:
        """Which part of the sequence this rank's hidden states are, and of how many."""
        if not self.layout.sequence:
            return 0, 1
        return parallel_state.get_tensor_model_parallel_rank(), self.layout.tensor

    def _carried(self, stage: int) -> list[int]:
        """Numbers of DeepStack's sets that `stage` sends on."""
        return self.layout.carried(self.spec.vision.deepstack_layers, stage) if stage >= 0 else []

    def _receive(self, shape: dict[str, int]) -> list[Tensor]:
        """What the stage before has sent."""
        received = self.input_tensor
        if received is None or self.stage == 0:
            return []
        if not self.learns_before:
            received = self._cut(received)
        return message.split(
            received, message.parts(self.spec, self.layout, self.stage - 1, **shape)
        )

    def _routing(self, batch: PackedBatch, arrived: list[Tensor]) -> Routing | None:
        """Where there is a load-balancing loss what earlier stages have routed; it is taken from
        what `arrived`."""
        if not self.spec.router_aux_loss_coef or self.stage < self.layout.merger_stage:
            return None
        if self.stage == self.layout.merger_stage:
            sums = torch.zeros(2, self.spec.num_experts, device=batch.input_ids.device)
        else:
            sums = message.to_sums(arrived.pop())
        return Routing.of(sums, batch, *self._part)

    def _send(
        self, tensors: list[Tensor], features: dict[int, Tensor], routing: Routing | None = None
    ) -> Tensor:
        sets = [features[number] for number in self._carried(self.stage)]
        sums = [] if routing is None else [message.from_sums(routing.sums, tensors[0].dtype)]
        return message.join(tensors + sets + sums)

    def _of_part(self, rows: Tensor, first: int, count: int) -> Tensor:
        """Of the visual rows [G, h] those in this rank's part of the sequence."""
        if self.layout.sequence:  # their gradients are summed over the group
            rows = tensor_parallel.copy_to_tensor_model_parallel_region(rows)
        return rows.narrow(0, first, count)

    def _embed_encoded(self, batch: PackedBatch) -> tuple[Tensor, dict[int, Tensor]]:
        """Embeddings [S or S/tp, h] with the rows that parallel/multiplex.py has encoded, and
        DeepStack's sets."""
        assert isinstance(batch, EncodedPack) and batch.encoded is not None
        visual, *sets = batch.encoded.chunk(self.spec.visual_sets, -1)
        # The index holds this rank's part of them alone.
        embeddings = self._summed(self._lookup(batch, visual, batch.visual_index))
        if self.layout.tensor > 1 and not self.layout.sequence:  # each rank adds all of them
            rank = parallel_state.get_tensor_model_parallel_rank()
            first, count = batch.visual_rows(rank, self.layout.tensor)
            after = batch.visual_rows(0, 1)[1] - first - count
            sets = [
                tensor_parallel.reduce_from_tensor_model_parallel_region(
                    F.pad(rows, (0, 0, first, after))
                )
                for rows in sets
            ]
        return embeddings, dict(enumerate(sets))

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

    def _scatter_rows(self, words: Tensor, visual: Tensor, index: Tensor) -> Tensor:
        """Write the visual rows into embeddings [S or S/tp, h] that another stage has looked up."""
        if not self.layout.sequence:
            return scatter_visual(words, visual, index, allow_unused=True)  # the tower's padding
        # Each rank uses only its own positions' rows: their gradients are summed over the group.
        visual = tensor_parallel.copy_to_tensor_model_parallel_region(visual)
        shard = (parallel_state.get_tensor_model_parallel_rank(), self.layout.tensor)
        return scatter_visual(words, visual, index, shard=shard)

    def _language(
        self,
        batch: PackedBatch,
        embeddings: Tensor | None,
        features: dict[int, Tensor],
        first: int,
        routing: Routing | None,
        logits: bool,
    ) -> Tensor:
        """`embeddings` [S or S/tp, h]; None: the decoder has its input. `features`: DeepStack's
        sets, from visual row `first` on."""
        assert self.language_model is not None
        index = batch.pack_index if isinstance(batch, EncodedPack) else batch.visual_index
        assert index is not None
        index = index - first if first else index

        def after_layer(layer: int, x: Tensor) -> Tensor:
            if layer not in features:
                return x
            rows = features[layer].view(-1, self.spec.hidden_size)
            shard = self._part if self.layout.sequence else None
            return add_visual_(x, rows, index, shard=shard, allow_unused=True)

        packed = RotaryPackedSeqParams(
            qkv_format="sbhd",
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_kv=batch.cu_seqlens,
            max_seqlen_q=batch.max_seqlen,
            rotary_table=mrope_table(batch.position_ids, self.spec),
        )
        labels = batch.labels if self.post_process and not logits else None
        weights, rows = batch.loss_weights, None
        if labels is not None and (chosen := self._target_rows(batch)) is not None:
            whole, rows = chosen
            labels = labels[whole]
            weights = None if weights is None else weights.index_select(0, rows.whole)
        if embeddings is not None:
            embeddings = ask_for_gradient(self.language_model.decoder, embeddings.unsqueeze(1))
        return self.language_model(
            batch.input_ids[None],
            batch.position_ids[:, None],
            None,
            decoder_input=embeddings,
            labels=labels,
            packed_seq_params=packed,
            extra_block_kwargs={
                "after_layer": after_layer if features else None,
                "routing": routing,
                "loss_rows": rows,
            },
            loss_mask=weights,
        )

    def _target_rows(self, batch: PackedBatch) -> tuple[Tensor, LossRows] | None:
        """The tokens that go on behind the last layer's attention, in host memory, and for its
        layer; None: all."""
        part, parts = self._part
        if not (self.spec.ends_on_targets and self.layout.text_layers[self.stage]):
            return None
        if (places := batch.target_rows(parts)) is None:
            return None
        starts = np.arange(parts)[:, None] * (batch.length // parts)
        whole = torch.from_numpy((places + starts).reshape(-1))
        device = batch.input_ids.device
        own = to_device(torch.from_numpy(places[part]), device)
        return whole, LossRows(to_device(whole, device) if parts > 1 else own, own)

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
