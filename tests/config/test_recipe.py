"""Recipes: what is read, what is refused, and in which words."""

from __future__ import annotations

import pickle

import pytest

from dynaflow_train.config import Recipe, StreamOptions
from dynaflow_train.errors import RecipeError

FULL = {
    "strategy": "dual_batch",
    "parameters": {"micro_batches": 2, "min_tokens": 512},
    "region": "layer",
    "layers_per_region": 4,
    "max_micro_batches": 3,
    "executor": "eager",
    "engine": "interpreter",
    "batch_dim": 1,
    "strict": True,
    "verify": True,
    "agree_timeout_s": 5,
    "cuda_graphs": True,
    "nccl": {"comm": {"max_ctas": 8, "min_ctas": 2, "priority": "high"}},
    "max_contexts": 2,
    "transfer": "copy_engine",
    "transfer_chunks": 4,
    "tensor_parallel": "host",
    "expert_parallel": 2,
    "sm_reserve": 8,
    "host": "hf",
    "description": "for a test",
}


def write(path, text: str) -> str:
    file = path / "r.yaml"
    file.write_text(text)
    return str(file)


def test_defaults_are_the_documented_ones():
    recipe = Recipe("sequential")
    assert recipe.to_dict() == {
        "strategy": "sequential",
        "parameters": {},
        "region": "model",
        "layers_per_region": 0,
        "max_micro_batches": 4,
        "executor": "inductor",
        "engine": "fast",
        "batch_dim": 0,
        "strict": False,
        "verify": False,
        "agree_timeout_s": 60.0,
        "transfer": "group",
        "transfer_chunks": 1,
        "cuda_graphs": False,
        "nccl": {},
        "max_contexts": 16,
        "tensor_parallel": "merged",
        "expert_parallel": 1,
        "sm_reserve": 0,
        "host": None,
        "description": "",
    }


def test_every_key_survives_dump_load_and_pickle(tmp_path):
    recipe = Recipe(**FULL)
    recipe.dump(tmp_path / "out.yaml")
    assert Recipe.load(tmp_path / "out.yaml") == recipe
    assert recipe.to_dict() == FULL
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert hash(recipe) == hash(Recipe(**FULL))


def test_options_that_are_no_key_are_strategy_parameters():
    recipe = Recipe.from_options({"strategy": "dual_batch", "micro_batches": 2, "region": "layer"})
    assert recipe.parameters == {"micro_batches": 2}
    assert recipe.region == "layer"


def test_options_and_recipe_do_not_share_a_mapping():
    given = {"micro_batches": 2}
    recipe = Recipe("dual_batch", parameters=given)
    given["micro_batches"] = 3
    assert recipe.parameters == {"micro_batches": 2}


def test_options_of_streams_are_kept_as_they_were_given():
    given = {"comm": {"max_ctas": 8}, "memory": {"priority": "normal"}}
    recipe = Recipe.from_options({"strategy": "nanoflow", "nccl": given})
    given["comm"]["max_ctas"] = 2
    assert recipe.parameters == {}
    assert recipe.streams == {
        "comm": StreamOptions(max_ctas=8),
        "memory": StreamOptions(priority="normal"),
    }
    assert str(StreamOptions(8, priority="high")) == "max_ctas 8, priority high"


def test_chunks_of_a_transfer_that_has_none_are_refused():
    with pytest.raises(RecipeError, match="transfer_chunks 2 is for transfer: copy_engine, found"):
        Recipe("dual_batch", transfer_chunks=2)


def test_parameter_given_twice_is_refused():
    with pytest.raises(RecipeError, match="'micro_batches' is given twice, also in 'parameters'"):
        Recipe.from_options(
            {"strategy": "x", "micro_batches": 2, "parameters": {"micro_batches": 3}}
        )


def test_unknown_key_names_the_nearest_and_the_file(tmp_path):
    path = write(tmp_path, "strategy: dual_batch\nmax_microbatches: 3\n")
    with pytest.raises(RecipeError) as caught:
        Recipe.load(path)
    assert str(caught.value).startswith(
        f"recipe {path}: unknown key 'max_microbatches'. Did you mean 'max_micro_batches'? "
        "There are strategy, parameters, region, "
    )


def test_unknown_key_with_nothing_near_lists_all(tmp_path):
    path = write(tmp_path, "strategy: dual_batch\nzzz: 3\n")
    with pytest.raises(RecipeError, match=r"unknown key 'zzz'\. There are strategy, parameters"):
        Recipe.load(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("region", "block", "must be one of ('model', 'layer'), found 'block' (str)"),
        ("host", "vllm", "must be one of ('hf', 'megatron', None), found 'vllm' (str)"),
        ("executor", None, "must be one of ('inductor', 'eager'), found None (NoneType)"),
        ("max_micro_batches", 0, "must be a whole number of at least 1, found 0 (int)"),
        ("max_micro_batches", True, "must be a whole number of at least 1, found True (bool)"),
        ("max_contexts", "4", "must be a whole number of at least 1, found '4' (str)"),
        ("batch_dim", -1, "must be a whole number of at least 0, found -1 (int)"),
        ("agree_timeout_s", 0, "must be a number of seconds above 0, found 0 (int)"),
        ("strict", "yes", "must be true or false, found 'yes' (str)"),
        ("parameters", [2], "must be a mapping of parameter names to values, found [2] (list)"),
        ("parameters", {2: 3}, "must be a mapping of parameter names to values, found {2: 3}"),
        ("nccl", 8, "must be a mapping of streams' names to mappings with max_ctas, min_ctas, pri"),
        ("nccl", {"comm": 8}, "must be a mapping of streams' names to mappings with max_ctas, min"),
        ("strategy", "", "must be the name of a strategy, found '' (str)"),
        ("description", 7, "must be text, found 7 (int)"),
    ],
)
def test_wrong_values_say_what_is_allowed_and_what_was_found(key, value, words):
    for make in (lambda v: Recipe(**v), Recipe.from_options):
        with pytest.raises(RecipeError) as caught:
            make({"strategy": "dual_batch", key: value})
        assert f"{key!r} {words}" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_cta": 8}, "unknown key 'max_cta'. Did you mean 'max_ctas'? There are max_ctas, min"),
        ({3: 8}, "unknown key 3. There are max_ctas, min_ctas, priority."),
        ({"max_ctas": 0}, "'max_ctas' must be a whole number of at least 1, found 0 (int)"),
        ({"max_ctas": True}, "'max_ctas' must be a whole number of at least 1, found True (bool)"),
        ({"max_ctas": None}, "'max_ctas' must be a whole number of at least 1, found None"),
        ({"min_ctas": 1.5}, "'min_ctas' must be a whole number of at least 1, found 1.5 (float)"),
        ({"priority": -1}, "'priority' must be one of ('normal', 'high'), found -1 (int)"),
        ({"priority": [1]}, "'priority' must be one of ('normal', 'high'), found [1] (list)"),
        ({}, "says nothing; give max_ctas, min_ctas, priority or leave it out"),
        ({"max_ctas": 2, "min_ctas": 4}, "min_ctas 4 is above max_ctas 2; lower it"),
    ],
)
def test_wrong_options_of_a_stream(given, words):
    for make in (lambda v: Recipe(**v), Recipe.from_options):
        with pytest.raises(RecipeError) as caught:
            make({"strategy": "dual_batch", "nccl": {"comm": given}})
        assert f": nccl of stream 'comm': {words}" in str(caught.value)


def test_the_priority_of_the_callers_stream_is_the_callers():
    with pytest.raises(RecipeError, match="'compute' is the caller's own stream"):
        Recipe("sequential", nccl={"compute": {"priority": "high"}})
    assert Recipe("sequential", nccl={"compute": {"max_ctas": 4}}).streams


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("region: layer\n", "no 'strategy' given; `dynaflow strategies` lists them"),
        ("- a\n", "must hold keys and values ('strategy: dual_batch'), found list"),
        ("", "must hold keys and values ('strategy: dual_batch'), found NoneType"),
        ("strategy: [\n", "is not YAML:"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, words):
    path = write(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        Recipe.load(path)
    assert str(caught.value).startswith(f"recipe {path}: {words}")


def test_missing_file():
    with pytest.raises(RecipeError, match=r"recipe no/such\.yaml: cannot be read: No such file"):
        Recipe.load("no/such.yaml")
