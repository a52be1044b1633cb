"""Writes into tensors become values: any program of views and in-place ops stays what it was."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compare import relative_error
from graphs import trace
from seqsplit.errors import CaptureError
from seqsplit.passes.capture.functionalize import functionalize

ROWS, COLUMNS = 6, 6

# Of a name: another name for its memory, or for a part of it.
VIEWS = {
    "half": lambda v: v[: max(v.shape[0] // 2, 1)],
    "rest": lambda v: v[min(1, v.shape[0] - 1) :],
    "columns": lambda v: v[..., 1:],
    "turned": lambda v: v.transpose(0, -1),
    "one more": lambda v: v.unsqueeze(1).squeeze(1),
    "row": lambda v: v[0].unsqueeze(0),
    "permuted": lambda v: v.permute(*reversed(range(v.dim()))),
    "all": lambda v: v[:],
}
# Into a name, maybe from another one.
WRITES = {
    "scaled": lambda v, o: v.mul_(1.5),
    "added": lambda v, o: v.add_(o.mean()),
    "zero": lambda v, o: v[..., :1].zero_(),
    "copied": lambda v, o: v.copy_(o.sum().sin() + v.cos()),
    "twice": lambda v, o: v.neg_().add_(0.5),
    "assigned": lambda v, o: v.__setitem__(0, o.sum() * 0.1),
    "cut": lambda v, o: v.clamp_(-1.0, 1.0),
    "added to": lambda v, o: v.__iadd__(v.flip(0)),
}
# Values of their own.
READS = {
    "product": lambda v, o: v * o.mean(),
    "copy": lambda v, o: v.clone(),
    "sine": lambda v, o: v.sin(),
}

steps = st.one_of(
    st.tuples(st.just("view"), st.sampled_from(sorted(VIEWS)), st.integers(0, 9)),
    st.tuples(
        st.just("write"), st.sampled_from(sorted(WRITES)), st.integers(0, 9), st.integers(0, 9)
    ),
    st.tuples(
        st.just("read"), st.sampled_from(sorted(READS)), st.integers(0, 9), st.integers(0, 9)
    ),
)


def program(steps):
    """Runs them on a value and on an input that may be written to, and gives all names."""

    def run(x, buffer):
        names = [x * 1.0, buffer]
        for kind, what, *places in steps:
            operands = [names[place % len(names)] for place in places]
            if kind == "view":
                names.append(VIEWS[what](*operands))
            elif kind == "read":
                names.append(READS[what](*operands))
            else:
                WRITES[what](*operands)
        return tuple(names)

    return run


def values_and_gradient(function, written=()):
    """All names, the input that may be written to as it is afterwards, and a gradient."""
    x = torch.linspace(-2, 2, ROWS * COLUMNS, dtype=torch.float64).reshape(ROWS, COLUMNS)
    buffer, x = x.flip(0).cos(), x.requires_grad_()
    values = function(x, buffer)
    for index, write in enumerate(reversed(written)):
        assert write.index == 1 and not write.rebinds
        buffer = values[-1 - index]
    values = values[: len(values) - len(written)]
    goal = sum((value * (index + 1) * value.cos()).sum() for index, value in enumerate(values))
    return [*values, buffer, *torch.autograd.grad(goal, x)]


def functionalized(run):
    """The same program as values, and its writes into inputs."""
    x = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    lowered = trace(run, x, x.clone())
    with next(iter(lowered.graph.nodes)).meta["val"].fake_mode:
        written = functionalize(lowered.graph)
    for node in lowered.graph.nodes:
        assert not getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    lowered.graph.lint()
    lowered.module.recompile()
    return lowered.module, written


def check(run):
    expected = values_and_gradient(run)
    found = values_and_gradient(*functionalized(run))
    for have, want in zip(found, expected, strict=True):
        assert relative_error(have, want) <= 1e-12


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(steps, min_size=1, max_size=8))
def test_programs_of_views_and_writes(steps):
    run = program(steps)
    try:
        values_and_gradient(run)
    except RuntimeError:  # autograd refuses a write over what it has kept
        return
    try:
        check(run)
    except CaptureError:  # what cannot be told is refused
        return


@pytest.mark.parametrize("place", [0, 1], ids=["value", "input"])
@pytest.mark.parametrize("name", sorted(VIEWS))
def test_writes_through_every_kind_of_view_are_taken(name, place):
    """None of them is refused, and a second write through the same view arrives."""
    check(program([("view", name, place), ("write", "scaled", 2, 0), ("write", "twice", 2, 0)]))
