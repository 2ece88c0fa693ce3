"""What knowing every step beforehand costs: the plan of an epoch, its digest, its heaviest steps.

    python -m benchmarks.step_plans --samples 100000

Samples of random lengths, a third with an image; the shapes of Qwen2.5-VL-7B.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from tests.released import released_spec
from vlmtrain.core.config import TrainConfig, TrainSection
from vlmtrain.data.formats.sources import SourceSpec
from vlmtrain.data.index import SampleIndex
from vlmtrain.data.packing.sampler import Position, Sampler
from vlmtrain.parallel.layout import make_layout
from vlmtrain.plan.heaviest import Loads, heaviest, peak_models
from vlmtrain.training import agreement

PACK, BATCH = 8192, 64


def make_index(samples: int) -> SampleIndex:
    rng = np.random.default_rng(0)
    images = rng.random(samples) < 1 / 3
    sides = rng.integers(4, 32, (int(images.sum()), 2)) * 2
    grids = np.concatenate([np.ones((len(sides), 1), dtype=np.int64), sides], axis=1)
    tokens = np.zeros(samples, dtype=np.int64)
    tokens[images] = sides.prod(1) // 4
    zeros = np.zeros(samples, dtype=np.int64)
    return SampleIndex(
        sources=[SourceSpec("random")],
        ids=[str(i) for i in range(samples)],
        source=zeros.astype(np.int32),
        number=zeros,
        offset=zeros,
        size=zeros,
        crc=zeros.astype(np.uint32),
        content=zeros.astype(np.uint32),
        lengths=tokens + rng.integers(20, 2000, samples),
        target_tokens=zeros,
        image_tokens=tokens,
        media_start=np.concatenate(([0], images.cumsum())),
        grids=grids,
        kinds=np.zeros(len(grids), dtype=np.uint8),
        infos=np.zeros((len(grids), 4)),
        pack_length=PACK,
        content_hash="random",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=100_000)
    samples = parser.parse_args().samples
    spec = released_spec("qwen2_5_vl-7b")
    layout = make_layout(spec, world_size=16, pipeline=4, vision_layers="auto")
    train = TrainSection(pack_length=PACK, global_batch_packs=BATCH)
    config = TrainConfig(Path(), "", Path(), train=train)
    index = make_index(samples)
    sampler = Sampler(
        index, spec, "balanced", pack_length=PACK, global_batch=BATCH, seed=0, ranks=layout.data
    )

    def timed(name: str, start: float) -> float:
        print(f"{name}: {time.process_time() - start:.2f} s of CPU", flush=True)
        return time.process_time()

    start = time.process_time()
    packs = len(sampler.epoch_plan(0))
    start = timed(f"plan of an epoch of {samples:,} samples, {packs:,} packs", start)
    agreement._plan(sampler, Position(), layout)
    start = timed("digest of its packs, and of the messages of the first 1,024", start)
    loads = Loads.of(sampler.steps(Position(), sampler.steps_per_epoch), index)
    start = timed("patches of its steps", start)
    heaviest(loads, peak_models(config, spec, layout, cuda=True))
    start = timed("its heaviest steps, on 4 stages of 4 replicas", start)

    layout = make_layout(spec, world_size=16, pipeline=4, multiplexed=True)
    agreement._plan(sampler, Position(), layout)
    start = timed("multiplexed: the digest, of the owners of images too", start)
    steps = sampler.steps(Position(), sampler.steps_per_epoch)
    loads = Loads.of(steps, index, spec, layout)
    start = timed("multiplexed: patches of its steps, and who encodes them", start)
    heaviest(loads, peak_models(config, spec, layout, cuda=True))
    timed("multiplexed: its heaviest steps", start)


if __name__ == "__main__":
    main()
