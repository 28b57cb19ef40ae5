"""Dense kernels in whole steps: found in captured graphs, chosen or not; the right gradients."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynaflow_train as df
from dynaflow_train.errors import KernelError
from dynaflow_train.execute.symmetric import Rings
from dynaflow_train.integrations.hf import tensor_parallel as tp
from dynaflow_train.overlap_kernels import choice
from tests.engine.harness import Oracle, batch, compiled, step
from tests.engine.parallel import gathered, own, scattered
from tests.engine.zoo import Case, second
from tests.hf.models import build, oracle, plain_step, tokens, worst_excess
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist
WIDTH, LENGTH = 16, 6


class Columns(nn.Module):
    """All ranks' rows times this rank's columns of the weight."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(gathered(x, 0), self.weight)


class Rows(nn.Module):
    """The sum over ranks, scattered."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, inputs) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return scattered(F.linear(x, self.weight), 0)


class Layer(nn.Module):
    """As Megatron's MLP with sequence parallelism, named alike: [s / ranks, b, h]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear_fc1, self.linear_fc2 = Columns(24), Rows(24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear_fc2(F.gelu(self.linear_fc1(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


SEQUENCE = Case(Stack, own(second(LENGTH // 2, WIDTH)), batch_dim=1)


def chosen(wanted: str) -> None:
    """Settle every choice for the way whose name holds `wanted`; this process runs nothing else."""
    Rings.why_not = lambda self, group: ""
    choice.measure = lambda functions, inputs, exchange: dict.fromkeys(functions, 1.0)
    choice.choose = lambda times: next(name for name in times if wanted in name)


def llama(strategy: str, region: str, **options: Any) -> tuple[float, str, str, list[str]]:
    model, batches = tp.parallelize(build("llama"), 2), [tokens(0), tokens(1)]
    df.compile(model, strategy, region=region, executor="eager", **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):  # each batch twice: the third call is measured, for `explain`
            model.zero_grad()
            found = plain_step(model, batches, tp.full_gradients)
    excess, where = worst_excess(found, *oracle("llama", batches))
    texts = [str(each.message) for each in told]
    return excess, where, str(df.explain(model)), texts


def by_kernels(rank: int) -> dict[str, tuple[float, str, str, list[str]]]:
    del rank
    found = {}
    for strategy, region, way in (
        ("tokenweave", "model", "2 shot(s), 16"),
        ("tokenweave", "layer", "copies in 2"),
        ("flux", "model", "4 chunks"),
    ):
        chosen(way)
        found[f"{strategy} {region} {way}"] = llama(strategy, region)
    chosen("2 chunks")
    for strategy in (df.strategies.get("flux"), df.strategies.get("flux", dgrads=True)):
        wanted = Oracle(SEQUENCE, 4, torch.float32)
        model = compiled(SEQUENCE, strategy)
        for _ in range(4):
            wanted.check(step(model, batch(SEQUENCE, 4)), "flux")
        found[str(strategy)] = 0.0, "", str(df.explain(model)), []
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_strategies_give_the_gradients_of_the_plain_run_by_their_kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for found in run_ranks(by_kernels, 2, spawn=True, timeout_s=290):
        for name, (excess, where, explained, told) in found.items():
            assert excess < 4, (name, where)
            assert not told, name
            assert "cannot run" not in explained, name
        texts = "\n".join(explained for *_, explained, _ in found.values())
        for kernel in ("all_reduce_rms_norm", "matmul_all_reduce"):
            assert re.search(rf"kernel {kernel}, .*: (1|2|4|copies).*, of ", texts), kernel
        fused = re.findall(r"kernel (all_gather_matmul|matmul_reduce_scatter), .*: 2 chunks", texts)
        assert set(fused) == {"all_gather_matmul", "matmul_reduce_scatter"}
        assert texts.count("MiB of shared buffers") >= len(found)


def by_itself(rank: int) -> tuple[Any, ...]:
    del rank
    refused = llama("tokenweave", "model"), llama("flux", "model")
    with pytest.raises(KernelError) as raised:
        llama("flux", "model", strict=True)
    Rings.why_not = lambda self, group: ""
    return *refused, llama("flux", "model"), str(raised.value)


@pytest.mark.slow
def test_where_a_kernel_cannot_run_or_loses_the_plain_chain_runs_and_explain_says_so():
    for woven, fluxed, slower, raised in run_ranks(by_itself, 2):
        for excess, where, explained, told in (woven, fluxed):
            assert excess < 4, where
            for text in (explained, *told):
                assert re.search(r"kernel '\w+' cannot run here: .*on cpu", text), text
            assert len(told) == 1
        assert "kernel 'matmul_all_reduce' cannot run here: rank 0: the copy engine" in raised
        excess, where, explained, told = slower
        assert excess < 4, where
        assert not told
        assert re.search(r"kernel matmul_all_reduce, .*: the plain chain, of the plain", explained)


def test_a_choice_keeps_what_wins_and_what_takes_least():
    plain = choice.PLAIN
    assert choice.choose({"a": 2.0, "b": 1.5, plain: 1.5}) == plain
    assert choice.choose({"few": 1.02, "many": 1.0, plain: 1.5}) == "few"
    assert choice.choose({"few": 1.1, "many": 1.0, plain: 1.5}) == "many"
    assert choice.choose({"few": 1.01, "many": 1.0, plain: 1.005}) == "many"
