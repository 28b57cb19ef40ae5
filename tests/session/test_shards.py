"""Sharded parameters enter graphs as local tensors, and get sharded gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dynaflow_train.capture.shards import localise, locals_of
from tests.ranks import run_ranks

SHAPE = (4, 6)


def sharded(mesh, placement, *, trained=True) -> nn.Parameter:
    torch.manual_seed(1)
    return nn.Parameter(distribute_tensor(torch.randn(*SHAPE), mesh, [placement]), trained)


class Uses(nn.Module):
    """Each way to take a parameter's local tensor."""

    def __init__(self, mesh) -> None:
        super().__init__()
        self.rows, self.columns = sharded(mesh, Shard(0)), sharded(mesh, Shard(1))
        self.whole = sharded(mesh, Replicate())
        self.frozen = sharded(mesh, Shard(0), trained=False)
        self.summed = sharded(mesh, Replicate())

    def forward(self, x):
        y = x @ self.rows.to_local().t() @ self.rows.to_local() + self.whole.to_local()[0]
        y = y + x @ self.frozen.to_local().t() @ self.frozen.to_local()
        y = y * self.summed.to_local(grad_placements=[Partial()])[0]
        return torch.relu(y[:, : SHAPE[1] // 2]) @ self.columns.to_local().t()


def on_ranks(rank):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    plain, model = Uses(mesh), Uses(mesh)
    kinds, x = [], torch.randn(3, SHAPE[1])

    def probe(gm, inputs):
        local, wrap = localise(gm, inputs)
        kinds.extend(isinstance(each, DTensor) for each in local)
        return wrap(gm.forward)

    plain(x).square().sum().backward()
    torch.compile(model, backend=probe)(x).square().sum().backward()
    found = {}
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            found[name] = mine.grad is None
            continue
        torch.testing.assert_close(mine.grad.to_local(), theirs.grad.to_local())
        found[name] = mine.grad.placements == theirs.grad.placements
    return sum(kinds), found


@pytest.mark.dist
def test_parameters_enter_as_local_tensors_and_their_gradients_are_sharded():
    for sharded_inputs, found in run_ranks(on_ranks, 2):
        assert sharded_inputs == 1, "only the one whose gradient is to be summed stays"
        assert found == dict.fromkeys(("rows", "columns", "whole", "frozen", "summed"), True)


def transposed(rank):
    """The gradient of a local tensor, laid out the other way round."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    weight = sharded(mesh, Shard(1))
    local, unused = locals_of([weight, sharded(mesh, Shard(0))])
    gradient = torch.randn(local.shape[::-1]).t()
    (found,) = torch.autograd.grad(local, weight, gradient)
    assert torch.equal(found.to_local(), gradient)
    assert unused.requires_grad
    assert not locals_of([])
    return found.stride(), found.to_local().stride(), found.full_tensor().shape


@pytest.mark.dist
def test_a_gradient_of_another_layout_says_so():
    for stride, local, shape in run_ranks(transposed, 2):
        assert (stride, local, shape) == ((1, 4), (1, 4), SHAPE)
