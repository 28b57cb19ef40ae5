"""Lines of `--strategies`: a strategy, and what its endings set."""

from __future__ import annotations

import argparse

import pytest
import torch

from dynaflow_train.benchmarks import command, specs
from dynaflow_train.benchmarks.variants import STRATEGIES, variants
from dynaflow_train.config import Recipe
from dynaflow_train.errors import RecipeError

LIMIT = {"nccl": {"comm": {"max_ctas": 8}}}


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("comm_overlap", {}),
        ("comm_overlap+graph", {"cuda_graphs": True}),
        ("comm_overlap+ctas=8", LIMIT),
        ("comm_overlap+copies", {"transfer": "copy_engine"}),
        ("comm_overlap+copies=4", {"transfer": "copy_engine", "transfer_chunks": 4}),
        ("comm_overlap+layers=4", {"layers_per_region": 4}),
        ("comm_overlap+reserve=8", {"sm_reserve": 8}),
        ("comm_overlap+ctas=8+graph", LIMIT | {"cuda_graphs": True}),
        ("comm_overlap +graph +ctas=8", LIMIT | {"cuda_graphs": True}),
    ],
)
def test_endings_combine_in_any_order(line, options):
    spec = specs.read(line)
    assert (spec.strategy.name, spec.options) == ("comm_overlap", options)
    assert spec.graph == ("cuda_graphs" in options)
    assert Recipe.from_options({"strategy": "comm_overlap", **spec.options})


def test_endings_come_behind_parameters_and_settings():
    spec = specs.read("dual_batch micro_batches=4 split_wgrad=false+ctas=8+graph")
    assert (spec.strategy.micro_batches, spec.strategy.split_wgrad) == (4, False)
    assert spec.options == LIMIT | {"cuda_graphs": True}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "dual_batch+grph",
            "no ending '+grph'. Did you mean 'graph'? There are graph, ctas, copies, layers, ",
        ),
        ("dual_batch+", "no ending '+'. There are graph, ctas, copies, layers, reserve, copied, "),
        ("dual_batch+graph=1", "+graph takes no value, found '1'"),
        ("dual_batch+ctas", "+ctas=N takes a whole number of at least 1, found 'none'"),
        ("dual_batch+ctas=-2", "+ctas=N takes a whole number of at least 1, found '-2'"),
        ("dual_batch+copies=0", "+copies=N takes a number of chunks, found '0'"),
        ("dual_batch+layers", "+layers=N takes a number of layers, found 'none'"),
        ("dual_batch+reserve=x", "+reserve=N takes a number of SMs, found 'x'"),
        ("dual_batch+ctas=4+ctas=8", "+ctas sets nccl a second time; leave one out"),
        ("sequential+ctas=8", "sequential has no stream for collectives whose ctas could be lim"),
    ],
)
def test_wrong_endings_are_refused(line, words):
    with pytest.raises(RecipeError) as caught:
        specs.read(line)
    assert str(caught.value).startswith(f"{line!r}: {words}")


def test_a_variant_is_named_by_its_line():
    found = {each.name: each for each in variants([*STRATEGIES, "comm_overlap+ctas=8+graph"])}
    assert found["comm_overlap+ctas=8+graph"].graph
    assert not found["comm_overlap"].graph


@pytest.mark.parametrize(
    ("line", "host", "ranks", "link", "words"),
    [
        ("flux", "hf-sp", 2, "nvlink", ""),
        ("flux", "hf", 2, "nvlink", ""),
        ("flux", "megatron", 4, "nvlink", "flux fuses the all-reduces of 2 ranks, these are 4: "),
        ("tokenweave", "hf", 4, "nvlink", ""),
        ("tokenweave+graph", "megatron-sp", 2, "nvlink", "has none: take --host megatron"),
        ("tokenweave", "hf", 2, "no-p2p", "it needs GPUs with peer access, the link is no-p2p"),
        ("flux", "hf-sp", 2, "gloo", "it needs GPUs with peer access, the link is gloo"),
        ("flux", "hf-sp", 1, "single", "it is about what ranks exchange, this is one"),
    ],
)
def test_kernels_that_talk_to_ranks_run_where_they_have_something_to_replace(
    line, host, ranks, link, words
):
    assert {"flux", "tokenweave", "flux+graph", "tokenweave+graph"} < set(STRATEGIES)
    made = {each.name: each for each in variants([line], host=host, ranks=ranks)}
    reason = made[line].why_not(torch.device("cuda"), link)
    assert words in reason if words else reason is None


def test_each_number_of_connections_has_a_group_and_files_of_its_own(tmp_path):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    typed = ["--device", "cpu", "--cases", "tiny", "--out", str(tmp_path)]
    jobs = command._jobs(parser.parse_args([*typed, "--connections", "1", "32", "1"]), typed)
    assert [(job.link, job.connections) for job in jobs] == [("gloo", 1), ("gloo", 32)]
    assert [job.result("tiny").name for job in jobs] == [
        "tiny.gloo.1-connections.json",
        "tiny.gloo.32-connections.json",
    ]
    (job,) = command._jobs(parser.parse_args(typed), typed)
    assert (job.connections, job.result("tiny").name) == (None, "tiny.gloo.json")
