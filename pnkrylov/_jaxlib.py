"""Switches off a fusion of one jaxlib release that computes wrong numbers on CPU.

jaxlib 0.10.2, the newest one for Python 3.11, returns wrong sums of products with a broadcast
operand beyond 32768 float32 entries, under `jit` on CPU (jax issue 39103: 0.10.1 is right). A
library whose numbers carry error bars cannot live with that, so importing it sets the XLA flag
that avoids the fusion, for this release only. XLA reads its flags when JAX runs its first
operation: import pnkrylov before that, or set the flag yourself.
"""

import os
from importlib.metadata import version

_BROKEN = "0.10.2"
_OPTION = "--xla_cpu_experimental_ynn_fusion_type"

_flags = os.environ.get("XLA_FLAGS", "")
if version("jaxlib") == _BROKEN and _OPTION not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} {_OPTION}=".strip()
