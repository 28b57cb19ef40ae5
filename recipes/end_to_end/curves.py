"""Whether a loss curve lies as near to others as they lie to each other, and memory stays flat."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MIB = 2**20
# The distance of two curves is one draw, and one more reference run would lie beyond the largest of
# six such draws once in a while, but hardly by half.
FACTOR = 1.5
ROUNDING = 1e-5  # of the loss: what fp32 sums in another order move, where nothing else does
FLAT = {"allocated": MIB, "reserved": 20 * MIB}  # bytes; the second is one segment of the allocator


@dataclass(frozen=True)
class Distance:
    """Between two smoothed curves: the largest and the mean absolute difference."""

    largest: float
    mean: float


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Moving average: each value of the last `window` losses, from the first whole window on."""
    sums = list(itertools.accumulate(losses, initial=0.0))
    return [(b - a) / window for a, b in zip(sums, sums[window:], strict=False)]


def distance(one: Sequence[float], other: Sequence[float], window: int) -> Distance:
    """Of the curves of two equally long runs, smoothed."""
    pairs = zip(smoothed(one, window), smoothed(other, window), strict=True)
    gaps = [abs(a - b) for a, b in pairs]
    return Distance(max(gaps), sum(gaps) / len(gaps))


@dataclass(frozen=True)
class Judged:
    """A curve beside the reference runs.

    Attributes:
        ours: to the first reference. spread: the largest, and the largest mean, of two references.
        pairs: "name, name" -> their distance. allowed: what `ours` may be.
        repeats: whether the first two references, the same run twice, are the same bit for bit.
    """

    ours: Distance
    spread: Distance
    pairs: dict[str, Distance]
    allowed: Distance
    repeats: bool

    @property
    def inside(self) -> bool:
        """Whether both distances are allowed."""
        ours, allowed = self.ours, self.allowed
        return ours.largest <= allowed.largest and ours.mean <= allowed.mean


def judge(ours: Sequence[float], references: Mapping[str, Sequence[float]], window: int) -> Judged:
    """Compare `ours` with reference runs: the first two the same run twice, others reordered."""
    pairs = {
        f"{a}, {b}": distance(references[a], references[b], window)
        for a, b in itertools.combinations(references, 2)
    }
    spread = Distance(max(p.largest for p in pairs.values()), max(p.mean for p in pairs.values()))
    first, second = list(references.values())[:2]
    least = ROUNDING * max(first)
    allowed = Distance(*(FACTOR * max(each, least) for each in (spread.largest, spread.mean)))
    same = list(first) == list(second)
    return Judged(distance(ours, first, window), spread, pairs, allowed, same)


def growth(looks: Sequence[Mapping[str, int]], settled: int) -> dict[str, int] | None:
    """Most bytes that any look after step `settled` is above the first from there on.

    None where there are no two such looks: on the CPU, which has no such figures.
    """
    later = [look for look in looks if look["step"] >= settled]
    if len(later) < 2:
        return None
    return {kind: max(look[kind] for look in later[1:]) - later[0][kind] for kind in FLAT}


def flat(grown: Mapping[str, int]) -> bool:
    """Whether that is next to nothing."""
    return all(grown[kind] <= most for kind, most in FLAT.items())
