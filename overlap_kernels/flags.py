# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
"""Waiting for another program's flag: what every kernel does that others hand data to."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for(
    flag: tl.tensor,
    least: tl.tensor,
    state: tl.tensor,
    host: tl.tensor,
    peer: tl.tensor,
    limit: tl.tensor,
) -> None:
    """Spin until the flag is `least` or more; after `limit` give up and tell the host who."""
    left = tl.where(tl.load(state) == 0, limit, 0)
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (seen < least) & (left > 0):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        left -= 1
    if seen < least:
        tl.store(state, 1)
        tl.store(host, peer + 1)
