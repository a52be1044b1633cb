"""What seqsplit is compared with, on the decoder of ``models.py``.

All of them compute the same loss. ``checkpointed_chunked`` is the usual way to train on long
sequences today: per-layer checkpointing, fused causal attention, a loss that never holds all
logits. ``tiled`` runs the MLP in pieces as well, as the Mini-Sequence Transformer does
(arXiv 2407.15892); ``compiled_layers`` leaves each layer to torch's own compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from .models import Decoder, Layer, Tables, shifted_loss

Loss = Callable[[Tensor, Tensor], Tensor]


def eager(model: Decoder) -> Loss:
    """The model as it is: every activation is kept."""
    return model


def checkpointed(model: Decoder, early_stop: bool = True) -> Loss:
    """Per-layer gradient checkpointing (non-reentrant), logits and loss whole.

    Args:
        early_stop: torch's default: a layer's recomputation ends with the last activation that
            backward asks for, so the layer's final matmul is not run again. Off, all of the
            layer's forward is.
    """

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = _hidden(model, model.layers, tokens, early_stop)
        return shifted_loss(model.head(hidden), labels)

    return loss


def checkpointed_chunked(
    model: Decoder,
    loss_chunk: int = 512,
    early_stop: bool = True,
    layers: Sequence[Callable[[Tensor, Tables], Tensor]] | None = None,
) -> Loss:
    """Per-layer checkpointing as above, and the loss over ``loss_chunk`` positions at a time.

    Args:
        layers: what is run in place of the model's layers.
    """
    used = model.layers if layers is None else layers

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        # The last position has no target: ignoring it spares a copy of all hidden states.
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        hidden = _hidden(model, used, tokens, early_stop)
        return chunked_cross_entropy(hidden, model.head.weight, targets, loss_chunk)

    return loss


def tiled(model: Decoder, rows: int, loss_chunk: int) -> Loss:
    """The same with MLPs that run ``rows`` positions at a time, each tile checkpointed again."""
    layers = [_Tiled(layer, rows) for layer in model.layers]
    return checkpointed_chunked(model, loss_chunk, layers=layers)


def compiled_layers(model: Decoder, loss_chunk: int) -> Loss:
    """Checkpointing with a chunked loss, and every layer compiled by torch.compile."""
    layers = [torch.compile(layer, dynamic=True) for layer in model.layers]
    return checkpointed_chunked(model, loss_chunk, layers=layers)


class _Tiled:
    def __init__(self, layer: Layer, rows: int) -> None:
        self._layer, self._rows = layer, rows

    def __call__(self, x: Tensor, tables: Tables) -> Tensor:
        x = x + self._layer.attention(self._layer.attention_norm(x), tables)
        tiles = x.split(self._rows, dim=1)
        return torch.cat([checkpoint(self._mlp, tile, use_reentrant=False) for tile in tiles], 1)

    def _mlp(self, x: Tensor) -> Tensor:
        return x + self._layer.mlp(self._layer.mlp_norm(x))


def _hidden(
    model: Decoder,
    layers: Sequence[Callable[[Tensor, Tables], Tensor]] | nn.ModuleList,
    tokens: Tensor,
    early_stop: bool,
) -> Tensor:
    x, tables = model.begin(tokens)
    with set_checkpoint_early_stop(early_stop):
        for layer in layers:
            x = checkpoint(layer, x, tables, use_reentrant=False)
    return model.norm(x)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, ignore_index: int = -100
) -> Tensor:
    """Mean cross entropy of ``hidden @ weight.T``, with the logits of one chunk alive at a time.

    The loss is linear in its sum, so both gradients are taken while the logits of a chunk are at
    hand and only scaled in backward: logits are computed once. The weight's gradient is summed in
    float32.

    Args:
        hidden: ``[batch, T, d]``.
        weight: ``[vocab, d]``.
        targets: int64 ``[batch, T]``.
        chunk: positions per chunk.
        ignore_index: target that does not count.

    Returns:
        A scalar in float32 (float64 for float64 input).
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, targets, chunk, ignore_index)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk, ignore_index):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        count = (targets != ignore_index).sum()
        total = hidden.new_zeros((), dtype=wide)
        d_hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        d_weight = torch.zeros_like(weight, dtype=wide) if weight.requires_grad else None
        for start in range(0, hidden.shape[1], chunk):
            part = slice(start, start + chunk)
            x = hidden[:, part].flatten(0, 1)
            target = targets[:, part].flatten()
            with torch.enable_grad():
                logits = (x @ weight.T).detach().requires_grad_()
                loss = torch.nn.functional.cross_entropy(
                    logits.to(wide), target, ignore_index=ignore_index, reduction="sum"
                )
            total += loss.detach()
            (d_logits,) = torch.autograd.grad(loss, logits)
            del loss, logits
            if d_hidden is not None:
                d_hidden[:, part] = (d_logits @ weight).view_as(d_hidden[:, part])
            if d_weight is not None:
                d_weight += d_logits.T @ x
        ctx.save_for_backward(d_hidden, d_weight, count)
        ctx.weight_dtype = weight.dtype
        return total / count

    @staticmethod
    def backward(ctx, grad):
        d_hidden, d_weight, count = ctx.saved_tensors
        scale = grad / count
        return (
            None if d_hidden is None else d_hidden * scale.to(d_hidden.dtype),
            None if d_weight is None else (d_weight * scale).to(ctx.weight_dtype),
            None,
            None,
            None,
        )
