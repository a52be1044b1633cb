"""Calls of ops, at least one for every rule and for every op that a captured decoder uses.

Sizes are distinct primes, so that a swapped dim shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from seqsplit.ops.linear_attention import linear_attention
from seqsplit.ops.linear_scan import linear_scan

aten = torch.ops.aten
A, B, C, D = 5, 3, 7, 2


@dataclass(frozen=True)
class Call:
    """A function of tensors in which `op` is called once, with the tensors to call it on.

    arguments: of the op, with the tensors in it; `None` if some are made of tensors' sizes.
    """

    op: Any
    function: Callable
    tensors: tuple[torch.Tensor, ...]
    arguments: tuple | None = None

    def on(self, tensors):
        return Call(self.op, self.function, tuple(tensors), self.arguments)


def of(op, *args, **kwargs):
    """The call `op(*args, **kwargs)`, as a function of the tensors in it."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def function(*tensors):
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return op(*args, **kwargs)

    return Call(op, function, tuple(leaves[place] for place in places), args)


def built(op, function, *tensors):
    """A call whose other arguments are made of the tensors' sizes."""
    return Call(op, function, tensors)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def ints(high, *shape):
    return torch.randint(0, high, shape)


CALLS = {
    "add": lambda: of(aten.add.Tensor, x(A, B), x(B)),
    "add_ones": lambda: of(aten.add.Tensor, x(A, 1, C), x(B, 1)),
    "sub_equal": lambda: of(aten.sub.Tensor, x(A, B), x(A, B)),
    "mul_scalar_tensor": lambda: of(aten.mul.Tensor, x(A, B), x()),
    "div": lambda: of(aten.div.Tensor, x(A, B), x(A, 1)),
    "where": lambda: of(aten.where.self, x(A, B) > 0, x(B), x(A, 1)),
    "masked_fill": lambda: of(aten.masked_fill.Scalar, x(A, B), x(B) > 0, 0.5),
    "silu": lambda: of(aten.silu.default, x(A, B, C)),
    "gelu": lambda: of(aten.gelu.default, x(A, B)),
    "cast": lambda: of(aten.to.dtype, x(A, B), torch.float32),
    "and": lambda: of(aten.__and__.Tensor, x(A, B) > 0, x(B) > 0),
    "mm": lambda: of(aten.mm.default, x(A, B), x(B, C)),
    "bmm": lambda: of(aten.bmm.default, x(A, B, C), x(A, C, D)),
    "mv": lambda: of(aten.mv.default, x(A, B), x(B)),
    "dot": lambda: of(aten.dot.default, x(A), x(A)),
    "cdist": lambda: of(aten.cdist.default, x(A, B, 4), x(A, C, 4)),
    "linear": lambda: of(aten.linear.default, x(A, B, C), x(D, C)),
    "linear_bias": lambda: of(aten.linear.default, x(A, B, C), x(D, C), x(D)),
    "addmm": lambda: of(aten.addmm.default, x(C), x(A, B), x(B, C)),
    "baddbmm": lambda: of(aten.baddbmm.default, x(A, 1, D), x(A, B, C), x(A, C, D)),
    "matmul": lambda: of(aten.matmul.default, x(A, B, C), x(A, C, D)),
    "matmul_broadcast": lambda: of(aten.matmul.default, x(A, 1, B, C), x(D, C, B)),
    "matmul_weight": lambda: of(aten.matmul.default, x(A, B, C), x(C, D)),
    "matmul_vector": lambda: of(aten.matmul.default, x(A, B, C), x(C)),
    "einsum": lambda: of(aten.einsum.default, "bqd,bkd->bqk", [x(A, B, C), x(A, D, C)]),
    "einsum_dots": lambda: of(aten.einsum.default, "...ij,jk->...ik", [x(A, B, C), x(C, D)]),
    "conv1d": lambda: of(aten.conv1d.default, x(A, B, C), x(D, B, 1), x(D)),
    "conv2d": lambda: of(aten.conv2d.default, x(A, B, C, D), x(B, B, 1, 1)),
    "conv2d_wide": lambda: of(
        aten.conv2d.default, x(A, B, C, D), x(B, B, 3, 1), None, [1, 1], [1, 0],
    ),
    "sum": lambda: of(aten.sum.default, x(A, B)),
    "sum_dims": lambda: of(aten.sum.dim_IntList, x(A, B, C), [1, -1], True),
    "mean": lambda: of(aten.mean.dim, x(A, B, C), [-1]),
    "amax": lambda: of(aten.amax.default, x(A, B, C), [1]),
    "logsumexp": lambda: of(aten.logsumexp.default, x(A, B), [-1]),
    "var_mean": lambda: of(aten.var_mean.correction, x(A, B), [-1]),
    "max_dim": lambda: of(aten.max.dim, x(A, B), -1),
    "softmax": lambda: of(aten.softmax.int, x(A, B, C), -1),
    "log_softmax": lambda: of(aten.log_softmax.int, x(A, B), 1),
    "cumsum": lambda: of(aten.cumsum.default, x(A, B), -1),
    "topk": lambda: of(aten.topk.default, x(A, C), 2),
    "sort": lambda: of(aten.sort.default, x(A, C)),
    "layer_norm": lambda: of(aten.layer_norm.default, x(A, B, 7), [7], x(7), x(7)),
    "rms_norm": lambda: of(aten.rms_norm.default, x(A, B, 7), [7], x(7)),
    "embedding": lambda: of(aten.embedding.default, x(C, D), ints(C, A, B)),
    "gather": lambda: of(aten.gather.default, x(A, B, C), 2, ints(C, A, B, 2)),
    "index_select": lambda: of(aten.index_select.default, x(A, B), 1, ints(B, C)),
    "index_pairs": lambda: of(aten.index.Tensor, x(A, B, D), [ints(A, C, 1), ints(B, 4)]),
    "index_middle": lambda: of(aten.index.Tensor, x(A, B, D), [None, ints(B, C)]),
    "one_hot": lambda: of(aten.one_hot.default, ints(6, A, B), 6),
    "cross_entropy": lambda: of(aten.cross_entropy_loss.default, x(A, 7), ints(7, A), None, 2),
    "cross_entropy_weights": lambda: of(
        aten.cross_entropy_loss.default, x(A, 7, B), ints(7, A, B), x(7).abs(), 2, 1, 0.1,
    ),
    "cross_entropy_none": lambda: of(aten.cross_entropy_loss.default, x(A, 7), ints(7, A), None, 0),
    "cross_entropy_soft": lambda: of(
        aten.cross_entropy_loss.default, x(A, 7), x(A, 7).softmax(-1), None, 2,
    ),
    "nll": lambda: of(aten.nll_loss_nd.default, x(A, 7), ints(7, A), None, 2),
    "mse": lambda: of(aten.mse_loss.default, x(A, B), x(A, B), 2),
    "kl": lambda: of(aten.kl_div.default, x(A, B), x(A, B).abs(), 2),
    "transpose": lambda: of(aten.transpose.int, x(A, B, C), 0, -1),
    "permute": lambda: of(aten.permute.default, x(A, B, C), [2, 0, -2]),
    "movedim": lambda: of(aten.movedim.int, x(A, B, C), 0, -1),
    "t": lambda: of(aten.t.default, x(A, B)),
    "unsqueeze": lambda: of(aten.unsqueeze.default, x(A, B), -2),
    "squeeze": lambda: of(aten.squeeze.dim, x(A, 1, B), 1),
    "select": lambda: of(aten.select.int, x(A, B, C), 1, 2),
    "cat": lambda: of(aten.cat.default, [x(A, B), x(A, B)], 1),
    "stack": lambda: of(aten.stack.default, [x(A, B), x(A, B)], -1),
    "split": lambda: of(aten.split.Tensor, x(A, B, 6), 3, -1),
    "chunk": lambda: of(aten.chunk.default, x(A, B, 6), 3, 2),
    "unbind": lambda: of(aten.unbind.int, x(A, B, 2), -1),
    "repeat_interleave": lambda: of(aten.repeat_interleave.self_int, x(A, B, C), 2, 1),
    "flatten": lambda: of(aten.flatten.using_ints, x(A, B, C), 1, 2),
    "pad": lambda: of(aten.pad.default, x(A, B, C), [1, 2]),
    "roll": lambda: of(aten.roll.default, x(A, B, C), [1], [-1]),
    "flip": lambda: of(aten.flip.default, x(A, B), [1]),
    "contiguous": lambda: of(aten.contiguous.default, x(A, B, C)),
    "clone": lambda: of(aten.clone.default, x(A, B)),
    "slice": lambda: of(aten.slice.Tensor, x(A, B, C), 1, 1, 3),
    "split_with_sizes": lambda: of(aten.split_with_sizes.default, x(A, B, 6), [2, 4], -1),
    "le": lambda: of(aten.le.Tensor, x(A, 1), x(1, B)),
    "ne": lambda: of(aten.ne.Scalar, ints(3, A, B), 1),
    "pow": lambda: of(aten.pow.Tensor_Scalar, x(A, B), 2),
    "clamp": lambda: of(aten.clamp.default, x(A, B), -1, 1),
    "not": lambda: of(aten.bitwise_not.default, x(A, B) > 0),
    "softplus": lambda: of(aten.softplus.default, x(A, B)),
    "floor_divide": lambda: of(aten.floor_divide.default, ints(9, A, B), 2),
    "scatter": lambda: of(aten.scatter.value, x(A, B, C), 2, ints(C, A, B, 2), 0.0),
    "glu": lambda: of(aten.glu.default, x(A, B, 6), -1),
    "group_norm": lambda: of(aten.group_norm.default, x(A, 6, B), 3),
    "addcmul": lambda: of(aten.addcmul.default, x(A, B), x(B), x(A, 1)),
    "lerp": lambda: of(aten.lerp.Tensor, x(A, B), x(A, B), x(B)),
    "norm": lambda: of(aten.linalg_vector_norm.default, x(A, B, C), 2, [-1]),
    "argmax": lambda: of(aten.argmax.default, x(A, B), -1),
    "any": lambda: of(aten.any.dim, x(A, B) > 1, 1),
    "outer": lambda: of(aten.outer.default, x(A), x(B)),
    "attention": lambda: of(
        aten.scaled_dot_product_attention.default, x(A, B, 11, 4), x(A, B, C, 4), x(A, B, C, 4),
        x(11, C),
    ),
    # Values made of sizes, and views whose sizes are those of other tensors.
    "full": lambda: built(aten.full.default, lambda t: aten.full([t.shape[0], 4], 0.5), x(A, B)),
    "ones": lambda: built(aten.ones.default, lambda t: aten.ones([3, t.shape[1]]), x(A, B)),
    "zeros": lambda: built(aten.zeros.default, lambda t: aten.zeros(t.shape), x(A, B)),
    "tril": lambda: of(aten.tril.default, x(C, C), -1),
    "triu": lambda: of(aten.triu.default, x(A, C, B), 1),
    "expand": lambda: built(
        aten.expand.default, lambda s, t: t.expand(s.shape), x(A, B, C), x(A, 1, C)
    ),
    "expand_more_dims": lambda: built(
        aten.expand.default, lambda s, t: t.expand([4, *s.shape]), x(A, B), x(1, B)
    ),
    "broadcast_to": lambda: built(
        aten.broadcast_to.default, lambda s, t: aten.broadcast_to(t, s.shape), x(A, B), x(B)
    ),
    "view_merges": lambda: built(
        aten.view.default, lambda t: t.view(t.shape[0] * t.shape[1], t.shape[2]), x(A, B, C)
    ),
    "view_takes_apart": lambda: built(
        aten.view.default, lambda s, t: t.view(s.shape[0], s.shape[1], t.shape[1]),
        x(A, B), x(A * B, C),
    ),
    "reshape_merges": lambda: built(
        aten.reshape.default, lambda t: t.reshape(t.shape[0], t.shape[1] * t.shape[2]), x(A, B, C)
    ),
    "reshape_takes_apart": lambda: built(
        aten.reshape.default, lambda s, t: t.reshape(t.shape[0], s.shape[0], s.shape[1]),
        x(B, C), x(A, B * C),
    ),
    "unflatten": lambda: of(aten.unflatten.int, x(A, B, 6), -1, [2, 3]),
    "slice_of_a_table": lambda: built(
        aten.slice.Tensor, lambda s, t: t[: s.shape[0]], x(A, B), x(11, C)
    ),
    # Views of a fixed arrangement.
    "repeat": lambda: of(aten.repeat.default, x(A, B), [1, 2]),
    "repeat_more_dims": lambda: of(aten.repeat.default, x(A, B), [3, 1, 1]),
    "tile": lambda: of(aten.tile.default, x(A, B), [2]),
    "view_as_complex": lambda: of(aten.view_as_complex.default, x(A, B, 2)),
    "view_as_real": lambda: of(aten.view_as_real.default, torch.complex(x(A, B), x(A, B))),
    "diagonal": lambda: of(aten.diagonal.default, x(A, B, B), 0, 1, -1),
    "select_scatter": lambda: of(aten.select_scatter.default, x(A, B, C), x(A, C), 1, 2),
    "slice_scatter": lambda: of(aten.slice_scatter.default, x(A, B, C), x(A, 2, C), 1, 0, 2),
    "numpy_T": lambda: of(aten.numpy_T.default, x(A, B, C)),
    "mT": lambda: of(aten.mT.default, x(A, B, C)),
    "squeeze_dims": lambda: of(aten.squeeze.dims, x(1, A, 1, B), [0, 2]),
    "unbind_first": lambda: of(aten.unbind.int, x(2, A, B), 0),
    "tensor_split": lambda: of(aten.tensor_split.sections, x(A, B, 6), 2, -1),
    "concat": lambda: of(aten.concat.default, [x(A, B), x(A, B)], -1),
    "concat_of_three": lambda: of(aten.cat.default, [x(A, B), x(A, B), x(A, C)], 1),
    "pad_constant": lambda: of(aten.constant_pad_nd.default, x(A, B, C), [1, 0, 0, 0]),
    "unfold": lambda: of(aten.unfold.default, x(A, B, C), 2, 3, 2),
    "solve_triangular": lambda: of(
        aten.linalg_solve_triangular.default,
        x(A, 4, 4) + 8 * torch.eye(4, dtype=torch.float64), x(A, 4, B), upper=False,
    ),
    "diff": lambda: of(aten.diff.default, x(A, B, C), 1, -1),
    # Looking up, putting down.
    "scatter_add": lambda: of(
        aten.scatter_add.default, x(A, B, C), 2, ints(C, A, B, 2), x(A, B, 2)
    ),
    "scatter_src": lambda: of(aten.scatter.src, x(A, B, C), -1, ints(C, A, B, 2), x(A, B, 2)),
    "index_add": lambda: of(aten.index_add.default, x(A, B, C), 1, ints(B, 2), x(A, 2, C)),
    # Other reductions and losses.
    "histc": lambda: of(aten.histc.default, x(A, B), 4, -2, 2),
    "max_of_all": lambda: of(aten.max.default, x(A, B)),
    "sum_first": lambda: of(aten.sum.dim_IntList, x(A, B, C), [0]),
    "amin": lambda: of(aten.amin.default, x(A, B, C), [0], True),
    "var": lambda: of(aten.var.correction, x(A, B, C), [-1]),
    "var_dim": lambda: of(aten.var.dim, x(A, B, C), [1]),
    "std": lambda: of(aten.std.correction, x(A, B, C), [-1]),
    "prod": lambda: of(aten.prod.dim_int, x(A, B), -1),
    "all": lambda: of(aten.all.dim, x(A, B) > 0, 0, True),
    "argmin": lambda: of(aten.argmin.default, x(A, B), 0),
    "min_dim": lambda: of(aten.min.dim, x(A, B, C), 1, True),
    "count": lambda: of(aten.count_nonzero.dim_IntList, ints(2, A, B), [1]),
    "old_norm": lambda: of(aten.norm.ScalarOpt_dim, x(A, B, C), 2, [-1]),
    "cumprod": lambda: of(aten.cumprod.default, x(A, B), 1),
    "logcumsumexp": lambda: of(aten.logcumsumexp.default, x(A, B), 0),
    "argsort": lambda: of(aten.argsort.default, x(A, C)),
    "sort_stable": lambda: of(aten.sort.stable, x(A, C), stable=True, dim=0),
    "native_layer_norm": lambda: of(
        aten.native_layer_norm.default, x(A, B, 7), [7], x(7), x(7), 1e-5
    ),
    "log_softmax_inner": lambda: of(aten._log_softmax.default, x(A, B), 1, False),
    "softmax_inner": lambda: of(aten._softmax.default, x(A, B, C), 0, False),
    "l1": lambda: of(aten.l1_loss.default, x(A, B), x(A, B), 2),
    "l1_none": lambda: of(aten.l1_loss.default, x(A, B), x(A, B), 0),
    "huber": lambda: of(aten.huber_loss.default, x(A, B), x(A, B), 2),
    "bce": lambda: of(
        aten.binary_cross_entropy_with_logits.default, x(A, B), x(A, B).sigmoid(), None, None, 2
    ),
    "nll_inner": lambda: of(aten.nll_loss.default, x(A, 7), ints(7, A), None, 2),
    # States along time.
    "linear_scan": lambda: of(linear_scan, x(A, C, B).sigmoid(), x(A, C, B), 1),
    "linear_scan_of_heads": lambda: of(linear_scan, x(A, C, 1, 1).sigmoid(), x(A, C, B, D), 1),
    "linear_attention": lambda: of(
        linear_attention, x(A, C, B, D), x(A, C, B, D), x(A, C, B, 4), -x(A, C, B).abs()
    ),
    # Others that treat each element by itself.
    "eq": lambda: of(aten.eq.Tensor, ints(3, A, B), ints(3, B)),
    "or": lambda: of(aten.__or__.Tensor, x(A, B) > 0, x(A, 1) > 0),
    "polar": lambda: of(aten.polar.default, x(A, B).abs(), x(A, B)),
    "cast_layout": lambda: of(aten.to.dtype_layout, x(A, B), dtype=torch.float32),
    "move": lambda: of(aten.to.device, x(A, B), torch.device("cpu"), torch.float32),
    "dropout_off": lambda: of(aten.dropout.default, x(A, B), 0.5, False),
    "native_dropout_off": lambda: of(aten.native_dropout.default, x(A, B), 0.5, False),
    "prelu": lambda: of(aten.prelu.default, x(A, B, C), x(1).abs()),
    "clamp_tensor": lambda: of(aten.clamp.Tensor, x(A, B), x(B) - 1, x(A, B).abs()),
    "div_mode": lambda: of(aten.div.Tensor_mode, x(A, B), x(B).abs() + 1, rounding_mode="floor"),
    "masked_fill_tensor": lambda: of(aten.masked_fill.Tensor, x(A, B), x(A, 1) > 0, x()),
    "where_scalar": lambda: of(aten.where.ScalarOther, x(A, B) > 0, x(A, B), 0.5),
    "where_scalars": lambda: of(aten.where.Scalar, x(A, B) > 0, 1.0, 0.0),
    "scalar_pow": lambda: of(aten.pow.Scalar, 2.0, x(A, B)),
    "rsub": lambda: of(aten.rsub.Scalar, x(A, B), 1.0),
    **{
        f"{op}_number": lambda op=op: of(getattr(aten, op).Scalar, ints(3, A, B), 1)
        for op in ("gt", "ge", "lt", "eq", "mul", "add", "sub")
    },
    **{
        op: lambda op=op: of(getattr(aten, op).Tensor, x(A, B), x(B))
        for op in ("gt", "ge", "lt")
    },
    **{
        op: lambda op=op: of(getattr(aten, op).default, x(A, B), x(A, 1))
        for op in ("maximum", "minimum", "atan2", "logaddexp")
    },
    "xlogy": lambda: of(aten.xlogy.Tensor, x(A, B), x(A, 1).abs()),
    **{
        f"{op}_other": lambda op=op: of(getattr(aten, op).other, x(A, B), x(B))
        for op in ("max", "min")
    },
    "pow_tensors": lambda: of(aten.pow.Tensor_Tensor, x(A, B).abs(), x(B)),
    "logical_or": lambda: of(aten.logical_or.default, x(A, B) > 0, x(B) > 0),
    **{
        op: lambda op=op: of(getattr(aten, op).default, x(A, B).abs() + 0.1)
        for op in (
            "abs", "alias", "celu", "cos", "elu", "erf", "exp", "expm1", "floor", "hardtanh",
            "isfinite", "isinf", "isnan", "leaky_relu", "log", "log1p", "log_sigmoid",
            "logical_not", "mish", "neg", "reciprocal", "relu", "relu6", "round", "rsqrt", "selu",
            "sigmoid", "sign", "sin", "sqrt", "square", "tan", "tanh", "detach",
        )
    },
}  # fmt: skip
