# pyright: basic, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, C901, N803, PLR0913
"""Triton kernels over memory that the ranks of one host share; imported only where Triton is.

A flag is a scalar that one thread writes with release and another reads with acquire, at system
scope: atomics with scalar pointers compile to just that, and the interpreter runs them too. What a
flag covers is written by plain stores: a TMA store may still be on its way when the flag is seen.
Epochs are counted in device memory, so that a CUDA graph may be replayed. A CTA meets only the CTA
of its own number on the other ranks: no two CTAs of one rank need to run at the same time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dynaflow_train.overlap_kernels.flags import wait_for


@triton.jit
def _handshake(
    flags, state, host, limit, epoch, rank, slot, WORLD: tl.constexpr, SLOTS: tl.constexpr
):
    """What all ranks' CTAs of this slot wrote before can be read by all of them after."""
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    for peer in tl.static_range(WORLD):
        theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(theirs + rank * SLOTS + slot, epoch, sem="release", scope="sys")
    own = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(WORLD):
        wait_for(own + peer * SLOTS + slot, epoch, state, host, peer, limit)


@triton.jit(do_not_specialize=["rank", "slot", "limit"])
def meet(flags, epochs, state, host, limit, rank, slot, WORLD: tl.constexpr, SLOTS: tl.constexpr):
    """All ranks, once, in a stream: what came before it on each is seen by what comes after."""
    epoch = tl.load(epochs + slot) + 1
    _handshake(flags, state, host, limit, epoch, rank, slot, WORLD, SLOTS)
    tl.store(epochs + slot, epoch)


@triton.jit
def _tile(pointer, rows, columns, mask, WIDTH: tl.constexpr):
    """Elements [rows, columns] of a row-major matrix, as fp32."""
    offsets = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _put(pointer, value, rows, columns, mask, WIDTH: tl.constexpr):
    offsets = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(pointer + offsets, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _of(table, rank, like):
    """A rank's buffer; aligned as every allocation is."""
    return tl.multiple_of(tl.load(table + rank).to(like.dtype), 16)


@triton.jit
def _finish(
    value, given, made, rows, columns, mask, eps, NORM: tl.constexpr, WIDTH: tl.constexpr,
    HAS_SUM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Adds, normalises and writes; statistics are those of the total as it is stored."""
    residual, weight, bias = given
    summed, total, normed, means, scales = made
    if HAS_SUM:
        _put(summed, value, rows, columns, mask, WIDTH)
    if HAS_RESIDUAL:
        value += _tile(residual, rows, columns, mask, WIDTH)
    value = value.to(total.dtype.element_ty).to(tl.float32)
    _put(total, value, rows, columns, mask, WIDTH)
    if NORM != "none":
        inside = columns < WIDTH
        live = tl.max(mask.to(tl.int32), 1) > 0
        if NORM == "layer":
            mean = tl.sum(value, 1) / WIDTH
            value = tl.where(inside[None, :], value - mean[:, None], 0.0)
            tl.store(means + rows, mean, mask=live)
        scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
        tl.store(scales + rows, scale, mask=live)
        factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        value = value * scale[:, None] * factor[None, :]
        if HAS_BIAS:
            shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
            value = value + shift[None, :]
        _put(normed, value, rows, columns, mask, WIDTH)


@triton.jit(do_not_specialize=["limit", "rank", "begin", "rows", "eps"])
def all_reduce_norm(
    table, flags, epochs, state, host, limit, rank, begin, rows, eps, mine, pulled,
    residual, weight, bias, summed, total, normed, means, scales,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WORLD: tl.constexpr,
    SLOTS: tl.constexpr, NORM: tl.constexpr, SHOTS: tl.constexpr, HAS_SUM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Total = residual + sum over ranks; normed = norm(total): see `all_reduce_rms_norm`.

    One shot: each rank pulls every row. Two: it pulls its share of the rows, leaves the sums in its
    buffer, and pulls the others' sums; the norm of a pulled row costs nothing beside its way. None:
    the copy engine has pulled the only other rank's rows `begin` to `rows`.
    """
    pid, ctas = tl.program_id(0), tl.num_programs(0)
    columns, lines = tl.arange(0, BLOCK), tl.arange(0, ROWS)
    epoch = tl.load(epochs + pid)
    if SHOTS > 0:
        _handshake(flags, state, host, limit, epoch + 1, rank, pid, WORLD, SLOTS)
    first = rows * rank // WORLD if SHOTS == 2 else begin
    last = rows * (rank + 1) // WORLD if SHOTS == 2 else rows
    at = first + pid * ROWS
    while at < last:
        row = at + lines
        mask = (row < last)[:, None] & (columns < WIDTH)[None, :]
        value = tl.zeros((ROWS, BLOCK), tl.float32)
        if SHOTS == 0:
            value += _tile(mine, row, columns, mask, WIDTH)
            value += _tile(pulled, row, columns, mask, WIDTH)
        else:
            for peer in tl.static_range(WORLD):  # in one order: all ranks get the same bits
                value += _tile(_of(table, peer, total), row, columns, mask, WIDTH)
        if SHOTS == 2:  # the others see it rounded
            value = value.to(total.dtype.element_ty).to(tl.float32)
            _put(_of(table, rank, total), value, row, columns, mask, WIDTH)
        _finish(
            value, (residual, weight, bias), (summed, total, normed, means, scales), row, columns,
            mask, eps, NORM, WIDTH, HAS_SUM, HAS_RESIDUAL, HAS_BIAS,
        )  # fmt: skip
        at += ctas * ROWS
    if SHOTS > 0:
        _handshake(flags, state, host, limit, epoch + 2, rank, pid, WORLD, SLOTS)
    if SHOTS == 2:
        for step in tl.static_range(1, WORLD):
            peer = (rank + step) % WORLD
            last = rows * (peer + 1) // WORLD
            at = rows * peer // WORLD + pid * ROWS
            while at < last:
                row = at + lines
                mask = (row < last)[:, None] & (columns < WIDTH)[None, :]
                value = _tile(_of(table, peer, total), row, columns, mask, WIDTH)
                _finish(
                    value, (residual, weight, bias), (summed, total, normed, means, scales), row,
                    columns, mask, eps, NORM, WIDTH, HAS_SUM, HAS_RESIDUAL, HAS_BIAS,
                )  # fmt: skip
                at += ctas * ROWS
        _handshake(flags, state, host, limit, epoch + 3, rank, pid, WORLD, SLOTS)
    if SHOTS > 0:
        tl.store(epochs + pid, epoch + 1 + SHOTS)


@triton.jit(do_not_specialize=["rows"])
def norm_backward(
    total, means, scales, weight, of_normed, of_total, of_input, of_weight, of_bias, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
    HAS_TOTAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Row by row; each CTA leaves its rows' share of the gradients of weight and bias, fp32."""
    pid, ctas = tl.program_id(0), tl.num_programs(0)
    columns, lines = tl.arange(0, BLOCK), tl.arange(0, ROWS)
    inside = columns < WIDTH
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    share, shift = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    at = pid * ROWS
    while at < rows:
        row = at + lines
        live = row < rows
        mask = live[:, None] & inside[None, :]
        scale = tl.load(scales + row, mask=live, other=0.0)
        value = _tile(total, row, columns, mask, WIDTH)
        if NORM == "layer":
            value = value - tl.load(means + row, mask=live, other=0.0)[:, None]
        normal = tl.where(mask, value * scale[:, None], 0.0)
        gradient = _tile(of_normed, row, columns, mask, WIDTH)
        share += tl.sum(gradient * normal, 0)
        if HAS_BIAS:
            shift += tl.sum(gradient, 0)
        gradient = gradient * factor[None, :]
        result = gradient - normal * (tl.sum(gradient * normal, 1) / WIDTH)[:, None]
        if NORM == "layer":
            result = result - (tl.sum(gradient, 1) / WIDTH)[:, None]
        result = result * scale[:, None]
        if HAS_TOTAL:
            result += _tile(of_total, row, columns, mask, WIDTH)
        _put(of_input, result, row, columns, mask, WIDTH)
        at += ctas * ROWS
    tl.store(of_weight + pid * WIDTH + columns, share, mask=inside)
    if HAS_BIAS:
        tl.store(of_bias + pid * WIDTH + columns, shift, mask=inside)
