"""The environment is read in one place, at the call and not at import."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaflow_train.config import MULTICAST_OFF, Environment, environment, exported_recipe
from dynaflow_train.errors import RecipeError


@pytest.fixture
def env(monkeypatch):
    for name in (
        "DYNAFLOW_RECIPE",
        "DYNAFLOW_AGREE_TIMEOUT",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "NCCL_P2P_DISABLE",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        *MULTICAST_OFF,
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DYNAFLOW_CACHE", "off")
    return monkeypatch


def test_nothing_set(env):
    assert environment() == Environment()


def test_the_cache_is_where_users_keep_caches_unless_told(env, tmp_path):
    env.delenv("DYNAFLOW_CACHE")
    env.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment().cache == tmp_path / "dynaflow"
    env.delenv("XDG_CACHE_HOME")
    env.setenv("HOME", "/home/somebody")
    assert environment().cache == Path("/home/somebody/.cache/dynaflow")
    env.setenv("DYNAFLOW_CACHE", "/scratch/choices")
    assert environment().cache == Path("/scratch/choices")


def test_everything_set(env):
    for name, value in MULTICAST_OFF.items():
        env.setenv(name, value)
    env.setenv("NCCL_P2P_DISABLE", "1")
    env.setenv("RANK", "3")
    env.setenv("WORLD_SIZE", "4")
    env.setenv("LOCAL_RANK", "1")
    env.setenv("DYNAFLOW_AGREE_TIMEOUT", "2.5")
    env.setenv("DYNAFLOW_RECIPIE", "x")
    now = environment()
    assert (now.rank, now.world_size, now.local_rank) == (3, 4, 1)
    assert now.agree_timeout_s == 2.5
    assert now.multicast_off
    assert now.p2p_off
    assert now.unknown == ("DYNAFLOW_RECIPIE",)
    env.setenv("NCCL_NVLS_ENABLE", "1")
    assert not environment().multicast_off


@pytest.mark.parametrize("text", ["soon", "-1"])
def test_timeout_that_is_no_number(env, text):
    env.setenv("DYNAFLOW_AGREE_TIMEOUT", text)
    with pytest.raises(RecipeError, match=f"must be a number of at least 0, found '{text}'"):
        environment()


@pytest.mark.parametrize("before", [None, "/other.yaml"])
def test_exported_recipe_is_absolute_and_taken_back(env, tmp_path, before):
    env.chdir(tmp_path)
    if before:
        env.setenv("DYNAFLOW_RECIPE", before)
    with exported_recipe("r.yaml"):
        assert environment().recipe == str(tmp_path / "r.yaml")
    assert environment().recipe == before
