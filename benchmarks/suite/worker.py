"""The process that runs a case with the seqsplit of this repository and its torch."""

from __future__ import annotations

import sys

from torch import Tensor, nn

from ..batches import make_batch
from ..common import DTYPES, make_model
from ..methods import GENERATED, OPTIONS, build, compile_for
from ..models import SHAPES
from ..names import CHECKPOINTED
from .cases import DECODER, Case
from .llama import checkpointed, make_llama
from .serve import WARM_UP, Subject, serve


def subject(case: Case) -> Subject:
    """The case's model under its method."""
    shape = SHAPES[case.shape]
    if case.family == DECODER:
        model = make_model(shape, DTYPES[case.dtype], "cpu")
        loss, trained = build(case.method, model, case.chunk, case.loss_chunk)
    else:
        trained = llama(case)

        def loss(tokens: Tensor, labels: Tensor) -> Tensor:
            return trained(input_ids=tokens, labels=labels, use_cache=False).loss

    def step(length: int) -> float:
        value = loss(*make_batch(shape, length))
        value.backward()
        return value.item()

    def prepare(length: int) -> None:
        """Compile for the chunks of another length, and take the step that compiles."""
        if (new := case.at(length)).chunk != case.at(WARM_UP).chunk:
            compile_for(case.method, trained, new.chunk, new.loss_chunk)
            step(WARM_UP)

    return Subject(trained, step, case.method in GENERATED, prepare)


def llama(case: Case) -> nn.Module:
    model = make_llama(SHAPES[case.shape], case.dtype)
    if case.method == CHECKPOINTED:
        return checkpointed(model)
    if case.method in OPTIONS:
        first = case.at(WARM_UP)
        return compile_for(case.method, model, first.chunk, first.loss_chunk)
    raise ValueError(f"no way to run {case.method!r} on this model")


if __name__ == "__main__":
    serve(Case.from_json(sys.argv[1]), subject)
