"""Ops that do not take float64: tried in their own dtypes, and no less strictly."""

import pytest
import torch
from torch import nn

import seqsplit
from graphs import output_of, trace
from seqsplit import errors
from seqsplit.frontend import handle
from seqsplit.passes.rules import registry
from seqsplit.passes.trials.trial import tolerance
from zoo import batches, probe
from zoo.probe import causal

B, T, K, N = 3, 9, 20, 20
MARK = 77.0


def register(name, forward, backward):
    """An op `(x, weight) -> x @ weight.T` with faults; its kernel knows two dtypes only."""

    @torch.library.custom_op(f"seqsplit_tests::{name}", mutates_args=())
    def op(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return forward(x, weight)

    op.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]))
    op.register_autograd(
        lambda ctx, grad: backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return getattr(torch.ops.seqsplit_tests, name).default


def product(x, weight):
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise NotImplementedError(f"no kernel for {x.dtype}")
    return x @ weight.T


def unwritten(x, weight):
    """What a switch over dtypes without a default gives: some memory."""
    known = x.dtype in (torch.float32, torch.bfloat16)
    return x @ weight.T if known else torch.rand(*x.shape[:-1], len(weight), dtype=x.dtype)


def leak(x):
    """How much a token takes from the others: little, but more than what rounding allows."""
    return {torch.float32: 1e-6, torch.bfloat16: 1e-2}[x.dtype] * x.mean(1, keepdim=True)


def gradients(grad, x, weight):
    return grad @ weight, torch.einsum("btn,btk->nk", grad, x)


def leaking_gradients(grad, x, weight):
    return gradients(grad + leak(grad), x, weight)


def gradient_of_the_first_rows(grad, x, weight):
    """A sum over tokens that forgets those beyond the fourth."""
    return grad @ weight, torch.einsum("btn,btk->nk", grad[:, :4], x[:, :4])


def leaking(x, weight):
    return product(x + leak(x), weight)


def neighbours(x, weight):
    return product(x.roll(1, 1), weight)


def mixing_when_marked(x, weight):
    return product(x.flip(1) if weight[0, 0] == MARK else x, weight)


PLAIN = register("plain_product", product, gradients)
UNWRITTEN = register("unwritten_product", unwritten, gradients)
MARKED = register("marked_product", mixing_when_marked, gradients)
WRONG = {
    "a little of all tokens": register("leaking_product", leaking, gradients),
    "the token before": register("neighbours_product", neighbours, gradients),
    "a little of all gradients": register("leaking_backward", product, leaking_gradients),
    "some tokens' share": register("short_backward", product, gradient_of_the_first_rows),
}


def split_dims(op, dtype):
    """The dims along which an op is found to split."""
    lowered = trace(op, torch.randn(B, T, K, dtype=dtype), torch.randn(7, K, dtype=dtype))
    node = output_of(lowered)
    assert not registry.takes_double(node, lowered.shape)
    return {row.out.spans[0][0] for row in registry.rows_of(node, lowered.shape)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", [PLAIN, UNWRITTEN], ids=str)
def test_rows_are_found(op, dtype):
    assert {0, 1} <= split_dims(op, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", WRONG)
def test_mixing_is_found(fault, dtype):
    assert 1 not in split_dims(WRONG[fault], dtype)


def test_float64_is_kept_where_it_is_taken():
    lowered = trace(lambda x: x.cumsum(-1), torch.randn(B, T))
    node = output_of(lowered)
    node.target = torch.special.i0  # without a rule
    node.args = node.args[:1]
    assert registry.takes_double(node, lowered.shape)


def test_the_tolerance_follows_dtype_and_length():
    half, single = torch.bfloat16, torch.float32
    assert tolerance([torch.float64], 10**6) == 1e-10
    assert tolerance([single], 4096) < 1e-4 < tolerance([half], 1)
    assert tolerance([single, half], 16) == tolerance([half], 16)
    assert tolerance([single], 100) < tolerance([single], 10000) < 11 * tolerance([single], 100)


# ---- In a model ----------------------------------------------------------------------------------


class Products(nn.Module):
    """Two layers, each followed by the op with a weight of its own."""

    def __init__(self, op):
        super().__init__()
        self.op, self.inner = op, probe.build(causal, width=K)
        self.weights = nn.ParameterList(torch.randn(N, K) / K for _ in self.inner.layers)

    def forward(self, ids):
        x = self.inner.embed(ids)
        for layer, weight in zip(self.inner.layers, self.weights):
            x = x + self.op(layer(x), weight)
        return self.inner.head(self.inner.norm(x))


def gradients_of(model, run, ids, labels):
    loss = run(ids, labels)
    loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [loss.detach(), *(parameter.grad.clone() for parameter in trained)]


def check(build, **options):
    """A float32 model's gradients, in eager and compiled; the report."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = build()

        def run(ids, labels, model=model):
            return probe.step(model, ids, labels)

        if compiled:
            run = seqsplit.compile(run, chunk_size=4, head_chunk_size=4, **options)
        found.append(gradients_of(model, run, *batches.with_labels(B, 13)))
    largest = max(want.norm() for want in found[0])  # a key bias has a gradient of rounding alone
    for want, have in zip(*found):
        assert (have - want).norm() <= 1e-5 * max(want.norm(), 1e-3 * largest)
    return seqsplit.explain(run, *batches.with_labels(B, 13))


def test_streamed():
    check(lambda: Products(UNWRITTEN), strict=True)


def test_mixing_with_the_real_weights_is_found():
    def marked():
        model = Products(MARKED)
        with torch.no_grad():
            for weight in model.weights:
                weight[0, 0] = MARK
        return model

    assert check(lambda: Products(MARKED)).fully_streamed
    report = check(marked)
    assert not report.fully_streamed
    assert any("on chunks is not" in reason for _, reason in report.whole)


def test_bodies_are_compared_as_closely_as_ever(monkeypatch):
    """An error far below the op's own rounding."""

    def slightly_wrong(*args, **kwargs):
        return tuple(value * (1 + 1e-8) for value in handle.run_segment(*args, **kwargs))

    executor = handle.executor_running(slightly_wrong)
    monkeypatch.setattr(handle.Handle.__init__, "__defaults__", (executor,))
    with pytest.raises(errors.NotStreamedError, match="does not equal the original"):
        check(lambda: Products(PLAIN), strict=True)
