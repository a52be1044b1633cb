"""Code inside a model that breaks recomputation: own backwards, updates, sharing, hooks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import seqsplit
from compare import Pair, assert_streamed, compare, gradient_differences, relative_error
from zoo import batches, hf, probe, rope

CHUNK = 4


def check(build, step=probe.step, lengths=(13, 8, 5), streamed=True):
    """Compare at several lengths; `step` defaults to the shifted loss of `model(ids)`."""
    pair = Pair(build, step=step, chunk_size=CHUNK, streamed=streamed)
    for length in lengths:
        pair.check(*batches.with_labels(3, length))


# ---- Checkpointing that is already there (case 35) ----------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_hf_gradient_checkpointing(family, reentrant):
    def build():
        model = hf.build(family)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    pair = Pair(build, chunk_size=CHUNK, streamed=False)
    ids, labels = batches.with_labels(3, 13)
    pair.check(input_ids=ids, labels=labels)


class Checkpointed(nn.Module):
    """Layers under checkpointing: one by one, in pairs, or the whole stack."""

    def __init__(self, how):
        super().__init__()
        self.inner = probe.build(layers=4)
        self.how = how

    def forward(self, ids):
        x = self.inner.embed(ids)
        size = {"each": 1, "pairs": 2, "all": 4}[self.how]
        for start in range(0, 4, size):

            def run(x, start=start):
                for layer in self.inner.layers[start : start + size]:
                    x = layer(x)
                return x

            x = checkpoint(run, x, use_reentrant=False)
        return self.inner.head(self.inner.norm(x))


@pytest.mark.parametrize("how", ["each", "pairs", "all"])
def test_checkpointing_by_hand(how):
    check(lambda: Checkpointed(how), streamed=False)


# ---- Functions with their own backward, and without any (case 35) -------------------------------


class Reversal(torch.autograd.Function):
    """Identity whose gradient is turned round and scaled: not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -0.3 * grad


class StraightThrough(torch.autograd.Function):
    """Rounding with the gradient of the identity, kept within limits that are saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class BoundedRoot(torch.autograd.Function):
    """A root, of positive numbers only, whose slope is bounded."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (4 * x).sqrt().clamp_min(0.01)


class HandLinear(torch.autograd.Function):
    """A linear map with a hand-written weight gradient, doubled so that it is recognisable."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, 2 * grad.flatten(0, 1).t() @ x.flatten(0, 1)


def _hand_linear(x, weight):
    return HandLinear.apply(x, weight)


class WithMiddle(nn.Module):
    """A decoder with `middle(x, weight)` applied between its layers."""

    def __init__(self, middle):
        super().__init__()
        self.inner = probe.build()
        self.middle = middle
        self.weight = nn.Parameter(torch.eye(20) + 0.1)

    def forward(self, ids):
        x = self.inner.embed(ids)
        for layer in self.inner.layers:
            x = self.middle(layer(x), self.weight)
        return self.inner.head(self.inner.norm(x))


@pytest.mark.parametrize(
    "middle",
    [
        lambda x, weight: Reversal.apply(x) @ weight,
        lambda x, weight: StraightThrough.apply(x @ weight),
        lambda x, weight: HandLinear.apply(x, weight),
        lambda x, weight: checkpoint(_hand_linear, x, weight, use_reentrant=False),
    ],
    ids=["reversal", "straight through", "hand-written linear", "inside of a checkpoint"],
)
def test_custom_backwards_are_kept(middle):
    check(lambda: WithMiddle(middle), streamed=False)


def test_a_custom_function_of_positive_numbers():
    """It is tried on numbers that it takes, and found to treat them one by one."""
    check(lambda: WithMiddle(lambda x, weight: BoundedRoot.apply(x.square() + 0.1) @ weight))


def frozen_branch(x, weight):
    with torch.no_grad():
        side = torch.tanh(x @ weight)
    return x @ weight + side


def detached_branch(x, weight):
    return x @ weight + (x.detach() @ weight).sigmoid()


def detached_weight(x, weight):
    return x @ weight.detach() + x * weight.diagonal()


def straight_through_by_detach(x, weight):
    y = x @ weight
    return y + (y.sign() - y).detach()


def grad_within_no_grad(x, weight):
    with torch.no_grad():
        scale = x.abs().mean(-1, keepdim=True)
        with torch.enable_grad():
            y = x @ weight
    return y / (scale + 1)


@pytest.mark.parametrize(
    "middle",
    [
        frozen_branch,
        detached_branch,
        detached_weight,
        straight_through_by_detach,
        grad_within_no_grad,
    ],
)
def test_parts_without_gradient(middle):
    check(lambda: WithMiddle(middle))


# ---- In-place updates (case 35) -----------------------------------------------------------------


def adds(x, weight):
    y = x @ weight
    y += x
    y.mul_(0.5).add_(1.0)
    return y


def writes_features(x, weight):
    y = (x @ weight).clone()
    y[..., :3] = x[..., 3:6] * 2
    y[:, :, 7].zero_()
    return y


def fills_masked(x, weight):
    y = x @ weight
    y.masked_fill_(y > 1.5, 0.25)
    return y


def writes_through_a_view(x, weight):
    y = x @ weight
    left, right = y[..., :10], y[..., 10:]
    left.mul_(2)
    right.copy_(left + right)
    return y + left.repeat(1, 1, 2)


def writes_twice_through_a_view(x, weight):
    y = x @ weight
    left = y[..., :10]
    left.mul_(2).add_(1)
    left.sub_(0.25)
    part = left[..., 2:5]
    part.mul_(3)
    part.neg_()
    return y * y + left.repeat(1, 1, 2)


def writes_after_a_dropout_of_nothing(x, weight):
    """It gives back what it was given, which is then scaled."""
    y = x @ weight
    z = F.dropout(y, 0.0, True)
    z *= 0.5
    return y + z.sin()


def writes_into_a_fresh_buffer(x, weight):
    y = torch.empty_like(x)
    y.copy_(x @ weight)
    y[..., 0] += 1
    return y


def keeps_the_dtype_of_its_place(x, weight):
    y = (x @ weight).float()
    y.mul_(torch.full((20,), 1 / 3, dtype=torch.float64))
    return y * x


def relu_in_place(x, weight):
    return F.relu(x @ weight, inplace=True) + x


@pytest.mark.parametrize(
    "middle",
    [
        adds,
        writes_features,
        fills_masked,
        writes_through_a_view,
        writes_twice_through_a_view,
        writes_after_a_dropout_of_nothing,
        writes_into_a_fresh_buffer,
        keeps_the_dtype_of_its_place,
        relu_in_place,
    ],
)
def test_in_place_updates(middle):
    check(lambda: WithMiddle(middle))


def writes_one_position(x, weight):
    """The position belongs to one chunk only."""
    y = (x @ weight).clone()
    y[:, 3] = y[:, 3] * 2 + 1
    y[:, -1] += 0.5
    return y


def test_an_update_of_single_positions():
    check(lambda: WithMiddle(writes_one_position), streamed=False)


class Remembering(nn.Module):
    """A buffer is updated by each forward: exactly once, whatever is recomputed."""

    def __init__(self, per_token):
        super().__init__()
        self.inner = probe.build()
        self.per_token = per_token
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(20))

    def forward(self, ids):
        hidden = self.inner.hidden(ids)
        self.steps += 1
        if self.per_token:
            with torch.no_grad():
                self.average.mul_(0.9).add_(0.1 * hidden.mean((0, 1)))
        return self.inner.head(hidden)


@pytest.mark.parametrize("per_token", [False, True])
def test_buffers_are_updated_once_per_call(per_token):
    pair = Pair(lambda: Remembering(per_token), chunk_size=CHUNK, streamed=False)
    for calls in (1, 2, 3):
        pair.check(batches.tokens(3, 13))
        assert pair.mine.steps == calls
        assert relative_error(pair.eager.average, pair.mine.average) <= 1e-12


class Clipped(nn.Module):
    """Keeps a weight within bounds, behind autograd's back, each time before it is used."""

    def __init__(self, used_before=False):
        super().__init__()
        self.inner, self.used_before = probe.build(), used_before
        self.mix = nn.Linear(20, 20)

    def forward(self, ids):
        hidden = self.inner.hidden(ids)
        if self.used_before:
            hidden = hidden + self.mix(hidden)
        for limit in (0.15, 0.1):
            self.mix.weight.data.clamp_(-limit, limit)
            hidden = hidden + self.mix(hidden).tanh()
            if not self.used_before:
                self.mix.bias.data[3:5].mul_(0.5)
        return self.inner.head(hidden)


def test_a_weight_that_is_clipped_before_it_is_used():
    """Its gradient is not cut where it was clipped; the parameter itself is changed."""

    class Once(Clipped):
        def forward(self, ids):
            hidden = self.inner.hidden(ids)
            self.mix.weight.data.clamp_(-0.15, 0.15).clamp_(-0.1, 0.1)
            self.mix.bias.data[3:5].mul_(0.5)
            return self.inner.head(hidden + self.mix(hidden).tanh())

    pair = Pair(Once, step=probe.step, chunk_size=CHUNK)
    version = pair.mine.mix.weight._version
    for _ in range(2):
        pair.check(*batches.with_labels(3, 13))
        for name in ("weight", "bias"):
            ours, theirs = (getattr(m.mix, name) for m in (pair.mine, pair.eager))
            assert torch.equal(ours, theirs)
    assert pair.mine.mix.weight.abs().max() == 0.1
    assert pair.mine.mix.weight._version == version
    assert_streamed(seqsplit.explain(pair.run_mine, *batches.with_labels(3, 13)))


@pytest.mark.parametrize("used_before", [False, True])
def test_a_weight_that_autograd_has_kept_is_not_clipped_behind_its_back(used_before):
    """A product before the write keeps the weight: its backward sees the clipped one."""
    check(lambda: Clipped(used_before), streamed=False)


def test_attributes_and_lists_are_written_once_per_call():
    class Noting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = probe.build()
            self.calls = 0
            self.lengths = []

        def forward(self, ids):
            self.calls += 1
            self.lengths.append(ids.shape[1])
            return self.inner(ids)

    pair = Pair(Noting, chunk_size=CHUNK, streamed=False)
    for length in (13, 7, 13):
        pair.check(batches.tokens(3, length))
    assert pair.mine.calls == pair.eager.calls == 3
    assert pair.mine.lengths == pair.eager.lengths == [13, 7, 13]


def test_a_loss_left_on_the_module():
    pair = Pair(rope.build, chunk_size=CHUNK, streamed=False)
    ids, labels = batches.with_labels(3, 13)
    found = []
    for model in (pair.eager, pair.mine):
        model(ids, labels)
        model.last_loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert relative_error(pair.eager.last_loss.detach(), pair.mine.last_loss.detach()) <= 1e-12
    assert not gradient_differences(*found)


# ---- Modules used more than once (case 35) ------------------------------------------------------


class Looped(nn.Module):
    """One layer for all depths, with an embedding of the depth."""

    def __init__(self, times):
        super().__init__()
        self.inner = probe.build(layers=1)
        self.depth = nn.Embedding(times, 20)
        self.times = times

    def forward(self, ids):
        x = self.inner.embed(ids)
        for index in range(self.times):
            x = self.inner.layers[0](x + self.depth.weight[index])
        return self.inner.head(self.inner.norm(x))


class Alternating(nn.Module):
    """Layers A B A B, and a head that is also used in the middle."""

    def __init__(self):
        super().__init__()
        self.inner = probe.build(layers=2)
        self.back = nn.Linear(batches.VOCAB, 20)

    def forward(self, ids):
        x = self.inner.embed(ids)
        for layer in [*self.inner.layers, *self.inner.layers]:
            x = layer(x)
        x = x + self.back(self.inner.head(x).softmax(-1))
        return self.inner.head(self.inner.norm(x))


class CalledTwiceInALayer(nn.Module):
    """The same projection makes queries and keys, the same norm is used before both branches."""

    def __init__(self):
        super().__init__()
        self.inner = probe.build(layers=2)
        for layer in self.inner.layers:
            layer.k = layer.q
            layer.mlp[0] = layer.norm

    def forward(self, ids):
        return self.inner(ids)


@pytest.mark.parametrize(
    "build", [lambda: Looped(3), Alternating, CalledTwiceInALayer], ids=["loop", "ABAB", "q is k"]
)
def test_shared_modules(build):
    check(build)


def twice(model, ids, labels):
    """Two passes of one model in one function, on different lengths."""
    first = probe.step(model, ids, labels)
    second = probe.step(model, ids[:, 3:], labels[:, 3:])
    return first + 0.5 * second


def on_its_own_output(model, ids, labels):
    """The second pass reads what the first one predicted."""
    with torch.no_grad():
        predicted = model(ids).argmax(-1)
    return probe.step(model, predicted, labels)


def consistency(model, ids, labels):
    """Two passes whose hidden states meet in one term."""
    first, second = model.hidden(ids), model.hidden(labels.clamp(min=0))
    return (first - second).square().mean()


@pytest.mark.parametrize("step", [twice, on_its_own_output, consistency])
def test_a_model_called_twice_in_a_function(step):
    check(probe.build, step=step, streamed=False)


# ---- Hooks (case 35) ----------------------------------------------------------------------------


def test_forward_hooks_that_change_values():
    def build():
        model = probe.build()
        model.layers[0].register_forward_hook(lambda module, args, out: out * 1.5)
        model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] + 0.25,))
        model.head.register_forward_hook(lambda module, args, out: out - 1)
        return model

    check(build)


def test_forward_hooks_on_the_compiled_module_itself():
    fired = []

    def build():
        model = probe.build()
        model.register_forward_pre_hook(lambda module, args: fired.append("before"))
        model.register_forward_hook(lambda module, args, out: out * 2)
        return model

    pair = Pair(build, chunk_size=CHUNK)
    for _ in range(2):
        fired.clear()
        pair.check(batches.tokens(3, 13))
        assert fired == ["before", "before"]  # once for each twin


def test_hooks_added_and_removed_between_calls():
    pair = Pair(probe.build, chunk_size=CHUNK)
    ids = batches.tokens(3, 13)
    pair.check(ids)
    handles = [
        model.layers[0].register_forward_hook(lambda module, args, out: out * 1.5)
        for model in (pair.eager, pair.mine)
    ]
    pair.check(ids)
    for handle in handles:
        handle.remove()
    pair.check(ids)


def test_a_hook_that_collects_hidden_states():
    pair = Pair(probe.build, chunk_size=CHUNK, streamed=False)
    seen = {}
    for which, model in (("eager", pair.eager), ("mine", pair.mine)):

        def collect(module, args, out, which=which):
            seen[which] = out.detach().clone()

        model.layers[0].register_forward_hook(collect)
    pair.check(batches.tokens(3, 13))
    assert relative_error(seen["eager"], seen["mine"]) <= 1e-12


@pytest.mark.parametrize("family", ["llama"])
def test_hf_hidden_states_and_attentions(family):
    pair = Pair(hf.builder(family, "eager"), chunk_size=CHUNK, streamed=False)
    ids, labels = batches.with_labels(3, 13)
    pair.check(input_ids=ids, labels=labels, output_hidden_states=True)
    pair.check(input_ids=ids, labels=labels, output_attentions=True)


def test_backward_hooks_of_modules():
    pair = Pair(probe.build, chunk_size=CHUNK, streamed=False)
    seen = {"eager": [], "mine": []}
    for which, model in (("eager", pair.eager), ("mine", pair.mine)):

        def hook(module, grad_input, grad_output, which=which):
            seen[which].append(grad_output[0].norm().item())

        model.layers[1].register_full_backward_hook(hook)
    pair.check(batches.tokens(3, 13))
    assert seen["mine"] == pytest.approx(seen["eager"], rel=1e-9)


# ---- What a call under no_grad gives back -----------------------------------------------------

SAME = {
    "a cast to its own dtype": lambda h, x: h.to(h.dtype),
    "type_as": lambda h, x: h.type_as(x),
    "contiguous": lambda h, x: h.contiguous(),
    "a slice of everything": lambda h, x: h[:, :],
    "a view": lambda h, x: h.view(h.shape),
    "a reshape": lambda h, x: h.reshape(h.shape),
    "flatten of one dim": lambda h, x: h.flatten(2, 2),
    "dropout of nothing": lambda h, x: F.dropout(h, 0.0),
    "dropout in evaluation": lambda h, x: F.dropout(h, 0.3, False),
    "expand": lambda h, x: h.expand(h.shape),
    "clone": lambda h, x: h.clone(),
}


@pytest.mark.parametrize("name", SAME)
def test_what_no_grad_gives_back(name):
    """Some calls return the tensor itself, with its history; others a new one without."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = probe.build()
            self.gate = nn.Linear(20, 20)

        def forward(self, ids):
            x = self.inner.embed(ids)
            for layer in self.inner.layers:
                h = layer.norm(x)
                with torch.no_grad():
                    same = SAME[name](h, x)
                    shift = (same * 2).mean(-1, keepdim=True)
                x = layer(x) * torch.sigmoid(self.gate(same)) + shift
            return self.inner.head(x)

    compare(Gated, batches.tokens(2, 13), chunk_size=4)


# ---- vmap and scans in the model -----------------------------------------------------------------


def _scaled(h, scale):
    return torch.tanh(h * scale)


def test_vmap():
    """What vmap computes is kept together, and streamed where it is found to be token-wise."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = probe.build()
            self.scales = nn.Parameter(torch.randn(5, 20))

        def forward(self, ids):
            x = self.inner.embed(ids)
            for layer in self.inner.layers:
                parts = torch.vmap(_scaled, (None, 0))(layer(x), self.scales)
                x = x + parts.mean(0)
            return self.inner.head(x)

    check(Model, streamed=False)


def test_associative_scan():
    """Its levels halve the sequence, and as a whole it is one recurrence."""
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = probe.build()
            self.gate = nn.Linear(20, 20)

        def forward(self, ids):
            x = self.inner.embed(ids)
            for layer in self.inner.layers:
                x = layer(x)
                pair = (torch.sigmoid(self.gate(x)), x)
                if torch.compiler.is_compiling():
                    x = associative_scan(combine, pair, dim=1, combine_mode="generic")[1]
                else:  # the plain recurrence
                    states = [pair[1][:, 0]]
                    for t in range(1, ids.shape[1]):
                        states.append(pair[0][:, t] * states[-1] + pair[1][:, t])
                    x = torch.stack(states, 1)
            return self.inner.head(x)

    check(Model, lengths=(13, 12), streamed=False)


def test_a_length_that_the_models_code_fixes_is_reported():
    """A loop over positions makes a graph for one length; labels have a length of their own."""

    def attend(q, k, v):
        states = [v[:, :, 0]]
        for place in range(1, q.shape[2]):
            states.append(0.9 * states[-1] + v[:, :, place])
        return (q * k).sigmoid() * torch.stack(states, 2)

    def build():
        return probe.build(attend)

    check(build, lengths=(13,), streamed=False)
    model = build().double()
    step = seqsplit.compile(lambda ids, labels: probe.step(model, ids, labels), chunk_size=CHUNK)
    report = seqsplit.explain(step, *batches.with_labels(2, 13))
    assert not report.fully_streamed
    assert any("fixes the length" in reason for _, reason in report.whole)
    with pytest.raises(seqsplit.SeqsplitError, match="fixes the length"):
        strict = seqsplit.compile(build().double(), chunk_size=CHUNK, strict=True)
        strict(batches.tokens(2, 13))


@pytest.mark.parametrize("change", ["unsqueeze_", "transpose_", "squeeze_"])
def test_shapes_changed_in_place(change):
    """`arange(T).unsqueeze_(-1)` writes nothing: the name stands for a view from there on."""

    def attend(q, k, v):
        length = q.shape[2]
        here = torch.arange(length, dtype=q.dtype)
        if change == "unsqueeze_":
            distance = here.unsqueeze(0) - here.unsqueeze_(-1)
        elif change == "transpose_":
            distance = (here.unsqueeze(-1) - here.unsqueeze(0)).transpose_(0, 1)
        else:
            distance = (here.view(1, 1, -1) - here.view(1, -1, 1)).squeeze_(0)
        decay = torch.exp(-distance.abs() / 5).masked_fill(distance > 0, 0.0)
        return ((q @ k.mT) * decay) @ v

    check(lambda: probe.build(attend))


def test_a_plain_loss_compiled_on_its_own():
    """The vocabulary has a symbol of its own, and labels point into it."""

    def loss(logits, labels):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    ids, labels = batches.with_labels(2, 13)
    logits = torch.randn(2, 13, 61, dtype=torch.float64, requires_grad=True)
    compiled = seqsplit.compile(loss, head_chunk_size=CHUNK, strict=True)
    grads = [torch.autograd.grad(f(logits, labels), logits)[0] for f in (loss, compiled)]
    assert relative_error(*grads) <= 1e-12
