"""Programmatic dependent launch (`kernels.device.pdl`): a kernel lets the next one start, and waits for its
predecessors."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Code before this call may not depend on any earlier kernel; code after it sees all that they wrote."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
