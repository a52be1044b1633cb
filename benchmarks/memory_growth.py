"""Growth of memory with the sequence length at a fixed chunk, against the floor.

Prints the peak of one training step (bytes above what was alive before it) for every method and
length, and the slope between neighbouring lengths in bytes per token next to the floor's. Ends
with status 1 if seqsplit's slope is above ``--limit`` times the floor.
"""

from __future__ import annotations

import argparse
import sys

import torch

from seqsplit.memory import track_memory

from . import common
from .floor import floor
from .models import SHAPES


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    screen = common.Screen()
    shape, dtype = SHAPES[options.shape], common.DTYPES[options.dtype]
    least = options.batch * floor(shape, dtype).total
    model = common.make_model(shape, dtype, options.device)

    results = {}
    steps = len(options.methods) * len(options.lengths)
    with screen.progress("one step each", steps) as begin:
        for method in options.methods:
            loss, trained = common.build(method, model, options.chunk)
            if method == common.OURS:  # compile outside of what is measured
                warm_up = common.make_batch(shape, 2 * options.chunk, options.batch, options.device)
                common.train_step(loss, trained, warm_up)
            runs: list[dict] = []
            for length in options.lengths:
                begin(f"{method}, T={length}")
                if expected_bytes(runs, length) > options.skip_above_gib * 2**30:
                    continue
                batch = common.make_batch(shape, length, options.batch, options.device)
                trained.zero_grad(set_to_none=True)
                with track_memory(allocator=options.allocator) as memory:
                    value = common.train_step(loss, trained, batch)
                runs.append(
                    {
                        "length": length,
                        "loss": value,
                        "peak_bytes": memory.peak_bytes,
                        "cuda_peak_bytes": memory.cuda_peak_bytes,
                        "largest_bytes": memory.largest_bytes,
                        "largest_op": memory.largest_op,
                    }
                )
                trained.zero_grad(set_to_none=True)
                # After every run, so that a long measurement that is cut short is not lost.
                results[method] = {"runs": runs, "slopes": slopes(runs)}
                found = {"floor_bytes_per_token": least, "methods": results}
                path = common.write_results("memory_growth", options, found)

    show(screen, options, results, least)
    screen.say(f"written: {path.relative_to(common.ROOT)}")
    return verdict(screen, results, least, options.limit)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    options = common.parser(__doc__)
    options.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    options.add_argument("--methods", nargs="+", choices=common.METHODS, default=common.METHODS)
    options.add_argument("--limit", type=float, default=1.15, help="allowed multiple of the floor")
    options.add_argument(
        "--allocator", action="store_true", help="count the allocator's blocks, kernels' included"
    )
    options.add_argument(
        "--skip-above-gib", type=float, default=16.0, help="skip runs expected to need more"
    )
    return options.parse_args(arguments)


def slopes(runs: list[dict]) -> list[float]:
    """Bytes per position between each two neighbouring lengths."""
    pairs = zip(runs, runs[1:], strict=False)
    return [(b["peak_bytes"] - a["peak_bytes"]) / (b["length"] - a["length"]) for a, b in pairs]


def expected_bytes(runs: list[dict], length: int) -> float:
    """Peak at ``length``, by the last slope (or proportionally, with one run to go by)."""
    if not runs:
        return 0.0
    last = runs[-1]
    slope = slopes(runs)[-1] if len(runs) > 1 else last["peak_bytes"] / last["length"]
    return last["peak_bytes"] + slope * (length - last["length"])


def show(screen: common.Screen, options: argparse.Namespace, results: dict, least: int) -> None:
    peaks = [["floor", *(common.mib(least * length) for length in options.lengths), "", ""]]
    growth = [["floor", *(f"{least:,}" for _ in options.lengths[1:]), "1.00"]]
    for method, result in results.items():
        by_length = {run["length"]: run for run in result["runs"]}
        cells = [
            common.mib(by_length[n]["peak_bytes"]) if n in by_length else "skipped"
            for n in options.lengths
        ]
        last = result["runs"][-1]
        peaks.append([method, *cells, common.mib(last["largest_bytes"]), last["largest_op"]])
        found = [f"{slope:,.0f}" for slope in result["slopes"]]
        found += ["skipped"] * (len(options.lengths) - 1 - len(found))
        worst = max(result["slopes"], default=float("nan")) / least
        growth.append([method, *found, f"{worst:.2f}"])
    steps = [f"{a}→{b}" for a, b in zip(options.lengths, options.lengths[1:], strict=False)]
    screen.table(
        f"Peak above the start of the step, chunk {options.chunk}",
        ["", *(f"T={n}" for n in options.lengths), "largest", "made by"],
        peaks,
    )
    screen.table("Growth in bytes per position", ["", *steps, "× floor"], growth)


def verdict(screen: common.Screen, results: dict, least: int, limit: float) -> int:
    if common.OURS not in results or not results[common.OURS]["slopes"]:
        return 0
    worst = max(results[common.OURS]["slopes"]) / least
    met = worst <= limit
    screen.say(
        f"seqsplit grows at {worst:.3f} × the floor: {'within' if met else 'ABOVE'} {limit} ×"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
