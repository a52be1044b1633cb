"""Each training objective, with its loss in the compiled function and outside of a compiled model.

Writes ``docs/objectives.md``: the error of the gradients against eager in float64 on a short
sequence; on a long one whether anything of the size of the logits was allocated, and the peak of
tracked memory beside eager and gradient checkpointing (bytes above what was alive before).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import seqsplit
from seqsplit.errors import MaterializedWarning

from .common import ROOT, Screen, mib

sys.path.insert(0, str(ROOT / "examples"))
from handwritten import Decoder, DecoderConfig
from objectives.steps import OBJECTIVES, Batch, Objective, make_batch

PAGE = ROOT / "docs" / "objectives.md"
WAYS = ("eager", "checkpointing", "inside", "outside")
SHORT, SHORT_CHUNK = 300, 7


def main() -> int:
    options = parse()
    if options.one:
        print(json.dumps(run_one(options)))
        return 0
    screen = Screen()
    found: dict[str, dict[str, Any]] = {}
    with screen.progress("objectives", len(OBJECTIVES) * len(WAYS)) as begin:
        for name in OBJECTIVES:
            for way in WAYS:
                begin(f"{name}, {way}")
                found.setdefault(name, {})[way] = in_a_process(name, way, options)
    PAGE.write_text(page(found, options))
    worst = max(found[name][way]["error"] for name in found for way in ("inside", "outside"))
    return 0 if worst <= 1e-9 else 1


def parse() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--length", type=int, default=8192)
    options.add_argument("--vocab", type=int, default=32_000)
    options.add_argument("--batch", type=int, default=2)
    options.add_argument("--dim", type=int, default=256)
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--one", nargs=2, metavar=("OBJECTIVE", "WAY"), help=argparse.SUPPRESS)
    return options.parse_args()


def in_a_process(name: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Each in a process of its own: what one leaves behind is not in the way of the next."""
    sizes = ("length", "vocab", "batch", "dim", "layers")
    arguments = [f"--{size}={getattr(options, size)}" for size in sizes]
    command = [sys.executable, "-m", "benchmarks.objectives", *arguments, "--one", name, way]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}, {way}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_one(options: argparse.Namespace) -> dict[str, Any]:
    name, way = options.one
    objective = OBJECTIVES[name]
    found: dict[str, Any] = {}
    if way in ("inside", "outside"):
        found["error"] = gradient_error(objective, way)
    config = DecoderConfig(options.vocab, dim=options.dim, num_layers=options.layers)
    model, reference = models(objective, config, torch.float32)
    loss = step_of(objective, way, model, reference, chunk=512)
    warm_up = make_batch(1024, options.vocab, options.batch)
    if way in ("inside", "outside"):  # captures and tries its bodies outside of what is measured
        loss(warm_up).backward()
        model.zero_grad(set_to_none=True)
    batch = make_batch(options.length, options.vocab, options.batch)
    with seqsplit.track_memory() as memory, warnings.catch_warnings():
        warnings.simplefilter("error", MaterializedWarning)
        loss(batch).backward()
    logits = options.batch * options.length * options.vocab * 4
    return found | {
        "peak_bytes": memory.peak_bytes,
        "largest_bytes": memory.largest_bytes,
        "has_logits": memory.largest_bytes >= logits // 2,
    }


def models(
    objective: Objective, config: DecoderConfig, dtype: torch.dtype
) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = objective.model(config).to(dtype)
    reference = Decoder(config).to(dtype).requires_grad_(False)
    return model, reference


def step_of(
    objective: Objective, way: str, model: nn.Module, reference: nn.Module, chunk: int
) -> Callable[[Batch], Tensor]:
    """The loss of a batch, computed in one of the ways."""
    options = {"chunk_size": chunk, "head_chunk_size": min(chunk, 256)}
    if way == "outside":
        seqsplit.compile(model, **options)
        seqsplit.compile(reference, **options)
    if way == "checkpointing":
        for module in (model, reference):
            for part in module.modules():
                if isinstance(part, Decoder):
                    part.checkpointing = True
    if way != "inside":
        return lambda batch: objective.loss(model, reference, batch)

    def loss(*fields: Tensor) -> Tensor:
        return objective.loss(model, reference, Batch(*fields))

    compiled = seqsplit.compile(loss, **options)
    names = [field.name for field in dataclasses.fields(Batch)]
    return lambda batch: compiled(*(getattr(batch, name) for name in names))


def gradient_error(objective: Objective, way: str) -> float:
    """The largest relative error of a parameter's gradient, float64."""
    config = DecoderConfig(61, dim=20, num_layers=2, head_dim=6, mlp_dim=29)
    model, reference = models(objective, config, torch.float64)
    mine, frozen = copy.deepcopy(model), copy.deepcopy(reference)
    batch = make_batch(SHORT, 61, dtype=torch.float64)
    step_of(objective, "eager", model, reference, SHORT_CHUNK)(batch).backward()
    step_of(objective, way, mine, frozen, SHORT_CHUNK)(batch).backward()
    pairs = zip(model.parameters(), mine.parameters())
    return max(float((p.grad - q.grad).norm() / p.grad.norm()) for p, q in pairs)


def page(found: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    logits = options.batch * options.length * options.vocab * 4
    rows = []
    for name, ways in found.items():
        for way in ("inside", "outside"):
            run = ways[way]
            rows.append(
                f"| {name} | {way} | {run['error']:.0e} | {'yes' if run['has_logits'] else 'no'} "
                f"| {mib(run['peak_bytes'])} | {mib(ways['eager']['peak_bytes'])} "
                f"| {mib(ways['checkpointing']['peak_bytes'])} "
                f"| {ways['checkpointing']['peak_bytes'] / run['peak_bytes']:.1f} |"
            )
    table = "\n".join(rows)
    return f"""# Objectives

Written by `make objectives`; not by hand. The objectives are those of `examples/objectives/`,
plain PyTorch that knows nothing of seqsplit. *Inside*: the function that computes the loss is
compiled, models and all. *Outside*: `seqsplit.compile(model)` (and the reference model), and the
loss in the caller's own code, from logits that are never there as a whole.

- Error: of the gradients against eager, the largest over the parameters, float64, T={SHORT}.
- T x V: whether anything as large as half of the logits was allocated.
- Peak: tracked bytes above what was alive before the step, float32, B={options.batch},
  T={options.length}, V={options.vocab}, d={options.dim}, {options.layers} layers, weight gradients
  included. The logits alone are {mib(logits)}.

| objective | loss | error | T x V | peak | eager | checkpointing | ratio to checkpointing |
| --- | --- | --- | --- | --- | --- | --- | --- |
{table}
"""


if __name__ == "__main__":
    sys.exit(main())
