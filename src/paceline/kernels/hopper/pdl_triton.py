"""Launched early (`kernels.device.pdl`): a kernel lets the next one begin, and waits for those before it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """What comes before this may not depend on any kernel before; what comes behind it sees all that they wrote."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
