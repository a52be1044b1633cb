"""Float64 models that are float64 throughout.

The models of the transformers library write float32 into their middle (norms, the softmax, the
logits before the loss). In a float64 model that is a rounding to float32, whose result depends on
the order of sums: no two orders agree to 1e-9, and exactness could not be tested. Within
`honest()` the library's modelling code finds float64 where it says `torch.float32`.
"""

import contextlib
import types

import torch
import torch.nn.functional as F
from transformers.models.bloom import modeling_bloom
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen3 import modeling_qwen3

MODELLING = [
    modeling_bloom,
    modeling_gemma2,
    modeling_gpt2,
    modeling_gpt_neox,
    modeling_llama,
    modeling_mistral,
    modeling_qwen3,
]

_wide_torch = types.ModuleType("torch")
_wide_torch.__dict__.update(vars(torch), float32=torch.float64)


def _gemma_norm(self, x):
    """Gemma's norm without its calls of `.float()`."""
    return self._norm(x) * (1.0 + self.weight)


@contextlib.contextmanager
def honest():
    """Within this context the modelling code computes in float64 where it would in float32."""
    norm = modeling_gemma2.Gemma2RMSNorm
    original = norm.forward
    norm.forward = _gemma_norm
    for module in MODELLING:
        module.torch = _wide_torch
    try:
        yield
    finally:
        norm.forward = original
        for module in MODELLING:
            module.torch = torch


def causal_lm_loss(
    logits,
    labels,
    vocab_size,
    num_items_in_batch=None,
    ignore_index=-100,
    shift_labels=None,
    **kwargs,
):
    """Next-token cross entropy in the dtype of the logits, with the library's signature."""
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
