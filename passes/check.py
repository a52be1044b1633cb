"""Check: the invariants of a finished plan."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..plan import Plan
from .cut import Cuts
from .facts import Facts
from .stitch import Placed

__all__ = ["check_plan"]


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
        _check_body(item)


def _check_body(item: Placed) -> None:
    body = item.split.body
    body.module.graph.lint()
    names = [node.name for node in body.module.graph.nodes if node.op == "placeholder"]
    expected = 3 + len(item.split.sizes) + len(body.inputs) + len(body.caches) + 1
    assert len(names) == expected, f"a body takes {len(names)} values instead of {expected}"
    assert (body.fill is not None) == bool(body.caches)
    for node in body.module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        assert schema is None or not schema.is_mutable, f"{node.target} changes its input"
