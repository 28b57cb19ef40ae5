"""What `apply` touches and puts back, and what is refused, by name; no ranks needed."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dynaflow_train.config import Recipe
from dynaflow_train.errors import RecipeError, UnsupportedError

pytest.importorskip("megatron.core", reason="needs megatron-core, see docs/megatron.md")
pytestmark = pytest.mark.filterwarnings("ignore")  # megatron-core's own at import

ROOT = Path(__file__).parents[2]


def places():
    import megatron.core.distributed.distributed_data_parallel as ddp
    import megatron.core.tensor_parallel.layers as layers
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.transformer.dot_product_attention as attention
    import megatron.core.transformer.moe.moe_layer as moe
    import megatron.core.transformer.moe.moe_logging as logging
    import megatron.core.transformer.moe.moe_utils as utils
    import megatron.core.transformer.torch_norm as norm

    owners = {
        layers: ["linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight"],
        mappings: [
            "_reduce",
            "_gather_along_first_dim",
            "_reduce_scatter_along_first_dim",
            "_gather_along_last_dim",
        ],
        attention.DotProductAttention: ["forward"],
        norm.WrappedTorchNorm: ["__new__"],
        ddp.DistributedDataParallel: ["_make_forward_pre_hook"],
        moe.MoELayer: ["forward"],
        utils.MoEAuxLossAutoScaler: ["backward"],
        logging.MoEMetricsTracker: ["record"],
    }
    return {
        (owner, name): owner.__dict__[name] for owner, names in owners.items() for name in names
    }


def test_import_touches_nothing_and_undo_puts_everything_back():
    before = places()
    from dynaflow_train.integrations import megatron

    assert places() == before
    with megatron.apply():
        assert all(places()[place] is not plain for place, plain in before.items())
        with pytest.raises(UnsupportedError, match="undo first"):
            megatron.apply()
    assert places() == before
    undo = megatron.apply()
    undo()
    assert places() == before


def test_outside_a_capture_the_host_runs():
    import megatron.core.tensor_parallel.layers as layers

    from dynaflow_train.integrations import megatron

    with megatron.apply():
        x, w = torch.randn(2, 3), torch.randn(4, 3, requires_grad=True)
        out = layers.linear_with_grad_accumulation_and_async_allreduce(
            x, w, None, False, False, False, tp_group=None
        )
    assert type(out.grad_fn).__name__ == "LinearWithGradAccumulationAndAsyncCommunicationBackward"


def test_another_version_is_refused(monkeypatch):
    from dynaflow_train.integrations.megatron import apply, versions

    monkeypatch.setattr(versions, "found_version", "0.20.1+abc")
    with pytest.raises(UnsupportedError, match=r"knows megatron-core 0\.19\.2, found 0\.20\.1"):
        apply()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"tp_comm_overlap": True}, "--tp-comm-overlap"),
        ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        ({"context_parallel_size": 2}, "--context-parallel-size 1"),
        ({"fp8": "e4m3"}, "--fp8-format"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl none"),
        ({"recompute_granularity": "selective"}, "--recompute-granularity full"),
    ],
)
def test_settings_are_refused_with_their_flag(setting, words):
    from dynaflow_train.integrations.megatron.versions import check_config

    check_config(SimpleNamespace(tp_comm_overlap=False, context_parallel_size=1))
    with pytest.raises(UnsupportedError, match=words):
        check_config(SimpleNamespace(**setting))


def test_a_model_without_layers_and_a_wrong_batch_dimension_are_refused():
    from dynaflow_train.integrations import megatron

    with pytest.raises(UnsupportedError, match="Linear holds no transformer layers"):
        megatron.compile(torch.nn.Linear(2, 2), "sequential")
    layer = torch.nn.Linear(2, 2)
    layer.config = SimpleNamespace(recompute_granularity=None)
    model = torch.nn.Sequential(torch.nn.ModuleList([layer]))
    with pytest.raises(RecipeError, match="the recipe needs batch_dim: 1, found 0"):
        megatron.compile(model, Recipe("sequential"))


def test_full_recomputation_needs_layers_without_dropout():
    from dynaflow_train.integrations.megatron.versions import check_recomputation

    config = SimpleNamespace(recompute_granularity="full", hidden_dropout=0, attention_dropout=0)
    check_recomputation(config, "layer")
    with pytest.raises(UnsupportedError, match="--dynaflow-region layer"):
        check_recomputation(config, "model")
    config.num_moe_experts = 8
    with pytest.raises(UnsupportedError, match="full with experts: leave it out"):
        check_recomputation(config, "layer")
    config.num_moe_experts, config.hidden_dropout = None, 0.1
    with pytest.raises(UnsupportedError, match=r"dropout \(hidden 0\.1, attention 0\)"):
        check_recomputation(config, "layer")


def test_flags_become_a_recipe():
    from dynaflow_train.integrations.megatron import arguments

    parser = arguments.add(argparse.ArgumentParser())
    assert arguments.recipe_of(parser.parse_args([])) is None
    line = ["--dynaflow-strategy", "dual_batch", "--dynaflow-micro-batches", "6"]
    more = ["--dynaflow-region", "layer", "--dynaflow-verify"]
    found = arguments.recipe_of(parser.parse_args([*line, *more]))
    assert found == Recipe(
        "dual_batch",
        parameters={"micro_batches": 6},
        region="layer",
        max_micro_batches=6,
        batch_dim=1,
        verify=True,
        host="megatron",
    )
    path = ROOT / "recipes" / "megatron_llama_tp2.yaml"
    assert arguments.recipe_of(parser.parse_args(["--dynaflow-recipe", str(path)])) == Recipe.load(
        path
    )


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="megatron.training imports here")
def test_the_launcher_says_which_python_it_needs(tmp_path):
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("raise SystemExit('ran')")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "dynaflow_train.launch", "--megatron", str(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert ran.returncode == 2
    assert "needs Python >= 3.12, this is 3.11" in ran.stderr
