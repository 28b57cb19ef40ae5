"""Arithmetic of medians, limit, H, E and bounds, on numbers worked out by hand."""

from __future__ import annotations

import itertools

import pytest

from dynaflow_train.benchmarks import figures


def test_median_and_quartiles():
    assert figures.spread([4.0, 1.0, 3.0, 2.0]) == figures.Spread(2.5, 1.75, 3.25)
    assert figures.spread([10.0, 1.0, 2.0, 3.0, 4.0]) == figures.Spread(3.0, 2.0, 4.0)
    assert figures.spread([7.0]) == figures.Spread(7.0, 7.0, 7.0)


def test_phases_are_medians_of_their_own():
    rounds = [(1.0, 30.0), (2.0, 10.0), (9.0, 20.0)]
    assert figures.phases(rounds) == (2.0, 20.0)
    assert figures.whole(rounds) == [31.0, 12.0, 29.0]


def test_limit_takes_communication_where_it_is_longer_than_compute():
    # Forward 30 with and 13 without collectives: 17 of communication, longer. Backward 42, 25: 17.
    assert figures.limit_ms((30.0, 42.0), (13.0, 25.0)) == 17.0 + 25.0


def test_h_and_e_of_the_prototype_without_p2p():
    base, without, limit, ours = 72.2, 38.4, 43.0, 52.0
    assert figures.share_of(base, ours, without) == pytest.approx(20.2 / 33.8)  # H
    assert figures.share_of(base, ours, limit) == pytest.approx(20.2 / 29.2)  # E
    assert figures.share_of(base, 80.0, limit) == pytest.approx(-7.8 / 29.2)
    assert figures.share_of(base, base, limit) == 0.0
    assert figures.share_of(base, limit, limit) == 1.0


def test_no_room_no_share():
    assert figures.share_of(10.0, 9.0, 10.0) is None
    assert figures.share_of(10.0, 9.0, 10.5) is None


def test_ratios_are_paired_by_round():
    assert figures.ratios([10.0, 20.0], [5.0, 40.0]) == [2.0, 0.5]


@pytest.mark.parametrize(("rounds", "rank"), [(5, 1), (7, 1), (8, 2), (10, 2), (20, 6), (30, 11)])
def test_lower_bound_is_the_order_statistic_of_a_table_of_the_sign_test(rounds, rank):
    # P(Bin(20, 1/2) <= 5) = 0.0207 and <= 6 is 0.0577, so the 6th of 20; likewise the others.
    values = [float(v) for v in range(rounds, 0, -1)]
    assert figures.lower_bound(values) == rank


def test_fewer_than_five_rounds_have_no_bound():
    assert figures.lower_bound([1.0, 2.0, 3.0, 4.0]) is None


def test_the_bound_lies_above_the_median_in_at_most_5_percent_of_all_samples():
    # Each of 8 rounds falls below (-1) or above (+1) a true median of 0 with equal chance.
    bounds = [figures.lower_bound(signs) for signs in itertools.product((-1.0, 1.0), repeat=8)]
    share = sum(bound > 0 for bound in bounds) / len(bounds)
    assert 0 < share <= 0.05
