"""Propagate: what is known of every value before anything is cut.

Three questions, answered from the inputs forward: which of its dims grow with the sequence, does
it need a gradient, and is it *outer*? Outer values live in the outer graph, whole, because they
are small or because computing them chunk by chunk would save nothing:

- parameters, inputs, and arithmetic on them alone;
- the *prologue*: positions, masks' small ingredients, rotary tables, shifted labels: derived from
  inputs without passing through a table of features, and with no dim pair of size T x T;
- the *entry*: embeddings and what is done to them that keeps no activation for the backward
  (adding position embeddings, scaling). An embedding inside a chunk body would build one
  vocabulary-sized gradient per chunk.

Everything else is *active*: it is computed inside chunk bodies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
import torch
from sympy.core.function import Application
from torch import fx

from seqsplit.errors import InvalidOptionError, format_message
from seqsplit.passes.graph.lowered import Lowered
from seqsplit.passes.rules.attention import SDPA, SOFTMAX, kernel_of
from seqsplit.passes.rules.registry import arguments_of, operands_of
from seqsplit.passes.rules.scans import recurrence_of

__all__ = [
    "FEW",
    "Facts",
    "NothingToSplit",
    "draws_random",
    "find_sequence",
    "fixed_dims",
    "fixed_length",
    "propagate",
]

aten = torch.ops.aten

# Ops whose backward keeps nothing of the size of an activation.
_KEEPS_NOTHING = {
    aten.add.Tensor,
    aten.alias.default,
    aten.cat.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.embedding.default,
    aten.expand.default,
    aten.neg.default,
    aten.permute.default,
    aten.reshape.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.sub.Tensor,
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}
_SCALES = {aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar}
FEW = 4  # positions that are no sequence yet
# Dtypes that quantised weights are packed in, and the most of them that an element holds (of two
# bits, in an int32).
_PACKED = {
    getattr(torch, name)
    for name in ("uint8", "int8", "int16", "int32", "float8_e4m3fn", "float8_e5m2")
    if hasattr(torch, name)
}
_MOST_PER_ELEMENT = 16
_MULTIPLIES = {aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.einsum}
_DETACHES = {aten.detach.default, aten.detach_.default}


@dataclass
class Facts:
    """What :func:`propagate` found.

    Attributes:
        lowered: the graph these facts are about.
        sequence: the symbol of the sequence length, ``None`` if there is none.
        needs_grad: values through which a gradient flows.
        outer: values computed whole in the outer graph.
        features: outer values that come from an embedding table or a float input.
        stream: active values that depend on features. The other active values (masks, position
            biases, weights unpacked from quantised ones) are cheap and are computed anew wherever
            they are needed.
        position: each node's place in the graph's order.
    """

    lowered: Lowered
    sequence: sympy.Symbol | None
    needs_grad: set[fx.Node] = field(default_factory=set)
    outer: set[fx.Node] = field(default_factory=set)
    features: set[fx.Node] = field(default_factory=set)
    stream: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.position = {node: i for i, node in enumerate(self.lowered.graph.nodes)}

    def shape(self, node: fx.Node) -> tuple[sympy.Expr, ...]:
        return self.lowered.shape(node)

    def is_sequence(self, size: sympy.Expr) -> bool:
        """Whether a size grows with the sequence."""
        return self.sequence is not None and self.sequence in size.free_symbols

    def sequence_dims(self, node: fx.Node) -> list[int]:
        """The dims of a tensor that grow with the sequence (a tuple counts by its first item)."""
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            value = value[0] if value else None
        if not isinstance(value, torch.Tensor):
            return []
        return [dim for dim, size in enumerate(self.shape(node)) if self.is_sequence(size)]

    def is_in_blocks(self, node: fx.Node) -> bool:
        """Whether a tensor has the sequence only as it is counted otherwise, in blocks, say: none
        of its dims grows by one with each position, or by a fixed number."""
        sizes = [self.shape(node)[dim] for dim in self.sequence_dims(node)]
        return bool(sizes) and all(
            any(self.sequence in part.free_symbols for part in size.atoms(Application))
            for size in sizes
        )

    @property
    def keeps_activations(self) -> bool:
        """Whether computing the outer values keeps activations for the backward."""
        return any(
            node in self.features
            and node in self.needs_grad
            and node.op == "call_function"
            and self.is_tensor(node)
            and not _keeps_nothing(self, node)
            for node in self.outer
        )

    def is_tensor(self, node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), torch.Tensor)

    def is_active(self, node: fx.Node) -> bool:
        """Whether a tensor is computed inside chunk bodies."""
        value = node.meta.get("val")
        return isinstance(value, (torch.Tensor, tuple, list)) and node not in self.outer


class NothingToSplit(Exception):
    """A graph has no sequence of more than one position.

    Attributes:
        no_sequence: none of its inputs even looks like one.
        fixed: there is one, but the model's own code fixes its length.
    """

    def __init__(self, reason: str, *, no_sequence: bool = False, fixed: bool = False) -> None:
        super().__init__(reason)
        self.no_sequence, self.fixed = no_sequence, fixed


def find_sequence(lowered: Lowered, seq_dim: int | None) -> sympy.Symbol:
    """The symbol of the dim that attention mixes, else of ``seq_dim``, else of dim 1.

    Raises:
        NothingToSplit: no size of the inputs that may be the sequence is symbolic.
        InvalidOptionError: ``seq_dim`` names a dim that no input has.
    """
    inputs = [n for n in lowered.placeholders if isinstance(n.meta.get("val"), torch.Tensor)]
    symbolic = {
        size.free_symbols.pop()
        for node in inputs
        for size in lowered.shape(node)
        if len(size.free_symbols) == 1
    }
    if not symbolic:
        raise _nothing_to_split(lowered, inputs, seq_dim)
    longest: dict[sympy.Symbol, sympy.Expr] = {}  # of the inputs' dims that grow with a symbol
    for size in (size for node in inputs for size in lowered.shape(node)):
        for symbol in symbolic & size.free_symbols:
            if (size - symbol).is_Integer:
                longest[symbol] = max(size, longest.get(symbol, size), key=lambda e: e - symbol)
    votes: dict[sympy.Expr, int] = {}
    for node in lowered.graph.nodes:
        mixed = _mixed_size(node, lowered)
        near = [symbol for symbol in symbolic if (mixed - symbol).is_Integer] if mixed else []
        if near:
            # A softmax over all positions and a sink; unless there are as many rows, of which the
            # first are tokens that the model itself puts before the others.
            if mixed - longest[near[0]] > 0 and not _mixes_its_rows(node, mixed, lowered):
                mixed = longest[near[0]]
            votes[mixed] = votes.get(mixed, 0) + 1
    candidates = [size for size in votes if votes[size] == max(votes.values())]
    if seq_dim is None and len(candidates) == 1:
        return _as_symbol(lowered, candidates[0])
    asked = 1 if seq_dim is None else seq_dim
    growing = [n for n in inputs if any(s.free_symbols for s in lowered.shape(n))]
    named = [
        lowered.shape(node)[asked]
        for node in growing
        if -len(lowered.shape(node)) <= asked < len(lowered.shape(node))
    ]
    named = [size for size in named if isinstance(size, sympy.Symbol)]
    preferred = [size for size in named if not candidates or size in candidates]
    if seq_dim is not None and not named:
        raise InvalidOptionError(
            format_message(
                f"seq_dim={seq_dim} is not a sequence in any input",
                got=", ".join(f"{n.name}: {list(lowered.shape(n))}" for n in growing),
                fix="give the dim of an input that holds the tokens, 1 for [batch, tokens]",
            )
        )
    if seq_dim is not None:
        return named[0]
    found = preferred or named or candidates
    if not found:
        raise _nothing_to_split(lowered, inputs, seq_dim)
    return found[0]


def _nothing_to_split(
    lowered: Lowered, inputs: list[fx.Node], seq_dim: int | None
) -> NothingToSplit:
    place = 1 if seq_dim is None else seq_dim
    fixed = fixed_dims(lowered, place)
    mixed = [size for n in lowered.graph.nodes if (size := _mixed_size(n, lowered)) is not None]
    tokens = any(not node.meta["val"].is_floating_point() for node, _ in fixed)
    if fixed and (mixed or tokens):  # else it may as well be a width
        return fixed_length(max(fixed.values()))
    if any(size == 1 for node in inputs for size in lowered.shape(node)[place : place + 1 or None]):
        return NothingToSplit("the sequence has one position")
    if mixed:
        return fixed_length(max((int(size) for size in mixed if size.is_Integer), default=0))
    return NothingToSplit("no dim of the inputs is a sequence", no_sequence=True)


def fixed_dims(lowered: Lowered, dim: int) -> dict[tuple[fx.Node, int], int]:
    """The inputs whose ``dim`` Dynamo had left open before the model's code fixed it, with that
    dim counted from the front, and their sizes; a few positions are no sequence, and where some
    input's is open still, what is fixed are widths."""
    found: dict[tuple[fx.Node, int], int] = {}
    for node in lowered.placeholders:
        held = node.meta.get("val")
        rank = held.ndim if isinstance(held, torch.Tensor) else 0
        if -rank <= dim < rank and dim % rank in node.meta.get("open_dims", ()):
            size = lowered.shape(node)[dim]
            if size.free_symbols:
                return {}
            if size > FEW:
                found[node, dim % rank] = int(size)
    return found


def fixed_length(length: int) -> NothingToSplit:
    """The refusal of a graph that holds for one length. A few positions, of which one is left
    when labels are shifted, are no more of a sequence than one is."""
    if 0 < length <= FEW:
        return NothingToSplit(f"the sequence has {length} positions")
    reason = "the model's own code fixes the length of the sequence"
    return NothingToSplit(reason, fixed=True)


def _as_symbol(lowered: Lowered, size: sympy.Expr) -> sympy.Symbol:
    """A symbol for a length; a model that is given all tokens but the last has ``s - 1``."""
    if isinstance(size, sympy.Symbol):
        return size
    (symbol,) = size.free_symbols
    length = sympy.Symbol("T", integer=True, positive=True)
    lowered.rename(symbol, length - (size - symbol))
    return length


def _mixed_size(node: fx.Node, lowered: Lowered) -> sympy.Expr | None:
    """The size of the dim whose positions a node mixes by attention or by a recurrence."""
    if node.target is SDPA:
        return lowered.shape(node.args[1])[-2]
    if (kernel := kernel_of(node.target)) is not None:
        return lowered.shape(node.args[kernel.places["key"]])[kernel.dim]
    if (recurrence := recurrence_of(node.target)) is not None:
        return lowered.shape(node)[recurrence.dim]
    if node.target in SOFTMAX:
        return lowered.shape(node)[node.args[1]]
    return None


def _mixes_its_rows(node: fx.Node, mixed: sympy.Expr, lowered: Lowered) -> bool:
    """Whether there is a row for each of the positions that a node mixes."""
    if node.target in SOFTMAX:
        return lowered.shape(node).count(mixed) > 1
    if (kernel := kernel_of(node.target)) is not None:
        return lowered.shape(node.args[kernel.places["query"]])[kernel.dim] == mixed
    return lowered.shape(node.args[0])[-2] == mixed


def propagate(lowered: Lowered, sequence: sympy.Symbol | None) -> Facts:
    """Fill :class:`Facts` in one sweep over the graph."""
    facts = Facts(lowered, sequence)
    for node in lowered.graph.nodes:
        if node.op == "output":
            continue
        if node.op in ("placeholder", "get_attr"):
            _note_input(facts, node)
            continue
        inputs = [i for i in node.all_input_nodes if i.meta.get("val") is not None]
        if _carries_gradient(facts, node, inputs):
            facts.needs_grad.add(node)
        if all(i in facts.outer for i in inputs) and _stays_outer(facts, node, inputs):
            facts.outer.add(node)
            if any(i in facts.features for i in inputs) or node.target is aten.embedding.default:
                facts.features.add(node)
        elif any(i in facts.features or i in facts.stream for i in inputs):
            facts.stream.add(node)
    return facts


def _note_input(facts: Facts, node: fx.Node) -> None:
    facts.outer.add(node)
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return
    if node.meta.get("requires_grad"):
        facts.needs_grad.add(node)
    if value.is_floating_point() and value.ndim > 1 and facts.sequence_dims(node):
        facts.features.add(node)


def _carries_gradient(facts: Facts, node: fx.Node, inputs: list[fx.Node]) -> bool:
    if not node.meta["region"].grad or node.target in _DETACHES:
        return False
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
        return False
    return any(i in facts.needs_grad for i in inputs)


def _stays_outer(facts: Facts, node: fx.Node, inputs: list[fx.Node]) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, (torch.Tensor, tuple, list)):
        return True  # a size
    num_sequence_dims = len(facts.sequence_dims(node))
    read_sequence = any(facts.sequence_dims(i) for i in inputs)
    if num_sequence_dims == 0 and not read_sequence:
        return not _unpacks(facts, node)  # parameters and constants
    if num_sequence_dims > 1:
        return False
    carried = [i for i in inputs if i in facts.features or i in facts.needs_grad]
    if not carried:
        return True
    # Two values where there was one would be two checkpoints.
    replaces = all(len(i.users) == 1 or not facts.sequence_dims(i) for i in carried)
    return replaces and _keeps_nothing(facts, node)


def _unpacks(facts: Facts, node: fx.Node) -> bool:
    """Whether a node makes a frozen weight out of a quantised one.

    Unpacked whole, it would be there for all chunks, and from the forward to the backward, at
    several times the size of what it comes from. Each chunk unpacks its own, which costs as much
    as it does in every step of the model without chunks; what multiplies matrices costs more.
    """
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or node in facts.needs_grad or value.ndim < 2:
        return False
    if not value.is_floating_point() or not all(size.is_Integer for size in facts.shape(node)):
        return False
    if getattr(node.target, "overloadpacket", None) in _MULTIPLIES:
        return False
    packed = [root.meta["val"] for root in _inputs_of(node)]
    size = value.numel() * value.itemsize
    return size > sum(v.numel() * v.itemsize for v in packed) and any(
        v.dtype in _PACKED and value.numel() <= _MOST_PER_ELEMENT * v.numel() for v in packed
    )


def _inputs_of(node: fx.Node) -> list[fx.Node]:
    """The graph's input tensors that a value is computed from."""
    found, stack = {}, [node]
    while stack:
        node = stack.pop()
        if node not in found and isinstance(node.meta.get("val"), torch.Tensor):
            found[node] = node.op == "placeholder"
            stack.extend(node.all_input_nodes)
    return [node for node, is_input in found.items() if is_input]


def _keeps_nothing(facts: Facts, node: fx.Node) -> bool:
    if node.target in _SCALES:
        return sum(operand in facts.needs_grad for operand in operands_of(node)) <= 1
    if node.target is aten.dropout.default:
        return not arguments_of(node)["train"] or arguments_of(node)["p"] == 0
    return node.target in _KEEPS_NOTHING


def draws_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers in this call (a dropout of zero does not)."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = arguments_of(node)
    if "dropout_p" in arguments:
        return arguments["dropout_p"] > 0
    if target is aten.dropout.default or target is aten.native_dropout.default:
        return bool(arguments.get("train", True)) and arguments["p"] > 0
    return True
