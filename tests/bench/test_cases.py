"""Cases: their names say their shapes; what cannot be cut is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from transformers import masking_utils

from dynaflow_train.benchmarks import cases
from dynaflow_train.benchmarks.cases import CASES
from dynaflow_train.benchmarks.models import build, config, share
from dynaflow_train.errors import RecipeError, UnsupportedError
from tests.collectives import CountCollectives
from tests.ranks import run_ranks


def test_every_case_that_was_asked_for_exists():
    sizes = ("2x4096", "2x1024", "1x2048", "8x512", "16x128")
    cuts = ("", "-tp2", "-tp4", "-tp8")
    wanted = {f"{m}-{size}{tp}" for m in ("8b", "70b") for size in sizes for tp in cuts}
    wanted |= {f"8b-{n}layers-2x1024{tp}" for n in (2, 8, 32) for tp in cuts}
    wanted |= {"tiny", "tiny-8"}
    moe = {f"{m}{n}-2x4096" for m in ("mixtral", "qwen-moe") for n in ("", "-1layer")}
    moe |= {"tiny-mixtral", "tiny-qwen-moe"}
    wanted |= moe | {f"{name}-skewed" for name in moe}
    assert set(CASES) == wanted
    assert all(name == case.name for name, case in CASES.items())


@pytest.mark.parametrize(
    ("name", "layers", "batch", "tokens", "hidden", "tp"),
    [
        ("8b-2x4096", 4, 2, 4096, 4096, None),
        ("70b-1x2048", 2, 1, 2048, 8192, None),
        ("8b-16x128-tp8", 4, 16, 128, 4096, 8),
        ("8b-32layers-2x1024", 32, 2, 1024, 4096, None),
        ("8b-32layers-2x1024-tp2", 32, 2, 1024, 4096, 2),
    ],
)
def test_names_say_the_shapes(name, layers, batch, tokens, hidden, tp):
    case = CASES[name]
    found = (case.layers, case.batch, case.tokens, case.hidden, case.tp)
    assert found == (layers, batch, tokens, hidden, tp)


def test_local_shapes_are_those_of_the_larger_group():
    case = CASES["8b-2x1024-tp8"]
    cut = config(case, case.cut(2))  # what a rank holds, whoever it shares the rest with
    assert (cut.num_attention_heads, cut.num_key_value_heads, cut.intermediate_size) == (4, 1, 1792)
    assert (cut.head_dim, cut.hidden_size) == (128, 4096)
    plain = CASES["8b-2x1024"]
    assert config(plain, plain.cut(2)).num_attention_heads == 16


def test_ranks_that_do_not_divide_the_group_are_refused():
    with pytest.raises(UnsupportedError, match=r"'8b-2x4096-tp4' has the shapes of TP 4, which 3"):
        CASES["8b-2x4096-tp4"].cut(3)
    with pytest.raises(UnsupportedError, match=r"'tiny' has kv_heads = 2, which TP 4 does not"):
        CASES["tiny"].cut(4)


def test_picking_by_name_pattern_and_near_miss():
    assert cases.pick(["tiny", "8b-2x4096", "tiny"]) == ["tiny", "8b-2x4096"]
    names = [f"8b-2x1024{cut}" for cut in ("", "-tp2", "-tp4", "-tp8")]
    assert cases.pick(["8b-2x1024*"]) == names
    twice = {name for name in CASES if name.endswith("-tp2")}  # on two ranks
    experts = {name for name, case in CASES.items() if isinstance(case, cases.ExpertCase)}
    tiny = {name for name in CASES if name.startswith("tiny")}
    assert set(cases.pick(["all"])) == CASES.keys() - twice - experts - tiny
    assert set(cases.pick(["moe"])) == experts - tiny
    with pytest.raises(RecipeError, match=r"no case '8b-2x4069'. Did you mean '8b-2x4096'\?"):
        cases.pick(["8b-2x4069"])


def test_models_share_one_copy_of_equal_weights():
    device, dtype = torch.device("cpu"), torch.float32
    one, other = (build(CASES["tiny"], device, dtype) for _ in range(2))
    before = dict(other.named_parameters())
    assert all(torch.equal(p, before[n]) for n, p in one.named_parameters())
    share(other, one)
    assert all(p is q for p, q in zip(one.parameters(), other.parameters(), strict=True))


def alone(rank):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    device, dtype = torch.device("cpu"), torch.float32
    case = dataclasses.replace(CASES["tiny"], tp=2)
    one, bare = build(case, device, dtype, mesh=mesh), build(case, device, dtype, cut=2)
    inputs, counts = case.inputs(device, dtype), []
    with CountCollectives() as seen:
        out = one(**inputs).last_hidden_state
        counts.append(seen.counts.total())
        out.sum().backward()
        counts.append(seen.counts.total())
    bare(**inputs).last_hidden_state.sum().backward()
    pairs = zip(one.parameters(), bare.parameters(), strict=True)
    used = [(p.grad, q.grad) for p, q in pairs if q.grad is not None]  # not the embedding
    off = [float((getattr(g, "_local_tensor", g) - h).norm() / h.norm()) for g, h in used]
    return counts, one.config.num_attention_heads, off


@pytest.mark.dist
def test_one_rank_runs_the_collectives_of_its_cut_over_itself():
    ((counts, heads, off),) = run_ranks(alone, 1)
    assert (counts, heads) == ([4, 8], 2)  # 2 layers, 2 in each direction
    assert len(off) == 19
    assert max(off) < 1e-5  # only the order in which a block's input gradients are summed


def test_no_mask_is_made_and_attention_is_that_of_sdpa(monkeypatch):
    case, device = CASES["tiny"], torch.device("cpu")
    ours = build(case, device, torch.float32)
    plain = build(case, device, torch.float32)
    plain.config._attn_implementation = "sdpa"
    inputs = case.inputs(device, torch.float32)
    seen = []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", seen.append)
    out = ours(**inputs).last_hidden_state
    assert seen == []
    torch.testing.assert_close(out, plain(**inputs).last_hidden_state, rtol=0, atol=0)
    assert len(seen) == 1  # what is left out
    moved = {"inputs_embeds": inputs["inputs_embeds"].detach().clone()}
    moved["inputs_embeds"][:, -1] += 1.0
    after = ours(**moved).last_hidden_state
    torch.testing.assert_close(after[:, :-1], out[:, :-1])  # causal
    assert not torch.equal(after[:, -1], out[:, -1])
