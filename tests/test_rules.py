"""Every row of the rule table is executed: parts give parts, on distinct sizes, in float64."""

import itertools

import pytest
import torch

from graphs import output_of, trace
from seqsplit.passes.rules import registry
from seqsplit.placement import Sum

aten = torch.ops.aten
A, B, C, D = 5, 3, 7, 2  # distinct, so that a swapped dim shows

torch.manual_seed(0)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def ints(high, *shape):
    return torch.randint(0, high, shape)


# One call per op (or more, where its arguments change the rows).
CALLS = {
    "add": lambda: (aten.add.Tensor, x(A, B), x(B)),
    "add_ones": lambda: (aten.add.Tensor, x(A, 1, C), x(B, 1)),
    "sub_equal": lambda: (aten.sub.Tensor, x(A, B), x(A, B)),
    "mul_scalar_tensor": lambda: (aten.mul.Tensor, x(A, B), x()),
    "div": lambda: (aten.div.Tensor, x(A, B), x(A, 1)),
    "where": lambda: (aten.where.self, x(A, B) > 0, x(B), x(A, 1)),
    "masked_fill": lambda: (aten.masked_fill.Scalar, x(A, B), x(B) > 0, 0.5),
    "silu": lambda: (aten.silu.default, x(A, B, C)),
    "gelu": lambda: (aten.gelu.default, x(A, B)),
    "cast": lambda: (aten.to.dtype, x(A, B), torch.float32),
    "and": lambda: (aten.__and__.Tensor, x(A, B) > 0, x(B) > 0),
    "mm": lambda: (aten.mm.default, x(A, B), x(B, C)),
    "bmm": lambda: (aten.bmm.default, x(A, B, C), x(A, C, D)),
    "mv": lambda: (aten.mv.default, x(A, B), x(B)),
    "dot": lambda: (aten.dot.default, x(A), x(A)),
    "cdist": lambda: (aten.cdist.default, x(A, B, 4), x(A, C, 4)),
    "linear": lambda: (aten.linear.default, x(A, B, C), x(D, C)),
    "linear_bias": lambda: (aten.linear.default, x(A, B, C), x(D, C), x(D)),
    "addmm": lambda: (aten.addmm.default, x(C), x(A, B), x(B, C)),
    "baddbmm": lambda: (aten.baddbmm.default, x(A, 1, D), x(A, B, C), x(A, C, D)),
    "matmul": lambda: (aten.matmul.default, x(A, B, C), x(A, C, D)),
    "matmul_broadcast": lambda: (aten.matmul.default, x(A, 1, B, C), x(D, C, B)),
    "matmul_weight": lambda: (aten.matmul.default, x(A, B, C), x(C, D)),
    "matmul_vector": lambda: (aten.matmul.default, x(A, B, C), x(C)),
    "einsum": lambda: (aten.einsum.default, "bqd,bkd->bqk", [x(A, B, C), x(A, D, C)]),
    "einsum_dots": lambda: (aten.einsum.default, "...ij,jk->...ik", [x(A, B, C), x(C, D)]),
    "conv1d": lambda: (aten.conv1d.default, x(A, B, C), x(D, B, 1), x(D)),
    "conv2d": lambda: (aten.conv2d.default, x(A, B, C, D), x(B, B, 1, 1)),
    "conv2d_wide": lambda: (
        aten.conv2d.default, x(A, B, C, D), x(B, B, 3, 1), None, [1, 1], [1, 0],
    ),
    "sum": lambda: (aten.sum.default, x(A, B)),
    "sum_dims": lambda: (aten.sum.dim_IntList, x(A, B, C), [1, -1], True),
    "mean": lambda: (aten.mean.dim, x(A, B, C), [-1]),
    "amax": lambda: (aten.amax.default, x(A, B, C), [1]),
    "logsumexp": lambda: (aten.logsumexp.default, x(A, B), [-1]),
    "var_mean": lambda: (aten.var_mean.correction, x(A, B), [-1]),
    "max_dim": lambda: (aten.max.dim, x(A, B), -1),
    "softmax": lambda: (aten.softmax.int, x(A, B, C), -1),
    "log_softmax": lambda: (aten.log_softmax.int, x(A, B), 1),
    "cumsum": lambda: (aten.cumsum.default, x(A, B), -1),
    "topk": lambda: (aten.topk.default, x(A, C), 2),
    "sort": lambda: (aten.sort.default, x(A, C)),
    "layer_norm": lambda: (aten.layer_norm.default, x(A, B, 7), [7], x(7), x(7)),
    "rms_norm": lambda: (aten.rms_norm.default, x(A, B, 7), [7], x(7)),
    "embedding": lambda: (aten.embedding.default, x(C, D), ints(C, A, B)),
    "gather": lambda: (aten.gather.default, x(A, B, C), 2, ints(C, A, B, 2)),
    "index_select": lambda: (aten.index_select.default, x(A, B), 1, ints(B, C)),
    "index_pairs": lambda: (aten.index.Tensor, x(A, B, D), [ints(A, C, 1), ints(B, 4)]),
    "index_middle": lambda: (aten.index.Tensor, x(A, B, D), [None, ints(B, C)]),
    "one_hot": lambda: (aten.one_hot.default, ints(6, A, B), 6),
    "cross_entropy": lambda: (aten.cross_entropy_loss.default, x(A, 7), ints(7, A), None, 2),
    "cross_entropy_weights": lambda: (
        aten.cross_entropy_loss.default, x(A, 7, B), ints(7, A, B), x(7).abs(), 2, 1, 0.1,
    ),
    "cross_entropy_none": lambda: (aten.cross_entropy_loss.default, x(A, 7), ints(7, A), None, 0),
    "cross_entropy_soft": lambda: (
        aten.cross_entropy_loss.default, x(A, 7), x(A, 7).softmax(-1), None, 2,
    ),
    "nll": lambda: (aten.nll_loss_nd.default, x(A, 7), ints(7, A), None, 2),
    "mse": lambda: (aten.mse_loss.default, x(A, B), x(A, B), 2),
    "kl": lambda: (aten.kl_div.default, x(A, B), x(A, B).abs(), 2),
    "transpose": lambda: (aten.transpose.int, x(A, B, C), 0, -1),
    "permute": lambda: (aten.permute.default, x(A, B, C), [2, 0, -2]),
    "movedim": lambda: (aten.movedim.int, x(A, B, C), 0, -1),
    "t": lambda: (aten.t.default, x(A, B)),
    "unsqueeze": lambda: (aten.unsqueeze.default, x(A, B), -2),
    "squeeze": lambda: (aten.squeeze.dim, x(A, 1, B), 1),
    "select": lambda: (aten.select.int, x(A, B, C), 1, 2),
    "cat": lambda: (aten.cat.default, [x(A, B), x(A, B)], 1),
    "stack": lambda: (aten.stack.default, [x(A, B), x(A, B)], -1),
    "split": lambda: (aten.split.Tensor, x(A, B, 6), 3, -1),
    "chunk": lambda: (aten.chunk.default, x(A, B, 6), 3, 2),
    "unbind": lambda: (aten.unbind.int, x(A, B, 2), -1),
    "repeat_interleave": lambda: (aten.repeat_interleave.self_int, x(A, B, C), 2, 1),
    "flatten": lambda: (aten.flatten.using_ints, x(A, B, C), 1, 2),
    "pad": lambda: (aten.pad.default, x(A, B, C), [1, 2]),
    "roll": lambda: (aten.roll.default, x(A, B, C), [1], [-1]),
    "flip": lambda: (aten.flip.default, x(A, B), [1]),
    "contiguous": lambda: (aten.contiguous.default, x(A, B, C)),
    "clone": lambda: (aten.clone.default, x(A, B)),
    "slice": lambda: (aten.slice.Tensor, x(A, B, C), 1, 1, 3),
    "split_with_sizes": lambda: (aten.split_with_sizes.default, x(A, B, 6), [2, 4], -1),
    "le": lambda: (aten.le.Tensor, x(A, 1), x(1, B)),
    "ne": lambda: (aten.ne.Scalar, ints(3, A, B), 1),
    "pow": lambda: (aten.pow.Tensor_Scalar, x(A, B), 2),
    "clamp": lambda: (aten.clamp.default, x(A, B), -1, 1),
    "not": lambda: (aten.bitwise_not.default, x(A, B) > 0),
    "softplus": lambda: (aten.softplus.default, x(A, B)),
    "floor_divide": lambda: (aten.floor_divide.default, ints(9, A, B), 2),
    "scatter": lambda: (aten.scatter.value, x(A, B, C), 2, ints(C, A, B, 2), 0.0),
    "glu": lambda: (aten.glu.default, x(A, B, 6), -1),
    "group_norm": lambda: (aten.group_norm.default, x(A, 6, B), 3),
    "addcmul": lambda: (aten.addcmul.default, x(A, B), x(B), x(A, 1)),
    "lerp": lambda: (aten.lerp.Tensor, x(A, B), x(A, B), x(B)),
    "norm": lambda: (aten.linalg_vector_norm.default, x(A, B, C), 2, [-1]),
    "argmax": lambda: (aten.argmax.default, x(A, B), -1),
    "any": lambda: (aten.any.dim, x(A, B) > 1, 1),
    "outer": lambda: (aten.outer.default, x(A), x(B)),
    "attention": lambda: (
        aten.scaled_dot_product_attention.default, x(A, B, 11, 4), x(A, B, C, 4), x(A, B, C, 4),
        x(11, C),
    ),
}  # fmt: skip


def one_node(call):
    """The call as a node with symbolic sizes, its real arguments, and its shape function."""
    op, *arguments = call
    leaves, spec = torch.utils._pytree.tree_flatten(arguments)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(*tensors):
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return op(*torch.utils._pytree.tree_unflatten(filled, spec))

    tensors = [leaves[place] for place in places]
    lowered = trace(function, *tensors)
    nodes = [n for n in lowered.graph.nodes if n.op == "call_function"]
    node = next(n for n in nodes if n.target is op)
    return node, function, tensors, lowered.shape


def outputs(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def parts(value, placement, bounds):
    for start, end in bounds:
        part = value
        for dim, _ in placement.spans:
            part = part.narrow(dim, start, end - start)
        yield part


@pytest.mark.parametrize("name", CALLS)
def test_rows_hold(name):
    node, function, tensors, shape = one_node(CALLS[name]())
    rows = [row for row in registry.rows_of(node, shape) if not row.exact_factors]
    assert rows, f"{name} has no rows"
    whole = outputs(function(*tensors))
    for row in rows:
        split = [(t, p) for t, p in zip(tensors, row.operands, strict=True) if p.spans]
        if not split:
            continue
        length = split[0][0].shape[split[0][1].spans[0][0]]
        assert all(t.shape[p.spans[0][0]] == length for t, p in split), f"{name}: {row}"
        bounds = [(0, 1), (1, length)] if length > 1 else [(0, 1)]
        chunks = zip(*(parts(t, p, bounds) for t, p in zip(tensors, row.operands)), strict=True)
        results = [outputs(function(*chunk)) for chunk in chunks]
        for item, want in enumerate(whole):
            pieces = [result[item] for result in results]
            have = sum(pieces) if row.out == Sum else torch.cat(pieces, row.out.spans[0][0])
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


# Rows that hold and are not wanted: attention's rows are a recipe of their own (split/demand.py).
NOT_WANTED = {"attention"}


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
            have.shape == want.shape and torch.allclose(have.double(), want.double(), atol=1e-12)
            for have, want in zip(joined, whole)
        )

    if whole[0].is_floating_point() and same(lambda parts: parts[0] + parts[1]):
        yield "sum"
    for dim, size in enumerate(whole[0].shape):
        if size == length and same(lambda parts, dim=dim: torch.cat(parts, dim)):
            yield dim


@pytest.mark.parametrize("name", [name for name in CALLS if name not in NOT_WANTED])
def test_no_row_is_missing(name):
    node, function, tensors, shape = one_node(CALLS[name]())
    told = set()
    for row in registry.rows_of(node, shape):
        dims = tuple(p.spans[0][0] if p.spans else None for p in row.operands)
        told.add(("sum" if row.out == Sum else row.out.spans[0][0], dims))
    missing = executed_rows(function, tensors) - told
    assert not missing, f"{name} also splits as (output, operands): {sorted(missing, key=str)}"


def test_a_wrong_row_would_be_noticed(monkeypatch):
    def wrong(self):
        from seqsplit.placement import Chunk

        yield Chunk(1), Chunk(1)

    entry = registry._Rule(wrong, None, None)
    monkeypatch.setitem(registry._RULES, aten.cumsum.default, entry)
    with pytest.raises(AssertionError):
        test_rows_hold("cumsum")


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
