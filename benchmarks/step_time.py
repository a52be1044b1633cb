"""Time of one training step: seqsplit against checkpointing with a chunked loss.

The two are run in turn, the order alternating, and compared pair by pair: what disturbs the
machine for longer than a pair cancels out. Reports the median ratio and its spread.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch

from . import common
from .models import SHAPES


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    screen = common.Screen()
    shape, dtype = SHAPES[options.shape], common.DTYPES[options.dtype]
    model = common.make_model(shape, dtype, options.device)
    methods = {
        name: common.build(name, model, options.chunk) for name in (common.OURS, options.against)
    }

    results = {}
    steps = len(options.lengths) * (1 + options.pairs)
    with screen.progress("pairs", steps) as begin:
        for length in options.lengths:
            batch = common.make_batch(shape, length, options.batch, options.device)
            begin(f"T={length}, warm-up")
            run_pair(methods, batch, options.device, reverse=False)
            pairs = []
            for index in range(options.pairs):
                begin(f"T={length}, pair {index + 1} of {options.pairs}")
                pairs.append(run_pair(methods, batch, options.device, reverse=index % 2 == 1))
            results[length] = summarise(pairs, options.against)

    rows = [
        [
            f"T={length}",
            f"{found['seconds'][common.OURS]:.2f} s",
            f"{found['seconds'][options.against]:.2f} s",
            f"{found['ratio']['median']:.3f}",
            f"{found['ratio']['quartiles'][0]:.3f}–{found['ratio']['quartiles'][1]:.3f}",
            f"{found['ratio']['range'][0]:.3f}–{found['ratio']['range'][1]:.3f}",
        ]
        for length, found in results.items()
    ]
    screen.table(
        f"Step time, {options.pairs} pairs, chunk {options.chunk}",
        ["", common.OURS, options.against, "median ratio", "quartiles", "range"],
        rows,
    )
    path = common.write_results("step_time", options, results)
    screen.say(f"written: {path.relative_to(common.ROOT)}")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    options = common.parser(__doc__)
    options.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    options.add_argument("--pairs", type=int, default=5, help="measured pairs per length")
    others = [name for name in common.METHODS if name != common.OURS]
    options.add_argument("--against", choices=others, default=common.CHUNKED)
    return options.parse_args(arguments)


def run_pair(
    methods: dict[str, tuple], batch: tuple, device: str, *, reverse: bool
) -> dict[str, float]:
    """Seconds of one step of each method, one right after the other."""
    order = list(methods)[::-1] if reverse else list(methods)
    seconds = {}
    for name in order:
        loss, trained = methods[name]
        seconds[name] = common.timed(device, common.train_step, loss, trained, batch)
        trained.zero_grad(set_to_none=True)
    return seconds


def summarise(pairs: list[dict[str, float]], against: str) -> dict:
    """Median seconds of both, and median, quartiles and range of the pairs' ratios."""
    ratios = sorted(pair[common.OURS] / pair[against] for pair in pairs)
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else None
    return {
        "seconds": {name: statistics.median(pair[name] for pair in pairs) for name in pairs[0]},
        "ratio": {
            "median": statistics.median(ratios),
            "quartiles": [quartiles[0], quartiles[2]] if quartiles else [ratios[0], ratios[0]],
            "range": [ratios[0], ratios[-1]],
            "all": ratios,
        },
    }


if __name__ == "__main__":
    sys.exit(main())
