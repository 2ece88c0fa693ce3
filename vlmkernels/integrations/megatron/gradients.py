"""When the gradients of Megatron's buckets are final: early enough to send them to the host while
the backward pass goes on.

With `overlap_grad_reduce` Megatron reduces a bucket of gradients over the data-parallel ranks as
soon as the last microbatch's backward pass has been through all its parameters. A copy that comes
after that reduction has this rank's shard of the final gradients, but for what Megatron's
`finalize_model_grads` does at the end of the pass:

1. All gradients are divided by the number of tokens (`calculate_per_token_loss`). Copies that began
   before are multiplied by the same factor where they are read: in float32 to the same bits, while
   bfloat16 copies are rounded before, not after. So that no step rounds otherwise than the next,
   those that could not begin early begin before the division too.
2. A few parameters' gradients are added up over tensor- or pipeline-parallel ranks (norms under
   sequence parallelism, tied embeddings): those are not sent early.

With one data-parallel rank there is nothing to reduce: a gradient is final when its parameter has
been through. Without `overlap_grad_reduce` Megatron doesn't say which microbatch is the last, and
nothing is early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron.core.utils import get_model_config
from torch import Tensor

from vlmkernels.optim.transfer import Waitable


class _Reduction:
    """A reduction that was started. It is waited for once: gloo writes the result in `wait`, again
    at each call, over whatever was done to it in between."""

    def __init__(self, handle: Waitable) -> None:
        self._handle: Waitable | None = handle

    def wait(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()

    def waited(self) -> None:
        """Somebody else has."""
        self._handle = None


@dataclass(eq=False)
class _Buffer:
    """What happened to a gradient buffer in this step."""

    data: Tensor
    reduced: int | None = None  # autograd's version of the data when all of it was reduced
    factors: list[Any] = field(default_factory=list)  # what it was multiplied by since

    @property
    def known(self) -> bool:
        """Whether nothing else has changed it, and the changes can be repeated on a copy."""
        if self.reduced is None or len(self.factors) > 1:
            return False
        return self.data._version == self.reduced + len(self.factors)


class EarlyGradients:
    """Calls back when gradients are final or will be when a reduction ends; see the module.

    Args:
        chunks: DistributedDataParallel models; their bucket groups and buffers get hooks, for good.
        buffers: those of their buffers whose gradients are wanted.
        begin: gets a parameter and what its gradient must wait for, or None.
        before_change: called before gradients are changed in place.
    """

    def __init__(
        self,
        chunks: Iterable[Any],
        buffers: list[Any],
        begin: Callable[[Tensor, Waitable | None], bool],
        before_change: Callable[[], None],
    ) -> None:
        self._begin, self._before_change = begin, before_change
        self._buffers = {buffer: _Buffer(buffer.grad_data) for buffer in buffers}
        self._of: dict[Tensor, _Buffer] = {}
        self._sent: dict[Tensor, None] = {}
        for buffer, seen in self._buffers.items():
            self._of.update(dict.fromkeys(buffer.params, seen))
            self._watch_buffer(buffer, seen)
        wanted = {id(bucket) for buffer in buffers for bucket in buffer.buckets}
        self._late: set[Tensor] = set()
        for chunk in chunks:
            self._late |= _changed_late(chunk)
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                if any(id(bucket) in wanted for bucket in group.buckets):
                    self._watch_group(group)

    def take(self) -> dict[Tensor, Any]:
        """At the step: parameters whose gradients were sent and are what they were, up to a factor,
        which comes with them. Forgets the step."""
        good = {param: seen for param in self._sent if (seen := self._of[param]).known}
        found = {param: seen.factors[0] if seen.factors else 1.0 for param, seen in good.items()}
        self._sent = {}
        for seen in self._buffers.values():
            seen.reduced, seen.factors = None, []
        return found

    def _send(self, params: Iterable[Tensor], after: Waitable | None) -> None:
        for param in params:
            if param not in self._late and param in self._of and self._begin(param, after):
                self._sent[param] = None

    def _watch_buffer(self, buffer: Any, seen: _Buffer) -> None:
        plain = buffer.scale_gradients

        def scale_gradients(factor: Any) -> None:
            self._before_change()
            plain(factor)
            seen.factors.append(factor)

        buffer.scale_gradients = scale_gradients

    def _watch_group(self, group: Any) -> None:
        ready, start, finish = (
            group.register_grad_ready,
            group.start_grad_sync,
            group.finish_grad_sync,
        )
        config = group.ddp_config
        alone = (
            group.intra_distributed_optimizer_instance_size == 1
            and config.num_distributed_optimizer_instances == 1
            and all(bucket.gradient_scaling_factor == 1.0 for bucket in group.buckets)
        )
        # Where Megatron sums in float32, waiting is what writes the gradients: they go at the step.
        waits = not getattr(config, "reduce_scatter_with_fp32_accumulation", False)
        reductions: list[_Reduction] = []
        registered: set[Tensor] = set()  # sent in this pass

        def register_grad_ready(param: Tensor, *more: Any, **options: Any) -> None:
            ready(param, *more, **options)
            times = group.golden_per_param_grad_ready_counts.get(param)
            if alone and times and group.per_param_grad_ready_counts.get(param) == times:
                registered.add(param)
                self._send([param], None)

        def start_grad_sync(*more: Any, **options: Any) -> None:
            running = group.grad_reduce_handle
            start(*more, **options)
            handle = group.grad_reduce_handle
            if waits and not alone and handle is not None and handle is not running:
                reductions.append(_Reduction(handle))
                self._send((p for b in group.buckets for p in b.params_list), reductions[-1])

        def finish_grad_sync(*more: Any, **options: Any) -> None:
            finish(*more, **options)
            for reduction in reductions:
                reduction.waited()
            reductions.clear()
            if alone and config.overlap_grad_reduce:  # a first batch, of which counts aren't known
                params = (p for b in group.buckets for p in b.params_list)
                self._send((p for p in params if p not in registered), None)
            registered.clear()
            for bucket in group.buckets:
                seen = self._of.get(bucket.params_list[0])
                if seen is not None:
                    seen.reduced, seen.factors = seen.data._version, []

        group.register_grad_ready = register_grad_ready
        group.start_grad_sync = start_grad_sync
        group.finish_grad_sync = finish_grad_sync


def _changed_late(chunk: Any) -> set[Tensor]:
    """Parameters whose gradients `finalize_model_grads` adds up over tensor- or pipeline-parallel
    ranks after the reduction over data-parallel ones; rather too many than too few."""
    config = get_model_config(chunk)
    module = chunk.module
    while hasattr(module, "module"):
        module = module.module
    pipeline = chunk.pp_group
    piped = isinstance(pipeline, list) or pipeline.size() > 1
    tied = getattr(module, "share_embeddings_and_output_weights", True) or bool(
        getattr(config, "mtp_num_layers", None)
    )
    late = set()
    if piped and tied and hasattr(module, "shared_embedding_or_output_weight"):
        late.add(module.shared_embedding_or_output_weight())
    for name, param in chunk.named_parameters():
        spread = chunk.tp_group.size() > 1 and (
            getattr(param, "average_gradients_across_tp_domain", False)
            or getattr(param, "sequence_parallel", False)
            or (config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name))
        )
        table = "embedding" in name or "output_layer" in name
        shared = table and (tied or "position_embeddings" in name)
        shared = shared or getattr(param, "shared_embedding", False)
        if spread or (piped and (shared or getattr(param, "pipeline_parallel", False))):
            late.add(param)
    return late
