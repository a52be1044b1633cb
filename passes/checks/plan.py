"""Check: the invariants that hold after each pass.

:func:`check_plan` is cheap and runs on every finished plan; the others recompute what the passes
recorded, and are run by the tests after each pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from seqsplit.ir.placement import Kind, Placement
from seqsplit.ir.plan import Body, Plan
from seqsplit.ops import caches
from seqsplit.passes.analysis.facts import Facts
from seqsplit.passes.graph.lowered import Lowered, fake_mode_of
from seqsplit.passes.rules.attention import SOFTMAX
from seqsplit.passes.rules.registry import pull
from seqsplit.passes.split.cut import Cuts, summing_row
from seqsplit.passes.split.demand import Compute, Demands
from seqsplit.passes.split.stitch import Placed

__all__ = ["check_body", "check_demands", "check_graph", "check_plan"]


def check_graph(lowered: Lowered) -> None:
    """Raise ``AssertionError`` if the lowered graph breaks an invariant.

    - it lints, and no op changes its operands;
    - recorded shapes and dtypes are those that the ops give.
    """
    lowered.graph.lint()
    mode = fake_mode_of(lowered.graph)
    for node in lowered.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        assert not node.target._schema.is_mutable, f"{node.target} changes its operand"
        held = node.meta.get("val")
        if not isinstance(held, torch.Tensor):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with mode, enable_python_dispatcher():
            again = node.target(*args, **kwargs)
        assert again.dtype == held.dtype, f"{node} is recorded as {held.dtype}, not {again.dtype}"
        shapes = [[lowered.expr(size) for size in value.shape] for value in (held, again)]
        assert shapes[0] == shapes[1], f"{node} is recorded as {shapes[0]}, not {shapes[1]}"


def check_demands(facts: Facts, demands: Demands) -> None:
    """Raise ``AssertionError`` if a recipe is not one that the rules give.

    - what an op is to give and what it takes are a row of its rule;
    - only a sum, and what is linear in it, takes shares of sums;
    - what a recipe needs has a recipe.
    """
    for node, placement, recipe in demands.items():
        if not isinstance(recipe, Compute):
            continue
        for operand, wanted in recipe.operands:
            assert wanted in demands.recipes[operand], f"{node} takes {operand}, which nobody gives"
            assert placement.partial or not wanted.partial, f"{node} takes a share of {operand}"
        given = tuple(wanted for _, wanted in recipe.operands)
        if placement.partial:
            assert given == summing_row(facts, node), f"{node} is no sum of what it takes"
            continue
        for span in placement.spans:
            if node.target in SOFTMAX and span[1].kind is Kind.KEYS:
                continue  # what lies outside the range is masked: attend.py has proved it
            asked = pull(node, Placement((span,)), facts.shape)
            for needed, wanted in zip(asked, given, strict=True):
                dims = {dim for dim, _ in wanted.spans}
                missing = [dim for dim, _ in needed.spans if dim not in dims]
                assert not missing, f"{node} takes too much along {missing} for its {placement}"


def check_body(body: Body, num_sizes: int) -> None:
    """Raise ``AssertionError`` if a chunk body breaks an invariant.

    - it lints, takes exactly what it declares and changes none of it;
    - it reads no rows after its own: every read of a cache ends where the chunk does;
    - a weight comes in once, so that its gradient has one accumulator.
    """
    graph = body.module.graph
    graph.lint()
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    expected = 3 + num_sizes + len(body.inputs) + len(body.caches) + 1
    assert len(placeholders) == expected, f"a body takes {len(placeholders)}, not {expected} values"
    assert (body.fill is not None) == bool(body.caches)
    whole = [spec.operand for spec in body.inputs if not spec.placement.spans]
    assert len(whole) == len(set(whole)), "a weight has two accumulators"
    start, end = placeholders[:2]
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        assert schema is None or not schema.is_mutable, f"{node.target} changes its input"
        if node.target in (caches.cached_read, caches.cached_parts):
            assert node.args[3:5] == (start, end), f"{node} reads beyond its chunk"


def check_plan(facts: Facts, cuts: Cuts, placed: Sequence[Placed], plan: Plan) -> None:
    """Raise ``AssertionError`` if a plan breaks an invariant.

    - every graph lints;
    - a segment's operands exist before it runs;
    - no value is given by two segments;
    - a body takes exactly the inputs it declares and changes none of them;
    - caches are filled by the part that fills them.
    """
    plan.module.graph.lint()
    order = {node: index for index, node in enumerate(facts.lowered.graph.nodes)}
    given: dict[fx.Node, int] = {}
    for item in placed:
        for node in item.split.operands:
            outer = node in facts.outer or node in cuts.whole
            assert outer or given.get(node, len(order) + 1) <= item.position, (
                f"{item.segment.scope} takes {node} before it exists"
            )
        for node in item.values:
            assert node not in given, f"{node} is given twice"
            given[node] = item.position
        check_body(item.split.body, len(item.split.sizes))
