"""``seqsplit.verify``: eager against compiled, on the user's own input."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils import _pytree as pytree

from seqsplit.deferred import DeferredTensor
from seqsplit.frontend.handle import Handle, disable, handle_for, handle_of

__all__ = ["Verification", "verify"]

# What rounding alone makes of a norm-wise relative error, with room for long sums.
_TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}


@dataclass(frozen=True)
class Verification:
    """What :func:`verify` returns; ``str()`` of it is a table.

    Attributes:
        errors: norm-wise relative error by name: ``"output 0"``, ``"grad layers.0.weight"``.
        tolerance: what counts as equal for the dtypes at hand.
    """

    errors: dict[str, float]
    tolerance: float

    @property
    def max_rel_error(self) -> float:
        """The largest error."""
        return max(self.errors.values(), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether all errors are within the tolerance (NaN is not)."""
        return all(error <= self.tolerance for error in self.errors.values())

    def __str__(self) -> str:
        table = Table("value", "relative error", "")
        for name, error in self.errors.items():
            table.add_row(name, f"{error:.2e}", "" if error <= self.tolerance else "differs")
        console = Console(file=io.StringIO(), width=100)
        console.print(table)
        verdict = "equal" if self.ok else "NOT equal"
        return f"{console.file.getvalue()}{verdict} within {self.tolerance:.0e}"


def verify(target: Callable, *args: Any, **kwargs: Any) -> Verification:
    """Compare loss, outputs and every gradient of eager and compiled.

    The loss is the output named ``loss``, else an output that is a single number, else the sum of
    all floating-point outputs weighted at random. No ``.grad`` is changed. Dropout draws other
    numbers chunk by chunk than in one piece: verify a model in ``eval()`` mode, or without
    dropout.

    Args:
        target: a module or function, compiled or not.
        args, kwargs: inputs as in training.
    """
    handle = handle_of(target) or handle_for(target)
    leaves = _leaves(handle, args, kwargs)
    state = torch.get_rng_state()
    with torch.enable_grad():
        with disable():
            expected = _run(handle.original, args, kwargs, list(leaves.values()))
        torch.set_rng_state(state)
        got = _run(handle, args, kwargs, list(leaves.values()))
    errors = {
        f"output {index}": _error(have, want)
        for index, (have, want) in enumerate(zip(got[0], expected[0]))
    }
    scale = max((float(g.norm()) for g in expected[1] if g is not None), default=0.0)
    for name, have, want in zip(leaves, got[1], expected[1]):
        if have is not None or want is not None:
            errors[f"grad {name}"] = _error(have, want, 1e-6 * scale)
    dtypes = [value.dtype for value in (*leaves.values(), *expected[0])]
    return Verification(errors, max((_TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0))


def _leaves(handle: Handle, args: tuple, kwargs: dict) -> dict[str, Tensor]:
    found = {
        name: parameter
        for module in handle.modules
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    for index, value in enumerate(pytree.tree_leaves((args, kwargs))):
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            found[f"input {index}"] = value
    return found


def _run(
    function: Callable, args: tuple, kwargs: dict, leaves: list[Tensor]
) -> tuple[list[Tensor], list[Tensor | None]]:
    result = function(*args, **kwargs)
    outputs = [v for v in pytree.tree_leaves(_plain(result)) if isinstance(v, Tensor)]
    outputs = [_computed(v) for v in outputs if v.is_floating_point()]
    differentiable = [v for v in outputs if v.requires_grad]
    if not leaves or not differentiable:
        return [v.detach() for v in outputs], [None] * len(leaves)
    loss = getattr(result, "loss", None)
    if loss is None:
        loss = next((v for v in differentiable if v.numel() == 1), None)
    if loss is None:
        generator = torch.Generator().manual_seed(0)
        loss = sum(
            (v * torch.randn(v.shape, generator=generator).to(v)).sum() for v in differentiable
        )
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [v.detach() for v in outputs], list(grads)


def _computed(value: Tensor) -> Tensor:
    """Logits are compared as a whole."""
    return value.materialize() if isinstance(value, DeferredTensor) else value


def _plain(result: Any) -> Any:
    """Outputs as containers that can be walked: model outputs are mappings or dataclasses."""
    if hasattr(result, "to_tuple"):
        return result.to_tuple()
    if hasattr(result, "__dataclass_fields__"):
        return {name: getattr(result, name) for name in result.__dataclass_fields__}
    return dict(result) if isinstance(result, dict) else result


def _error(have: Tensor | None, want: Tensor | None, floor: float = 0.0) -> float:
    if have is None or want is None:
        other = have if want is None else want
        return 0.0 if not other.any() else float("inf")
    have, want = have.double(), want.double()
    same = (have == want) | (have.isnan() & want.isnan())
    difference = (have - want).masked_fill(same, 0.0).norm()
    return float(difference / want.nan_to_num().norm().clamp_min(max(floor, 1e-30)))
