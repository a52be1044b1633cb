"""The sequence rules of ops: one table, by family.

Importing this package fills the registry.
"""

from seqsplit.passes.rules import (
    attention,
    contraction,
    convolution,
    creation,
    indexing,
    loss,
    pointwise,
    reduction,
    views,
)
from seqsplit.passes.rules.registry import (
    Operand,
    Row,
    Unsplittable,
    pull,
    rewrite_arguments,
    rows_of,
    rule,
    sum_rows,
)

__all__ = [
    "Operand",
    "Row",
    "Unsplittable",
    "attention",
    "contraction",
    "convolution",
    "creation",
    "indexing",
    "loss",
    "pointwise",
    "pull",
    "reduction",
    "rewrite_arguments",
    "rows_of",
    "rule",
    "sum_rows",
    "views",
]
