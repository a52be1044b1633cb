"""What mixes positions in other ways than attention: exact, whether or not it can be streamed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compare import Pair
from zoo import batches, probe

WIDTH = 20


class Mixed(nn.Module):
    """A decoder with a mixer between its layers; the mixer maps [B, T, d] to [B, T, d]."""

    def __init__(self, mixer):
        super().__init__()
        self.inner = probe.build()
        self.mixer = mixer()

    def forward(self, ids):
        first, second = self.inner.layers
        x = first(self.inner.embed(ids))
        x = x + self.mixer(x)
        return self.inner.head(self.inner.norm(second(x)))


def check(mixer, lengths=(13, 8, 4), streamed=False):
    pair = Pair(lambda: Mixed(mixer), step=probe.step, chunk_size=3, streamed=streamed)
    for length in lengths:
        pair.check(*batches.with_labels(3, length), explain=streamed and length > 3)


class Function(nn.Module):
    """A mixer from a plain function of x."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def block_means(x):
    B, T, d = x.shape
    padded = F.pad(x, (0, 0, 0, -T % 4))
    means = padded.view(B, -1, 4, d).mean(2, keepdim=True).expand(-1, -1, 4, -1)
    return means.reshape(B, -1, d)[:, :T]


def top_tokens(x):
    """The three tokens with the largest scores are changed, the others left."""
    chosen = x.norm(dim=-1).topk(3, dim=1).indices[..., None].expand(-1, -1, x.shape[-1])
    return torch.zeros_like(x).scatter(1, chosen, x.gather(1, chosen).tanh())


WHOLE = {
    "mean": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "max": lambda x: x - x.amax(1, keepdim=True),
    "softmax over tokens": lambda x: x.softmax(1) * 3,
    "norm over tokens": lambda x: F.layer_norm(x.transpose(1, 2), x.shape[1:2]).transpose(1, 2),
    "fourier": lambda x: torch.fft.fft(x, dim=1, norm="ortho").real,
    "flip": lambda x: x.flip(1),
    "sort": lambda x: x.sort(1).values,
    "block means": block_means,
    "top tokens": top_tokens,
    "last token": lambda x: x[:, -1:].tanh() * torch.ones_like(x),
    "first token": lambda x: x[:, :1] + torch.zeros_like(x),
    "gram matrix": lambda x: x @ (x.transpose(1, 2) @ x).tanh(),
    "mean over the batch": lambda x: x.mean(0, keepdim=True).expand_as(x),
}


@pytest.mark.parametrize("name", WHOLE)
def test_mixing_of_all_positions(name):
    check(lambda: Function(WHOLE[name]))


class TokenBatchNorm(nn.Module):
    """Statistics over the batch and all tokens, and running ones that are kept."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def test_batch_norm_over_tokens():
    pair = Pair(lambda: Mixed(TokenBatchNorm), step=probe.step, chunk_size=3, streamed=False)
    for calls in (1, 2):
        pair.check(*batches.with_labels(3, 13))
        assert pair.mine.mixer.norm.num_batches_tracked == calls
        eager, mine = pair.eager.mixer.norm, pair.mine.mixer.norm
        torch.testing.assert_close(mine.running_var, eager.running_var, rtol=1e-12, atol=0)


class CausalConvolution(nn.Module):
    """Depthwise or full, plain or dilated, padded on the left."""

    def __init__(self, kernel, groups=1, dilation=1, trim=False):
        super().__init__()
        self.left = (kernel - 1) * dilation
        self.trim = trim
        self.conv = nn.Conv1d(
            WIDTH,
            WIDTH,
            kernel,
            groups=groups,
            dilation=dilation,
            padding=self.left if trim else 0,
        )

    def forward(self, x):
        length = x.shape[1]
        x = x.transpose(1, 2)
        x = self.conv(x if self.trim else F.pad(x, (self.left, 0)))
        return x[..., :length].transpose(1, 2)


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("kernel, groups, dilation", [(4, WIDTH, 1), (5, 1, 1), (3, 4, 3)])
def test_causal_convolutions_longer_than_a_chunk(kernel, groups, dilation, trim):
    lengths = (13, 8, 4, 2)
    check(lambda: CausalConvolution(kernel, groups, dilation, trim), lengths, streamed=True)


def test_a_centred_convolution():
    check(lambda: Function(lambda x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)))


class TokenShift(nn.Module):
    """A learned blend of each token with the one before it."""

    def __init__(self, how):
        super().__init__()
        self.blend = nn.Parameter(torch.full((WIDTH,), 0.3))
        self.how = how

    def forward(self, x):
        if self.how == "pad":
            before = F.pad(x, (0, 0, 1, -1))
        elif self.how == "cat":
            before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        else:
            before = x.roll(1, dims=1)  # the last token comes round to the first
        return before * self.blend + x * (1 - self.blend)


@pytest.mark.parametrize("how", ["pad", "cat", "roll"])
def test_token_shift(how):
    check(lambda: TokenShift(how), streamed=how != "roll")


class Recurrence(nn.Module):
    """A gated linear recurrence over time, written as scans or as a loop."""

    def __init__(self, how):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, x):
        log_decay = F.logsigmoid(self.gate(x))
        if self.how == "loop":
            state, states = torch.zeros_like(x[:, 0]), []
            for t in range(x.shape[1]):
                state = state * log_decay[:, t].exp() + x[:, t]
                states.append(state)
            return torch.stack(states, dim=1)
        total = log_decay.cumsum(1)
        if self.how == "cumsum":
            return (x * (-total).exp()).cumsum(1) * total.exp()
        weights = (total[:, :, None] - total[:, None]).exp()
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, :, :, None]
        return torch.einsum("btsd,bsd->btd", weights.masked_fill(~later, 0.0), x)


@pytest.mark.parametrize("how", ["cumsum", "decay matrix", "loop"])
def test_recurrences(how):
    check(lambda: Recurrence(how), streamed=how == "cumsum")


SCANS = {
    "cumsum": lambda x: x.cumsum(1) / 10,
    "cumprod": lambda x: (1 + 0.1 * x.tanh()).cumprod(1),
    "cummax": lambda x: x.cummax(1).values,
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "running mean": lambda x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None],
    "from the end": lambda x: x.flip(1).cumsum(1).flip(1) / 10,
}


@pytest.mark.parametrize("name", SCANS)
def test_scans(name):
    streamed = name in ("cumsum", "cumprod", "logcumsumexp", "running mean")
    check(lambda: Function(SCANS[name]), streamed=streamed)


class LinearAttention(nn.Module):
    """A sum of outer products of keys and values up to each position."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 6) for _ in range(3))
        self.o = nn.Linear(6, WIDTH)

    def forward(self, x):
        q, k = F.elu(self.q(x)) + 1, F.elu(self.k(x)) + 1
        states = torch.einsum("btk,btv->btkv", k, self.v(x)).cumsum(1)
        norm = (q * k.cumsum(1)).sum(-1, keepdim=True)
        return self.o(torch.einsum("btk,btkv->btv", q, states) / norm)


def test_linear_attention():
    check(LinearAttention)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_of_torch(kind):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(WIDTH, WIDTH, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0]

    check(Recurrent)


class Experts(nn.Module):
    """Two of four experts per token; the load is over the whole batch."""

    def __init__(self, dense):
        super().__init__()
        self.dense = dense
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.linspace(-1, 1, 4 * WIDTH * 7).view(4, WIDTH, 7))
        self.down = nn.Parameter(torch.linspace(1, -1, 4 * WIDTH * 7).view(4, 7, WIDTH).sin())
        self.auxiliary = None

    def forward(self, x):
        flat = x.flatten(0, 1)
        probability = self.router(flat).softmax(-1)
        weight, chosen = probability.topk(2, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        if self.dense:
            gates = torch.zeros_like(probability).scatter(-1, chosen, weight)
            hidden = torch.einsum("nd,edh->enh", flat, self.up).relu()
            out = torch.einsum("enh,ehd,ne->nd", hidden, self.down, gates)
        else:
            order = chosen.flatten().argsort(stable=True)
            token = order // 2
            counts = F.one_hot(chosen.flatten(), 4).sum(0)
            which = torch.repeat_interleave(torch.arange(4), counts, output_size=chosen.numel())
            hidden = torch.einsum("nd,ndh->nh", flat[token], self.up[which]).relu()
            shares = torch.einsum("nh,nhd->nd", hidden, self.down[which])
            out = torch.zeros_like(flat).index_add(
                0, token, shares * weight.flatten()[order][:, None]
            )
        load = F.one_hot(chosen, 4).sum(1).to(x.dtype).mean(0)
        self.auxiliary = 4 * (load * probability.mean(0)).sum()
        return out.view_as(x)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("with_auxiliary", [False, True])
def test_mixtures_of_experts(dense, with_auxiliary):
    def step(model, ids, labels):
        loss = probe.step(model, ids, labels)
        return loss + 0.1 * model.mixer.auxiliary if with_auxiliary else loss

    pair = Pair(lambda: Mixed(lambda: Experts(dense)), step=step, chunk_size=3, streamed=False)
    for length in (13, 3):
        pair.check(*batches.with_labels(3, length))
        assert pair.mine.mixer.router.weight.grad.norm() > 0


@pytest.mark.parametrize("kind", ["value residual", "first hidden state", "shared keys"])
def test_values_that_skip_layers(kind):
    """What an early layer made is read again by every later one."""

    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = probe.build(layers=3)
            self.mix = nn.Parameter(torch.tensor([0.3, 0.6, 0.9]))

        def forward(self, ids):
            x = first = self.inner.embed(ids)
            kept = None
            for index, layer in enumerate(self.inner.layers):
                if kind == "first hidden state":
                    x = x + self.mix[index] * first
                h = layer.norm(x)
                q, k, v = (
                    p(h).unflatten(-1, (4, 6)).transpose(1, 2) for p in (layer.q, layer.k, layer.v)
                )
                kept = (k, v) if kept is None else kept
                if kind == "value residual":
                    v = self.mix[index] * kept[1] + v
                elif kind == "shared keys":
                    k, v = kept
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = x + layer.o(y.transpose(1, 2).flatten(2))
                x = x + layer.mlp(x)
            return self.inner.head(self.inner.norm(x))

    pair = Pair(Skipping, step=probe.step, chunk_size=4, streamed=False)
    for length in (13, 3):
        pair.check(*batches.with_labels(3, length))
