"""Loading of the native module, registration with torch, and the argument checks all ops share.

The pattern of an op that torch's dispatcher or torch.compile must see (attention, embedding, image,
loss; see image/patchify.py): a plain-torch `*_reference`; a function that checks its arguments and
hands raw pointers to `launch`; `define` with that function, a fake one (shapes only, for
torch.compile) and an autograd formula; the public function, which calls the op. What modules call
inside (layer.py, rotary.py, product.py, optim) has an autograd.Function and `launch` alone.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterable
from numbers import Integral
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch  # first: the native module then shares torch's OpenMP runtime and thread count
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import TransformType, get_interpreter_stack, is_legacy_batchedtensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

F = TypeVar("F", bound=Callable[..., Any])


def _missing(name: str) -> None:
    raise AttributeError(
        f"vlmkernels' native module has no {name}: it was built from other sources than these; "
        "build it again, `pip install .` or `pip install -e .` in the source tree"
    )


def _load() -> ModuleType:
    try:
        _C = importlib.import_module("vlmkernels._C")
    except ImportError as error:
        folder = Path(__file__).parent
        built = sorted(p.name for p in folder.glob("_C*"))
        todo = "build it in the source tree, with this Python: `pip install -e .`"
        if not built and (folder.parent / "setup.py").exists():
            todo = (
                "this is the source tree, found ahead of an installed package: leave this folder, "
                "or `pip install -e .` in it"
            )
        raise ImportError(
            f"vlmkernels' native module did not load ({error}); {folder} holds "
            f"{', '.join(built) or 'no file _C*'}; {todo}"
        ) from error
    vars(_C)["__getattr__"] = _missing
    _C.isa()  # a bad VLMKERNELS_ISA is an error at import, not at the first kernel
    return _C


_C: Any = _load()

#: Ops given to `define` are torch.ops.vlmkernels.<name>.
LIBRARY = torch.library.Library("vlmkernels", "FRAGMENT")

#: Codes of vlmk::DType in csrc/common/params.h.
DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def define(
    schema: str,
    run: Callable,
    *,
    fake: Callable,
    devices: Iterable[str] = ("CPU", "CUDA"),
    autograd: tuple[Callable, Callable] | None = None,
    capturable: bool = True,
) -> Any:
    """Registers torch.ops.vlmkernels.<name> and returns it, ready to be called.

    autograd: setup_context(ctx, inputs, output) and the backward formula, as torch.library's.
    capturable: False where it waits for the GPU, or keeps memory beyond a call: torch.compile then
    leaves it out of its CUDA graphs (where torch knows the tag).

    Torch's dispatcher takes about 6 us a call (torch.library.custom_op, which does the same, 11);
    `_direct` goes there only if somebody looks on.
    """
    name = schema.split("(", 1)[0]
    unsafe = [] if capturable else [getattr(torch.Tag, "cudagraph_unsafe", None)]
    LIBRARY.define(schema, tags=tuple(filter(None, unsafe)))
    # Without a formula the dispatcher leaves grad mode on, in which no out= takes what learns.
    checked = _without_tangents(name, run if autograd else torch.no_grad()(run))
    for device in devices:
        LIBRARY.impl(name, checked, device)
    qualified = f"vlmkernels::{name}"
    torch.library.register_fake(qualified, fake, lib=LIBRARY)
    op = getattr(torch.ops.vlmkernels, name).default
    aliases = [argument.alias_info for argument in op._schema.arguments]
    if written := [i for i, alias in enumerate(aliases) if alias is not None and alias.is_write]:
        LIBRARY.impl(name, _counted(op, written), "ADInplaceOrView", with_keyset=True)
    if autograd is None:
        return op if written else _direct(name, op, run, op)
    setup_context, backward = autograd
    torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=LIBRARY)
    elsewhere = without_transforms(name, op, maps=True)
    if written:
        return elsewhere
    return _direct(name, elsewhere, run, recorded(_function(name, run, setup_context, backward)))


def _function(
    name: str, run: Callable, setup_context: Callable, backward: Callable
) -> type[torch.autograd.Function]:
    """The op as an autograd.Function of its own, without the wrappers that torch.library puts
    around it, which every small kernel would wait for."""

    def forward(ctx: Any, *args: Any) -> Any:
        output = run(*args)
        setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)


def _direct(name: str, op: Callable, run: Callable, by_autograd: Callable) -> Callable:
    """The op; `by_autograd` where only autograd or a profiler looks on, `run` where nobody does. A
    kernel waits for all that is called before it: behind another kernel, which has left none of
    that in the caches, several times as long as in a loop."""

    def call(*args: Any) -> Any:
        if (
            is_compiling()
            or _get_tracing_state()
            or _len_torch_dispatch_stack()
            or forward_ad._current_level >= 0
            or get_interpreter_stack()
        ):
            return op(*args)
        tensors = [x for x in args if isinstance(x, Tensor)]
        if not is_plain(*tensors):
            return op(*args)
        learns = learning() and any(x.requires_grad for x in tensors)
        return (by_autograd if learns or _profiler_enabled() else run)(*args)

    call.__name__ = name
    return call


def learning() -> bool:
    """Whether autograd records: never in inference mode, whatever grad mode is set in it."""
    return torch.is_grad_enabled() and (is_compiling() or not torch.is_inference_mode_enabled())


def recorded(function: type[torch.autograd.Function]) -> Callable:
    """function.apply, which alone would record in inference mode where grad mode is on."""

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() and not learning():
            with torch.no_grad():
                return function.apply(*args)
        return function.apply(*args)

    return call


def is_plain(*tensors: Tensor) -> bool:
    """Whether they hold their own elements in memory, on the CPU or on CUDA, with their sign."""
    return all(
        type(x) in (Tensor, Parameter)
        and (x.is_cpu or x.is_cuda)
        and not x.is_neg()
        and not is_legacy_batchedtensor(x)  # of is_grads_batched
        for x in tensors
    )


def _counted(op: Any, written: list[int]) -> Callable:
    """The op, for autograd to notice where a tensor that it has saved was written."""

    def run(keyset: Any, *args: Any) -> Any:
        for i in written:
            if args[i] is not None:
                torch.autograd.graph.increment_version(args[i])
        return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    return run


def have_tangents(*args: Any) -> bool:
    """Whether some do, in forward mode."""
    return forward_ad._current_level >= 0 and (
        bool(eager_transforms.JVP_NESTING)  # there the tangents can't be seen from here
        or any(
            forward_ad.unpack_dual(x).tangent is not None
            for x in args
            if isinstance(x, Tensor) and x.is_floating_point()
        )
    )


def _without_tangents(name: str, run: Callable) -> Callable:
    """`run`, but an error in forward mode, where torch would go on with tangents of zero."""

    @functools.wraps(run)
    def checked(*args: Any) -> Any:
        if have_tangents(*args):
            raise RuntimeError(
                f"vlmkernels.{name} has no forward-mode derivative; use backward(), or plain torch"
            )
        return run(*args)

    return checked


def without_transforms(name: str, function: Callable, *, maps: bool = False) -> Callable:
    """`function`, with a clear error under torch.func, whose own names an autograd.Function inside;
    maps: under vmap alone it works."""

    def call(*args: Any) -> Any:
        if is_compiling():
            return function(*args)
        kinds = {layer.key() for layer in get_interpreter_stack() or ()}
        if kinds == {TransformType.Vmap} and not maps:
            raise RuntimeError(f"vlmkernels.{name} can't be mapped by torch.func.vmap; use a loop")
        if TransformType.Grad in kinds or (kinds and not maps):
            raise RuntimeError(
                f"vlmkernels.{name} can't be differentiated by torch.func (grad, vjp, jacrev, ..); "
                "use torch.autograd, or plain torch"
            )
        return function(*args)

    return call


def not_traced(function: F) -> F:
    """`function`, which compiled code calls and torch.compile does not trace."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]  # has no types


#: Called before a kernel on the CPU: torch gives a thread its number of threads, which OpenMP keeps
#: for each, when the thread first asks for it.
take_threads = torch.get_num_threads


def launch(name: str, tensor: Tensor, *args: Any, **named: Any) -> None:
    """Runs the native function `name`; for a tensor on a GPU `name`_cuda, on its current stream."""
    if not tensor.is_cuda:
        take_threads()
        getattr(_C, name)(*args, **named)
        return
    if not has_cuda_kernels():
        raise RuntimeError(
            "vlmkernels was built without CUDA kernels: rebuild it where nvcc is found "
            "(VLMKERNELS_CUDA=ON says what is missing)"
        )
    native, device = getattr(_C, name + "_cuda"), tensor.device
    stream = torch._C._cuda_getCurrentRawStream(device.index)  # current_stream makes an object
    if device.index == torch.cuda.current_device():
        native(*args, **named, stream=stream)
        return
    with torch.cuda.device(device):
        native(*args, **named, stream=stream)


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """tensor.to(device), which on CUDA the host doesn't wait for: from pageable memory a copy of
    more than 64 KB would begin only when the GPU has done all that the stream has for it."""
    if tensor.is_cpu and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pointer(tensor: Tensor | None) -> int:
    """Where a kernel finds a tensor's elements; 0 for None.

    Raises:
        ValueError: it has no memory, or there with the other sign.
    """
    if tensor is None:
        return 0
    address = tensor.data_ptr()
    if address == 0:
        check_allocated(lambda: "a tensor", tensor)
    if tensor.is_neg():
        raise ValueError(f"a tensor is {describe(tensor)}")
    return address


def sparse_rows(rows: Tensor, values: Tensor, count: int) -> Tensor:
    """The sparse tensor [count, ..] that has `values` in `rows`, which ascend. By the context:
    torch 2.11 warns of what its argument asks for."""
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(
            rows[None], values, (count, *values.shape[1:]), is_coalesced=True
        )


def no_rows(like: Tensor) -> Tensor:
    """A sparse tensor as `like`, without a row: hooks on a parameter fire, and nothing is added."""
    values = like.new_empty(0, *like.shape[1:])
    return sparse_rows(values.new_empty(0, dtype=torch.int64), values, len(like))


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Callable[..., Any], _: Tensor | None, *inputs: Any) -> Any:
        ctx.name = f"vlmkernels.{op.__name__}" if isinstance(op, FunctionType) else str(op)
        return op(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{ctx.name} has no derivative: results of vlmkernels can be differentiated once, "
            "not twice; use plain torch there"
        )


def once(op: Callable[..., Any], *inputs: Any, also: Tensor | None = None) -> Any:
    """op(*inputs) in a backward formula, for an op without one of its own.

    Under create_graph=True torch would warn and go on without this op's share of the second
    derivative; so its results refuse to be differentiated there. In forward mode an error.

    also: what the results depend on beside `inputs`.
    """
    if not is_compiling() and have_tangents(*inputs):
        raise RuntimeError(
            "a backward pass of vlmkernels has no forward-mode derivative, as forward over reverse "
            "asks for; use plain torch there"
        )
    return _Once.apply(op, also, *inputs) if torch.is_grad_enabled() else op(*inputs)


def set_isa(name: str) -> None:
    """For tests: run the kernels of one of available_isas() from here on; "": those chosen for this
    machine."""
    _C.set_isa(name)


def available_isas() -> list[str]:
    """The instruction sets compiled in that this machine runs, plainest first; "amx_emulated", the
    kernels of "amx_bf16" for tests on any AVX-512, is the last and never chosen by itself."""
    return _C.available_isas()


@functools.cache
def has_cuda_kernels() -> bool:
    return _C.build_info()["cuda"] is not None


def cuda_archs() -> tuple[str, ...]:
    """What the CUDA kernels were compiled for, ("80", "90a"); the first one's PTX is there too."""
    return tuple(filter(None, _C.build_info()["cuda_archs"].split(",")))


# ---- argument checks: each raises ValueError (TypeError for what is no tensor) with one sentence
# that names the argument, what it got and what it needs ------------------------------------------


def describe(tensor: object) -> str:
    """dtype, shape and device of a tensor, for error texts."""
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}"
    text = f"{str(tensor.dtype)[6:]} {list(tensor.shape)} on {tensor.device}"
    if not is_compiling() and tensor.is_neg():  # which can't be traced
        text += ", a negated view (pass its resolve_neg())"
    return text


def check(condition: bool, message: str) -> None:
    """For conditions about values; the message is formatted by the caller only if it is cheap."""
    if not condition:
        raise ValueError(message)


def is_whole(value: object) -> bool:
    """An int, numpy's too, or a traced size; no bool."""
    if type(value) is int:
        return True
    return isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)


def check_whole(**values: object) -> None:
    for name, value in values.items():
        if not is_whole(value):
            raise ValueError(f"{name} is {value!r}; it must be a whole number")


def check_pair(name: str, value: object) -> tuple[int, int]:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        first, second = value
        if is_whole(first) and is_whole(second):
            return first, second
    raise ValueError(f"{name} is {value!r}; it must be two whole numbers")


def check_tensors(**tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            hint = f": pass torch.from_numpy({name})" if type(tensor).__name__ == "ndarray" else ""
            raise TypeError(f"{name} is {describe(tensor)}; it must be a torch.Tensor{hint}")


def check_tensor(
    name: str,
    tensor: object,
    *,
    dtypes: Collection[torch.dtype],
    shape: str,
    dim: int,
    device: torch.device | None = None,
) -> None:
    """`shape` is the documented shape, "[T, H, D]": only its number of dimensions is checked."""
    if not isinstance(tensor, Tensor):
        return check_tensors(**{name: tensor})  # raises
    if (
        tensor.dtype not in dtypes
        or tensor.dim() != dim
        or (device is not None and tensor.device != device)
    ):
        kinds = " or ".join(str(d)[6:] for d in dtypes)
        where = f" on {device}" if device is not None else ""
        raise ValueError(f"{name} is {describe(tensor)}; it must be {kinds} {shape}{where}")


def check_allocated(name: Callable[[], str], tensor: Tensor) -> None:
    """`name` is asked for only if there is no storage: freed, as FSDP does, or a subclass's."""
    if tensor.data_ptr() == 0 and tensor.numel() > 0:
        because = "its storage was freed"
        if hasattr(tensor, "to_local"):
            because = "it is a DTensor; pass its to_local()"
        raise ValueError(f"{name()}, {describe(tensor)}, has no memory: {because}")


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may share memory: where their ranges of addresses do."""

    def ends(x: Tensor) -> tuple[int, int]:
        steps = (max(n - 1, 0) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        return x.data_ptr(), x.data_ptr() + (sum(steps) + 1) * x.element_size()

    (begin, end), (other_begin, other_end) = ends(one), ends(other)
    return bool(one.numel() and other.numel()) and begin < other_end and other_begin < end


def check_apart(name: str, x: Tensor, written: str, out: Tensor) -> None:
    if overlap(x, out):
        raise ValueError(
            f"{name} lies in the memory of {written}, which is written; pass {name}.clone()"
        )


def check_in_place(name: str, x: Tensor, instead: str, dirty: Tensor | None = None) -> None:
    """dirty: what is written into an x that an autograd.Function marks as dirty."""
    because = None
    if x.is_leaf and x.requires_grad and learning():
        because = "a leaf that requires a gradient"
    elif not x.is_contiguous():
        because = "not contiguous"
    elif is_compiling():  # the rest can't be traced
        return
    elif x.is_neg():
        because = "a negated view"
    elif x.is_inference() and not torch.is_inference_mode_enabled():
        because = "a tensor of inference mode"
    elif x._is_view() and learning():
        because = _not_followed(x, dirty)
    if because:
        raise ValueError(f"{name} is {because}, so it can't be written in place; {instead}")


def _not_followed(view: Tensor, dirty: Tensor | None) -> str | None:
    """Why autograd would not follow what is written into a view, or None. Of views marked as dirty
    it says so itself, but when they are written."""
    base, meta = view._base, torch._C._autograd._get_creation_meta(view)
    if base is not None and base.is_leaf and base.requires_grad:
        return "a view of a leaf that requires a gradient"
    learns = dirty is not None and (view.requires_grad or dirty.requires_grad)
    if learns and meta != torch._C._autograd.CreationMeta.DEFAULT:
        return "a view that autograd does not follow (of chunk, split, a custom Function, no_grad)"
    return None


def is_traced() -> bool:
    """Whether a tracer or FakeTensorMode looks on, for which no value is known."""
    mode, kinds = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
    return mode(kinds.FAKE) is not None or mode(kinds.PROXY) is not None


def check_not_recorded(name: str) -> None:
    """Of a function that calls a kernel itself, without an op that could be recorded."""
    if is_compiling():
        return
    mode, kinds = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
    if mode(kinds.FAKE) is not None and mode(kinds.PROXY) is None:
        raise RuntimeError(f"vlmkernels.{name} does not run under FakeTensorMode; run it outside")
    if mode(kinds.PROXY) is not None or torch.jit.is_tracing():
        raise RuntimeError(
            f"vlmkernels.{name} can't be recorded by make_fx or torch.jit.trace; use torch.compile"
        )


def check_last_contiguous(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel() > 0:
        raise ValueError(
            f"{name} has strides {tuple(tensor.stride())}; its last dimension must be contiguous: "
            f"pass {name}.contiguous()"
        )


def saved_tensor_hooks() -> bool:
    """Whether what autograd keeps now goes through hooks: in a checkpoint that is not reentrant, in
    save_on_cpu and the like."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is not None:
        return top(True) is not None
    with torch.enable_grad():  # torch 2.6: a tensor kept with hooks takes no others
        kept = torch.ones((), requires_grad=True).exp().grad_fn
    try:
        kept._raw_saved_result.register_hooks(lambda x: x, lambda x: x)  # type: ignore[union-attr]
    except RuntimeError:
        return True
    return False


def main_grad_of(weight: Tensor, name: str = "weight") -> Tensor | None:
    """What weight_grad="main_grad" (name_grad) adds to; None where no gradient is wanted, and under
    torch.compile."""
    if is_compiling() or not (weight.requires_grad and learning()):
        return None
    main_grad = getattr(weight, "main_grad", None)
    if (
        not isinstance(main_grad, Tensor)
        or main_grad.dtype != torch.float32
        or main_grad.shape != weight.shape
        or main_grad.device != weight.device
        or not main_grad.is_contiguous()
    ):
        raise ValueError(
            f"{name}.main_grad is {describe(main_grad)}; {name}_grad='main_grad' needs a "
            f"contiguous float32 {list(weight.shape)} on {weight.device}"
        )
    return main_grad
