"""Write docs/walkthrough.md: one tiny decoder on its way through every pass.

Run it from the repository's root: ``make walkthrough``.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx, nn

import seqsplit
from seqsplit.frontend.handle import handle_of
from seqsplit.ir.plan import Body, Plan
from seqsplit.passes import watching
from seqsplit.passes.analysis.facts import Facts
from seqsplit.passes.driver import Context
from seqsplit.passes.graph.dump import dump

PAGE = Path(__file__).with_suffix(".md")


# model
class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int = 50, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads=2) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# end of model

INTRODUCTION = """\
# One model on its way through the passes

Written by `make walkthrough` from a real run. The page follows the list `PASSES` in
[passes/pipeline.py](../passes/pipeline.py); a pass that leaves this model's graph alone is named
in a line. `B` is the batch, `T` the length of the sequence, both symbols: one plan holds for all
batches and lengths. Long runs of lines that do not change are left out.

## The model

```python
{model}```

It is compiled and called with `seqsplit.compile(Decoder(), chunk_size=4)(ids)`. Dynamo captures
one graph of torch functions.
"""

WORDS = {
    "find linear scans": "A gated sum over time, however it is written, would become one op. There "
    "is none here; slices that cut nothing off go, which the search asks for.",
    "lower": "Dynamo's graph is traced again, above autograd, to ATen ops. Ops that are composed "
    "of others (`linear`, `layer_norm`, attention, the loss) stay whole.",
    "normalize": "The mean of the loss becomes a sum and a division by the count, since shares "
    "of a sum can be added up over chunks. Other spellings become the ones that rules speak of.",
    "express sizes": "Numbers that are sizes are written in the sizes of the inputs.",
    "find sequence": "The dim that attention mixes is the sequence. Now every value has a kind: "
    "*outer* values exist whole, the *stream* lives in chunks, *positional* values are masks and "
    "the like, computed anew for each chunk.",
    "find segments": "Cuts are put where few bytes per token cross. What lies between two cuts is "
    "a segment. Each is asked for the chunk's rows of what it gives, rule rows turn that into what "
    "it needs of its operands, and the answers are written as a chunk body. Keys and values are "
    "needed from before the chunk: they are read from caches.",
    "compare": "The whole lowered graph was run against the captured one in float64, forward and "
    "backward.",
}


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    """The text of the page."""
    steps: list[tuple[str, str]] = []
    names: dict[sympy.Symbol, str] = {}

    def note_down(name: str, graph: Any, context: Context) -> None:
        names.update(names_of_sizes(graph))
        steps.append((name, text_after(graph, context, names)))

    torch.manual_seed(0)
    model, ids = Decoder(), torch.randint(50, (2, 13))
    compiled = seqsplit.compile(model, chunk_size=4)
    with watching(note_down):
        compiled(ids).backward()
    (run,) = handle_of(compiled).log
    text = "\n".join([introduction(), *pages(steps, run.plan)])
    for symbol, name in names.items():  # in placements
        text = re.sub(rf"\b{symbol}\b", name, text)
    return text


def introduction() -> str:
    source = Path(__file__).read_text()
    model = source[source.index("# model\n") + 8 : source.index("\n\n# end of model")]
    return INTRODUCTION.format(model=model.rstrip() + "\n")


def text_after(graph: Any, context: Context, names: dict[sympy.Symbol, str]) -> str:
    """The graph after a pass, with the kinds of its values once they are known."""
    facts = context.facts(graph) if context.sequence is not None else None
    return dump(graph, names, lambda node: kind_of(facts, node))


def kind_of(facts: Facts | None, node: fx.Node) -> str:
    if facts is None or node.op == "output" or not facts.is_tensor(node):
        return ""
    if node in facts.stream:
        return "stream"
    return "outer" if node in facts.outer else "positional"


def names_of_sizes(graph: Any) -> dict[sympy.Symbol, str]:
    """``B`` and ``T``, as the model's input has them."""
    (ids,) = (
        n
        for n in graph.placeholders
        if isinstance(n.meta["val"], torch.Tensor) and n.meta["val"].dtype == torch.int64
    )
    return dict(zip(graph.shape(ids), "BT"))


def pages(steps: list[tuple[str, str]], plan: Plan) -> list[str]:
    written, before = [], None
    for number, (name, text) in enumerate(steps, 1):
        written.append(f"## {number}. {name}\n")
        if name in WORDS:
            written.append(WORDS[name] + "\n")
        if name == "find segments":
            written += segments(plan)
        elif text == before:
            written += [] if name in WORDS else ["Nothing to do in this model.\n"]
        elif before is None or name == "find sequence":
            written.append(block(shortened(text)))
        else:
            written.append(block(changes(before, text), "diff"))
        before = text
    written.append(f"## {len(steps) + 1}. stitch\n")
    written.append(
        "The outer graph: what is outer stays as it was, each segment is one call, which is one "
        "node of the autograd graph.\n"
    )
    written.append(block(code(plan.module), "python"))
    return written


def segments(plan: Plan) -> list[str]:
    table = ["| segment | chunk body |", "| --- | --- |"]
    numbers = {id(body): number for number, body in enumerate(plan.bodies, 1)}
    table += [f"| `{s.scope}` | {numbers[id(s.body)]} |" for s in plan.segments]
    written = ["\n".join(table) + "\n"]
    for number, body in enumerate(plan.bodies, 1):
        written.append(f"### Chunk body {number}\n")
        written.append(f"Takes {inputs(body)}; gives {outputs(body)}.\n")
        written.append(block(code(body.module), "python"))
    return written


def inputs(body: Body) -> str:
    return ", ".join(f"`in_{i}` {spec.placement}" for i, spec in enumerate(body.inputs))


def outputs(body: Body) -> str:
    return ", ".join(str(spec.placement) for spec in body.outputs)


def code(module: Any) -> str:
    """The generated Python, without what only says when a value dies."""
    lines = [line for line in module.code.strip().splitlines() if line.strip()]
    lines = [re.sub(r";( +\w+ =)+ None.*$", "", re.sub(r" {2,}# .*$", "", line)) for line in lines]
    return "\n".join(re.sub(r"torch\.ops\.aten\.", "aten.", line) for line in lines)


def changes(before: str, after: str) -> str:
    old, new = before.splitlines(), after.splitlines()
    found = list(difflib.unified_diff(old, new, lineterm="", n=1))[2:]
    return "\n".join("" if line.startswith("@@") else line for line in found).strip("\n")


def shortened(text: str, most: int = 36) -> str:
    lines = [line for line in text.splitlines() if "get_attr" not in line]
    if len(lines) <= most:
        return "\n".join(lines)
    return "\n".join([*lines[: most - 6], f"... {len(lines) - most} lines more ...", *lines[-6:]])


def block(text: str, language: str = "text") -> str:
    return f"```{language}\n{text}\n```\n"


if __name__ == "__main__":
    main()
