"""Functions that expose their recurrent state, and a decoder whose layers call them."""

import inspect

import torch
import torch.nn.functional as F
from torch import nn

from zoo.batches import VOCAB
from zoo.weights import randomise

CALLS = []  # the length of each call of `counted`


def gated_delta_rule(
    q, k, v, g, beta, initial_state=None, output_final_state=False, block=16, **kwargs
):
    """`S_t = exp(g_t) (1 - beta_t k_t k_t') S_{t-1} + beta_t k_t v_t'`, `o_t = q_t S_t`, by blocks
    that a Python loop goes through.

    q, k: [B, T, H, K]; v: [B, T, H, V]; g, beta: [B, T, H]. Returns [B, T, H, V] and the state
    [B, H, K, V], or None in its place.
    """
    length = q.shape[1]
    pad = (block - length % block) % block
    q, k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, pad)) for x in (q, k, v))
    g, beta = (F.pad(x.transpose(1, 2), (0, pad)) for x in (g, beta))
    q, k, v = (x.unflatten(2, (-1, block)) for x in (q, k, v))
    g, beta = (x.unflatten(2, (-1, block)) for x in (g, beta))
    above = torch.ones(block, block, dtype=torch.bool, device=q.device).triu(1)
    decay = g.cumsum(-1)
    between = (decay[..., None] - decay[..., None, :]).masked_fill(above, float("-inf")).exp()
    system = (k * beta[..., None]) @ k.transpose(-1, -2) * between
    solve = torch.linalg.solve_triangular
    new = solve(system, v * beta[..., None], upper=False, unitriangular=True)
    old = k * (beta * decay.exp())[..., None]
    old = solve(system, old, upper=False, unitriangular=True)
    inside = q @ k.transpose(-1, -2) * between
    state = initial_state
    if state is None:
        state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    for i in range(q.shape[2]):
        written = new[:, :, i] - old[:, :, i] @ state
        read = q[:, :, i] * decay[:, :, i, :, None].exp()
        outputs.append(read @ state + inside[:, :, i] @ written)
        last = decay[:, :, i, -1:, None]
        kept = k[:, :, i] * (last - decay[:, :, i, :, None]).exp()
        state = state * last.exp() + kept.transpose(-1, -2) @ written
    out = torch.cat(outputs, 2)[:, :, :length].transpose(1, 2)
    return out, state if output_final_state else None


def step_by_step(q, k, v, g, beta, initial_states=None, return_final_states=False):
    """The same, one position after the other, under the other pair of names; a tensor alone is
    given where no state is asked for."""
    state = initial_states
    if state is None:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        seen = (state * k[:, t, :, :, None]).sum(-2)
        written = (v[:, t] - seen) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * written[..., None, :]
        outputs.append((state * q[:, t, :, :, None]).sum(-2))
    out = torch.stack(outputs, 1)
    return (out, state) if return_final_states else out


class Opaque(torch.autograd.Function):
    """As kernels are: nothing of it can be traced, its gradients come from code of its own."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, state):
        ctx.save_for_backward(q, k, v, g, beta, state)
        out, final = gated_delta_rule(q, k, v, g, beta, state, True)
        return out, final

    @staticmethod
    def backward(ctx, grad, grad_final):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            results = gated_delta_rule(*leaves, True)
        return torch.autograd.grad(results, leaves, (grad, grad_final))


@torch.compiler.disable
def kernel(q, k, v, g, beta, initial_state=None, output_final_state=False):
    if initial_state is None:
        initial_state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    CALLS.append(q.shape[1])
    out, final = Opaque.apply(q, k, v, g, beta, initial_state)
    return out, final if output_final_state else None


class Layer(nn.Module):
    """A gated delta rule between projections, with its gates from the hidden states."""

    def __init__(self, function, width, heads, keys, values, own_state):
        super().__init__()
        self.function, self.sizes = function, (heads, keys, values)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, heads * (2 * keys + values))
        self.gates = nn.Linear(width, 2 * heads)
        self.out = nn.Linear(heads * values, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 29), nn.SiLU(), nn.Linear(29, width)
        )
        if own_state:
            self.state = nn.Parameter(torch.zeros(heads, keys, values))

    def arguments(self, x):
        """What the function takes, the state excepted."""
        heads, keys, values = self.sizes
        h = self.norm(x)
        q, k, v = self.qkv(h).split([heads * keys, heads * keys, heads * values], -1)
        q, k, v = (y.unflatten(-1, (heads, -1)) for y in (q, k, v))
        g, beta = self.gates(h).chunk(2, -1)
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, -F.softplus(g), beta.sigmoid()

    def forward(self, x):
        state = {}
        if hasattr(self, "state"):
            state["initial_state"] = self.state.expand(x.shape[0], -1, -1, -1)
        result = self.function(*self.arguments(x), **state)
        y = result[0] if isinstance(result, tuple) else result
        x = x + self.out(y.flatten(2))
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, function, *, layers=2, width=20, sizes=(3, 4, 5), own_state=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(
            Layer(function, width, *sizes, own_state) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(function, **options):
    return randomise(Decoder(function, **options))


# -- what is not to be believed --------------------------------------------------------------------


def forgets(*args, initial_state=None, **kwargs):
    """Takes a state and leaves it alone."""
    return gated_delta_rule(*args, **kwargs)


forgets.__signature__ = inspect.signature(gated_delta_rule)


def detaches(q, k, v, g, beta, initial_state=None, output_final_state=False):
    """Its outputs are right, the gradient of its state is lost."""
    if initial_state is not None:
        initial_state = initial_state.detach()
    return gated_delta_rule(q, k, v, g, beta, initial_state, output_final_state)


def of_the_last_block(q, k, v, g, beta, initial_state=None, output_final_state=False):
    """Its state is the one before the last block that was not full."""
    out, state = gated_delta_rule(q, k, v, g, beta, initial_state, True)
    if full := q.shape[1] // 16 * 16:
        parts = (x[:, :full] for x in (q, k, v, g, beta))
        state = gated_delta_rule(*parts, initial_state, True)[1]
    return out, state if output_final_state else None


def counts_positions(q, k, v, g, beta, initial_state=None, output_final_state=False):
    """Its decay depends on where a position lies in the call."""
    place = torch.arange(q.shape[1], device=q.device, dtype=q.dtype)[:, None]
    return gated_delta_rule(q, k, v, g / (1 + place), beta, initial_state, output_final_state)


def looks_back(q, k, v, g, beta, initial_state=None, output_final_state=False):
    """What it gives at a position depends on the next one."""
    return gated_delta_rule(q, k, v.roll(-1, 1), g, beta, initial_state, output_final_state)


def writes(q, k, v, g, beta, initial_state=None, output_final_state=False):
    """Updates its state in place, as decoding does."""
    out, state = gated_delta_rule(q, k, v, g, beta, initial_state, True)
    if initial_state is not None:
        with torch.no_grad():
            initial_state.copy_(state)
    return out, state if output_final_state else None


LIARS = (forgets, detaches, of_the_last_block, counts_positions, looks_back, writes)
