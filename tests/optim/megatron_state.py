"""One process, see test_megatron.py: Megatron's own load_state_dict after `offload`, and moving
state of an inner optimizer that counts steps by group, as apex' and transformer-engine's do."""

from __future__ import annotations

import io
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.checkpoint.test_resharding import same  # noqa: E402
from tests.checkpoint.worker import build, whole_state  # noqa: E402
from tests.parity import reference as ref  # noqa: E402
from vlmkernels.integrations.megatron import offload  # noqa: E402
from vlmkernels.optim.native import adam_reference  # noqa: E402
from vlmtrain.core import device, launch  # noqa: E402


class ByGroup(torch.optim.Optimizer):
    """Plain Adam whose states have moments only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                for key in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(key, torch.zeros_like(param))
                settings = {k: group[k] for k in ("lr", "betas", "eps", "weight_decay")}
                moments = state["exp_avg"], state["exp_avg_sq"]
                step = group["step"]
                adam_reference(param, param.grad, *moments, step, decoupled=True, **settings)


def duplicate(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Run:
    def __init__(self, model: Path, backend: Any) -> None:
        from megatron.core import parallel_state

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        self.engine, self.length = build(dict(model=model, layout={}), backend)
        (self.part,) = self.engine.optimizer.chained_optimizers

    def step(self, seed: int) -> None:
        self.engine.step([ref.pack(p, self.length) for p in ref.make_samples(seed)], ref.LR)

    def saved(self, kind: str) -> dict[str, Any]:
        """What dist_checkpointing would give back."""
        if kind == "dp_reshardable":
            state = self.part.get_parameter_state_dp_reshardable()
            for buffer in (v for k, v in state.items() if isinstance(k, int)):
                for bucket in (b for buckets in buffer.values() for b in buckets):
                    for entry in bucket:
                        entry["padding"] = False
        else:
            state = {}
            params = [p for b in self.part.buffers for p in b.param_index_map]
            for number, param in enumerate(params):
                tensors = self.part._get_main_param_and_optimizer_states(param)
                state[number] = {
                    "fp32_param": tensors["param"].detach().view(param.shape),
                    "exp_avg": tensors["exp_avg"].view(param.shape),
                    "exp_avg_sq": tensors["exp_avg_sq"].view(param.shape),
                }
        whole = {**self.part.state_dict(), "param_state": state, "param_state_sharding_type": kind}
        return duplicate(whole)


def main() -> None:
    folder = Path(sys.argv[1])
    model = folder / "model"
    ref.save_model(ref.make_model("qwen2_vl", vision_heads=3, seed=1), model)
    backend = device.setup(0)
    launch.connect(launch.Process(0, 1, 0), backend.process_group)

    run = Run(model, backend)
    run.step(0)
    run.step(1)
    saved = {kind: run.saved(kind) for kind in ("dp_reshardable", "fully_reshardable")}
    run.step(2)
    after_three = whole_state(run.engine)
    run.step(3)
    expected = whole_state(run.engine)
    for kind, state in saved.items():
        for fraction in (1.0, 0.5):
            run = Run(model, backend)
            run.step(7)  # state to be replaced
            offload(run.engine.optimizer, fraction)
            with torch.no_grad():
                run.part.load_state_dict(duplicate(state))
            run.step(2)
            offload(run.engine.optimizer, 1.0 - fraction / 2)
            run.step(3)
            same(whole_state(run.engine), expected, f"{kind} {fraction}")

    run = Run(model, backend)
    inner = ByGroup([torch.zeros(1)], {})
    inner.param_groups = run.part.optimizer.param_groups  # of which some aren't leaves
    run.part.optimizer = inner
    for seed, fraction in enumerate((1.0, 0.0, 1.0)):
        offload(run.engine.optimizer, fraction)
        run.step(seed)
    actual = whole_state(run.engine)
    for name, tensor in after_three.items():
        atol = 1e-3 * float(tensor.float().square().mean().sqrt().nan_to_num())
        torch.testing.assert_close(actual[name], tensor, rtol=1e-3, atol=atol, equal_nan=True)

    run = Run(model, backend)
    run.part.buffers[0].param_dtype = torch.float16
    try:
        offload(run.engine.optimizer, 1.0)
    except ValueError as error:
        assert "parameters are torch.float16; offload needs float32 or bfloat16" in str(error)
    else:
        raise AssertionError("float16 was taken")
    print("as expected")


if __name__ == "__main__":
    main()
