"""The suite for a GPU: exactness, memory and time, and the longest sequence that fits.

1. Exactness: gradients in float32 and bfloat16 with the fused attention kernels, against eager.
   Both are compared with float64, so that rounding is not taken for an error. In bfloat16 also
   with attention kernels of packages that are installed, and torch's own with functions.
2. Memory (``torch.cuda.max_memory_allocated``) and time of a step of a large random model,
   against per-layer checkpointing with causal flash attention and a chunked loss.
3. The same two at growing lengths until they do not fit in ``--limit-gib``, or until the time that
   is left does not suffice.

Needs no network. Stays within ``--budget-s`` seconds: what would not fit is skipped and said so.
Skips everything with a message where there is no GPU. Ends with status 1 if gradients are wrong,
or were not computed by fused kernels.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import seqsplit
from seqsplit.memory import track_memory

from . import baselines, common
from .batches import make_batch
from .floor import floor
from .flops import FlopCounter
from .kernels import check_kernels
from .methods import build
from .models import SHAPES, Decoder
from .names import CHUNKED, OURS

# Allowed error of our gradients as a multiple of eager's own error in the same type: of all
# gradients taken together, and of the worst parameter. A small parameter's error is a matter of
# luck, and in float32 so is the order of the sums; a wrong gradient is off by orders of magnitude.
ALLOWED = {torch.float32: (2.0, 3.0), torch.bfloat16: (1.1, 2.0)}

Step = Callable[[], Tensor]


class Budget:
    """Seconds left, and whether something expected to take so long should still begin."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()

    def allows(self, seconds: float) -> bool:
        return seconds < self.left


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    screen = common.Screen()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        screen.say("no GPU here: the GPU suite is skipped")
        return 0
    torch.set_num_threads(options.threads)
    budget = Budget(options.budget_s)

    results: dict[str, Any] = {}
    results["exactness"] = exactness(screen, options, budget)
    results["kernels"] = check_kernels(screen, options.device) if budget.allows(120) else []
    results["comparison"] = comparison(screen, options, budget)
    results["longest"] = longest(screen, options, budget)
    path = common.write_results("gpu", options, results)
    screen.say(f"written: {path.relative_to(common.ROOT)}; {options.budget_s - budget.left:.0f} s")
    return 0 if all(row["ok"] for row in results["exactness"] + results["kernels"]) else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    options = common.parser(__doc__, device="cuda", dtype="bfloat16", shape="1b", chunk=2048)
    options.add_argument("--budget-s", type=float, default=480.0, help="seconds for everything")
    options.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    options.add_argument("--pairs", type=int, default=3, help="timed pairs per length")
    options.add_argument(
        "--limit-gib", type=float, default=16.0, help="memory allowed in the search for the longest"
    )
    options.add_argument("--longest-from", type=int, default=16384, help="first length tried")
    return options.parse_args(arguments)


# --- 1. exactness -------------------------------------------------------------------------------


def exactness(screen: common.Screen, options: argparse.Namespace, budget: Budget) -> list[dict]:
    cases = {"decoder": decoder_case, "Qwen3": qwen3_case}
    chunks = (64, 100)  # of 257 positions: a last chunk of one, and of 57
    rows = []
    with screen.progress("exactness", len(cases) * len(ALLOWED)) as begin:
        for name, make in cases.items():
            for dtype in ALLOWED:
                begin(f"{name}, {dtype}")
                if not budget.allows(30):
                    screen.say(f"skipped for lack of time: {name}, {dtype}")
                    continue
                try:
                    model, loss_of = make(options.device, grouped=dtype != torch.float32)
                except ImportError as error:
                    screen.say(f"skipped: {name}: {error}")
                    break
                rows += compare_gradients(name, model, loss_of, dtype, chunks)
    screen.table(
        "Relative error of all gradients and of the worst one, and × eager's own",
        ["", "type", "chunk", "all", "×", "worst", "×", "fused", ""],
        [
            [
                row["case"],
                row["dtype"],
                row["chunk"],
                *(cell for kind in ("overall", "worst") for cell in error_cells(row[kind])),
                "yes" if row["fused"]["seqsplit"] else "no",
                "ok" if row["ok"] else "WRONG",
            ]
            for row in rows
        ],
    )
    return rows


# Grouped heads have no fused float32 kernel on CUDA: there, keys get as many heads as queries.


def decoder_case(device: str, grouped: bool) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    shape = SHAPES["tiny"]
    if not grouped:
        shape = dataclasses.replace(shape, kv_heads=shape.heads)
    model = common.make_model(shape, torch.float64, device)
    tokens, labels = make_batch(shape, 257, batch=2, device=device)
    return model, lambda module: module(tokens, labels)


def qwen3_case(device: str, grouped: bool) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2 if grouped else 4,
        head_dim=32,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config).to(device, torch.float64).train()
    tokens, labels = make_batch(SHAPES["tiny"], 257, batch=2, device=device)
    return model, lambda module: module(input_ids=tokens, labels=labels, use_cache=False).loss


def compare_gradients(
    name: str,
    model: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    dtype: torch.dtype,
    chunks: tuple[int, ...],
) -> list[dict]:
    """Errors of eager and of each chunk size, all from the same weights rounded to ``dtype``."""
    rounded = copy.deepcopy(model).to(dtype)
    exact = copy.deepcopy(rounded).to(torch.float64)
    reference, _ = gradients(exact, loss_of)
    found, eager_fused = gradients(copy.deepcopy(rounded), loss_of)
    eager = errors(found, reference)
    rows = []
    for chunk in chunks:
        ours = seqsplit.compile(copy.deepcopy(rounded), chunk_size=chunk, head_chunk_size=chunk)
        found, fused = gradients(ours, loss_of)
        error = errors(found, reference)
        limits = [limit * own for limit, own in zip(ALLOWED[dtype], eager, strict=True)]
        rows.append(
            {
                "case": name,
                "dtype": str(dtype).removeprefix("torch."),
                "chunk": chunk,
                "overall": {"eager": eager[0], "seqsplit": error[0]},
                "worst": {"eager": eager[1], "seqsplit": error[1]},
                "fused": {"eager": eager_fused, "seqsplit": fused},
                "ok": fused and error[0] <= limits[0] and error[1] <= limits[1],
            }
        )
    return rows


def gradients(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor]
) -> tuple[dict[str, Tensor], bool]:
    """Gradients of one step by parameter, and whether fused attention kernels ran in it."""
    with FlopCounter() as counter:
        loss_of(model).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return grads, counter.attention > 0


def errors(found: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, float]:
    """Relative norm-wise error of all gradients, and the largest of a single parameter's.

    A gradient that is missing or not finite makes both infinite.
    """
    wrong = total = worst = 0.0
    for name, exact in reference.items():
        if found[name] is None or not found[name].isfinite().all():
            return float("inf"), float("inf")
        error = (found[name].double() - exact).square().sum().item()
        size = exact.square().sum().item()
        wrong, total, worst = wrong + error, total + size, max(worst, error / size)
    return (wrong / total) ** 0.5, worst**0.5


def error_cells(error: dict[str, float]) -> list[str]:
    eager, ours = error["eager"], error["seqsplit"]
    return [f"{ours:.1e}", f"{ours / eager:.2f}"]


# --- 2. memory and time -------------------------------------------------------------------------


def comparison(screen: common.Screen, options: argparse.Namespace, budget: Budget) -> dict:
    shape, dtype = SHAPES[options.shape], common.DTYPES[options.dtype]
    model = common.make_model(shape, dtype, options.device)
    methods = {name: build(name, model, options.chunk) for name in (OURS, CHUNKED)}
    results: dict[int, dict] = {}
    expected = 0.0
    with screen.progress("comparison", 1 + len(options.lengths)) as begin:
        begin("compiling")
        short = make_batch(shape, 2 * options.chunk, options.batch, options.device)
        for loss, trained in methods.values():
            common.train_step(loss, trained, short)
        for length in options.lengths:
            begin(f"T={length}")
            if not budget.allows(expected):
                screen.say(f"skipped for lack of time: T={length}")
                continue
            start = time.perf_counter()
            batch = make_batch(shape, length, options.batch, options.device)
            found = results[length] = {}
            for name, (loss, trained) in methods.items():
                common.train_step(loss, trained, batch)  # warm-up
                found[name] = {"peak_bytes": peak_of(loss, trained, batch, options.device)}
            pairs = []
            for index in range(options.pairs):
                order = list(methods)[:: -1 if index % 2 else 1]
                pairs.append({n: step_seconds(*methods[n], batch, options.device) for n in order})
            for name in methods:
                found[name]["seconds"] = statistics.median(pair[name] for pair in pairs)
            ratios = [pair[OURS] / pair[CHUNKED] for pair in pairs]
            found["time_ratio"] = statistics.median(ratios)
            found["time_ratios"] = ratios
            # Attention makes the next length cost up to four times as much, where it doubles.
            expected = 4 * (time.perf_counter() - start)

    lengths = list(results)
    for before, after in zip(lengths, lengths[1:], strict=False):
        for name in methods:
            growth = results[after][name]["peak_bytes"] - results[before][name]["peak_bytes"]
            results[after][name]["bytes_per_token"] = growth / (after - before) / options.batch
    least = floor(shape, dtype).total
    screen.table(
        f"Shape {options.shape} in {options.dtype}, chunk {options.chunk}; floor {least:,} B/token",
        ["", "method", "peak above start", "B/token", "step", "ratio"],
        [
            [
                f"T={length}",
                name,
                common.mib(found[name]["peak_bytes"]),
                f"{found[name].get('bytes_per_token', float('nan')):,.0f}",
                f"{found[name]['seconds']:.3f} s",
                f"{found['time_ratio']:.3f}" if name == OURS else "",
            ]
            for length, found in results.items()
            for name in methods
        ],
    )
    return {"floor_bytes_per_token": least, "lengths": results}


def peak_of(loss: baselines.Loss, trained: nn.Module, batch: tuple, device: str) -> int:
    """Peak of one step above its start, gradients cleared before (the allocator's on CUDA)."""
    trained.zero_grad(set_to_none=True)
    if not device.startswith("cuda"):
        with track_memory(allocator=True) as memory:
            common.train_step(loss, trained, batch)
        return memory.peak_bytes
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    common.train_step(loss, trained, batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - start


def step_seconds(loss: baselines.Loss, trained: Decoder, batch: tuple, device: str) -> float:
    seconds = common.timed(device, common.train_step, loss, trained, batch)
    trained.zero_grad(set_to_none=True)
    return seconds


# --- 3. the longest that fits -------------------------------------------------------------------


def longest(screen: common.Screen, options: argparse.Namespace, budget: Budget) -> dict:
    """Lengths that fit: doubled until one does not, then the middle between the last two."""
    shape, dtype = SHAPES[options.shape], common.DTYPES[options.dtype]
    results = {}
    methods = (CHUNKED, OURS)
    share = budget.left / len(methods)
    with screen.progress("longest", 8 * len(methods)) as begin, MemoryLimit(options):
        for index, name in enumerate(methods):
            reserved = share * (len(methods) - 1 - index)  # for the methods that follow
            model = common.make_model(shape, dtype, options.device)
            if name == OURS:
                loss = seqsplit.compile(
                    model, chunk_size=options.chunk, head_chunk_size=options.chunk
                )
            else:
                loss = baselines.checkpointed_chunked(model, options.chunk)
            begin(f"{name}, warm-up")
            try_length(loss, model, 2 * options.chunk, options)  # compiles
            release(model)
            fits: list[dict] = []
            fails: int | None = None
            length, stopped = options.longest_from, "does not fit"
            while True:
                begin(f"{name}, T={length}")
                if fits and not budget.allows(reserved + 4 * fits[-1]["seconds"]):
                    stopped = "out of time"
                    break
                seconds = try_length(loss, model, length, options)
                release(model)
                if seconds is None:
                    fails = length
                else:
                    fits.append({"length": length, "seconds": seconds})
                if fails is None:
                    length *= 2
                elif fits and fails - fits[-1]["length"] > fails // 4:
                    length = (fails + fits[-1]["length"]) // 2
                else:
                    break
            results[name] = {
                "fits": fits,
                "longest": fits[-1]["length"] if fits else 0,
                "does_not_fit": fails,
                "stopped": stopped,
            }
            del loss, model
            release(None)
    screen.table(
        f"Longest sequence of shape {options.shape} in {options.limit_gib:g} GiB",
        ["", "fits", "does not fit", "step at the longest", "search ended"],
        [
            [
                name,
                f"{found['longest']:,}",
                f"{found['does_not_fit']:,}" if found["does_not_fit"] else "not reached",
                f"{found['fits'][-1]['seconds']:.1f} s" if found["fits"] else "",
                found["stopped"],
            ]
            for name, found in results.items()
        ],
    )
    return results


class MemoryLimit:
    """Lets the process have ``--limit-gib`` of the GPU, as if it were a smaller one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._on_gpu = options.device.startswith("cuda")
        self._limit = options.limit_gib * 2**30

    def __enter__(self) -> None:
        release(None)
        if self._on_gpu:
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(min(self._limit / total, 1.0))

    def __exit__(self, *error: object) -> None:
        if self._on_gpu:
            torch.cuda.set_per_process_memory_fraction(1.0)


def try_length(
    loss: baselines.Loss, model: Decoder, length: int, options: argparse.Namespace
) -> float | None:
    """Seconds of one step at ``length``, or None where it does not fit."""
    batch = make_batch(SHAPES[options.shape], length, options.batch, options.device)
    if not options.device.startswith("cuda"):  # nothing runs out: hold the peak to the limit
        start = time.perf_counter()
        peak = peak_of(loss, model, batch, options.device)
        return time.perf_counter() - start if peak <= options.limit_gib * 2**30 else None
    try:
        return common.timed(options.device, common.train_step, loss, model, batch)
    except torch.OutOfMemoryError:
        return None


def release(model: nn.Module | None) -> None:
    """Give back a model's gradients, or with ``None`` whatever earlier models have left."""
    if model is not None:
        model.zero_grad(set_to_none=True)
    else:
        torch._dynamo.reset()  # its caches hold on to models that are gone
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
