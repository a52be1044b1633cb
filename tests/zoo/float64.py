"""Float64 models that are float64 throughout.

Libraries write float32 into the middle of a model (`softmax(..., dtype=torch.float32)`,
`logits.float()` before the loss). In a float64 model that is a rounding to float32 whose result
depends on the order of sums, so no two orders agree to 1e-9 and exactness could not be tested.
"""

import contextlib

import torch
import torch.nn.functional as F

_softmax = F.softmax


def _wide_softmax(input, dim=None, _stacklevel=3, dtype=None):  # noqa: A002 - F.softmax's names
    """`F.softmax` that does not narrow a float64 input."""
    if input.dtype == torch.float64:
        dtype = torch.float64
    return _softmax(input, dim=dim, dtype=dtype)


@contextlib.contextmanager
def honest():
    """Within this context `F.softmax` of a float64 tensor stays float64."""
    F.softmax = _wide_softmax
    try:
        yield
    finally:
        F.softmax = _softmax


def causal_lm_loss(
    logits,
    labels,
    vocab_size,
    num_items_in_batch=None,
    ignore_index=-100,
    shift_labels=None,
    **kwargs,
):
    """Next-token cross entropy in the dtype of the logits, with HF's calling convention."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(
        logits.view(-1, vocab_size),
        shift_labels.reshape(-1),
        ignore_index=ignore_index,
        reduction=reduction,
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch
