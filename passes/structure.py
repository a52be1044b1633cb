"""A graph's code as text that is the same for equal layers."""

from __future__ import annotations

from torch import fx

__all__ = ["structure_of"]


def structure_of(module: fx.GraphModule) -> str:
    """A graph's code without the names of its values, which differ from layer to layer."""
    numbers = {node: index for index, node in enumerate(module.graph.nodes)}
    return "\n".join(
        f"{node.op} {'' if node.op == 'placeholder' else node.target} "
        f"{fx.node.map_arg((node.args, node.kwargs), lambda n: f'%{numbers[n]}')}"
        for node in module.graph.nodes
    )
