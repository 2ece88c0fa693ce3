"""One data-parallel rank (`ranks.run_cases`). One epoch is one global batch, packed and dealt in
several ways; what comes back are the gradients, under Hugging Face names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.parity.worker import gather_gradients, gradient
from tests.worker import serve
from vlmtrain.checkpoint.hf.save import gathered
from vlmtrain.checkpoint.load import load_weights
from vlmtrain.core import device
from vlmtrain.core.config import LoaderSection, OptimizerSection
from vlmtrain.data.index import scan_sources
from vlmtrain.data.loader import LoaderRank, PackedLoader
from vlmtrain.data.packing.plan import Policy
from vlmtrain.data.processor import Processor
from vlmtrain.models.family import read_spec
from vlmtrain.parallel.layout import make_layout
from vlmtrain.training.engine import Engine


def run(case: dict[str, Any], backend: device.Backend) -> dict[str, Any]:
    size = dist.get_world_size()
    spec = read_spec(case["model"])
    processor = Processor.from_folder(case["model"], spec)
    index = scan_sources([case["data"]], processor, spec, case["pack_length"])

    def loader(policy: Policy, length: int, packs: int) -> PackedLoader:
        return PackedLoader(
            index,
            processor,
            spec,
            LoaderSection(packing=policy, workers=0),
            LoaderRank(dist.get_rank(), size),
            pack_length=length,
            global_batch=packs,
            prefetch=False,
        )

    # A length with room for two samples a pack, at which every policy's epoch is a whole number of
    # packs for each rank.
    longest = int(index.lengths.max())
    for length in range(2 * longest, 4 * longest):
        packs = {p: len(loader(p, length, size).sampler.epoch_plan(0)) for p in case["policies"]}
        if not any(count % size for count in packs.values()):
            break
    layout = make_layout(spec, world_size=size, microbatches=1)
    engine = Engine(spec, layout, backend, dtype=torch.float32)
    load_weights(engine.parts, spec, case["model"])
    engine.prepare(OptimizerSection())
    results = {}
    for policy in case["policies"]:
        with loader(policy, length, packs[policy]) as batches:
            packs_here = batches.next_step()
        outputs = engine._forward_backward(packs_here, forward_only=False)
        loss = engine._result(packs_here, outputs, 0.0, 0.0, 0.0).loss
        gather_gradients(engine)
        places: list[Any] = [None] * size
        dist.all_gather_object(places, [batch.sample_ids for batch in packs_here])
        results[policy] = {
            "loss": loss,
            # Copies: the buffers are used again for the next policy.
            "gradients": {
                name: tensor.clone() for name, tensor in gathered(engine.exported, spec, gradient)
            },
            "places": places,
        }
    return results


if __name__ == "__main__":
    serve(run)
