"""Decoders drawn at random: a `Spec` says everything about one, and builds it.

A failing example prints as one readable line that can be pasted into a test.
"""

import dataclasses

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from seqsplit import Schedule

from .batches import VOCAB
from .rope import angles, rotate
from .weights import randomise

MAX_LENGTH = 24


@dataclasses.dataclass(frozen=True)
class Spec:
    """One decoder; every field has a plain default, to which shrinking leads."""

    layers: int = 1
    kv_heads: int = 4
    head_dim: int = 4
    norm: str = "layer"  # layer | rms
    place: str = "pre"  # pre | post | sandwich
    attention: str = "fused"  # fused | by hand
    mask: str = "causal"  # causal | where | buffer | window | prefix-lm | all
    bias: str = "none"  # none | alibi | learned
    softcap: bool = False
    sink: bool = False
    positions: str = "none"  # none | learned | rotary
    qk_norm: bool = False
    mlp: str = "plain"  # plain | gated | experts by loop | experts by sort
    shift: bool = False
    conv: bool = False
    scan: bool = False
    parallel: bool = False
    topology: str = "plain"  # plain | value residual | skip | shared block | shared keys
    tied: bool = False
    sequence_first: bool = False
    loss: str = "mean"  # mean | sum | weighted | z-loss | logits
    frozen: str = "none"  # none | embedding | first layer | all but the head

    @property
    def width(self):
        return 4 * self.head_dim

    def build(self):
        return randomise(Decoder(self)).train()


HEADS = 4


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def norm_of(spec, width):
    return nn.LayerNorm(width) if spec.norm == "layer" else RMSNorm(width)


class Attention(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.spec, E = spec, spec.head_dim
        self.q = nn.Linear(spec.width, HEADS * E)
        self.k = nn.Linear(spec.width, spec.kv_heads * E, bias=False)
        self.v = nn.Linear(spec.width, spec.kv_heads * E)
        self.o = nn.Linear(HEADS * E, spec.width)
        if spec.qk_norm:
            self.q_norm, self.k_norm = norm_of(spec, E), norm_of(spec, E)
        if spec.bias == "learned":
            self.distance = nn.Parameter(torch.zeros(HEADS, 4))
        if spec.sink:
            self.sink = nn.Parameter(torch.zeros(HEADS))
        if spec.mask == "buffer":
            table = torch.ones(MAX_LENGTH, MAX_LENGTH).tril()[None, None]
            self.register_buffer("table", table, persistent=False)

    def forward(self, x, keep, kept):
        spec, (B, T, _) = self.spec, x.shape
        q, k, v = (
            p(x).view(B, T, -1, spec.head_dim).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        if spec.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if spec.positions == "rotary":
            cos, sin = (t.to(x.dtype) for t in angles(spec.head_dim, T))
            q, k = (rotate(t.transpose(1, 2), cos, sin).transpose(1, 2) for t in (q, k))
        if spec.topology == "value residual" and "v" in kept:
            v = (v + kept["v"]) / 2
        if spec.topology == "shared keys" and "k" in kept:
            k, v = kept["k"], kept["v"]
        kept.setdefault("k", k)
        kept.setdefault("v", v)
        times = HEADS // spec.kv_heads
        if times > 1:
            k, v = (
                t[:, :, None].expand(-1, -1, times, -1, -1).reshape(B, HEADS, T, -1) for t in (k, v)
            )
        y = self.attend(q, k, v, keep)
        return self.o(y.transpose(1, 2).reshape(B, T, -1))

    def allowed(self, T, keep, device):
        """[B or 1, 1, T, T] booleans."""
        places = torch.arange(T, device=device)
        if self.spec.mask == "buffer":
            allowed = self.table[:, :, :T, :T] != 0
        else:
            allowed = (places <= places[:, None])[None, None]
        if self.spec.mask == "window":
            allowed = allowed & (places > places[:, None] - 3)
        elif self.spec.mask == "prefix-lm":
            allowed = allowed | (places < 3)
        elif self.spec.mask == "all":
            allowed = allowed | ~allowed
        return allowed if keep is None else allowed & keep[:, None, None, :]

    def extra(self, T, x):
        """Terms added to the scores, or None."""
        places = torch.arange(T, device=x.device)
        distance = places[:, None] - places
        if self.spec.bias == "alibi":
            slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=x.dtype)
            return -slopes[:, None, None] * distance.clamp_min(0).to(x.dtype)
        if self.spec.bias == "learned":
            return self.distance[:, distance.clamp(0, 3)]
        return None

    def attend(self, q, k, v, keep):
        spec, T = self.spec, q.shape[2]
        plain = spec.bias == "none" and keep is None
        if spec.attention == "fused" and not spec.softcap and not spec.sink:
            if plain and spec.mask == "causal":
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            mask, extra = self.allowed(T, keep, q.device), self.extra(T, q)
            if extra is not None:
                mask = extra.masked_fill(~mask, torch.finfo(q.dtype).min)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        scores = q @ k.transpose(2, 3) / spec.head_dim**0.5
        if spec.softcap:
            scores = 2.0 * torch.tanh(scores / 2.0)
        if (extra := self.extra(T, q)) is not None:
            scores = scores + extra
        allowed, low = self.allowed(T, keep, q.device), torch.finfo(q.dtype).min
        if spec.mask == "where":
            scores = torch.where(allowed, scores, torch.full_like(scores, low))
        else:
            scores = scores.masked_fill(~allowed, low)
        if spec.sink:
            sink = self.sink.view(1, HEADS, 1, 1).expand(q.shape[0], -1, T, 1)
            return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v
        return scores.softmax(-1) @ v


class Experts(nn.Module):
    """Two of three experts per token."""

    def __init__(self, spec):
        super().__init__()
        self.by_sort, self.hidden = spec.mlp == "experts by sort", 5
        self.router = nn.Linear(spec.width, 3)
        self.up = nn.Parameter(torch.zeros(3, spec.width, self.hidden))
        self.down = nn.Parameter(torch.zeros(3, self.hidden, spec.width))

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weight, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        if self.by_sort:
            return self.sorted(tokens, weight, chosen).view_as(x)
        out = torch.zeros_like(tokens)
        for expert in range(3):
            share = (weight * (chosen == expert)).sum(-1, keepdim=True)
            out = out + (tokens @ self.up[expert]).tanh() @ self.down[expert] * share
        return out.view_as(x)

    def sorted(self, tokens, weight, chosen):
        order = chosen.flatten().argsort(stable=True)
        which = chosen.flatten()[order]
        hidden = torch.einsum("nd,ndh->nh", tokens[order // 2], self.up[which]).tanh()
        shares = torch.einsum("nh,nhd->nd", hidden, self.down[which])
        shares = shares * weight.flatten()[order][:, None]
        return torch.zeros_like(tokens).index_add(0, order // 2, shares)


class MLP(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.gated = spec.mlp == "gated"
        self.up = nn.Linear(spec.width, 2 * 7 if self.gated else 7)
        self.down = nn.Linear(7, spec.width)

    def forward(self, x):
        if self.gated:
            gate, up = self.up(x).chunk(2, -1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.spec = spec
        self.attention = Attention(spec)
        self.mlp = Experts(spec) if spec.mlp.startswith("experts") else MLP(spec)
        self.norms = nn.ModuleList(norm_of(spec, spec.width) for _ in range(4))
        if spec.conv:
            self.conv = nn.Conv1d(spec.width, spec.width, 3, groups=spec.width, padding=2)
        if spec.shift:
            self.blend = nn.Parameter(torch.full((spec.width,), 0.5))

    def forward(self, x, keep, kept):
        spec = self.spec
        before = spec.place != "post"
        h = self.norms[0](x) if before else x
        if spec.conv:
            h = h + F.silu(self.conv(h.transpose(1, 2))[..., : h.shape[1]].transpose(1, 2))
        a = self.attention(h, keep, kept)
        if spec.scan:
            a = a + 0.1 * h.cumsum(1)
        if spec.parallel:
            return x + a + self.mlp(h)
        x = x + (self.norms[1](a) if spec.place == "sandwich" else a)
        x = x if before else self.norms[1](x)
        h = self.norms[2](x) if before else x
        if spec.shift:
            h = torch.lerp(h, F.pad(h, (0, 0, 1, -1)), self.blend)
        m = self.mlp(h)
        x = x + (self.norms[3](m) if spec.place == "sandwich" else m)
        return x if before else self.norms[3](x)


class Decoder(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(VOCAB, spec.width)
        if spec.positions == "learned":
            self.positions = nn.Embedding(MAX_LENGTH, spec.width)
        count = 1 if spec.topology == "shared block" else spec.layers
        self.blocks = nn.ModuleList(Block(spec) for _ in range(count))
        self.norm = norm_of(spec, spec.width)
        self.head = nn.Linear(spec.width, VOCAB, bias=False)
        if spec.tied:
            self.head.weight = self.embed.weight
        frozen = {
            "none": [],
            "embedding": [self.embed],
            "first layer": [self.blocks[0]],
            "all but the head": [self.embed, self.blocks],
        }[spec.frozen]
        for module in frozen:
            module.requires_grad_(False)
        self.head.weight.requires_grad_(True)

    def forward(self, ids, labels, keep=None):
        """ids, labels: int64 [B, T], or [T, B] where the sequence comes first."""
        spec = self.spec
        if spec.sequence_first:
            ids, labels = ids.transpose(0, 1), labels.transpose(0, 1)
        x, kept, first = self.embed(ids), {}, None
        if spec.positions == "learned":
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for index in range(spec.layers):
            x = self.blocks[index % len(self.blocks)](x, keep, kept)
            first = x if first is None else first
        if spec.topology == "skip":
            x = x + first
        logits = self.head(self.norm(x))
        return logits if spec.loss == "logits" else self.loss(logits, labels)

    def loss(self, logits, labels):
        scores, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        if self.spec.loss == "mean":
            return F.cross_entropy(scores, wanted)
        if self.spec.loss == "sum":
            return F.cross_entropy(scores, wanted, reduction="sum") / 7
        if self.spec.loss == "weighted":
            each = F.cross_entropy(scores, wanted, reduction="none")
            places = torch.arange(each.shape[0], dtype=each.dtype, device=each.device)
            return (each * (1 + places.cos())).sum() / each.shape[0]
        z = torch.logsumexp(scores, -1).square().mean()
        return F.cross_entropy(scores, wanted) + 0.01 * z


def _mostly(default, *others):
    """A field that is at its default about half of the time."""
    return st.one_of(st.just(default), st.sampled_from((default, *others)))


specs = st.builds(
    Spec,
    layers=st.integers(1, 3),
    kv_heads=st.sampled_from([4, 2, 1]),
    head_dim=st.sampled_from([4, 6]),
    norm=st.sampled_from(["layer", "rms"]),
    place=_mostly("pre", "post", "sandwich"),
    attention=st.sampled_from(["fused", "by hand"]),
    mask=_mostly("causal", "where", "buffer", "window", "prefix-lm", "all"),
    bias=_mostly("none", "alibi", "learned"),
    softcap=_mostly(False, True),
    sink=_mostly(False, True),
    positions=_mostly("none", "learned", "rotary"),
    qk_norm=_mostly(False, True),
    mlp=_mostly("plain", "gated", "experts by loop", "experts by sort"),
    shift=_mostly(False, True),
    conv=_mostly(False, True),
    scan=_mostly(False, True),
    parallel=_mostly(False, True),
    topology=_mostly("plain", "value residual", "skip", "shared block", "shared keys"),
    tied=_mostly(False, True),
    sequence_first=_mostly(False, True),
    loss=_mostly("mean", "sum", "weighted", "z-loss", "logits"),
    frozen=_mostly("none", "embedding", "first layer", "all but the head"),
)


@dataclasses.dataclass(frozen=True)
class Call:
    """The inputs of one call and how it is cut."""

    batch: int = 2
    lengths: tuple = (7,)
    padding: str = "none"
    chunk_size: int = 3
    head_chunk_size: int = 3
    segment_layers: int = 1
    schedule: Schedule = Schedule()


schedules = st.builds(
    Schedule,
    forwards=st.sampled_from([2, 3, 4]),
    keep_keys=st.booleans(),
    keep_attention=st.booleans(),
    offload=st.sampled_from([None, "cpu"]),
)

calls = st.builds(
    Call,
    batch=st.integers(1, 3),
    lengths=st.lists(st.integers(3, MAX_LENGTH - 1), min_size=1, max_size=2).map(tuple),
    padding=_mostly("none", "left", "right"),
    chunk_size=st.integers(1, 10),
    head_chunk_size=st.integers(1, 10),
    segment_layers=st.sampled_from([1, 1, 2]),
    schedule=st.one_of(st.just(Schedule()), schedules),
)
