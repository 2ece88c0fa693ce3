"""`python -m vlmkernels.info`: what was built, what was found, and why something is off."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys

import torch

import vlmkernels
from vlmkernels import _native, product
from vlmkernels.attention import select

#: Import name -> distribution and what it would be used for.
OPTIONAL = {
    "flash_attn": ("flash-attn", "attention on CUDA where neither window nor sm90 serves"),
    "transformer_engine": ("transformer-engine", "Megatron's fused Adam and gradient clipping"),
    "apex": ("apex", "Megatron's fused optimizer and gradient accumulation"),
}


def optional_backend(module: str, distribution: str) -> tuple[str | None, str]:
    """(version, "") if it imports, else (None, why not)."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        why = "not installed" if missing.split(".")[0] == module else f"needs {missing}"
        return None, why
    except Exception as error:  # built for another torch or CUDA: ImportError, OSError, others
        first_line = (str(error).splitlines() or [""])[0]
        return None, f"installed, but fails to import: {type(error).__name__}: {first_line}"
    try:
        return importlib.metadata.version(distribution), ""
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(found, "__version__", "unknown version")), ""


def gpu_lines() -> list[str]:
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return [f"none: torch {torch.__version__} is built without CUDA"]
        return ["none: torch finds no CUDA device or driver"]
    lines = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        memory = properties.total_memory / 2**30
        sm = f"sm_{properties.major}{properties.minor}"
        lines.append(f"{properties.name}, {sm}, {memory:.0f} GiB")
    return lines


def attention_lines() -> list[str]:
    """What select chooses on the CPU and on this machine's GPUs; without one, on six kinds."""
    cpu = select.Machine("cpu")
    lines = ["on the CPU: " + select.select(cpu, torch.bfloat16, 80, None)]
    if torch.cuda.is_available():
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        machines = {select.machine_of(device) for device in devices}
    else:
        archs, flash_attn = _native.cuda_archs(), select.flash_attn() is not None
        machines = {
            select.Machine("cuda", capability, shared, archs, flash_attn)
            for capability, shared in select.SHARED_OF_BLOCK.items()
        }
    tables: dict[tuple[str, ...], list[str]] = {}
    for machine in sorted(machines, key=lambda machine: machine.capability):
        capability = "{}.{}".format(*machine.capability)
        tables.setdefault(tuple(select.table(machine)), []).append(capability)
    for rows, capabilities in tables.items():
        lines += [f"on CUDA {', '.join(capabilities)}: {row}" for row in rows]
    return lines


def product_types() -> str:
    """The types in which vlmkernels.product.mm is ours."""
    found = []
    for dtype in product.TYPES:
        plain, transposed = (product.our_work(_native._C.isa(), dtype, t) for t in (False, True))
        if transposed:
            name, both = str(dtype)[6:], plain == transposed
            found.append(
                name if both else f"{name} of a transposed matrix, small or of large results"
            )
    return " and ".join(found)


def _amx_types() -> str:
    long = "float32 of more than 128 tokens, bf16"
    return f"{long} and fp16" if _native._C.tiles_multiply_fp16() else f"{long} (fp16: no AMX-FP16)"


def report() -> str:
    """The whole text."""
    build = _native._C.build_info()
    chosen = "VLMKERNELS_ISA" if os.environ.get("VLMKERNELS_ISA") else "cpuid"
    rows = [
        ("vlmkernels", f"{vlmkernels.__version__} in {os.path.dirname(vlmkernels.__file__)}"),
        ("python, torch", f"{platform.python_version()}, {torch.__version__}"),
        ("native module", f"version {build['version']}, compiler {build['compiler']}"),
        ("CPU kernels", f"{_native._C.isa()} (by {chosen})"),
        ("available", ", ".join(_native.available_isas())),
        (
            "AMX",
            f"off: {why}"
            if (why := _native._C.why_no_amx())
            else f"on, for attention in {_amx_types()} and products",
        ),
        ("products", f"ours in {ours}" if (ours := product_types()) else "torch's"),
        ("threads", str(torch.get_num_threads())),
    ]
    if build["cuda"] is None:
        rows.append(("CUDA kernels", "not built: no nvcc when the package was installed, or OFF"))
    else:
        archs = ", ".join(f"sm_{arch}" for arch in build["cuda_archs"].split(","))
        rows.append(("CUDA kernels", f"{archs} and PTX, by nvcc {build['cuda']}"))
    rows += [("GPU", line) for line in gpu_lines()]
    rows += [("attention", line) for line in attention_lines()]
    rows.append(("experts", "one after another by torch, with or without transformer-engine"))
    for module, (distribution, purpose) in OPTIONAL.items():
        version, why = optional_backend(module, distribution)
        rows.append((distribution, version or f"off: {why} (would serve: {purpose})"))
    return "\n".join(f"{name:<20}{value}" for name, value in rows)


if __name__ == "__main__":
    sys.stdout.write(report() + "\n")
