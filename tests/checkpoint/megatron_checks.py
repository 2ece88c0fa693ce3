"""What megatron-core does wrong with an optimizer's state, and what we make of it.

One process; prints a JSON object. `theirs`: what plain megatron-core does; `ours`: what
checkpoint/optimizer_state.py and torch_dist.py do. tests/checkpoint/test_workarounds.py says what
each must be.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from tests.parity import reference as ref
from tests.parity.worker import build
from vlmtrain.checkpoint.hf.files import ModelFiles
from vlmtrain.core import device, launch


def outcome(work: Any) -> str:
    """The name of the error that `work` ends with, or "works"."""
    try:
        work()
    except Exception as error:
        return type(error).__name__
    return "works"


def plain_optimizer(engine: Any) -> Any:
    """megatron-core's own, without anything of ours."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=1e-3, use_distributed_optimizer=True, params_dtype=torch.float32
    )
    return get_megatron_optimizer(config, engine.chunks).chained_optimizers[0]


def step_tensors(part: Any) -> int:
    return len({entry["step"].data_ptr() for entry in part.optimizer.state.values()})


def moments_lost(engine: Any) -> tuple[int, int]:
    """Parameters whose moments are saved wrong from several buckets, by Megatron and by us."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from vlmtrain.checkpoint.training import optimizer_state
    from vlmtrain.checkpoint.training.sharding import locations

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=5000
    )
    engine.chunks = [DistributedDataParallel(engine.config, config, engine.stages[0])]
    part = plain_optimizer(engine)
    optimizer_state.create_state(part)
    truth = {}
    for parameter, *_ in optimizer_state._slices(part):
        moment = part._get_main_param_and_optimizer_states(parameter)["exp_avg"]
        moment.normal_()
        truth[parameter] = moment
    assert len(part.buffers[0].buckets) > 10 and len(truth) > 50
    (state,) = part.get_parameter_state_dp_zero(use_gloo_comm=False)[0].values()
    theirs = sum(
        not torch.equal(state["exp_avg"][start:stop], truth[p].view(-1))
        for p, (start, stop, _) in part.buffers[0].param_index_map.items()
    )
    table = locations(engine.parts)
    saved = {(p.key, p.offsets): p.data for p in optimizer_state.pieces(part, table)}
    ours = sum(
        not torch.equal(saved[piece.key, piece.offsets], piece.data)
        for parameter, moment in truth.items()
        for piece in table[parameter].pieces(moment, prefix="optimizer.state.exp_avg.")
    )
    return theirs, ours


def cut_in_ranges(source: Path, target: Path) -> None:
    """A checkpoint as three data-parallel ranks write it: each a third of every tensor."""
    from vlmtrain.checkpoint.megatron.torch_dist import ChunkFile, ChunkReader, write_metadata
    from vlmtrain.checkpoint.tensors import flat_boxes

    reader, chunks = ChunkReader(source), []
    target.mkdir()
    shutil.copyfile(source / "common.pt", target / "common.pt")
    for rank in range(3):
        file = ChunkFile(target / f"__{rank}_0.distcp")
        for key in sorted(reader.keys()):
            shape = reader.shape(key)
            size = math.prod(shape)
            for box in flat_boxes(shape, size * rank // 3, size * (rank + 1) // 3):
                file.add(key, shape, [first for first, _ in box], reader.read(key, box))
        file.close()
        chunks += file.chunks
    write_metadata(target, chunks)


def main() -> None:
    folder = Path(sys.argv[1])
    model = folder / "model"
    ref.save_model(ref.make_model("qwen2_5_vl", vision_heads=3, seed=1), model)
    backend = device.setup(0)
    launch.connect(launch.Process(0, 1, 0), backend.process_group)
    engine, length = build(dict(model=model, layout={}), backend)
    from megatron.core import dist_checkpointing

    from vlmtrain.checkpoint.megatron.torch_dist import ChunkReader
    from vlmtrain.checkpoint.training import checkpoint, optimizer_state

    theirs: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    plain = plain_optimizer(engine)
    (part,) = optimizer_state.distributed_parts(engine.optimizer)

    theirs["state before a step"] = outcome(plain.state_dict)
    ours["state before a step"] = outcome(part.state_dict)

    packs = [ref.pack(p, length) for p in ref.make_samples(0)]
    for seed in range(2):
        engine.step([ref.pack(p, length) for p in ref.make_samples(seed)], ref.LR)

    parameter, *_ = next(optimizer_state._slices(part))
    state = {
        key: value.clone()
        for key, value in part._get_main_param_and_optimizer_states(parameter).items()
        if key != "step"
    }
    with torch.no_grad():
        theirs["saved tensors without a step"] = outcome(
            lambda: part._set_main_param_and_optimizer_states(parameter, state)
        )

    optimizer_state.create_state(plain)
    plain.load_state_dict(plain.state_dict())
    theirs["step tensors after a load"] = step_tensors(plain)
    saver = checkpoint.Saver(folder / "checkpoints", ModelFiles(model), keep=1)
    saver.start(2, engine.parts, engine.optimizer, {})
    saver.finish()
    path = folder / "checkpoints" / "step-00000002"
    checkpoint.load(path, engine.parts, engine.optimizer)
    ours["step tensors after a load"] = step_tensors(part)
    ours["parameters"] = len(part.optimizer.state)
    engine.step(packs, ref.LR)
    ours["step after a load and an update"] = optimizer_state.steps_taken(engine.optimizer)

    stub = type(part).__new__(type(part))
    stub.is_stub_optimizer, stub.optimizer = True, None
    theirs["a rank with nothing to train"] = outcome(stub.state_dict)
    ours["a rank with nothing to train"] = optimizer_state.steps_taken(stub)

    # The two implementations read each other's files.
    sharded = engine.stages[0].sharded_state_dict()
    sharded = {k: v for k, v in sharded.items() if not k.endswith("_extra_state")}
    want = {n: p.detach().clone() for n, p in engine.stages[0].named_parameters()}
    (folder / "theirs").mkdir()
    dist_checkpointing.save(dict(sharded), str(folder / "theirs"))
    saver.start(4, engine.parts, engine.optimizer, {})
    saver.finish()
    with torch.no_grad():
        for p in engine.stages[0].parameters():
            p.zero_()
    whole, cut = folder / "checkpoints" / "step-00000004", folder / "cut"
    cut_in_ranges(whole, cut)
    for name, path in (("whole", whole), ("cut", cut)):
        loaded = dist_checkpointing.load(dict(sharded), str(path))
        ours[f"read by megatron-core, {name}"] = all(
            torch.equal(loaded[name], tensor) for name, tensor in want.items()
        )
        with torch.no_grad():
            for p in engine.stages[0].parameters():
                p.zero_()
    ours_read, other = ChunkReader(whole), ChunkReader(folder / "theirs")
    keys = other.keys()
    ours["reads megatron-core's"] = len(keys) > 20 and all(
        torch.equal(
            ours_read.read(key, tuple((0, n) for n in ours_read.shape(key))),
            other.read(key, tuple((0, n) for n in other.shape(key))),
        )
        for key in keys
    )
    from vlmtrain.checkpoint.mapping import checkpoint_key, parameter_split_dim, rows
    from vlmtrain.checkpoint.parameters import stage_parameters

    parameters = stage_parameters(engine.stages[0])
    ours["keys"] = {checkpoint_key(name)[0] for name in parameters} == keys
    table = {row.megatron: row.split for row in rows(engine.spec)}
    ours["split dimensions"] = [
        name for name, p in parameters.items() if parameter_split_dim(p) != table[name]
    ]
    theirs["moments lost"], ours["moments lost"] = moments_lost(engine)
    print(json.dumps({"theirs": theirs, "ours": ours}))


if __name__ == "__main__":
    main()
