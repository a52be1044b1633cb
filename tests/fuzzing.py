"""One property over drawn decoders, and a command that tries many: `make fuzz N=2000`.

The property: loss, outputs and every gradient equal eager's, whatever was drawn. What share of
the decoders is streamed without any whole part is counted, not asked for.
"""

import argparse
import collections
import multiprocessing
import traceback

import hypothesis
import torch
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

import seqsplit
from compare import Pair
from zoo import batches
from zoo.drawn import calls, specs

examples = st.tuples(specs, calls)


def check(spec, call):
    """Raise where a drawn decoder is not exact. Returns the reasons of what stays whole."""
    torch._dynamo.reset()
    pair = Pair(
        spec.build,
        streamed=False,
        chunk_size=call.chunk_size,
        head_chunk_size=call.head_chunk_size,
        segment_layers=call.segment_layers,
        schedule=call.schedule,
    )
    for length in call.lengths:
        padding = "none" if spec.sequence_first else call.padding
        ids, keep, labels = batches.padded(padding, call.batch, length)
        labels[:, -1] = ids[:, -1]  # at least one target counts
        if spec.sequence_first:
            ids, labels = ids.T.contiguous(), labels.T.contiguous()
        kwargs = {} if padding == "none" else {"keep": keep.bool()}
        pair.check(ids, labels, **kwargs)
    report = seqsplit.explain(pair.run_mine, ids, labels, **kwargs)
    if report.segments and not report.whole:
        return []
    return sorted({reason for _, reason in report.whole}) or ["nothing was split"]


def _try(seed):
    torch.set_num_threads(1)
    drawn = []  # the first is always the simplest one

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=6, database=None, deadline=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(examples)
    def draw(example):
        drawn.append(example)

    draw()
    spec, call = drawn[-1]
    try:
        return spec, call, check(spec, call), None
    except Exception as error:
        return spec, call, [], f"{error}\n{traceback.format_exc(limit=-3)}"


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("count", type=int, nargs="?", default=200)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--seed", type=int, default=0)
    options = options.parse_args()
    console, failures, reasons, streamed = Console(), [], collections.Counter(), 0
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    seeds = range(options.seed, options.seed + options.count)
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, console=console) as progress,
        context.Pool(options.workers, maxtasksperchild=50) as pool,
    ):
        for spec, call, whole, failure in progress.track(
            pool.imap_unordered(_try, seeds), total=options.count
        ):
            if failure is not None:
                failures.append((spec, call))
                console.print(f"{spec}\n{call}\n{failure}", markup=False, highlight=False)
            reasons.update(whole)
            streamed += failure is None and not whole
    console.print(f"{options.count} decoders, {len(failures)} failures")
    console.print(f"fully streamed: {streamed / options.count:.1%}")
    for reason, count in reasons.most_common(20):
        console.print(f"  {count} x {reason}", markup=False, highlight=False)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
