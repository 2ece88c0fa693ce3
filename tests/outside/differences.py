"""Where we differ from what other projects' classes do, on purpose: `make test-outside` expects
these tests to fail, as they are described here, and no others."""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    tests: str  # regular expression, of a test's id
    error: type[BaseException]  # with which it ends
    reason: str


DIFFERENCES = [
    Difference(
        r"test_torch_optimizers.*-(maximize|amsgrad)\]",
        TypeError,
        "forms of Adam that no kernel here has: no such argument, and refused in groups",
    ),
    Difference(
        r"test_torch_optimizers.*test_flags\[",
        TypeError,
        "choices between torch's implementations: there is one here",
    ),
    Difference(
        r"test_errors.*lr as Tensor doesn't work with foreach|test_errors.*foreach=True",
        TypeError,
        "foreach is an argument of torch's own",
    ),
    Difference(
        r"test_errors.*betas must be either both",
        BaseException,
        "each beta may be a number or a tensor: kernels get numbers",
    ),
    Difference(
        r"test_errors.*a param group cannot have duplicate parameters",
        ValueError,
        "torch warns that this will be an error; here it is one",
    ),
    Difference(
        r"test_scenarios\[hybrid.*-(deepcopy|pickle)\]",
        TypeError,
        "copies between device and host can't be pickled; the sentence says what to do instead",
    ),
    Difference(
        r"test_scenarios\[.*-(complex|float64)\]",
        ValueError,
        "kernels step float32 (HybridDeviceOptimizer bfloat16 too); named when parameters come",
    ),
    Difference(
        r"test_scenarios\[CPUAdam.*-bfloat16\]",
        ValueError,
        "CPUAdam steps float32 masters; set_low_precision keeps a bfloat16 copy of them",
    ),
    Difference(
        r"test_scenarios\[hybrid.*-bfloat16\]",
        AssertionError,
        "torch rounds weights and moments to bfloat16 at every step; here they are float32",
    ),
]
