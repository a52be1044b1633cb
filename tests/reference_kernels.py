"""Attention kernels behind the signatures of well-known packages, computed densely on CPU.

The real ones need a GPU and half precision. These take the same arguments, reach the compiler in
the same two ways (an ``autograd.Function`` over custom ops, and a custom op with its own autograd),
align causal masks and windows at the bottom right as those do, and note how many keys they saw.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SEEN: list[tuple[int, int]] = []  # (queries, keys) of every call


class How(NamedTuple):
    """The arguments that say which attention it is."""

    scale: float
    causal: bool
    left: int
    right: int
    softcap: float = 0.0
    slopes: Tensor | None = None


def weights_of(q, k, how):
    """Probabilities ``[H, L, S]`` of ``[L, H, D]`` and ``[S, H, D]``, the derivative of the scores
    by the products, and the log-sum-exp. The last query is aligned with the last key."""
    products = torch.einsum("lhd,shd->hls", q, k)
    scores, slope = products * how.scale, torch.full_like(products, how.scale)
    if how.softcap > 0.0:
        bent = torch.tanh(scores / how.softcap)
        scores, slope = how.softcap * bent, slope * (1 - bent**2)
    queries, keys = q.shape[0], k.shape[0]
    place = torch.arange(queries, device=q.device)[:, None] + keys - queries
    key = torch.arange(keys, device=q.device)[None]
    if how.slopes is not None:
        scores = scores - how.slopes[:, None, None].to(scores.dtype) * (place - key).abs()
    hidden = torch.zeros(queries, keys, dtype=torch.bool, device=q.device)
    if how.left >= 0:
        hidden |= key < place - how.left
    if how.causal or how.right >= 0:
        hidden |= key > place + (0 if how.causal else how.right)
    scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0), slope, scores.logsumexp(-1)


def attend(q, k, v, how):
    """One sequence: ``[L, H, D]`` to ``[S, G, D]``; the output and the log-sum-exp ``[H, L]``."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights, _, lse = weights_of(q, k, how)
    return torch.einsum("hls,shd->lhd", weights, v), lse


def attend_backward(grad, q, k, v, how):
    """The gradients of ``q``, ``k`` and ``v``."""
    groups, shared = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    weights, slope, _ = weights_of(q, k, how)
    dv = torch.einsum("hls,lhd->shd", weights, grad)
    dweights = torch.einsum("lhd,shd->hls", grad, v)
    dproducts = weights * (dweights - (dweights * weights).sum(-1, keepdim=True)) * slope
    dq = torch.einsum("hls,shd->lhd", dproducts, k)
    dk = torch.einsum("hls,lhd->shd", dproducts, q)
    return dq, *(x.unflatten(1, (groups, shared)).sum(2) for x in (dk, dv))


def documents(starts_q, starts_k):
    """Slices of the queries and of the keys of each document."""
    ends = zip(starts_q, starts_q[1:], starts_k, starts_k[1:])
    return [(slice(a, b), slice(c, d)) for a, b, c, d in ends]


def batched(function, slopes, *tensors):
    """``function(slopes, *rows)`` for each row of the batch, the results stacked."""
    rows = range(tensors[0].shape[0])
    of = [slopes if slopes is None or slopes.dim() == 1 else slopes[row] for row in rows]
    results = [function(of[row], *(x[row] for x in tensors)) for row in rows]
    return [torch.stack(each).contiguous() for each in zip(*results)]


def by_documents(q, k, v, starts_q, starts_k, how):
    """Documents laid end to end, ``[T, H, D]``."""
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])
    for queries, keys in documents(starts_q.tolist(), starts_k.tolist()):
        out[queries], lse[:, queries] = attend(q[queries], k[keys], v[keys], how)
    return out, lse


def by_documents_backward(grad, q, k, v, starts_q, starts_k, how):
    # Rows of no document are left as they come: a kernel does not write them.
    dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
    for queries, keys in documents(starts_q.tolist(), starts_k.tolist()):
        dq[queries], dk[keys], dv[keys] = attend_backward(
            grad[queries], q[queries], k[keys], v[keys], how
        )
    return dq, dk, dv


# -- custom ops, one for the forward and one that writes gradients ---------------------------------


@torch.library.custom_op("seqsplit_kernels::forward", mutates_args=())
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    SEEN.append((q.shape[1], k.shape[1]))
    how = How(softmax_scale, causal, window_size_left, window_size_right, softcap)
    out, lse = batched(lambda s, *qkv: attend(*qkv, how._replace(slopes=s)), alibi_slopes, q, k, v)
    return out, lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


@forward_op.register_fake
def _(q, k, v, dropout_p, softmax_scale, causal, left, right, softcap, slopes, return_softmax):
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1])
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


@torch.library.custom_op("seqsplit_kernels::backward", mutates_args=("dq", "dk", "dv"))
def backward_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
) -> Tensor:  # fmt: skip
    how = How(softmax_scale, causal, window_size_left, window_size_right, softcap)
    grads = batched(
        lambda s, *x: attend_backward(*x, how._replace(slopes=s)), alibi_slopes, dout, q, k, v
    )
    for out, grad in zip((dq, dk, dv), grads):
        out.copy_(grad)
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1])


@backward_op.register_fake
def _(dout, q, *rest):
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1])


@torch.library.custom_op("seqsplit_kernels::varlen_forward", mutates_args=())
def varlen_forward_op(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    SEEN.append((q.shape[0], k.shape[0]))
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert all(b - a <= max_seqlen_q for a, b in zip(starts_q, starts_q[1:]))
    assert all(b - a <= max_seqlen_k for a, b in zip(starts_k, starts_k[1:]))
    how = How(softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    out, lse = by_documents(q, k, v, cu_seqlens_q, cu_seqlens_k, how)
    return out, lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


@varlen_forward_op.register_fake
def _(q, *rest, **more):
    lse = q.new_empty(q.shape[1], q.shape[0])
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


@torch.library.custom_op("seqsplit_kernels::varlen_backward", mutates_args=("dq", "dk", "dv"))
def varlen_backward_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
) -> Tensor:  # fmt: skip
    how = How(softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    grads = by_documents_backward(dout, q, k, v, cu_seqlens_q, cu_seqlens_k, how)
    for out, grad in zip((dq, dk, dv), grads):
        out.copy_(grad)
    return q.new_empty(q.shape[1], q.shape[0])


@varlen_backward_op.register_fake
def _(dout, q, *rest):
    return q.new_empty(q.shape[1], q.shape[0])


def _contiguous(*tensors):
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _padded(*tensors):
    """Head dims in multiples of eight."""
    surplus = -tensors[0].shape[-1] % 8
    return [torch.nn.functional.pad(x, (0, surplus)) if surplus else x for x in tensors]


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, dropout_p, scale, causal, window, softcap, slopes, deterministic,
                return_softmax, grad_enabled):  # fmt: skip
        keeps = grad_enabled and any(x.requires_grad for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        width = q.shape[-1]
        q, k, v = _padded(*_contiguous(q, k, v))
        out, lse, _, rng = torch.ops.seqsplit_kernels.forward(
            q, k, v, dropout_p, scale, causal=causal, window_size_left=window[0],
            window_size_right=window[1], softcap=softcap, alibi_slopes=slopes,
            return_softmax=return_softmax and dropout_p > 0,
        )  # fmt: skip
        if keeps:
            ctx.save_for_backward(q, k, v, out, lse, rng)
            ctx.how = (dropout_p, scale, causal, window[0], window[1], softcap, slopes)
            ctx.deterministic = deterministic
        out = out[..., :width]
        return (out, lse, rng) if return_softmax else out

    @staticmethod
    def backward(ctx, grad, *rest):
        q, k, v, _, _, _ = ctx.saved_tensors
        width = grad.shape[-1]
        (grad,) = _padded(*_contiguous(grad))
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.seqsplit_kernels.backward(
            grad, q, k, v, dq, dk, dv, *ctx.how, deterministic=ctx.deterministic
        )
        return dq[..., :width], dk[..., :width], dv[..., :width], *[None] * 9


class VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                scale, causal, window, softcap, slopes, deterministic, grad_enabled):  # fmt: skip
        keeps = grad_enabled and any(x.requires_grad for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        width = q.shape[-1]
        q, k, v = _padded(*_contiguous(q, k, v))
        out, lse, _, rng = torch.ops.seqsplit_kernels.varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, scale,
            causal=causal, window_size_left=window[0], window_size_right=window[1],
            softcap=softcap, alibi_slopes=slopes, return_softmax=False, block_table=None,
        )  # fmt: skip
        if keeps:
            ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, rng)
            ctx.max = (max_seqlen_q, max_seqlen_k)
            ctx.how = (dropout_p, scale, causal, window[0], window[1], softcap, slopes)
            ctx.deterministic = deterministic
        return out[..., :width]

    @staticmethod
    def backward(ctx, grad):
        q, k, v, _, _, starts_q, starts_k, _ = ctx.saved_tensors
        width = grad.shape[-1]
        (grad,) = _padded(*_contiguous(grad))
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.seqsplit_kernels.varlen_backward(
            grad, q, k, v, dq, dk, dv, starts_q, starts_k, *ctx.max, *ctx.how,
            deterministic=ctx.deterministic,
        )  # fmt: skip
        return dq[..., :width], dk[..., :width], dv[..., :width], *[None] * 12


def attention(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
              softcap=0.0, alibi_slopes=None, deterministic=False,
              return_attn_probs=False):  # fmt: skip
    """Attention of ``[B, T, H, D]``, called as the package's function is."""
    return Attention.apply(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, torch.is_grad_enabled(),
    )  # fmt: skip


def varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                     dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                     softcap=0.0, alibi_slopes=None, deterministic=False):  # fmt: skip
    """Attention of documents laid end to end, ``[T, H, D]``."""
    return VarlenAttention.apply(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, torch.is_grad_enabled(),
    )  # fmt: skip


# -- one custom op with its own autograd, by other names -------------------------------------------


@torch.library.custom_op("seqsplit_kernels::packed", mutates_args=())
def packed_op(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None,
    max_q: int, max_k: int, is_causal: bool = False, scale: float | None = None,
    window_size: list[int] | None = None, enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    SEEN.append((query.shape[0], key.shape[0]))
    how = packed_how(query, is_causal, scale, window_size)
    out, lse = by_documents(query, key, value, cu_seq_q, cu_seq_k, how)
    return out, lse, query.new_zeros(2, dtype=torch.int64)


def packed_how(query, is_causal, scale, window_size):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return How(scale, is_causal, *(window_size or (-1, -1)))


@packed_op.register_fake
def _(query, *rest, **more):
    lse = query.new_empty(query.shape[1], query.shape[0])
    return torch.empty_like(query), lse, query.new_empty(2, dtype=torch.int64)


def _packed_context(ctx, inputs, output):
    query, key, value, cu_q, cu_k, _, _, causal, scale, window, *_ = inputs
    ctx.save_for_backward(query, key, value, cu_q, cu_k)
    ctx.how = packed_how(query, causal, scale, window)


def _packed_backward(ctx, grad, *rest):
    grads = by_documents_backward(grad, *ctx.saved_tensors, ctx.how)
    return *grads, *[None] * 9


packed_op.register_autograd(_packed_backward, setup_context=_packed_context)


def packed_attention(query, key, value, starts, longest, *, window_size=(-1, -1), gqa=False):
    """Attention of documents laid end to end, ``[T, H, D]``; ``(-1, 0)`` is causal."""
    causal = window_size == (-1, 0)
    return torch.ops.seqsplit_kernels.packed(
        query, key, value, starts, starts, longest, longest, causal, None, list(window_size), gqa
    )[0]


# -- ops that only have the signature --------------------------------------------------------------


def _pretender(name, compute):
    """An op ``name(q, k, v, softmax_scale, causal)`` that is not what it says."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, block: int = 0
    ) -> Tensor:
        return compute(q, k, v, How(softmax_scale, causal, -1, -1), block)

    def backward(ctx, grad):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            grads = torch.autograd.grad(compute(*leaves, *ctx.how), leaves, grad)
        return *grads, None, None, None

    def context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3])
        ctx.how = (How(*inputs[3:5], -1, -1), inputs[5])

    op = torch.library.custom_op(f"seqsplit_kernels::{name}", forward, mutates_args=())
    op.register_fake(lambda q, *rest: torch.empty_like(q))
    op.register_autograd(backward, setup_context=context)
    return op


def _aligned_first(q, k, v, how, block):
    """The first query is where the first key is."""
    surplus = k.shape[1] - q.shape[1]
    padded = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, surplus))
    (out,) = batched(lambda _, *x: attend(*x, how)[:1], None, padded, k, v)
    return out[:, : q.shape[1]].contiguous()


def _shifted(q, k, v, how, block):
    """A query's place decides what is added to it."""
    places = torch.arange(q.shape[1], device=q.device)[:, None, None]
    return batched(lambda _, *x: attend(*x, how)[:1], None, q, k, v)[0] + 1e-3 * places * q


def _blockwise(q, k, v, how, block):
    """Each block of queries sees its own block of keys."""
    outs = [
        batched(lambda _, *x: attend(*x, how)[:1], None, *(x[:, i : i + block] for x in (q, k, v)))[
            0
        ]
        for i in range(0, q.shape[1], block)
    ]
    return torch.cat(outs, 1)


aligned_first = _pretender("aligned_first", _aligned_first)
shifted = _pretender("shifted", _shifted)
blockwise_op = _pretender("blockwise", _blockwise)


def blockwise(q, k, v, scale, causal):
    """Only sequences longer than a block show that it is another thing."""
    return blockwise_op(q, k, v, scale, causal, 32)
