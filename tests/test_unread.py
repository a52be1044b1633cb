"""Products whose values nobody reads when a chunk is run again: skipped, and only these."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seqsplit
from compare import compare
from seqsplit.frontend.handle import handle_of
from seqsplit.ops import weights
from seqsplit.ops.weights import WeightGradient
from seqsplit.passes.split import unread
from zoo.blocks import OfBlocks

VOCAB, WIDTH, HEADS, LENGTH, BATCH = 23, 16, 2, 19, 2


class Multiplied(nn.Module):
    """``x @ weight + bias``, the weight the other way round than in ``nn.Linear``."""

    def __init__(self, width, out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) / width**0.5)
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x):
        return x @ self.weight + self.bias


class InOneOp(Multiplied):
    def forward(self, x):
        rows = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)


class OfRows(Multiplied):
    def forward(self, x):
        return torch.mm(x.flatten(0, 1), self.weight).view(*x.shape[:-1], -1) + self.bias


class Block(nn.Module):
    """Attention and an MLP; what comes after a projection decides whether its value is read."""

    def __init__(self, after_keys=None, after_mlp=None, linear=nn.Linear):
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = linear(WIDTH, 3 * WIDTH), linear(3 * WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.after_keys = after_keys or (lambda block, k: k)
        self.after_mlp = after_mlp or (lambda block, y: y)

    def forward(self, x):
        y = self.norm(x)
        keys = self.after_keys(self, self.k(y))
        q, k, v = (
            z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (self.q(y), keys, self.v(y))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.after_mlp(self, self.down(F.gelu(self.up(self.norm_mlp(x)))))


def ids():
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def build(**options):
    torch.manual_seed(0)
    return OfBlocks((Block(**options) for _ in range(2)), VOCAB, WIDTH).double()


def compared(**options):
    """The compiled model, once its gradients were found to be eager's."""
    return compare(lambda: build(**options), ids(), chunk_size=4).mine


def skipped(model):
    """How many products the body of a block skips: in chunks before the last, and in that."""
    body = handle_of(model).log[0].plan.segments[0].body
    return tuple(
        sum(node.target in weights.UNREAD.values() for node in module.graph.nodes)
        for module in (body.visit, body.visit_last)
    )


KEYS = {
    "a table": (lambda block, k: k * torch.arange(k.shape[1])[:, None].cos(), True),
    "a number": (lambda block, k: -k / 2 + 1, True),
    "a dropout of nothing": (lambda block, k: F.dropout(k, 0.0), True),
    "a norm": (lambda block, k: F.normalize(k, dim=-1), False),
    "a square": (lambda block, k: k * k, False),
    "a gate": (lambda block, k: k * block.gate, False),
    "the gate over it": (lambda block, k: block.gate / (k.abs() + 1), False),
    "another reader": (lambda block, k: k + 0 * k.sigmoid(), False),
}


@pytest.mark.parametrize("after", KEYS)
def test_keys_are_projected_again_only_if_their_values_are_read(after):
    function, spared = KEYS[after]
    assert skipped(compared(after_keys=function)) == (
        2 + spared,
        1,
    )  # values, and the last product of the MLP


@pytest.mark.parametrize("after", KEYS)
def test_the_last_product_is_computed_again_only_if_its_value_is_read(after):
    function, spared = KEYS[after]
    assert skipped(compared(after_mlp=function)) == (2 + spared, int(spared))


@pytest.mark.parametrize("linear", [Multiplied, InOneOp, OfRows])
def test_products_are_found_however_they_are_written(linear):
    assert skipped(compared(linear=linear)) == skipped(compared()) == (3, 1)
    body = handle_of(compared(linear=linear)).log[0].plan.segments[0].body
    assert sum(node.target is weights.product for node in body.module.graph.nodes) == 6


def test_dropout_after_it_draws_what_it_drew():
    dropped = build(after_mlp=lambda block, y: F.dropout(y, 0.5))
    model = seqsplit.compile(dropped, chunk_size=4, strict=True)
    torch.manual_seed(3)
    found = torch.autograd.grad(model(ids()), model.blocks.parameters(), allow_unused=True)
    assert skipped(model)[1] == 1
    # The same masks from the same seed, in chunks as well, with nothing skipped.
    body = handle_of(model).log[0].plan.segments[0].body
    for part in ("visit", "visit_last"):
        object.__setattr__(body, part, body.module)
    torch.manual_seed(3)
    again = torch.autograd.grad(model(ids()), model.blocks.parameters(), allow_unused=True)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_a_value_that_is_skipped_though_it_is_read_is_caught(monkeypatch):
    monkeypatch.setattr(unread, "_is_linear", lambda user, operand: True)
    build_square = functools.partial(build, after_keys=KEYS["a square"][0])
    model = compare(build_square, ids(), chunk_size=4, streamed=False).mine
    report = seqsplit.explain(model, ids())
    assert any("does not equal the original" in reason for _, reason in report.whole)


@pytest.mark.parametrize("of_turned", [True, False])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_unread_product_has_the_gradients_of_the_product(dtype, trained, of_turned):
    """Under autocast as well: the dtypes and the rounding are its own."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, out = (
        torch.randn(size, generator=generator) for size in ((2, 5, 8), (6, 8), (6,), (2, 5, 6))
    )

    def run(product, sums):
        leaves = [t.clone().requires_grad_() for t in (x, bias)]
        w = weight if of_turned else weight.t()
        w = w.contiguous().clone().requires_grad_(trained)
        if sums and trained:
            w.seqsplit_gradient = WeightGradient(w, torch.float32)
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            y = product(leaves[0], w, leaves[1])
        wanted = [*leaves, *([w] if trained else [])]
        grads = list(torch.autograd.grad(y, wanted, out.to(y.dtype), allow_unused=True))
        if sums and trained:
            grads[-1] = w.seqsplit_gradient.take()
        return y, grads

    ours = weights.linear if of_turned else weights.product
    y, expected = run(F.linear if of_turned else lambda x, w, b: F.linear(x, w.t(), b), sums=False)
    for product in (ours, weights.UNREAD[ours]):
        value, found = run(product, sums=True)
        assert (value.dtype, value.shape) == (y.dtype, y.shape)
        assert torch.equal(value, y) is (product is ours)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
