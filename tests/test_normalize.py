"""What the rules speak of, whatever the model says."""

import torch

from graphs import trace
from seqsplit.passes.rewrite.normalize import normalize

aten = torch.ops.aten


def test_ops_with_two_names():
    def function(x):
        y = torch.subtract(torch.multiply(x, x), torch.divide(x, 2))
        y = torch.concat([torch.negative(y), torch.swapaxes(y, 0, 1)], 0)
        return torch.where(torch.greater(y, 0), torch.absolute(y), torch.clip(y, -1, 1))

    lowered = trace(function, torch.randn(3, 3))
    normalize(lowered)
    used = [node.target for node in lowered.graph.nodes if node.op == "call_function"]
    assert used == [
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.sub.Tensor,
        aten.neg.default,
        aten.transpose.int,
        aten.cat.default,
        aten.gt.Scalar,
        aten.abs.default,
        aten.clamp.default,
        aten.where.self,
    ]


def test_as_many_last_entries_as_there_are_are_all_of_them():
    def function(x, y):
        return x[:, -y.shape[0] :] + x[:, -x.shape[1] :] + y

    x = torch.randn(5, 5)
    lowered = trace(function, x, x)
    normalize(lowered)
    used = [node.target for node in lowered.graph.nodes if node.op == "call_function"]
    assert aten.slice.Tensor not in used
    lowered.module.recompile()
    assert torch.equal(lowered.module(x, x), function(x, x))


def test_what_holds_nothing_is_no_part_of_a_cat():
    def function(x, y):
        empty, other = torch.tensor([], dtype=x.dtype), x.new_empty(0, 5)
        narrow = torch.cat([torch.tensor([], dtype=torch.float64), x.float()], 0)
        return torch.cat([empty, x], 0) + torch.cat([other, x[:2], empty, y[2:]], 0) + narrow

    x, y = torch.randn(5, 5), torch.randn(5, 5)
    lowered = trace(function, x, y)
    normalize(lowered)
    cats = [node for node in lowered.graph.nodes if node.target is aten.cat.default]
    assert [len(node.args[0]) for node in cats] == [2, 2]
    lowered.module.recompile()
    have, want = lowered.module(x, y), function(x, y)
    assert torch.equal(have, want) and have.dtype == want.dtype
