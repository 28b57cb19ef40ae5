# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
"""Triton kernels over rows sorted by expert: rows times weights, and the weights' gradients.

Expert `e` owns rows `ends[e - 1]` to `ends[e]`; `ends` is read on the device only, so that nothing
waits for the host and a CUDA graph may hold the launch. Each program takes every `num_programs`-th
tile: the grid's size is the number of SMs it holds. Tiles of one expert follow each other, in
groups of rows that share weights in L2.

Operands come by TMA where their strides allow, else through masked pointers. Results leave by plain
stores where a tile ends within another expert's rows, which no descriptor can clip.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def expert_rows(ends: tl.tensor, experts: tl.tensor, padded: tl.constexpr) -> Any:
    """First and end row of each of `padded` experts; those past `experts` are empty."""
    expert = tl.arange(0, padded)
    row_end = tl.load(ends + tl.minimum(expert, experts - 1))
    before = tl.minimum(expert, experts) - 1
    return tl.load(ends + before, mask=before >= 0, other=0), row_end


@triton.jit
def longest_first(counts: tl.tensor, padded: tl.constexpr) -> Any:
    """The place of each expert when those with the most rows come first."""
    which = tl.arange(0, padded)
    more = counts[None, :] > counts[:, None]
    more |= (counts[None, :] == counts[:, None]) & (which[None, :] < which[:, None])
    return tl.sum(more.to(tl.int32), 1)


@triton.jit
def find_tile(tile: tl.tensor, row_end: tl.tensor, tile_end: tl.tensor) -> Any:
    """Expert of a tile, the tile's number within it, its expert's first and end row."""
    before = tile_end <= tile
    expert = tl.sum(before.to(tl.int32), 0)
    first = tl.max(tl.where(before, tile_end, 0), 0)
    row = tl.max(tl.where(before, row_end, 0), 0)
    end = tl.min(tl.where(before, 2147483647, row_end), 0)
    return expert, tile - first, row, end


@triton.jit
def swizzle(tile: tl.tensor, tiles_m: tl.tensor, tiles_n: tl.tensor, group: tl.constexpr) -> Any:
    """Row and column of a tile: `group` rows of tiles share their columns before the next ones."""
    width = group * tiles_n
    first = tile // width * group
    rows = tl.minimum(tiles_m - first, group)
    return first + tile % width % rows, tile % width // rows


@triton.jit
def load_weight(  # noqa: PLR0913
    w: tl.tensor, expert: tl.tensor, at_k: tl.tensor, at_n: tl.tensor, k: tl.tensor, n: tl.tensor,
    tma: tl.constexpr, k_major: tl.constexpr, block_k: tl.constexpr, block_n: tl.constexpr,
) -> Any:  # fmt: skip
    """A `[block_k, block_n]` tile of an expert's weight; zeros past `k` and `n`."""
    if tma and k_major:
        tile = w.load([expert, at_n, at_k]).reshape(block_n, block_k).T
    elif tma:
        tile = w.load([expert, at_k, at_n]).reshape(block_k, block_n)
    else:
        ks, ns = at_k + tl.arange(0, block_k), at_n + tl.arange(0, block_n)
        base = w + expert.to(tl.int64) * k * n
        inside = (ks < k)[:, None] & (ns < n)[None, :]
        place = ns[None, :] * k + ks[:, None] if k_major else ks[:, None] * n + ns[None, :]
        tile = tl.load(base + place, mask=inside, other=0.0)
    return tile


@triton.jit
def load_rows(  # noqa: PLR0913
    x: tl.tensor, rows: tl.tensor, valid: tl.tensor, row: tl.tensor, at: tl.tensor,
    width: tl.tensor, tma: tl.constexpr, block: tl.constexpr,
) -> Any:  # fmt: skip
    """A `[len(rows), block]` tile of rows; by pointers, zeros past `width` and where invalid."""
    if tma:
        tile = x.load([row, at])
    else:
        columns = at + tl.arange(0, block)
        inside = valid[:, None] & (columns < width)[None, :]
        place = x + rows.to(tl.int64)[:, None] * width + columns[None, :]
        tile = tl.load(place, mask=inside, other=0.0)
    return tile


@triton.jit
def store_rows(  # noqa: PLR0913
    y: tl.tensor, values: tl.tensor, rows: tl.tensor, valid: tl.tensor, at: tl.tensor, n: tl.tensor,
    block: tl.constexpr,
) -> None:  # fmt: skip
    """Plain masked store of a `[len(rows), block]` tile."""
    columns = at + tl.arange(0, block)
    inside = valid[:, None] & (columns < n)[None, :]
    place = y + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(place, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def store_part(  # noqa: PLR0913
    y: tl.tensor, y_tma: tl.tensor, values: tl.tensor, rows: tl.tensor, row: tl.tensor,
    end: tl.tensor, at: tl.tensor, n: tl.tensor, tma: tl.constexpr,
) -> None:  # fmt: skip
    """Store a tile whose first row is `row`, by TMA where wanted and all rows are the expert's."""
    if tma:
        if row + values.shape[0] <= end:
            y_tma.store([row, at], values.to(y.dtype.element_ty))
        else:
            store_rows(y, values, rows, rows < end, at, n, values.shape[1])
    else:
        store_rows(y, values, rows, rows < end, at, n, values.shape[1])


@triton.jit(do_not_specialize=["experts"])
def rows_kernel(  # noqa: PLR0913
    x: tl.tensor, w: tl.tensor, y: tl.tensor, y_tma: tl.tensor, index: tl.tensor, ends: tl.tensor,
    k: tl.tensor, n: tl.tensor, experts: tl.tensor, padded: tl.constexpr, x_tma: tl.constexpr,
    w_tma: tl.constexpr, y_tma_on: tl.constexpr, gather: tl.constexpr, k_major: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, group: tl.constexpr,
    halves: tl.constexpr, flatten: tl.constexpr,
) -> None:  # fmt: skip
    """y[r] = x[index[r]] @ w[expert of r]."""
    row_start, row_end = expert_rows(ends, experts, padded)
    tiles_n = tl.cdiv(n, block_n)
    tile_end = tl.cumsum(tl.cdiv(row_end - row_start, block_m) * tiles_n, 0)
    total = tl.max(tile_end, 0)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=flatten):
        expert, local, first, end = find_tile(tile, row_end, tile_end)
        tile_m, tile_n = swizzle(local, tl.cdiv(end - first, block_m), tiles_n, group)
        row, at_n = first + tile_m * block_m, tile_n * block_n
        rows = row + tl.arange(0, block_m)
        valid = rows < end
        sources = tl.load(index + rows, mask=valid, other=0) if gather else rows
        acc = tl.zeros((block_m, block_n), tl.float32)
        for at_k in tl.range(0, k, block_k):
            a = load_rows(x, sources, valid, row, at_k, k, x_tma, block_k)
            b = load_weight(w, expert, at_k, at_n, k, n, w_tma, k_major, block_k, block_n)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if halves == 1:
            store_part(y, y_tma, acc, rows, row, end, at_n, n, y_tma_on)
        else:
            low, high = acc.reshape(block_m, 2, block_n // 2).permute(0, 2, 1).split()
            store_part(y, y_tma, low, rows, row, end, at_n, n, y_tma_on)
            store_part(y, y_tma, high, rows, row, end, at_n + block_n // 2, n, y_tma_on)


@triton.jit
def sum_rows(  # noqa: PLR0913
    p: tl.tensor, q: tl.tensor, first: tl.tensor, end: tl.tensor, at_m: tl.tensor,
    at_n: tl.tensor, m: tl.tensor, n: tl.tensor, tma: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
) -> Any:  # fmt: skip
    """A tile of the sum of p[r]^T q[r] over rows `first` to `end`."""
    acc = tl.zeros((block_m, block_n), tl.float32)
    if tma:
        whole = first + (end - first) // block_k * block_k
        for row in tl.range(first, whole, block_k):
            a, b = p.load([row, at_m]), q.load([row, at_n])
            acc = tl.dot(a.T, b, acc, input_precision="ieee")
        if whole < end:
            valid = (whole + tl.arange(0, block_k) < end)[:, None]
            a, b = p.load([whole, at_m]), q.load([whole, at_n])
            a, b = tl.where(valid, a, 0.0), tl.where(valid, b, 0.0)
            acc = tl.dot(a.to(p.dtype).T, b.to(q.dtype), acc, input_precision="ieee")
    else:
        for row in tl.range(first, end, block_k):
            rows = row + tl.arange(0, block_k)
            valid = rows < end
            a = load_rows(p, rows, valid, row, at_m, m, False, block_m)
            b = load_rows(q, rows, valid, row, at_n, n, False, block_n)
            acc = tl.dot(a.T, b, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["experts"])
def weights_kernel(  # noqa: PLR0913
    p: tl.tensor, q: tl.tensor, out: tl.tensor, out_tma: tl.tensor,
    ends: tl.tensor, m: tl.tensor, n: tl.tensor, experts: tl.tensor, padded: tl.constexpr,
    tma: tl.constexpr, out_tma_on: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, group: tl.constexpr,
    flatten: tl.constexpr,
) -> None:  # fmt: skip
    """out[e] = sum over rows r of expert e of p[r]^T q[r]; zeros for an expert without rows.

    TMA clips no expert's last rows: a last partial block is masked, in registers, after the rest.
    """
    row_start, row_end = expert_rows(ends, experts, padded)
    tiles_m, tiles_n = tl.cdiv(m, block_m), tl.cdiv(n, block_n)
    places = longest_first(row_end - row_start, padded)
    total, programs = experts * tiles_m * tiles_n, tl.num_programs(0)
    for at in tl.range(tl.program_id(0), total, programs, flatten=flatten):
        back = programs - 1 - 2 * tl.program_id(0)  # to and fro: first turns are the longest
        turned = at + tl.where(at // programs % 2 == 1, back, 0)
        tile = tl.where(at // programs == (total - 1) // programs, at, turned)
        which = tl.arange(0, padded)
        expert = tl.sum(tl.where(places == tile // (tiles_m * tiles_n), which, 0), 0)
        tile_m, tile_n = swizzle(tile % (tiles_m * tiles_n), tiles_m, tiles_n, group)
        at_m, at_n = tile_m * block_m, tile_n * block_n
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends + expert)
        acc = sum_rows(
            p, q, first, end, at_m, at_n, m, n, tma, block_m, block_n, block_k,
        )  # fmt: skip
        values = acc.to(out.dtype.element_ty)
        if out_tma_on:
            out_tma.store([expert, at_m, at_n], values.reshape(1, block_m, block_n))
        else:
            outs = at_m + tl.arange(0, block_m)
            place = out + expert.to(tl.int64) * m * n
            store_rows(place, values, outs, outs < m, at_n, n, block_n)
