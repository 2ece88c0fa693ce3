"""What the compiler made of each CUDA kernel: python -m benchmarks.static

Builds csrc/cuda for every architecture that ships, without a GPU, and writes
benchmarks/static.json: registers, spills, shared memory, blocks an SM holds at once, and how many
instructions of which kind. Where the sources are not those that the file was written from,
tests/test_static.py builds them and fails where a figure is worse than the file says: a worse
figure is then a line of the commit that brings it.

The instructions are counted in the cubin: from sm_70 on each takes 16 bytes, and its low 9 bits are
the operation (checked against the PTX: every ldmatrix, mma.sync, cp.async, st.global, wgmma and
tensor copy is one).
Block size and dynamic shared memory are what the launchers ask a fake CUDA runtime for.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import re
import shutil
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from tests.cuda.params import params_struct
from tools.cudasim import CSRC
from tools.cudasim.ptx.toolchain import (
    ARCHITECTURES,
    fake_runtime,
    find_nvcc,
    missing_tool,
    run,
)

FILE = ROOT / "benchmarks" / "static.json"

#: Operation by the low 9 bits of an instruction: those that say where a kernel's time goes. LDL and
#: STL are spills or indexed register arrays. SYNCS: arrivals at mbarriers and waits; WARPGROUP:
#: fences of wgmma and waits.
OPCODES = {
    0x03C: "HMMA", 0x03B: "LDSM", 0x1AE: "LDGSTS", 0x181: "LDG", 0x186: "STG", 0x184: "LDS",
    0x188: "STS", 0x183: "LDL", 0x187: "STL", 0x108: "MUFU", 0x189: "SHFL", 0x11D: "BAR",
    0x023: "FFMA", 0x020: "FMUL", 0x021: "FADD", 0x03E: "F2FP", 0x024: "IMAD", 0x010: "IADD3",
    0x147: "BRA", 0x1F0: "HGMMA", 0x1B4: "UTMALDG", 0x1A7: "SYNCS", 0x1C5: "WARPGROUP",
    0x1C8: "USETMAXREG",
}  # fmt: skip

#: What the file says before the kernels.
HEAD = ("toolkit", "sources")

#: By architecture: bytes of shared memory of an SM, of which a block takes 1 KB more than it asks
#: for. Registers, warps and blocks are the same on both (CUDA C++ Programming Guide, compute
#: capabilities).
SHARED_OF_SM = {"80": 164 << 10, "90a": 228 << 10}
#: What other architectures have as a trap that no launcher reaches.
ONLY_ON = dict.fromkeys(
    ("sm90_forward", "sm90_backward_dkdv", "sm90_backward_dq", "sm90_backward_fused"), "90a"
)
REGISTERS_OF_PARTITION, PARTITIONS, WARPS_OF_SM, BLOCKS_OF_SM = 16384, 4, 64, 32


def toolkit() -> str:
    """Version of the compiler that is found: "13.0.88"."""
    nvcc = find_nvcc()
    assert nvcc is not None
    found = re.search(r"\bV(\d+\.\d+\.\d+)", run([nvcc, "--version"]))
    assert found is not None
    return found[1]


def sources_digest() -> str:
    """Of all that the figures follow from but the compiler, its options in this file among it."""
    files = [*CSRC.glob("common/*"), *CSRC.glob("cuda/**/*.*"), Path(__file__)]
    digest = hashlib.sha256()
    for path in sorted(files, key=str):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def blocks_of_sm(architecture: str, registers: int, threads: int, shared: int) -> int:
    """How many blocks an SM holds at once: cuda_occupancy.h's rules."""
    warps = -(-threads // 32)
    of_a_warp = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS_OF_PARTITION // of_a_warp * PARTITIONS // warps
    by_shared = SHARED_OF_SM[architecture] // (-(-(shared + 1024) // 128) * 128)
    return min(by_registers, by_shared, WARPS_OF_SM // warps, BLOCKS_OF_SM)


def kernel_codes(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and machine code of each kernel: the ELF file's .text sections."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
    strings = sections[names][4]
    for section in sections:
        start = strings + section[0]
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(".text."):
            yield name[6:], cubin[section[4] : section[4] + section[5]]


def operations(code: bytes) -> Counter[str]:
    """Instructions by operation; "all" is their number without the padding at the end."""
    counts: Counter[str] = Counter()
    for (word,) in struct.iter_unpack("<Q8x", code):
        counts[OPCODES.get(word & 0x1FF, "")] += 1
        counts["all"] += word & 0x1FF != 0x118  # NOP
    del counts[""]
    return counts


def order_of_products(code: bytes) -> str:
    """Where products of wgmma are started and waited for, and exponentials between, in the order of
    the code: "fence, 5 HGMMA, wait 0, 66 EX2"; "wait 1" is for all groups but one."""
    events = []
    for low, high in struct.iter_unpack("<QQ", code):
        operation = OPCODES.get(low & 0x1FF)
        if operation == "WARPGROUP":
            events.append(f"wait {high >> 8 & 0xFF}" if low >> 47 & 1 else "fence")
        elif operation == "HGMMA":
            events.append("HGMMA")
        elif operation == "MUFU" and high >> 8 & 0x3F == 8:
            events.append("EX2")
    runs = [(name, len(list(run))) for name, run in itertools.groupby(events)]
    return ", ".join(f"{n} {name}" if name in ("HGMMA", "EX2") else name for name, n in runs)


def given_registers(code: bytes) -> int:
    """Registers that are used where setmaxnreg has given all but 24 back: one more than the number
    of the highest that an instruction names which can be reached from there. 0: it gives none."""
    words = list(struct.iter_unpack("<QQ", code))
    gives = [low & 0x1FF == 0x1C8 and high >> 8 & 3 == 1 for low, high in words]
    todo = [i + 1 for i, here in enumerate(gives) if here]
    seen: set[int] = set()
    highest = -1
    while todo:
        at = todo.pop()
        while at < len(words) and at not in seen:
            seen.add(at)
            low, high = words[at]
            operation, always = low & 0x1FF, low >> 12 & 0xF == 7
            if operation == 0x147:  # BRA, by a multiple of 4 bytes from the next instruction
                distance = (low >> 34 | (high & 0x3FFFF) << 30) << 8 | low >> 16 & 0xFF
                todo.append(at + 1 + (distance - (distance >> 55 << 56)) // 4)
                if always and high >> 23 & 0xF == 7:
                    break
            elif operation in (0x14D, 0x15C) and always:  # EXIT, BPT.TRAP
                break
            elif operation == 0x144:  # CALL: what it uses is not known
                return 256
            else:
                highest = max(highest, *named_registers(low, high))
            at += 1
    return highest + 1


def named_registers(low: int, high: int) -> list[int]:
    """The registers that an instruction names, by its fields of 8 bits; -1 for none. What is not
    known here counts as a register."""
    operation = low & 0x1FF
    if 0x80 <= operation < 0x100 or operation == 0x02F:  # uniform ones, ELECT; but R2UR's source
        return [low >> 24 & 0xFF if operation == 0x0CA and low >> 24 & 0xFF != 0xFF else -1]
    target, fields = low >> 16 & 0xFF, [low >> 24 & 0xFF]
    memory = operation in (0x181, 0x184, 0x186, 0x188)  # LDG, LDS, STG, STS
    counts = operation in (0x1A7, 0x1A8, 0x18E)  # SYNCS, ATOMG, REDG
    if low >> 9 & 7 == 1 or operation in (0x186, 0x188) or counts:  # the second source: no constant
        fields.append(low >> 32 & 0xFF)
    if not memory and not counts and operation not in (0x00C, 0x01C):  # ISETP, PLOP3
        fields.append(high & 0xFF)
    more = {5: 1, 6: 3}.get(high >> 9 & 7, 0) if memory else operation == 0x025  # IMAD.WIDE
    return [-1, *(f for f in fields if f != 0xFF), *([target + more] if target != 0xFF else [])]


def late_exponentials(order: str) -> int:
    """Exponentials that ptxas put behind the wait for the product which was started to run beside
    them: of what follows a wait for all groups but one, those behind the wait for that one."""
    found = re.findall(r"wait 1, (?:\d+ EX2, )?wait 0, (\d+) EX2", order)
    return sum(map(int, found))


def short_names(mangled: list[str]) -> dict[str, str]:
    """window_forward<Bf16Math, 80, 64> of each, whatever the anonymous namespace is called."""
    lines = run(["c++filt", *mangled]).splitlines()
    short = {}
    for name, line in zip(mangled, lines, strict=True):
        line = line.replace("(anonymous namespace)::", "").split("(vlmk::")[0].split("(void")[0]
        short[name] = re.sub(r"\b\w+::", "", re.sub(r"\(.*$", "", line)).removeprefix("void ")
    return short


def launches(library: Path, runtime: Path) -> dict[str, tuple[int, int]]:
    """Threads and dynamic shared memory of each attention kernel, by mangled name."""
    seen: dict[str, tuple[int, int]] = {}
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_size_t,
        ctypes.c_void_p,
    )  # fmt: skip

    def launched(name: bytes, dims: Any, shared: int, _: Any) -> int:
        seen[name.decode()] = (dims[3] * dims[4] * dims[5], shared)
        return 0

    callback = kind(launched)
    fake = ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    fake.fakecuda_set_callback(callback)
    handle = ctypes.CDLL(str(library))
    try:
        for launcher, struct in attention_launchers(
            run(["nm", "-D", "--defined-only", str(library)])
        ):
            if struct == "TileListParams":
                one = params_struct(struct)(segments=1, tokens=1)
                getattr(handle, launcher)(ctypes.byref(one), None)
                continue
            for dtype, dim, max_seqlen, rotary, parts in itertools.product(
                (1, 2), (64, 72, 80, 96, 128), (64, 128), (0, 1), (1, 2)
            ):
                # One segment of one token, and a head for each part of a group; nothing is read.
                # An error: no such instance.
                params = params_struct(struct)()
                p = params.forward if "Grad" in struct else params
                p.max_seqlen = max_seqlen
                p.dtype, p.head_dim = dtype, dim
                p.segments = p.tokens = p.kv_heads = 1
                p.heads = parts
                p.rotary = rotary
                p.q.data = p.k.data = p.v.data = 256
                if "Grad" in struct:
                    params.dout.data = params.dq_sum = params.done = 256
                    params.group_parts, params.dkv_parts = parts, 256 * (parts - 1)
                getattr(handle, launcher)(ctypes.byref(params), None)
    finally:
        fake.fakecuda_set_callback(kind(0))
    return seen


def other_launch(kernel: str) -> tuple[int, int]:
    """The same of a kernel of cross_entropy.cu or a norm, kMostThreads and a word a warp, of what
    else is in layer/, or of embedding.cu: kThreads, or kLongThreads with that many sums."""
    if kernel.startswith(("cross_entropy", "rms_norm")):
        return 512, 512 // 32 * 4
    if kernel.startswith(("column_sums", "swiglu", "rotate_heads")):
        if kernel.startswith("column_sums"):
            return 1024, 1024 * 4
        return (128, 0) if kernel.startswith("swiglu_bias") else (256, 0)
    if not kernel.startswith("reduce_long_runs"):
        return 128, 0
    sums = next(n for name, n in (("Fp32x4", 4), ("x8", 8), ("x1", 1)) if name in kernel)
    return 512, 512 * 4 * sums


def attention_launchers(exported: str) -> Iterator[tuple[str, str]]:
    """Mangled name and params struct of each launcher of attention among a library's symbols."""
    structs = {"forward": "AttentionParams", "backward": "AttentionGradParams"}
    structs["tiles"] = "TileListParams"
    for name, way in re.findall(r"\bT (_ZN\w*?_(forward|backward|tiles)_cuda\w*)", exported):
        if re.search(r"window|sm80|sm90|tiles", name):
            yield name, structs[way]


def compiled(source: Path, keep: Path) -> str:
    """Builds one file for every architecture; what ptxas says, host.so and the cubins in `keep`."""
    nvcc = find_nvcc()
    assert nvcc is not None
    keep.mkdir()
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    return run(
        [nvcc, "-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", *targets]
        + ["-Xptxas=-v", "--threads=0", "--keep", "--keep-dir", str(keep)]
        + ["-cudart", "none", "-shared", "-Xcompiler", "-fPIC", "-I", str(CSRC)]
        + [str(source), "-o", str(keep / "host.so")]
    )


def measure() -> dict[str, Any]:
    """What static.json should hold for the sources as they are."""
    kernels: dict[str, dict[str, Any]] = {f"sm_{a}": {} for a in ARCHITECTURES}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        runtime = fake_runtime()
        sources = sorted((CSRC / "cuda").rglob("*.cu"))
        keeps = [folder / f"{s.parent.name}_{s.stem}" for s in sources]
        with ThreadPoolExecutor(2) as pool:  # a compiler waits for itself a tenth of its time
            reports = list(pool.map(compiled, sources, keeps))
        for keep, report in zip(keeps, reports, strict=True):
            figures = re.findall(
                r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?(\d+) bytes stack frame, "
                r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers(.*?)\n",
                report,
                flags=re.S,
            )
            if not figures:
                continue  # host code alone
            launched = launches(keep / "host.so", runtime)
            codes = {
                architecture: dict(kernel_codes(path.read_bytes()))
                for path in keep.glob("*.cubin")
                for architecture in re.findall(r"_(\d+a?)\.cubin$", path.name)
            }
            names = short_names(sorted({f[0] for f in figures}))
            for mangled, architecture, stack, stores, loads, registers, rest in figures:
                if ONLY_ON.get(names[mangled].split("<")[0], architecture) != architecture:
                    continue
                static = re.search(r"(\d+) bytes smem", rest)
                shared = int(static[1]) if static else 0
                assert not launched or mangled in launched, f"no launch of {names[mangled]}"
                threads, dynamic = launched.get(mangled) or other_launch(names[mangled])
                code = codes[architecture][mangled]
                kernels[f"sm_{architecture}"][names[mangled]] = {
                    "registers": int(registers),
                    "stack bytes": int(stack),
                    "spilled bytes": int(stores) + int(loads),
                    "static shared bytes": shared,
                    "dynamic shared bytes": dynamic,
                    "threads": threads,
                    "blocks of an SM": blocks_of_sm(
                        architecture, int(registers), threads, shared + dynamic
                    ),
                    "instructions": dict(sorted(operations(code).items())),
                }
                if given := given_registers(code):
                    kernels[f"sm_{architecture}"][names[mangled]]["registers after giving"] = given
                if order := order_of_products(code).partition("fence")[2]:
                    kernels[f"sm_{architecture}"][names[mangled]]["order"] = "fence" + order
    return {
        "toolkit": toolkit(),
        "sources": sources_digest(),
        "kernels": {a: dict(sorted(found.items())) for a, found in kernels.items()},
    }


def worse(measured: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """A line for each figure that is worse than recorded, and for each kernel of one side only."""
    lines = []
    for architecture in sorted({*measured["kernels"], *recorded["kernels"]}):
        new, old = (x["kernels"].get(architecture, {}) for x in (measured, recorded))
        for name in sorted({*new, *old}):
            where = f"{name} on {architecture}"
            if name not in new or name not in old:
                lines.append(f"{where}: {'not built any more' if name in old else 'not recorded'}")
                continue
            a, b = (
                {**{k: v for k, v in x[name].items() if k not in ("instructions", "order")},
                 **{f"{k} instructions": v for k, v in x[name]["instructions"].items()},
                 "late exponentials": late_exponentials(x[name].get("order", ""))}
                for x in (new, old)
            )  # fmt: skip
            for figure in sorted({*a, *b}):
                before, now = b.get(figure, 0), a.get(figure, 0)
                if now < before if figure == "blocks of an SM" else now > before:
                    lines.append(f"{where}: {figure} {now}, recorded {before}")
    return lines


def one_line_a_kernel(measured: dict[str, Any]) -> str:
    """JSON in which a change of a kernel is a change of its line."""
    blocks = [
        f'  "{architecture}": {{\n'
        + ",\n".join(f"   {json.dumps(name)}: {json.dumps(of)}" for name, of in found.items())
        + "\n  }"
        for architecture, found in measured["kernels"].items()
    ]
    head = "".join(f" {json.dumps(name)}: {json.dumps(measured[name])},\n" for name in HEAD)
    head += ' "kernels": {\n'
    return "{\n" + head + ",\n".join(blocks) + "\n }\n}\n"


def main() -> int:
    if reason := missing_tool():
        sys.stderr.write(f"static figures were not taken: {reason}\n")
        return 1
    measured = measure()
    if FILE.exists():
        for line in worse(measured, json.loads(FILE.read_text())):
            sys.stdout.write(f"worse: {line}\n")
    FILE.write_text(one_line_a_kernel(measured))
    sys.stdout.write(f"wrote {FILE.relative_to(ROOT)}\n")
    return 0


def hindrance() -> str | None:
    """Why the figures can't be compared here, or None."""
    if reason := missing_tool():
        return reason
    if shutil.which("c++filt") is None:
        return "no c++filt on PATH"
    recorded, found = json.loads(FILE.read_text())["toolkit"], toolkit()
    return None if recorded == found else f"nvcc is {found}, the file was written with {recorded}"


if __name__ == "__main__":
    sys.exit(main())
