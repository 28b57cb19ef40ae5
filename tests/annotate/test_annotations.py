"""Where rules and marks cut: the same names in forward and backward, and the gradients kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynaflow_train as df
from dynaflow_train.capture.labels import clean
from dynaflow_train.errors import RuleError
from dynaflow_train.strategies.comm_overlap import CommOverlap
from tests.engine.harness import Cut, Oracle, batch, compiled
from tests.engine.parallel import PARALLEL, ParallelBlock
from tests.engine.stepping import step
from tests.engine.zoo import Case, rows
from tests.ranks import run_ranks

aten = torch.ops.aten


class Rule(Cut):
    """Two micro-batches, cut where the given rules say."""

    def __init__(self, *rules: object, split_wgrad: bool = True) -> None:
        super().__init__(2)
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "split_wgrad", split_wgrad)


class Sine(torch.autograd.Function):
    """Its backward is its own code, which no operator's formula gives."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


def gate(x):
    return x.sigmoid() * x


def half(x):
    return x.tanh() / 2


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x):
        y = gate(self.up(x))
        with df.mark("wave"):
            y = Sine.apply(y)
        return self.down(half(y))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.LayerNorm(6), Body()

    def forward(self, x):
        return x + self.body(self.norm(x))


CASE = Case(Whole, rows(3, 6))


def cut_by(*rules: object, case: Case = CASE, **options: object) -> dict[str, dict[str, set[str]]]:
    """Of each phase the ops by name, each with its operators; the step is checked on the way."""
    model = compiled(case, Rule(*rules, **options), region="layer")
    Oracle(case, 4, torch.float32).check(step(model, batch(case, 4)), rules)
    found = {}
    for used in df.plans(model):
        launched = {name for launch in used.plan.launches for name in launch.ops}
        assert launched == {op.name for op in used.region.ops}
        found[used.region.phase] = {op.name: operators(op) for op in used.region.ops}
    return found


def operators(op) -> set[str]:
    """Names of the operators that an op runs."""
    return {n.target._opname for n in op.graph.graph.nodes if hasattr(n.target, "_opname")}


def home(ops: dict[str, set[str]], operator: str) -> set[str]:
    """The ops that run an operator."""
    return {name for name, inside in ops.items() if operator in inside}


@pytest.mark.parametrize(
    ("rule", "name", "forward", "backward"),
    [
        (df.SplitModule("*.up|*.norm"), "norm", "rsqrt", "sum"),
        (df.SplitModule(nn.LayerNorm), "norm", "rsqrt", "sum"),
        (df.SplitModule(lambda name: name.endswith("dy")), "body", "mm", "mm"),
        (df.SplitFunc(gate), "body.gate", "sigmoid", "sigmoid"),
        (df.SplitFunc(aten.mm), "body.down.mm", "mm", "mm"),
        (df.SplitFunc(aten.mm.default), "body.up.mm", "mm", "mm"),
    ],
    ids=["pattern", "class", "predicate", "function", "packet", "operator"],
)
def test_a_rule_cuts_in_forward_and_backward(rule, name, forward, backward):
    found = cut_by(rule)
    assert forward in found["forward"][name]
    assert backward in found["backward"][name]
    for ops in found.values():  # and nothing else of the region is in it
        for other, inside in ops.items():
            if other.startswith(name) and isinstance(rule, df.SplitFunc):
                assert not inside & {"cos", "sin", "rsqrt", "tanh"}, other


@pytest.fixture(scope="module")
def unruled():
    return cut_by()


def test_without_a_rule_there_is_no_such_cut(unruled):
    assert unruled["forward"]["body"] >= {"rsqrt", "mm", "sigmoid"}
    for ops in unruled.values():
        assert not {"norm", "body.gate", "body.up.mm"} & ops.keys()


def test_a_mark_holds_through_an_autograd_function(unruled):
    assert home(unruled["forward"], "sin") == {"body.wave"}
    assert home(unruled["backward"], "cos") == {"body.wave"}
    inside = {op for name, ops in unruled["backward"].items() if "wave" in name for op in ops}
    assert inside == {"sin", "cos", "mul"}  # recomputed, and the function's own backward


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = Whole()

    def forward(self, x):
        with df.mark("far"):
            x = x.exp()
            with df.mark("near"):
                x = gate(x)
        return self.outer(x)


def test_precedence():
    """A mark before a function before a module; the innermost mark; the deepest module."""
    rules = (
        df.SplitFunc(gate),
        df.SplitModule("*.body|*.outer"),
        df.SplitModule("*.body.down"),
    )
    ops = cut_by(*rules, case=Case(Nested, rows(3, 6)))["forward"]
    assert home(ops, "exp") == {"far"}
    assert home(ops, "sigmoid") == {"near", "outer.body.gate"}
    assert home(ops, "rsqrt") == {"outer"}
    assert home(ops, "sin") == {"outer.body.wave"}
    assert home(ops, "mm") == {"outer.body", "outer.body.down"}


def deep(x):
    return half(x)


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x):
        return deep(self.lin(x)) + 1


@pytest.mark.parametrize("order", [(deep, half), (half, deep)], ids=["outer", "inner"])
def test_of_two_functions_the_rule_that_stands_first_wins(order):
    rules = [df.SplitFunc(function) for function in order]
    last = df.SplitFunc(order[1], optional=True)
    ops = cut_by(rules[0], last, case=Case(Calls, rows(6)))
    for phase in ("forward", "backward"):
        assert order[0].__name__ in ops[phase]
    assert home(ops["forward"], "tanh") == {order[0].__name__}


def test_a_rule_about_an_operator_cuts_its_derivative():
    found = cut_by(df.SplitFunc(aten.tanh))
    assert found["forward"]["body.tanh"] == {"tanh"}
    inside = {op for name, ops in found["backward"].items() if "tanh" in name for op in ops}
    assert inside == {"tanh", "mul", "sub"}


def test_a_mark_goes_before_an_operator_and_that_before_a_function():
    rules = (df.SplitFunc(gate), df.SplitFunc(aten.sin, optional=True), df.SplitFunc(aten.sigmoid))
    ops = cut_by(*rules)["forward"]
    assert home(ops, "sin") == {"body.wave"}
    assert home(ops, "sigmoid") == {"body.sigmoid"}
    assert "body.gate" in ops


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (df.SplitModule("*.bodi"), r"SplitModule\('\*\.bodi'\) matches nothing.*Near: .*\bbody\b"),
        (df.SplitModule(nn.Conv2d), r"SplitModule\('Conv2d'\) matches nothing among 4 .*body\.up"),
        (df.SplitModule(lambda name: False), r"matches nothing among 4 module names.*Near: .*body"),
        (df.SplitFunc(operators), r"SplitFunc\('operators'\) matches nothing"),
        (df.SplitFunc(aten.cumsum), r"SplitFunc\('cumsum'\) matches nothing.*mm.*sigmoid"),
        (df.SplitFunc("all_gather"), r"SplitFunc\('all_gather'\) matches nothing.*has: none"),
    ],
    ids=["pattern", "class", "predicate", "function", "operator", "collective"],
)
def test_a_rule_that_matches_nothing_is_an_error(rule, message):
    model = compiled(CASE, Rule(rule))
    with pytest.raises(Exception, match=message) as raised:
        model(*batch(CASE, 4))
    assert isinstance(getattr(raised.value, "inner_exception", raised.value), RuleError)


def test_unless_it_is_optional(unruled):
    targets = ("*.bodi", nn.Conv2d, lambda name: False)
    rules = [df.SplitModule(target, optional=True) for target in targets]
    targets = (operators, aten.cumsum, "all_gather")
    rules += [df.SplitFunc(target, optional=True) for target in targets]
    assert cut_by(*rules) == unruled


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: df.SplitModule(3), r"name pattern, a module class or a predicate.*not 3 \(int\)"),
        (lambda: df.SplitFunc(3), r"an operator, a function or a kind of collective, not 3"),
        (lambda: df.SplitFunc("all_reduc"), r"'all_reduc'\) is no kind.*all_reduce, all_gather"),
    ],
)
def test_what_is_no_target_is_refused(make, message):
    with pytest.raises(RuleError, match=message):
        make()


def test_wgrads_are_ops_of_their_own(unruled):
    apart, together = unruled["backward"], cut_by(split_wgrad=False)["backward"]
    assert {"body.up.wgrad", "body.down.wgrad"} <= apart.keys()
    assert home(apart, "mm") > {"body.up.wgrad", "body.down.wgrad"}  # dgrads are elsewhere
    assert not [name for name in together if name.endswith("wgrad")]


class Beside(CommOverlap):
    """Rules of each kind over functional collectives; wgrads fill in beside them."""

    rules = (df.SplitFunc(ParallelBlock.self_attn), df.SplitModule(ParallelBlock))


class BesideReductions(Beside):
    rules = (*Beside.rules, df.SplitFunc("all_reduce"))


class BesideGathers(Beside):
    rules = (*Beside.rules, df.SplitFunc("all_gather"), df.SplitFunc("reduce_scatter"))


def on_ranks(rank: int, name: str) -> list[object]:
    """Names of the ops of each phase; what ran beside what in the backward."""
    del rank
    case = PARALLEL[name]
    model = compiled(case, BesideReductions() if name == "fg" else BesideGathers())
    Oracle(case, 4, torch.float32).check(step(model, batch(case, 4)), name)
    forward, backward = df.plans(model)
    names = [[op.name for op in used.region.ops] for used in (forward, backward)]
    return [*names, beside(backward)]


def beside(used) -> list[tuple[str, str]]:
    """(collective, wgrad) for each wgrad issued after a collective that it does not wait for."""
    ops, launches = used.region.op, used.plan.launches
    assert {name for name, op in ops.items() if op.is_wgrad} == {n for n in ops if ".wgrad" in n}
    needs: list[set[int]] = []  # everything each launch comes after
    found = []
    for at, launch in enumerate(launches):
        before = [i for i in range(at) if launches[i].stream == launch.stream][-1:]
        direct = {*launch.waits, *before}
        needs.append(direct.union(*(needs[i] for i in direct)))
        if ops[launch.ops[0]].is_wgrad:
            found += [
                (launches[i].ops[0], launch.ops[0])
                for i in range(at)
                if ops[launches[i].ops[0]].is_communication and i not in needs[at]
            ]
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "kinds"), [("fg", ["all_reduce"]), ("sp", ["all_gather", "reduce_scatter"])]
)
def test_collectives_are_cut_out_and_run_beside_wgrads(name, kinds):
    for forward, backward, pairs in run_ranks(on_ranks, 2, name):
        for names in (forward, backward):
            for layer in ("layers.0", "layers.1"):
                assert {layer, f"{layer}.self_attn"} <= set(names)
                for kind in kinds:
                    assert any(n.startswith(layer) and f".{kind}" in n for n in names), kind
        assert len({collective for collective, _ in pairs}) > 1
        assert all(".wgrad" in wgrad for _, wgrad in pairs)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self'].layers[1].mlp", "layers.1.mlp"),
        (
            "L['self'].layers[1].mlp.forward.__closure__[1].cell_contents.__self__.down_proj",
            "layers.1.mlp.down_proj",
        ),
        ("L['self'].mlp.forward.__wrapped__.func.__self__.forward", "mlp.forward"),
        ("L['self']._modules['mlp'].forward_proj", "mlp.forward_proj"),
    ],
)
def test_a_wrapped_forward_leaves_no_trace_in_names(path, name):
    assert clean(path) == name
