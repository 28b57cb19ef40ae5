"""Figures of merit: medians and their spread, the limit, H, E, and bounds of paired ratios.

A step's time is (forward, backward) in milliseconds, of the rank that took longest.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Phases = tuple[float, float]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles (linear between neighbours) of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def whole(rounds: Sequence[Phases]) -> list[float]:
    """Each round's step."""
    return [forward + backward for forward, backward in rounds]


def phases(rounds: Sequence[Phases]) -> Phases:
    """Median of each phase."""
    forward, backward = zip(*rounds, strict=True)
    return statistics.median(forward), statistics.median(backward)


def limit_ms(base: Phases, without: Phases) -> float:
    """Sum over the phases of max(compute, communication).

    Args:
        base: the best baseline's phases.
        without: the same step's, collectives removed: the compute.
    """
    return sum(max(w, b - w) for b, w in zip(base, without, strict=True))


def share_of(base: float, ms: float, bound: float) -> float | None:
    """How far `ms` is from `base` towards `bound`: 1 there, below 0 when slower than the base.

    H with the time without collectives as bound, E with the limit. None where there is no room.
    """
    return (base - ms) / (base - bound) if base > bound else None


def ratios(base: Sequence[float], ours: Sequence[float]) -> list[float]:
    """Round by round, as many times as fast as the base."""
    return [b / t for b, t in zip(base, ours, strict=True)]


def lower_bound(values: Sequence[float]) -> float | None:
    """Lower 95% bound (one-sided) of the median, from order statistics; None with fewer than 5.

    The k-th smallest lies above the median with the probability that fewer than k of n fair coins
    fall heads; k is the largest for which that is at most 5%. Nothing is assumed of the values.
    """
    n, k, chance = len(values), 0, 0.0
    while k < n and (chance := chance + math.comb(n, k) / 2**n) <= 0.05:
        k += 1
    return sorted(values)[k - 1] if k else None
