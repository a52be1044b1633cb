"""Time our passes take, against Dynamo's capture of the same model.

A tiny model with many layers from transformers: compile time goes with the number of layers, not
with their size. Dynamo's capture is timed in the same process with a backend that hands the graph
back as it is; the passes' times are those of the report. Ends with status 1 if the passes take
longer than the capture (``--limit`` times), or the first step more than twice as long.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from typing import Any

import torch

import seqsplit

from . import common


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    screen = common.Screen()
    model = make_model(options.model, options.layers)
    tokens = torch.randint(256, (2, options.length))
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    warm_up()

    captures, firsts, passes = [], [], []
    with screen.progress("compiling", 2 * options.repeats) as begin:
        for _ in range(options.repeats):
            begin("Dynamo alone")
            captures.append(capture_seconds(model, inputs))
            begin("seqsplit")
            first, report = compile_seconds(model, inputs)
            firsts.append(first)
            passes.append(dict(report.pass_seconds))

    by_pass = {name: statistics.median(run[name] for run in passes) for name in passes[0]}
    total = statistics.median(sum(run.values()) for run in passes)
    capture = statistics.median(captures)
    rows = [["Dynamo's capture", f"{capture:.2f} s", "1.00"]]
    rows += [[f"  {n}", f"{s:.2f} s", f"{s / capture:.2f}"] for n, s in by_pass.items()]
    rows.append(["our passes, together", f"{total:.2f} s", f"{total / capture:.2f}"])
    first = statistics.median(firsts)
    rows.append(["first step with everything", f"{first:.2f} s", f"{first / capture:.2f}"])
    screen.table(
        f"{options.layers}-layer {options.model}, median of {options.repeats}",
        ["", "time", "× capture"],
        rows,
    )
    results = {
        "capture_s": captures,
        "pass_seconds": passes,
        "first_step_s": firsts,
        "ratio": total / capture,
    }
    path = common.write_results("compile_time", options, results)
    screen.say(f"written: {path.relative_to(common.ROOT)}")
    limits = {"passes": (total, options.limit), "first step": (first, options.limit_first)}
    for what, (found, limit) in limits.items():
        met = "within" if found <= limit * capture else "ABOVE"
        screen.say(f"{what}: {found / capture:.2f} × capture: {met} the limit of {limit}")
    return int(any(found > limit * capture for found, limit in limits.values()))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__.strip().splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--model", choices=("qwen3", "llama", "gpt2"), default="qwen3")
    options.add_argument("--layers", type=int, default=36)
    options.add_argument("--length", type=int, default=64, help="tokens; does not matter much")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--limit", type=float, default=1.0, help="of the passes, in captures")
    options.add_argument("--limit-first", type=float, default=2.0, help="of the whole first step")
    return options.parse_args(arguments)


def make_model(kind: str, layers: int) -> torch.nn.Module:
    """A tiny random causal language model of transformers, in training mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_layer": layers, "n_embd": 64, "n_head": 4, "vocab_size": 256}
    else:
        sizes = {
            "num_hidden_layers": layers,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 256,
        }
    config = AutoConfig.for_model(kind, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def warm_up() -> None:
    """Import and initialise Dynamo, which would otherwise count as capture."""
    torch.compile(torch.nn.Linear(4, 4), backend=hand_back, dynamic=True)(torch.zeros(2, 4))


def hand_back(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
    return graph.forward


def capture_seconds(model: torch.nn.Module, inputs: dict[str, Any]) -> float:
    """First call under the idle backend, less a second call: what capturing alone takes."""
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend=hand_back, dynamic=True)
    first = seconds(lambda: compiled(**inputs))
    return first - seconds(lambda: compiled(**inputs))


def compile_seconds(model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[float, Any]:
    """First forward of a freshly compiled model, and the report of its compilation."""
    torch._dynamo.reset()
    compiled = seqsplit.compile(copy.deepcopy(model))
    first = seconds(lambda: compiled(**inputs))
    return first, seqsplit.explain(compiled, **inputs)


def seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
