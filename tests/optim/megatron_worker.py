"""One rank of an offloaded Megatron run: cases as in tests/checkpoint/worker.py, which does the
work, and in addition `fractions`, one a step, `delayed`, `gradients` (a type), `loss_scale`, with
which the second step gets an infinite gradient on the last rank, `early`: gradients must be copied
during the backward pass, `touched`: they are changed after it ("unseen": without a
new version, and not sent early, which is the default), `offload`: the fraction from the
start, and `weights`: a model folder that is loaded once the optimizer has been made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.checkpoint import worker  # noqa: E402
from tests.optim.delayed import DelayedTransfers  # noqa: E402
from vlmtrain.core import device  # noqa: E402

plain_build = worker.build


def parts(engine: Any) -> list[Any]:
    actual = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    return [part for part in actual if not part.is_stub_optimizer]


def check_share(engine: Any, fraction: float) -> None:
    """As much as was asked for is in host memory: the shards are small enough to come near."""
    for part in parts(engine):
        every = [p for group in part.optimizer.param_groups for p in group["params"]]
        host = getattr(part, "_host", None)  # none while nothing was ever offloaded
        share = sum(p.numel() for p in host.shards) if host is not None else 0
        total = sum(p.numel() for p in every)
        assert 0.95 * fraction * total <= share <= fraction * total, (share, total, fraction)


def spoil(engine: Any, scale: float) -> None:
    """A constant loss scale, and an infinity in the second step."""
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler

    steps = 0
    for part in parts(engine):
        part.grad_scaler, part.found_inf = ConstantGradScaler(scale), torch.zeros(1)
    plain = engine.optimizer.step

    def step() -> Any:
        nonlocal steps
        steps += 1
        if steps == 2 and dist.get_rank() == dist.get_world_size() - 1:
            buffer = parts(engine)[0].buffers[0].grad_data
            buffer[-buffer.numel() // 4] = float("inf")  # in this rank's shard
        result = plain()
        assert result[0] is (steps != 2)
        return result

    engine.optimizer.step = step


class Watch:
    """Of each step: how much of the backward pass was done when the first gradient's copy began,
    how many had when it was over, and how many started in all."""

    def __init__(self, engine: Any, transfers: DelayedTransfers) -> None:
        self.params = [p for c in engine.chunks for p in c.parameters() if p.requires_grad]
        self.hooks, self.first, self.in_backward = 0, 1.0, 0
        for param in self.params:
            param.register_hook(self.backward_reaches)
        self.transfers, self.before = transfers, 0
        copy, finalize = transfers.d2h, engine.config.finalize_model_grads_func

        def watched(*arguments: Any) -> Any:
            self.first = min(self.first, self.hooks / len(self.params))
            return copy(*arguments)

        def finalizing(*arguments: Any, **options: Any) -> None:
            self.in_backward = transfers.d2h_copies - self.before
            finalize(*arguments, **options)

        transfers.d2h = watched  # type: ignore[method-assign]
        engine.config.finalize_model_grads_func = finalizing

    def backward_reaches(self, gradient: Any) -> None:
        self.hooks += 1

    def start(self) -> None:
        self.hooks, self.first, self.in_backward = 0, 1.0, 0
        self.before = self.transfers.d2h_copies

    def check(self, engine: Any, late: int, microbatches: int) -> None:
        """Each shard was sent once, all but `late` parameters' during the backward pass."""
        tables = [part._host.shards for part in parts(engine)]
        shards = sum(p.numel() > 0 for table in tables for p in table)
        if sum(map(len, tables)) < len(self.params):  # some stay on the device
            late = min(late, shards - self.in_backward)
        assert self.transfers.d2h_copies - self.before == shards
        assert self.in_backward == shards - late, (self.in_backward, shards, late)
        # The last microbatch's pass comes last.
        assert self.first < microbatches - 0.3, (self.first, microbatches)


def touch(engine: Any, unseen: bool) -> None:
    """Twice the gradients of two layers, after Megatron is through with them and before the step:
    with or without a new version."""
    plain = engine.optimizer.step

    def step() -> Any:
        for chunk in engine.chunks:
            for number, param in enumerate(chunk.params_with_grad):
                if number in (3, 8):
                    (param.main_grad.data if unseen else param.main_grad).mul_(2.0)
        return plain()

    engine.optimizer.step = step


def load_other(engine: Any, case: dict[str, Any], options: dict[str, Any]) -> None:
    """Other weights, without optimizer state: noticed until the optimizer takes them."""
    from vlmkernels.integrations.megatron import check_masters, offload
    from vlmtrain.checkpoint.load import load_weights

    offload(engine.optimizer, case["fractions"][0], **options)
    check_masters(engine.optimizer)
    load_weights(engine.parts, engine.spec, case["weights"])
    try:
        check_masters(engine.optimizer)
    except RuntimeError as error:
        assert "call optimizer.reload_model_params()" in str(error)
    else:
        raise AssertionError("stale masters were not noticed")
    engine.optimizer.reload_model_params()


def check_counting_zeros_is_refused(engine: Any) -> None:
    """Megatron counts them in gradients of masters, which offloaded ones have not."""
    from vlmkernels.integrations.megatron import offload

    for part in parts(engine)[:1]:
        part.config.log_num_zeros_in_grad = True
        try:
            offload(engine.optimizer, 0.5)
        except ValueError as error:
            assert "doesn't work together with log_num_zeros_in_grad" in str(error)
        else:
            raise AssertionError("zeros were counted in gradients that are not there")
        part.config.log_num_zeros_in_grad = False


def build(case: dict[str, Any], backend: device.Backend) -> tuple[Any, int]:
    from vlmkernels.integrations.megatron import check_masters, offload

    engine, length = plain_build(case, backend)
    fractions = list(case.get("fractions", []))
    transfers = DelayedTransfers() if case.get("delayed") else None
    options = dict(gradients=case.get("gradients"), bucket_bytes=20_000, transfers=transfers)
    if case.get("touched") != "unseen":
        options["early"] = True
    if fractions and not case.get("offload"):
        check_counting_zeros_is_refused(engine)
    if case.get("load") and fractions:  # the state goes where it will be
        offload(engine.optimizer, fractions[0], **options)
    if case.get("offload"):
        assert all(part._early is not None for part in parts(engine))
    if case.get("weights"):
        load_other(engine, case, options)
    plain_step = engine.step

    def step(packs: list[Any], lr: float) -> Any:
        if fractions:
            offload(engine.optimizer, fractions[0], **options)
            check_share(engine, fractions.pop(0))
        check_masters(engine.optimizer)
        if watch is not None:
            watch.start()
        result = plain_step(packs, lr)
        check_masters(engine.optimizer)
        if watch is not None and engine.steps > 0:  # Megatron counts hooks in the first
            watch.check(engine, case["early"], len(packs))
        engine.steps += 1
        return result

    watch = Watch(engine, transfers) if transfers is not None and "early" in case else None
    engine.step, engine.steps = step, 0
    if case.get("touched"):
        touch(engine, case["touched"] == "unseen")
    if case.get("loss_scale"):
        spoil(engine, case["loss_scale"])
    return engine, length


if __name__ == "__main__":
    worker.build = build
    worker.main()
