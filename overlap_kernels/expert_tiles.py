# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
"""Triton kernels that move tokens and multiply by experts at once, on one rank or several.

After Comet (arXiv 2502.19811): programs that move tokens and programs that multiply run side by
side in one kernel and meet at flags. Dispatch is cut by rows: a tile of rows is multiplied as soon
as its rows are here. Combine is cut by columns: when all experts are through with a group of
columns, each token's sum over its experts can be made of them.

A program waits only for programs of lower number, or for other ranks, so that it makes no
difference how many run at a time. What a flag covers is written by plain stores and read by plain
loads: TMA is not ordered by flags.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from dynaflow_train.overlap_kernels.flags import wait_for
from dynaflow_train.overlap_kernels.grouped_tiles import (
    expert_rows,
    find_tile,
    load_rows,
    load_weight,
    store_rows,
    swizzle,
)


@triton.jit
def product(  # noqa: PLR0913
    x: tl.tensor, w: tl.tensor, rows: tl.tensor, valid: tl.tensor, expert: tl.tensor,
    at_n: tl.tensor, k: tl.tensor, n: tl.tensor, w_tma: tl.constexpr, k_major: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
) -> Any:  # fmt: skip
    """Rows times one tile of their expert's columns, rows through pointers."""
    acc = tl.zeros((block_m, block_n), tl.float32)
    for at_k in tl.range(0, k, block_k):
        a = load_rows(x, rows, valid, 0, at_k, k, False, block_k)
        b = load_weight(w, expert, at_k, at_n, k, n, w_tma, k_major, block_k, block_n)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def copy_rows(  # noqa: PLR0913
    peers: tl.tensor, staged: tl.tensor, source: tl.tensor, rows: tl.tensor, valid: tl.tensor,
    tokens: tl.tensor, k: tl.tensor, block: tl.constexpr,
) -> None:  # fmt: skip
    """Rows from wherever their tokens are (`rank * tokens + token`) into `staged`."""
    origin = tl.load(source + rows, mask=valid, other=0)
    base = tl.load(peers + origin // tokens).to(staged.dtype)
    place = tl.multiple_of(base, 16) + (origin % tokens).to(tl.int64) * k
    for at in tl.range(0, k, block):
        columns = at + tl.arange(0, block)
        inside = valid[:, None] & (columns < k)[None, :]
        values = tl.load(place[:, None] + columns[None, :], mask=inside, other=0.0)
        store_rows(staged, values, rows, valid, at, k, block)


@triton.jit(do_not_specialize=["experts", "tokens", "limit", "copiers", "rank"])
def dispatch_kernel(  # noqa: PLR0913
    peers: tl.tensor, staged: tl.tensor, source: tl.tensor, w: tl.tensor, y: tl.tensor,
    ends: tl.tensor, arrived: tl.tensor, state: tl.tensor, host: tl.tensor, limit: tl.tensor,
    tokens: tl.tensor, k: tl.tensor, n: tl.tensor, experts: tl.tensor, copiers: tl.tensor,
    rank: tl.tensor, padded: tl.constexpr, w_tma: tl.constexpr, k_major: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, block_r: tl.constexpr,
    block_c: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    """y[r] = staged[r] @ w[expert of r], with staged[r] fetched beside it, by the first programs.

    `arrived` [tiles of rows], zeros at the start, counts the parts of each tile that are here.
    """
    row_start, row_end = expert_rows(ends, experts, padded)
    tiles_end = tl.cumsum(tl.cdiv(row_end - row_start, block_m), 0)
    tiles_n = tl.cdiv(n, block_n)
    parts: tl.constexpr = block_m // block_r
    program = tl.program_id(0)
    if program < copiers:
        for part in tl.range(program, tl.max(tiles_end, 0) * parts, copiers):
            expert, tile, first, end = find_tile(part // parts, row_end, tiles_end)
            row = first + tile * block_m + part % parts * block_r
            rows = row + tl.arange(0, block_r)
            copy_rows(peers, staged, source, rows, rows < end, tokens, k, block_c)
            tl.debug_barrier()  # every thread's stores come before the one thread's release
            tl.atomic_add(arrived + part // parts, 1, sem="release", scope="gpu")
    else:
        total = tl.max(tiles_end, 0) * tiles_n
        for at in tl.range(program - copiers, total, tl.num_programs(0) - copiers):
            expert, local, first, end = find_tile(at, row_end, tiles_end * tiles_n)
            tile_m, tile_n = swizzle(local, tl.cdiv(end - first, block_m), tiles_n, group)
            before = (at - local) // tiles_n
            wait_for(arrived + before + tile_m, parts, state, host, rank, limit)
            rows = first + tile_m * block_m + tl.arange(0, block_m)
            valid, at_n = rows < end, tile_n * block_n
            acc = product(
                staged, w, rows, valid, expert, at_n, k, n, w_tma, k_major, block_m, block_n,
                block_k,
            )  # fmt: skip
            store_rows(y, acc, rows, valid, at_n, n, block_n)


@triton.jit
def weighted_sum(  # noqa: PLR0913
    y: tl.tensor, positions: tl.tensor, weights: tl.tensor, token: tl.tensor, live: tl.tensor,
    columns: tl.tensor, n: tl.tensor, top: tl.constexpr, weighted: tl.constexpr,
    block_t: tl.constexpr, block_c: tl.constexpr,
) -> Any:  # fmt: skip
    """Sum over a token's experts in their order, in fp32; experts of other ranks have row -1."""
    total = tl.zeros((block_t, block_c), tl.float32)
    for which in tl.static_range(top):
        row = tl.load(positions + token * top + which, mask=live, other=-1)
        inside = (row >= 0)[:, None] & (columns < n)[None, :]
        place = y + row.to(tl.int64)[:, None] * n + columns[None, :]
        values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        if weighted:
            values *= tl.load(weights + token * top + which, mask=live, other=0.0)[:, None]
        total += values
    return total


@triton.jit
def make(  # noqa: PLR0913
    x: tl.tensor, w: tl.tensor, y: tl.tensor, at: tl.tensor, row_end: tl.tensor,
    tiles_end: tl.tensor, counts: tl.tensor, k: tl.tensor, n: tl.tensor, w_tma: tl.constexpr,
    k_major: tl.constexpr, wide: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    block_k: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply tile `at`: group of columns by group, in each expert by expert; and count it."""
    tiles_m, tiles_n = tl.max(tiles_end, 0), tl.cdiv(n, block_n)
    which = at // (tiles_m * wide)
    width = tl.minimum(wide, tiles_n - which * wide)
    in_group = at - which * tiles_m * wide
    expert, local, first, end = find_tile(in_group, row_end, tiles_end * width)
    tile_m, tile_n = swizzle(local, tl.cdiv(end - first, block_m), width, group)
    rows = first + tile_m * block_m + tl.arange(0, block_m)
    valid, at_n = rows < end, (which * wide + tile_n) * block_n
    acc = product(x, w, rows, valid, expert, at_n, k, n, w_tma, k_major, block_m, block_n, block_k)
    store_rows(y, acc, rows, valid, at_n, n, block_n)
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    tl.atomic_add(counts + which, 1, sem="release", scope="gpu")


@triton.jit
def send(  # noqa: PLR0913
    y: tl.tensor, positions: tl.tensor, weights: tl.tensor, target: tl.tensor, owner: tl.tensor,
    token: tl.tensor, tokens: tl.tensor, first: tl.tensor, n: tl.tensor, top: tl.constexpr,
    weighted: tl.constexpr, parts: tl.constexpr, block_t: tl.constexpr, block_c: tl.constexpr,
) -> None:  # fmt: skip
    """The sums of a block of an owner's tokens, `parts` blocks of columns from `first`."""
    live = token < tokens
    for part in tl.range(0, parts):
        at = first + part * block_c
        columns = at + tl.arange(0, block_c)
        places = owner * tokens + token
        total = weighted_sum(
            y, positions, weights, places, live, columns, n, top, weighted, block_t, block_c
        )
        store_rows(target, total, token, live, at, n, block_c)


@triton.jit
def announce(
    sent: tl.tensor,
    blocks: tl.tensor,
    flags: tl.tensor,
    owner: tl.tensor,
    place: tl.tensor,
    epoch: tl.tensor,
) -> None:
    """The last block that was sent to an owner tells it so."""
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    if tl.atomic_add(sent, 1, sem="acq_rel", scope="sys") == blocks - 1:
        flag = tl.load(flags + owner).to(tl.pointer_type(tl.int32)) + place
        tl.atomic_xchg(flag, tl.load(epoch) + 1, sem="release", scope="sys")


@triton.jit
def receive(  # noqa: PLR0913
    own: tl.tensor, out: tl.tensor, token: tl.tensor, tokens: tl.tensor, first: tl.tensor,
    n: tl.tensor, world: tl.constexpr, parts: tl.constexpr, block_t: tl.constexpr,
    block_c: tl.constexpr,
) -> None:  # fmt: skip
    """All ranks' sums of a block of tokens, added in the order of ranks."""
    live = token < tokens
    for part in tl.range(0, parts):
        at = first + part * block_c
        columns = at + tl.arange(0, block_c)
        inside = live[:, None] & (columns < n)[None, :]
        total = tl.zeros((block_t, block_c), tl.float32)
        for source in tl.static_range(world):
            row = source * tokens.to(tl.int64) + token
            place = own + row[:, None] * n + columns[None, :]
            total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        store_rows(out, total, token, live, at, n, block_c)


@triton.jit(do_not_specialize=["experts", "tokens", "limit", "makers", "senders", "rank"])
def combine_kernel(  # noqa: PLR0913
    x: tl.tensor, w: tl.tensor, y: tl.tensor, ends: tl.tensor, positions: tl.tensor,
    weights: tl.tensor, slots: tl.tensor, flags: tl.tensor, out: tl.tensor, counts: tl.tensor,
    epoch: tl.tensor, state: tl.tensor, host: tl.tensor, limit: tl.tensor, tokens: tl.tensor,
    rank: tl.tensor, k: tl.tensor, n: tl.tensor, experts: tl.tensor, makers: tl.tensor,
    senders: tl.tensor, padded: tl.constexpr, w_tma: tl.constexpr, k_major: tl.constexpr,
    weighted: tl.constexpr, top: tl.constexpr, world: tl.constexpr, flags_a_rank: tl.constexpr,
    wide: tl.constexpr, block_t: tl.constexpr, block_c: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    """out[t] = sum over k of weights[t, k] * (x @ w)[positions[t, k]], over all ranks' experts.

    The first `makers` programs multiply, `wide` tiles of columns at a time over all experts. The
    next `senders` add each token's rows of such a group and, with other ranks, store the sum in
    its owner's slot for this rank. The rest, of other ranks' sums, add in the order of ranks.
    `counts` [(1 + world) * groups of columns], zeros at the start.
    """
    row_start, row_end = expert_rows(ends, experts, padded)
    tiles_end = tl.cumsum(tl.cdiv(row_end - row_start, block_m), 0)
    tiles_m, tiles_n = tl.max(tiles_end, 0), tl.cdiv(n, block_n)
    groups, blocks_t = tl.cdiv(tiles_n, wide), tl.cdiv(tokens, block_t)
    parts: tl.constexpr = wide * block_n // block_c
    columns: tl.constexpr = wide * block_n
    program = tl.program_id(0)
    if program < makers:
        for at in tl.range(program, tiles_m * tiles_n, makers):
            make(
                x, w, y, at, row_end, tiles_end, counts, k, n, w_tma, k_major, wide, block_m,
                block_n, block_k, group,
            )  # fmt: skip
    elif program < makers + senders:
        for task in tl.range(program - makers, groups * world * blocks_t, senders):
            which, rest = task // (world * blocks_t), task % (world * blocks_t)
            owner, block = (rank + 1 + rest // blocks_t) % world, rest % blocks_t
            need = tiles_m * tl.minimum(wide, tiles_n - which * wide)
            wait_for(counts + which, need, state, host, rank, limit)
            token = block * block_t + tl.arange(0, block_t)
            target = out
            if world > 1:
                target = tl.multiple_of(tl.load(slots + owner).to(out.dtype), 16)
                target += rank.to(tl.int64) * tokens * n
            send(
                y, positions, weights, target, owner, token, tokens, which * columns, n, top,
                weighted, parts, block_t, block_c,
            )  # fmt: skip
            if world > 1:
                sent = counts + groups + owner * groups + which
                announce(sent, blocks_t, flags, owner, rank * flags_a_rank + which, epoch)
    elif world > 1:
        others = tl.num_programs(0) - makers - senders
        for task in tl.range(program - makers - senders, groups * blocks_t, others):
            which, block = task // blocks_t, task % blocks_t
            ours = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + which
            for source in tl.static_range(world):
                flag = ours + source * flags_a_rank
                wait_for(flag, tl.load(epoch) + 1, state, host, source, limit)
            own = tl.multiple_of(tl.load(slots + rank).to(out.dtype), 16)
            token = block * block_t + tl.arange(0, block_t)
            receive(own, out, token, tokens, which * columns, n, world, parts, block_t, block_c)


@triton.jit(do_not_specialize=["experts"])
def scale_kernel(  # noqa: PLR0913
    plain: tl.tensor, x: tl.tensor, weights: tl.tensor, slot: tl.tensor, ends: tl.tensor,
    dx: tl.tensor, scaled: tl.tensor, dweights: tl.tensor, experts: tl.tensor, k: tl.tensor,
    block_r: tl.constexpr, block_c: tl.constexpr,
) -> None:  # fmt: skip
    """Dx = plain * weight, scaled = x * weight, d(weight) = plain . x, row by row."""
    rows = tl.program_id(0) * block_r + tl.arange(0, block_r)
    valid = rows < tl.load(ends + experts - 1)
    place = tl.load(slot + rows, mask=valid, other=0)
    factor = tl.load(weights + place, mask=valid, other=0.0)[:, None]
    total = tl.zeros((block_r,), tl.float32)
    for at in tl.range(0, k, block_c):
        columns = at + tl.arange(0, block_c)
        inside = valid[:, None] & (columns < k)[None, :]
        where = rows.to(tl.int64)[:, None] * k + columns[None, :]
        a = tl.load(plain + where, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(a * b, 1)
        store_rows(dx, a * factor, rows, valid, at, k, block_c)
        store_rows(scaled, b * factor, rows, valid, at, k, block_c)
    tl.store(dweights + place, total, mask=valid)
