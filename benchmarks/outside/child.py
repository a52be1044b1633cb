"""One option set: build it tiny, run it in eager and under seqsplit, print one line of JSON."""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqsplit
from seqsplit.frontend.handle import handle_of
from seqsplit.ir.plan import Plan

from ..catalogue.child import first_line, randomise
from .options import BATCH, LENGTH, VOCAB, OptionSet
from .packages import describe

CHUNKS = (4, 7)
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
# A gradient that is zero in exact arithmetic is rounding noise: none is judged against less than
# this part of the largest one.
FLOOR = 1e-6

Step = Callable[[Tensor, Tensor], Tensor]
Outcome = dict[str, "Tensor | None"]


def main(package: str, name: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.perf_counter()
    found: dict[str, Any] = {"package": package, "name": name}
    try:
        options = next(o for o in describe(package).option_sets() if o.name == name)
        found |= examine(options)
    except Exception as error:  # whatever it is, it is what is to be reported
        found |= {"status": "error", "why": first_line(error), "trace": traceback.format_exc()}
    found["seconds"] = round(time.perf_counter() - began, 1)
    print("RESULT " + json.dumps(found))


def examine(options: OptionSet) -> dict[str, Any]:
    """Compare with eager at each chunk size, then ask what was split."""
    batch = make_batch()
    try:
        model = build(options)
        step = make_step(model, options)
        expected = run(step, model, batch)
        check_eager(expected, run(step, model, batch), options)
    except Exception as error:
        return {"status": "not run", "why": first_line(error), "trace": traceback.format_exc()}
    compiled = seqsplit.compile(step, chunk_size=CHUNKS[0], head_chunk_size=CHUNKS[0])
    result: dict[str, Any] = {"status": "exact", "errors": [], "dtype": str(options.dtype)[6:]}
    for rows in CHUNKS:
        change_chunks(compiled, rows)  # one capture for both: it is what takes the time
        errors = compare(expected, run(compiled, model, batch))
        worst = max(errors, key=errors.get)
        result["errors"].append(errors[worst])
        if not errors[worst] <= TOLERANCES[options.dtype]:
            result |= {"status": "mismatch", "why": f"{worst}: {errors[worst]:.1e}; "}
    return result | summary(seqsplit.explain(compiled, *batch))


def build(options: OptionSet) -> nn.Module:
    """The decoder, with weights at which no term of a gradient vanishes."""
    torch.set_default_dtype(options.dtype)  # for tensors that are made in the middle of its code
    if options.widen:
        widen(options.widen)
    torch.manual_seed(0)
    model = options.build()
    randomise(model)
    return model.to(options.dtype).train()


def widen(package: str) -> None:
    """Make a package compute in float64 where it writes float32.

    A rounding to float32 in the middle of a float64 model depends on the order of sums, and
    nothing could be compared to 1e-9.
    """
    importlib.import_module(package)
    wide = types.ModuleType("torch")
    wide.__dict__.update(vars(torch), float32=torch.float64, float=torch.float64)
    for name, module in list(sys.modules.items()):
        if name.startswith(package) and getattr(module, "torch", None) is torch:
            module.torch = wide
    torch.Tensor.float = torch.Tensor.double


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    return ids, ids.clone()


def make_step(model: nn.Module, options: OptionSet) -> Step:
    """Next-token cross entropy, as a user would write it around a decoder that has no loss."""
    take = options.logits

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        logits = take(model(ids))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return step


def run(step: Step, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
    """The loss and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = step(*batch)
    loss.backward()
    found: Outcome = {"loss": loss.detach().clone()}
    for name, parameter in model.named_parameters():
        found[f"grad {name}"] = None if parameter.grad is None else parameter.grad.clone()
    return found


def check_eager(first: Outcome, second: Outcome, options: OptionSet) -> None:
    """Raise where eager gives nothing to compare with."""
    if not all(value.isfinite().all() for value in first.values() if value is not None):
        raise ValueError("its loss or a gradient is not finite")
    if all(value is None for name, value in first.items() if name != "loss"):
        raise ValueError("no parameter has a gradient")
    if max(compare(first, second).values()) > TOLERANCES[options.dtype]:
        raise ValueError("two calls give two losses or gradients")


def compare(expected: Outcome, actual: Outcome) -> dict[str, float]:
    """Relative error by name: the largest difference over the largest entry."""
    sizes = [largest(v) for n, v in expected.items() if n != "loss" and v is not None]
    floor = FLOOR * max(sizes, default=0.0)
    return {name: error_of(want, actual[name], floor) for name, want in expected.items()}


def error_of(want: Tensor | None, have: Tensor | None, floor: float) -> float:
    if want is None or have is None:
        other = have if want is None else want
        return 0.0 if other is None or not other.any() else float("inf")
    difference = largest(have - want)
    return difference / max(largest(want), floor) if difference else 0.0


def largest(value: Tensor) -> float:
    return float(value.abs().max())


def change_chunks(compiled: Any, rows: int) -> None:
    """Let the segments that a compiled function has by now run in chunks of another size."""
    for run_ in handle_of(compiled).log:
        for segment in run_.plan.segments if isinstance(run_.plan, Plan) else ():
            segment.options = replace(segment.options, chunk_size=rows, head_chunk_size=rows)


def summary(report: seqsplit.Report) -> dict[str, Any]:
    return {
        "layer_segments": sum(not segment.is_head for segment in report.segments),
        "head_streamed": any(segment.is_head for segment in report.segments),
        "chunks": report.num_chunks,
        "bodies": report.distinct_bodies,
        "graphs": report.num_graphs,
        "streamed": report.fully_streamed,
        "whole": [[scope, reason] for scope, reason in report.whole],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
