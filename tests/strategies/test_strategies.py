from __future__ import annotations

import time

import pytest

from dynaflow_train.errors import RecipeError, SplitError
from dynaflow_train.overlap_kernels.registry import default_registry
from dynaflow_train.report import explain
from dynaflow_train.schedule.record import record
from dynaflow_train.schedule.simulate import simulate
from dynaflow_train.strategies import BUILT_IN, get, names
from dynaflow_train.strategy import Context
from tests.schedule.regions import Builder, llama_backward, llama_forward

LAYERS = 4


def planned(strategy, region, batch=4, sizes=None, **fields):
    """Plan and explanation; in the backward with the forward's sizes."""
    forward = sizes if region.phase == "backward" else None
    context = Context(region.phase, batch, batch * 1024, forward_sizes=forward, **fields)
    plan = record(strategy, region, context, default_registry().kernels)
    return plan, explain(plan, region, simulate(plan, region))


def sequence_parallel(layers=LAYERS, parts=1):
    """reduce_scatter and all_gather in place of each all_reduce, as Megatron's."""
    b, x = Builder("forward"), "x"
    for layer in range(layers):
        for block in ("self_attention", "mlp"):
            at = f"layers.{layer}.{block}"
            n = b.add(f"{at}_norm", x, kind="memory", bytes=10**7)
            g = b.add(f"{at}.all_gather", n, collective="all_gather", bytes=5 * 10**7)
            for part in range(parts):
                g = b.add(f"{at}.{part}", g, flops=400 * 10**9 // parts)
            r = b.add(f"{at}.reduce_scatter", g, collective="reduce_scatter", bytes=5 * 10**7)
            x = b.add(f"{at}_add", x, r, kind="memory", bytes=10**7)
    return b.region(x)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("make", [llama_forward, llama_backward, sequence_parallel])
@pytest.mark.parametrize("batch", [2, 3, 5])
def test_every_strategy_covers_every_region_the_same_way_each_time(name, make, batch):
    region, sizes = make(LAYERS), (batch // 2 + batch % 2, batch // 2)
    if name in ("sequential", "comm_overlap", "flux", "auto"):
        sizes = (batch,)
    plan, _ = planned(get(name), region, batch, sizes)  # record checks it
    assert plan.sizes == sizes
    assert plan == planned(get(name), make(LAYERS), batch, sizes)[0]


def test_sequential_is_the_plain_order_on_one_stream():
    region = llama_forward(2)
    plan, found = planned(get("sequential"), region)
    assert [launch.ops[0] for launch in plan.launches] == [op.name for op in region.ops]
    assert plan.streams == ("compute",)
    assert found.hidden_share == 0
    assert get("sequential").split_wgrad is False


def test_comm_overlap_runs_wgrads_beside_the_all_reduce_of_the_dgrad():
    region = llama_backward(LAYERS)
    plan, found = planned(get("comm_overlap"), region, sizes=(4,))
    assert found.hidden_share == 1
    order = [launch.ops[0].removeprefix("layers.3.") for launch in plan.launches[:6]]
    assert order == [
        "mlp.dgrad", "mlp.all_reduce", "mlp.in.wgrad", "mlp.out.wgrad", "mlp_norm",
        "self_attn.dgrad",
    ]  # fmt: skip
    sequential = planned(get("sequential"), region, sizes=(4,))[1]
    assert found.wall_ms == pytest.approx(sequential.wall_ms - sequential.ms)


@pytest.mark.parametrize("name", ["dual_batch", "nanoflow"])
def test_two_micro_batches_hide_all_but_the_last_collective(name):
    region = llama_forward(LAYERS)
    _, found = planned(get(name), region)
    exposed = [each for each in found.collectives if each.reason]
    assert [each.launch for each in exposed] == [found.collectives[-1].launch]
    assert found.hidden_share > 1 - 1.01 / len(found.collectives)
    sequential = planned(get("sequential"), region)[1]
    limit = sequential.wall_ms - sequential.ms
    assert found.wall_ms < limit + found.collectives[-1].ms + 0.01 * limit


@pytest.mark.parametrize("parts", [1, 3])
def test_sequence_parallel_collectives_hide_with_finer_ops_or_more_micro_batches(parts):
    region = sequence_parallel(parts=parts)
    _, found = planned(get("dual_batch", micro_batches=2 if parts == 3 else 4), region)
    at_the_ends = found.collectives[0].ms + found.collectives[-1].ms
    assert found.ms - found.hidden_ms <= 1.01 * at_the_ends
    if parts == 1:  # with two, either side of a block waits for one of its two collectives
        assert 0.45 < planned(get("dual_batch"), region)[1].hidden_share < 0.6


def test_a_plan_made_with_wrong_times_still_hides_most():
    region = llama_backward(LAYERS)
    slow = {op.name: 1.5 for op in region.ops if op.is_communication}  # twice the estimate
    context = Context("backward", 4, 4096, forward_sizes=(2, 2))
    plan = record(get("dual_batch"), region, context)
    assert explain(plan, region, simulate(plan, region, slow)).hidden_share > 0.8


def test_dual_batch_alternates_across_layers():
    plan, _ = planned(get("dual_batch"), llama_forward(LAYERS))
    blocks = [
        (launch.ops[0].split(".", 1)[1], launch.micro_batches[0])
        for launch in plan.launches
        if launch.ops[0].endswith((".mlp", ".self_attn"))
    ]
    expected = [
        (f"{layer}.{block}", part)
        for layer in range(LAYERS)
        for block in ("self_attn", "mlp")
        for part in (0, 1)
    ]
    assert blocks == expected


@pytest.mark.parametrize("most", [2, 8])
@pytest.mark.parametrize("comm_bytes", [10**6, 10**8, 10**9])
def test_no_more_wgrads_wait_than_allowed(most, comm_bytes):
    region = llama_backward(8, comm_bytes=comm_bytes)
    plan, _ = planned(get("dual_batch", max_wgrads=most), region, sizes=(2, 2))
    waiting, kept = 0, []
    for launch in plan.launches:
        waiting += 2 * launch.ops[0].endswith(".dgrad") - launch.ops[0].endswith(".wgrad")
        kept.append(waiting)
    assert max(kept) <= most + 2  # one dgrad makes two ready


def test_merged_wgrads_run_once_for_both_micro_batches():
    plan, _ = planned(get("dual_batch", merge_wgrads=True), llama_backward(LAYERS), sizes=(2, 2))
    wgrads = [launch for launch in plan.launches if launch.ops[0].endswith(".wgrad")]
    assert len(wgrads) == 4 * LAYERS
    assert {launch.micro_batches for launch in wgrads} == {(0, 1)}


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("make", [llama_forward, llama_backward])
def test_nanoflow_gives_each_resource_its_stream(apart, make):
    region = make(LAYERS)
    plan, _ = planned(get("nanoflow", memory_stream=apart), region, sizes=(2, 2))
    streams = {"communication": "comm"}
    if apart:
        streams["memory"] = "memory"
    found = {(region.op[launch.ops[0]].kind, launch.stream) for launch in plan.launches}
    assert found == {(kind, streams.get(kind, "compute")) for kind, _ in found}
    assert {kind for kind, _ in found} >= {"communication", "compute", "memory"}
    if not apart:
        assert plan.launches == planned(get("dual_batch"), region, sizes=(2, 2))[0].launches


def test_nanoflow_takes_sizes():
    plan, _ = planned(get("nanoflow", sizes=[2, 1, 1]), llama_forward(LAYERS))
    assert plan.sizes == (2, 1, 1)
    with pytest.raises(SplitError, match=r"\[2, 1, 1\] samples make 4, the batch has 5"):
        planned(get("nanoflow", sizes=[2, 1, 1]), llama_forward(LAYERS), batch=5)


@pytest.mark.parametrize("name", ["comm_overlap", "dual_batch", "nanoflow", "tokenweave", "flux"])
def test_below_the_threshold_it_is_sequential_and_says_so(name):
    plan, _ = planned(get(name, min_tokens=4097), llama_forward(1))
    assert plan.streams == ("compute",)
    assert plan.sizes == (4,)
    assert plan.reason == "4096 tokens < min_tokens=4097"
    assert planned(get(name, min_tokens=4096), llama_forward(1))[0].reason is None


def test_a_whole_model_in_four_micro_batches_is_planned_in_well_under_a_second():
    strategy = get("dual_batch", micro_batches=4)
    for region in (llama_forward(40), llama_backward(32)):
        start = time.perf_counter()
        plan, _ = planned(strategy, region, 8, (2,) * 4)
        assert len(plan.launches) == 1280
        assert time.perf_counter() - start < 2  # 0.2 s alone on a core, plus explain


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("dual_bach", {}, "no strategy 'dual_bach'. Did you mean 'dual_batch'\\? There are seq"),
        ("zzz", {}, "no strategy 'zzz'. There are sequential, comm_overlap, dual_batch, nanoflow"),
        ("dual_batch", {"micro_batch": 2}, "no parameter 'micro_batch'. Did you mean 'micro_batc"),
        ("sequential", {"min_tokens": 2}, "no parameter 'min_tokens'. There are none"),
        ("dual_batch", {"micro_batches": "2"}, r"takes micro_batches as int .default 2., got '2'"),
        ("dual_batch", {"micro_batches": True}, r"takes micro_batches as int .default 2., got Tr"),
        ("nanoflow", {"sizes": 2}, r"takes sizes as tuple .default \(\)., got 2 .int."),
    ],
)
def test_wrong_names_and_values_name_the_nearest(name, parameters, message):
    with pytest.raises(RecipeError, match=message):
        get(name, **parameters)


def test_names_are_the_files():
    for strategy in BUILT_IN:
        assert strategy.__module__ == f"dynaflow_train.strategies.{strategy.name}"


def test_each_says_how_many_micro_batches_it_cuts_into():
    most = {
        get("sequential"): 1,
        get("comm_overlap"): 1,
        get("dual_batch", micro_batches=3): 3,
        get("nanoflow"): 2,
        get("tokenweave"): 2,
        get("flux"): 1,
        get("nanoflow", sizes=[1, 1, 2]): 3,
    }
    assert {strategy: strategy.most_micro_batches for strategy in most} == most
