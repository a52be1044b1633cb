"""The rule table, executed: every row holds, none is missing, and a wrong one would be noticed."""

import itertools
from pathlib import Path

import pytest
import torch

import rule_calls
from graphs import output_of, trace
from row_checks import Traced, assert_holds
from rule_calls import CALLS, A, B, C, aten, x
from seqsplit.ir.placement import Chunk, Sum, Whole
from seqsplit.passes.rules import registry

DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool)
# Other sizes to make the calls with: other primes, and dims of size 1.
SIZES = ({"A": 2, "B": 7, "C": 5, "D": 3}, {"A": 1}, {"B": 1}, {"C": 1})
# No part of the operand makes a part of the result.
WITHOUT_ROWS = {aten.max.default}


def in_dtype(call, dtype):
    """The same call on floating-point tensors of another dtype; ``None`` if it is not taken."""

    def converted(t):  # no number becomes 0
        return t > 0 if dtype == torch.bool else (3 * t).abs().ceil().to(dtype)

    exact = not dtype.is_floating_point
    tensors = tuple(
        (converted(t) if exact else t.to(dtype)) if t.is_floating_point() else t
        for t in call.tensors
    )
    try:
        call.function(*tensors)
    except (RuntimeError, IndexError, TypeError, NotImplementedError):
        return None
    return call.on(tensors)


@pytest.mark.parametrize("name", CALLS)
def test_rows_hold(name):
    """In several dtypes: some rows are for some of them only."""
    call = CALLS[name]()
    ran = 0
    for dtype in DTYPES:
        if (own := in_dtype(call, dtype)) is not None:
            one = Traced(own)
            ran += sum(assert_holds(one, row) for row in one.rows)
    assert bool(ran) is (call.op not in WITHOUT_ROWS), f"{ran} rows of {name} were run"


@pytest.mark.parametrize("name", CALLS)
def test_rows_hold_for_other_sizes(name, monkeypatch):
    for sizes in SIZES:
        with monkeypatch.context() as patch:
            for letter, size in sizes.items():
                patch.setattr(rule_calls, letter, size)
            try:
                call = CALLS[name]()
                call.function(*call.tensors)
                one = Traced(call)
            except (RuntimeError, IndexError, ValueError):  # not for a call of such sizes
                continue
            for row in one.rows:
                assert_holds(one, row)


# ---- Rows that are not there --------------------------------------------------------------------

# Rows that hold and are not wanted: attention's and recurrences' rows along the sequence are
# recipes of their own (split/demand.py).
NOT_WANTED = {"attention", "recurrence", "recurrence_of_heads", "linear_attention"}


def executed_rows(function, tensors):
    """All ways to split one dim of the output, or to share its sum, that hold when executed."""
    whole = outputs(function(*tensors))
    if len({value.shape for value in whole}) > 1:
        return set()
    lengths = {size for tensor in tensors for size in tensor.shape if size > 1}
    found = set()
    for length in lengths:
        choices = [
            [None, *(dim for dim, size in enumerate(t.shape) if size == length)] for t in tensors
        ]
        for dims in itertools.product(*choices):
            if all(dim is None for dim in dims):
                continue
            try:
                pieces = [
                    outputs(
                        function(
                            *(
                                t if dim is None else t.narrow(dim, start, end - start)
                                for t, dim in zip(tensors, dims)
                            )
                        )
                    )
                    for start, end in ((0, 1), (1, length))
                ]
            except Exception:  # the op does not take such parts
                continue
            found |= {(out, dims) for out in _outs(whole, pieces, length)}
    return found


def _outs(whole, pieces, length):
    """The dims along which pieces make the whole; "sum" if they add up to it."""

    def same(join):
        try:
            joined = [join(parts) for parts in zip(*pieces)]
        except RuntimeError:
            return False
        return all(
            have.shape == want.shape and torch.allclose(wide(have), wide(want), atol=1e-12)
            for have, want in zip(joined, whole)
        )

    if whole[0].is_floating_point() and same(lambda parts: parts[0] + parts[1]):
        yield "sum"
    for dim, size in enumerate(whole[0].shape):
        if size == length and same(lambda parts, dim=dim: torch.cat(parts, dim)):
            yield dim


def wide(value):
    return value if value.is_complex() else value.double()


def outputs(result):
    return [result] if isinstance(result, torch.Tensor) else [r for r in result if r is not None]


def told_of(row):
    """A row as `executed_rows` has it: the output's dim or "sum", and the operands' dims."""
    dims = tuple(p.spans[0][0] if p.spans else "sum" if p == Sum else None for p in row.operands)
    return ("sum" if row.out == Sum else row.out.spans[0][0], dims)


@pytest.mark.parametrize(
    "name", [n for n in CALLS if n not in NOT_WANTED and CALLS[n]().arguments is not None]
)
def test_no_row_is_missing(name):
    call = CALLS[name]()
    told = {told_of(row) for row in Traced(call).rows}
    missing = executed_rows(call.function, call.tensors) - told
    assert not missing, f"{name} also splits as (output, operands): {sorted(missing, key=str)}"


# ---- Rows that are wrong ------------------------------------------------------------------------


def wrong_rows(one, row):
    """A row with one thing changed: where the output is cut, or one operand."""
    for out in (*map(Chunk, range(len(one.shape(one.node)))), Sum):
        yield registry.Row(out, row.operands)
    for index, operand in enumerate(one.operands):
        for other in (Whole, *map(Chunk, range(len(one.shape(operand))))):
            operands = list(row.operands)
            operands[index] = other
            yield registry.Row(row.out, tuple(operands))


def is_noticed(one, row):
    """Whether it is; raises if it is not. What splits nothing that varies cannot be run."""
    try:
        ran = assert_holds(one, row)
    except (AssertionError, RuntimeError, IndexError, ValueError, UserWarning):
        return True
    assert not ran, f"{row} was not noticed"
    return False


def family_of(call):
    """The rule that says the rows of a call."""
    entry = registry._find(call.op)
    return None if entry is None else entry.function


FAMILIES = {}
for _name in CALLS:
    if (_family := family_of(CALLS[_name]())) is not None:
        FAMILIES.setdefault(_family, []).append(_name)
# Of a value that is made of sizes alone, every dim that varies may be cut: no row is wrong.
NEVER_WRONG = {"filled"}


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.__name__ not in NEVER_WRONG])
def test_a_wrong_row_is_noticed(family):
    """Planted in the rule, one at a time, it fails the check that the right rows pass."""
    noticed = 0
    for name in FAMILIES[family][:4]:
        call = CALLS[name]()
        one = Traced(call)
        right = {told_of(row) for row in one.rows}
        right |= executed_rows(call.function, call.tensors) if call.arguments is not None else set()
        for row in one.rows:
            for wrong in wrong_rows(one, row):
                if told_of(wrong) not in right:
                    noticed += is_noticed(one, wrong)
    assert noticed, f"no wrong row could be made for {family.__name__}"


# ---- What is called -----------------------------------------------------------------------------


def test_reshapes_name_the_factors_of_merged_dims():
    lowered = trace(lambda t: t.reshape(t.shape[0] * t.shape[1], t.shape[2]), x(A, B, C))
    node = output_of(lowered)
    batch, length, _ = lowered.shape(node.args[0])
    merged = [row for row in registry.rows_of(node, lowered.shape) if row.exact_factors]
    factors = {
        row.operands[0].spans[0][0]: (row.out.spans[0][1].outer, row.out.spans[0][1].inner)
        for row in merged
    }
    assert factors == {0: (1, length), 1: (batch, 1)}


def test_an_op_without_a_rule_is_found_by_execution():
    def custom(a, b):
        return torch.special.i0(a) * b

    custom.__module__ = __name__
    lowered = trace(lambda a: a + 1, x(A, B))
    node = output_of(lowered)
    source = node.args[0]
    with lowered.graph.inserting_after(node):
        new = lowered.graph.call_function(custom, (source, source))
    new.meta = dict(node.meta)
    found = {row.out.spans[0][0] for row in registry.rows_of(new, lowered.shape)}
    assert found == {0, 1}

    def mixing(a):
        return a.flip(0)

    mixing.__module__ = __name__
    with lowered.graph.inserting_after(new):
        other = lowered.graph.call_function(mixing, (source,))
    other.meta = dict(node.meta)
    assert {row.out.spans[0][0] for row in registry.rows_of(other, lowered.shape)} == {1}


# Ops that no rule is asked about, since what reaches the rules is functional and normalised, or
# since they make values of numbers alone, or draw at random (tests/test_dropout.py).
OTHERS = {
    "without tensors": {
        "arange.default", "arange.start", "arange.start_step", "scalar_tensor.default",
    },
    "become others": {
        "_unsafe_view.default", "concat.default", "detach_.default", "expand_as.default",
        "empty_like.default", "full_like.default", "new_empty.default", "new_full.default",
        "new_ones.default", "new_zeros.default", "ones_like.default", "reshape_as.default",
        "squeeze.default", "type_as.default", "view_as.default", "zeros_like.default",
        "lift_fresh_copy.default",
    },
    "drawn": {"exponential_.default", "rand_like.default", "uniform_.default", "bernoulli.p"},
}  # fmt: skip


def test_every_captured_op_is_called():
    lines = Path(__file__).with_name("captured_ops.txt").read_text().splitlines()
    captured = {line for line in lines if not line.startswith("#")}
    called = {str(CALLS[name]().op).removeprefix("aten.") for name in CALLS}
    others = set().union(*OTHERS.values())
    mutable = {op for op in captured if op.split(".")[0].endswith("_") and "__" not in op}
    left = captured - called - others - mutable
    assert not left, sorted(left)


def test_every_rule_is_called():
    """But those that say that there are no rows, and those of attention's kernels and of functions
    that expose a state, which have tests of their own."""
    rules = {entry.function for entry in registry._RULES.values()}
    rules |= {entry.function for _, entry in registry._FAMILIES}
    called = {family_of(CALLS[name]()) for name in CALLS}
    assert {rule.__name__ for rule in rules - called} == {
        "data_dependent", "final_state", "getitem", "kernel", "recurrent",
    }  # fmt: skip
