"""The process that runs a case with StreamBP's published code, in an environment of its own.

The package pins its torch and transformers (``make streambp`` installs them apart). Its forward
takes the gradients as well, and it needs the mask of padding to be given.
"""

from __future__ import annotations

import sys

import torch

from ..batches import make_batch
from ..models import SHAPES
from .cases import CHECKPOINTED_OLD, Case
from .llama import checkpointed, make_llama
from .serve import Subject, serve

# Positions per chunk of the logits: what its own scripts use.
_LOGITS_CHUNK = 100


def subject(case: Case) -> Subject:
    """The case's model under StreamBP, or under plain checkpointing with the same versions."""
    shape = SHAPES[case.shape]
    model = make_llama(shape, case.dtype)
    if case.method == CHECKPOINTED_OLD:
        return checkpointing(case, checkpointed(model))
    from streambp.stream_model import StreamModel

    streamed = StreamModel(
        model,
        gradient_accumulation_steps=1,
        logits_chunk_size=_LOGITS_CHUNK,
        checkpoint_chunk_size=case.chunk,
        stream_checkpoint=True,
    )
    streamed.gradient_checkpointing_enable()

    def step(length: int) -> float:
        tokens, labels = make_batch(shape, length)
        mask = torch.ones_like(tokens)
        streamed.checkpoint_chunk_size = case.at(length).chunk
        return streamed(
            input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False
        ).loss.item()

    return Subject(streamed, step)


def checkpointing(case: Case, model: torch.nn.Module) -> Subject:
    def step(length: int) -> float:
        tokens, labels = make_batch(SHAPES[case.shape], length)
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        return loss.item()

    return Subject(model, step)


if __name__ == "__main__":
    serve(Case.from_json(sys.argv[1]), subject)
