"""What is built: of window attention two instances, all of them take a minute."""

from __future__ import annotations

from tests.ptxsim.attention_cases import keep_instances

#: (head_dim, keys).
INSTANCES = ((80, 64), (64, 128))
EDIT = {"attention_window.cuh": lambda code: keep_instances(code, INSTANCES)}
#: With the sanitizers, whose code takes longest to compile.
EDIT_ONE = {"attention_window.cuh": lambda code: keep_instances(code, INSTANCES[:1])}
SOURCES = ("embedding.cu", "attention_window.cu", "attention_window_vision.cu")
