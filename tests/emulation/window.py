"""Which instances of window attention are built: all of them take a minute."""

from __future__ import annotations

from tests.ptxsim.attention_cases import keep_instances

#: (head_dim, keys).
INSTANCES = ((80, 64), (64, 128))
EDIT = {"attention_window.cu": lambda code: keep_instances(code, INSTANCES)}
