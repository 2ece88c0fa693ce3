"""One data-parallel rank: python deal_worker.py CASE.pt. One epoch is one global batch, packed and
dealt in several ways; the gradients, under Hugging Face names, go beside it from rank 0."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.parity.worker import gather_gradients, gradient  # noqa: E402
from vlmtrain.checkpoint.hf.save import gathered  # noqa: E402
from vlmtrain.checkpoint.load import load_weights  # noqa: E402
from vlmtrain.core import device, launch  # noqa: E402
from vlmtrain.core.config import LoaderSection, OptimizerSection  # noqa: E402
from vlmtrain.data.index import scan_sources  # noqa: E402
from vlmtrain.data.loader import LoaderRank, PackedLoader  # noqa: E402
from vlmtrain.data.packing.plan import Policy  # noqa: E402
from vlmtrain.data.processor import Processor  # noqa: E402
from vlmtrain.models.family import read_spec  # noqa: E402
from vlmtrain.parallel.layout import make_layout  # noqa: E402
from vlmtrain.training.engine import Engine  # noqa: E402


def main(path: Path) -> None:
    case: dict[str, Any] = torch.load(path, weights_only=False)
    process = launch.joined()
    assert process is not None
    backend = device.setup(process.local_rank)
    launch.connect(process, backend.process_group)
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
        packs = {p: len(loader(p, length, size)._plan(0)) for p in case["policies"]}
        if not any(count % size for count in packs.values()):
            break
    layout = make_layout(spec, world_size=size, pack_length=length, microbatches=1)
    engine = Engine(spec, layout, backend, dtype=torch.float32)
    load_weights(engine.parts, spec, case["model"])
    engine.prepare(OptimizerSection())
    results = {}
    for policy in case["policies"]:
        with loader(policy, length, packs[policy]) as batches:
            mine = batches.next_step()
        outputs = engine._forward_backward(mine, forward_only=False)
        loss = engine._result(mine, outputs, 0.0, 0.0, 0.0).loss
        gather_gradients(engine)
        places: list[Any] = [None] * size
        dist.all_gather_object(places, [batch.sample_ids for batch in mine])
        results[policy] = {
            "loss": loss,
            # Copies: the buffers are used again for the next policy.
            "gradients": {
                name: tensor.clone() for name, tensor in gathered(engine.exported, spec, gradient)
            },
            "places": places,
        }
    if dist.get_rank() == 0:
        torch.save(results, path.with_suffix(".out"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
