"""Where we differ from what other projects' classes do, on purpose: `make test-outside` expects
these tests to fail, as they are described here, and no others."""

from __future__ import annotations

from typing import NamedTuple

import pytest


class Difference(NamedTuple):
    tests: str  # regular expression, of a test's id
    error: type[BaseException]  # with which it ends
    reason: str


DIFFERENCES = [
    Difference(
        r"test_inputs\[(maximize|amsgrad)-",
        TypeError,
        "forms of Adam that no kernel here has: no such argument, and refused in groups",
    ),
    Difference(
        r"test_flags\[",
        TypeError,
        "choices between torch's implementations: there is one here",
    ),
    Difference(
        r"test_errors.*foreach",
        TypeError,
        "foreach is an argument of torch's own",
    ),
    Difference(
        r"test_errors.*betas must be either both",
        pytest.fail.Exception,
        "each beta may be a number or a tensor: kernels get numbers",
    ),
    Difference(
        r"test_scenarios\[(deepcopy|pickle)-.*-hybrid",
        TypeError,
        "copies between device and host can't be pickled; the sentence says what to do instead",
    ),
    Difference(
        r"test_scenarios\[float64-",
        ValueError,
        "kernels step float32 (HybridDeviceOptimizer bfloat16 too); named when parameters come",
    ),
    Difference(
        r"test_scenarios\[bfloat16-.*-CPUAdam\]",
        ValueError,
        "CPUAdam steps float32 masters; set_low_precision keeps a bfloat16 copy of them",
    ),
    Difference(
        r"test_scenarios\[bfloat16-.*-hybrid",
        AssertionError,
        "torch rounds weights and moments to bfloat16 at every step; here they are float32",
    ),
    Difference(
        r"test_of_transformers\[.*-test_(attention_outputs|capture_outputs_decorator"
        r"|eager_matches_sdpa_inference_.*_output_attentions|model_outputs_equivalence"
        r"|retain_grad_hidden_states_attentions)\]",
        AssertionError,
        "they ask for attention weights (output_attentions), which no kernel forms: refused",
    ),
    Difference(
        r"test_of_transformers\[.*-test_(attn_implementation_composite_models"
        r"|can_set_attention_dynamically(_composite_model)?"
        r"|sdpa_can_dispatch_composite_models)\]",
        AssertionError,
        "they look for the attention implementation they set; enable has set its own",
    ),
]
