"""FLOPs of one training step, in matrix products (F) and attention (A), by method.

The reference is gradient checkpointing that runs every layer's forward again: 4 F + 4.5 A for the
layers, 3 F for the head. torch's checkpointing stops a recomputation as soon as backward has what
it needs, which spares the last matmul of each layer; that count is printed as well. Ends with
status 1 if seqsplit needs more than ``--limit`` times the reference.
"""

from __future__ import annotations

import argparse
import sys

import torch

from . import common
from .flops import FlopCounter, attention_flops
from .models import SHAPES, Decoder, DecoderShape

REFERENCE = "checkpointing, full"
STOPPING = "checkpointing, early stop"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    screen = common.Screen()
    shape, dtype = SHAPES[options.shape], common.DTYPES[options.dtype]
    model = common.make_model(shape, dtype, options.device)
    methods = (common.EAGER, STOPPING, REFERENCE, common.OURS)

    results: dict[int, dict[str, dict]] = {}
    with screen.progress("counting", len(methods) * len(options.lengths)) as begin:
        for length in options.lengths:
            batch = common.make_batch(shape, length, options.batch, options.device)
            results[length] = {}
            for name in methods:
                begin(f"{name}, T={length}")
                results[length][name] = count(name, model, options.chunk, batch)

    for length, found in results.items():
        show(screen, shape, options.batch, length, found)
    path = common.write_results("flop_count", options, results)
    screen.say(f"written: {path.relative_to(common.ROOT)}")
    worst = max(ratio(found[common.OURS], found[REFERENCE]) for found in results.values())
    met = worst <= options.limit
    screen.say(
        f"seqsplit: {worst:.3f} × checkpointing's FLOPs: "
        f"{'within' if met else 'ABOVE'} {options.limit} ×"
    )
    return 0 if met else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    options = common.parser(__doc__)
    options.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    options.add_argument("--limit", type=float, default=1.03, help="allowed multiple")
    return options.parse_args(arguments)


def count(
    name: str, model: Decoder, chunk: int, batch: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, int]:
    """FLOPs of one step of a method, counted on a second step: the first may compile."""
    method = common.CHECKPOINTED if name in (REFERENCE, STOPPING) else name
    loss, trained = common.build(method, model, chunk, early_stop=name != REFERENCE)
    if method == common.OURS:
        common.train_step(loss, trained, batch)
    with FlopCounter() as counter:
        common.train_step(loss, trained, batch)
    return {
        "linear": counter.linear,
        "batched": counter.batched,
        "attention": counter.attention,
        "total": counter.total,
    }


def ratio(found: dict[str, int], reference: dict[str, int]) -> float:
    return found["total"] / reference["total"]


def units(shape: DecoderShape, batch: int, length: int) -> tuple[int, int]:
    """F of the layers and A of one forward pass, by hand."""
    linear = 2 * batch * length * shape.layers * shape.layer_weights
    q = (batch, shape.heads, length, shape.head_dim)
    kv = (batch, shape.kv_heads, length, shape.head_dim)
    attention = attention_flops(q, kv, kv, causal=True, align="top_left", backward=False)
    return linear, shape.layers * attention


def show(
    screen: common.Screen, shape: DecoderShape, batch: int, length: int, found: dict[str, dict]
) -> None:
    layers, attention = units(shape, batch, length)
    head = 3 * 2 * batch * length * shape.vocab * shape.d
    rows = []
    for name, flops in found.items():
        products = flops["linear"] + flops["batched"]
        rows.append(
            [
                name,
                f"{flops['total'] / 1e9:,.1f}",
                f"{(products - head) / layers:.2f} F",
                f"{flops['attention'] / attention:.2f} A",
                f"{ratio(flops, found[STOPPING]):.3f}",
                f"{ratio(flops, found[REFERENCE]):.3f}",
            ]
        )
    screen.table(
        f"One step at T={length} (F and A: layers' products less 3 × the head's, attention)",
        ["", "GFLOP", "layers", "attention", "× early stop", "× full"],
        rows,
    )


if __name__ == "__main__":
    sys.exit(main())
