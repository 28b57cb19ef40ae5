"""Settings of Megatron's experts that are refused, by name; no ranks needed."""

from __future__ import annotations

import dataclasses
import fnmatch
import re

import pytest

from dynaflow_train.errors import UnsupportedError

pytest.importorskip("megatron.core", reason="needs megatron-core, see docs/megatron.md")
pytestmark = pytest.mark.filterwarnings("ignore")  # megatron-core's own at import


def config(**more):
    from megatron.core.transformer.transformer_config import TransformerConfig

    given = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_moe_experts": 4}
    given |= {"moe_token_dispatcher_type": "alltoall", "add_bias_linear": False}
    return TransformerConfig(**{**given, "moe_ffn_hidden_size": 8, **more})


def refusal(found) -> str:
    from dynaflow_train.integrations.megatron.moe_settings import check_settings

    with pytest.raises(UnsupportedError) as caught:
        check_settings(found)
    return str(caught.value)


def changed(value):
    """Another value of the same kind, or some where there is none."""
    return not value if isinstance(value, bool) else "other" if isinstance(value, str) else 7


def test_each_setting_that_is_not_captured_is_refused_with_its_flag_and_why():
    from dynaflow_train.integrations.megatron.moe_settings import SUPPORTED, verdict

    refused = {f.name: why for f in dataclasses.fields(config()) if (why := verdict(f.name))}
    refused = {name: why for name, why in refused.items() if why != SUPPORTED}
    assert len(refused) > 30
    for name, why in refused.items():
        found = config()
        value = True if name == "add_bias_linear" else changed(getattr(found, name))
        setattr(found, name, value)
        words = refusal(found)
        assert f"{name}={value!r}: --{name.replace('_', '-')} must be " in words
        assert f"({why})" in words


def test_every_setting_of_experts_is_in_the_table_and_what_is_supported_passes():
    from dynaflow_train.integrations.megatron import moe_settings

    fields = {f.name for f in dataclasses.fields(config())}
    concerned = {name for name in fields if "moe" in name or "expert" in name}
    assert [name for name in concerned if moe_settings.verdict(name) is None] == []
    patterns = [word for word in moe_settings._TABLE.split() if "_" in word]
    unknown = [p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in fields)]
    assert unknown == []
    assert moe_settings.verdict("moe_aux_loss_coeff") == moe_settings.SUPPORTED
    check_settings = moe_settings.check_settings
    kinds = ["aux_loss", "seq_aux_loss", "global_aux_loss"]
    check_settings(config(moe_z_loss_coeff=1e-3))
    check_settings(config(moe_router_load_balancing_type=kinds, moe_aux_loss_coeff=[0.1] * 3))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"moe_token_dispatcher_type": "allgather"}, "must be 'alltoall'"),
        ({"moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type='flex'"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "'aux_loss' or 'seq_aux_loss' or"),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, "quantile_balancing"),
        ({"moe_expert_capacity_factor": 1.0}, "nothing is dropped or padded"),
        ({"tensor_model_parallel_size": 2}, "expert-tensor-parallel-size must be 1 or None"),
        (
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            "pass --sequence-parallel too",
        ),
        ({"expert_model_parallel_size": 3}, "4 experts do not divide over .* 3"),
    ],
)
def test_a_configuration_is_refused(more, words):
    assert re.search(words, refusal(config(**more)))


def test_a_setting_of_a_later_megatron_is_refused_once_it_is_changed():
    from dynaflow_train.integrations.megatron.moe_settings import check_settings

    found = config()
    later = dataclasses.make_dataclass(
        "Later",
        [("moe_new", bool, False)],
        bases=(type(found),),
        namespace={"__post_init__": lambda self: None},
    )
    values = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
    check_settings(later(**values))
    words = refusal(later(**values, moe_new=True))
    assert "moe_new=True: --moe-new must be False (dynaflow_train does not know it)" in words
