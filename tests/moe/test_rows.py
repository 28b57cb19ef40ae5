"""Rows on one process: what the operators compute, and the SMs that products leave."""

from __future__ import annotations

import pytest
import torch

from dynaflow_train.integrations.experts import grouped_linear
from dynaflow_train.rows import define, sms_left

left = torch._C._get_sm_carveout_experimental


@pytest.mark.parametrize("before", [None, 4])
def test_sms_are_left_within_and_what_was_asked_before_comes_back(before):
    torch._C._set_sm_carveout_experimental(before)
    try:
        with sms_left(0):
            assert left() == before
        with sms_left(16):
            assert left() == 16
        assert left() == before
    finally:
        torch._C._set_sm_carveout_experimental(None)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ends", [[0, 2, 2, 7], [7, 7, 7, 7], [0, 0, 0, 7]])
def test_products_and_their_gradients_are_those_of_each_expert(ends, transposed):
    define()
    rows, weight = torch.randn(7, 3).double(), torch.randn(4, 5, 3).double()
    weight = weight.transpose(1, 2).contiguous() if transposed else weight
    rows, weight = (t.requires_grad_() for t in (rows, weight))
    last = torch.tensor(ends, dtype=torch.int32)
    assert torch.autograd.gradcheck(
        lambda r, w: grouped_linear(r, w, last, transposed=transposed, reserve=8), (rows, weight)
    )
    parts = torch.tensor_split(rows, ends)[:4]
    wanted = [p @ (w if transposed else w.T) for p, w in zip(parts, weight, strict=True)]
    found = grouped_linear(rows, weight, last, transposed=transposed)
    torch.testing.assert_close(found, torch.cat(wanted))
