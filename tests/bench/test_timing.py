"""Whose turn it is: no variant always runs behind the same one."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from dynaflow_train.benchmarks.timing import order


@pytest.mark.parametrize("number", range(1, 12))
def test_each_follows_each_other_and_stands_at_each_place_equally_often(number):
    rounds = number if number % 2 == 0 else 2 * number
    turns = [order(number, place) for place in range(rounds)]
    assert all(sorted(turn) == list(range(number)) for turn in turns)
    pairs = Counter(pair for turn in turns for pair in itertools.pairwise(turn))
    assert len(pairs) == number * (number - 1)
    assert len(set(pairs.values())) <= 1
    places = Counter((at, each) for turn in turns for at, each in enumerate(turn))
    assert len(places) == number**2
    assert len(set(places.values())) == 1
