"""Windows: a piece of the model that works in blocks of positions, each of which sees its own and
some before it.

Attention in blocks pads the sequence to a multiple of the block, views it as ``(blocks, block)``
and lets every block look at the one before. No step of it can be cut into chunks, since a chunk
may end inside a block. But the same code gives a chunk's rows when it is run on a window that
begins with a block, early enough: on the rows that the chunk's first block sees. When an op on
values of such a form cannot be split, everything between the values that have the length of the
sequence is gathered into one node; that it is local, causal and the same for every block is found
by execution, as is how far back it sees. Then its chunks read a window, as those of a shift do.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from seqsplit.ops.linear_attention import linear_attention
from seqsplit.passes.analysis.facts import Facts, draws_random
from seqsplit.passes.graph.lowered import Lowered
from seqsplit.passes.graph.lowered import Region as Contexts
from seqsplit.passes.graph.sizes import SizeWriter
from seqsplit.passes.rewrite.pieces import is_value, write_piece
from seqsplit.passes.rewrite.regions import has_rows
from seqsplit.passes.rewrite.stencils import WindowedPiece, windowed_of
from seqsplit.passes.rules.scans import SCANS

__all__ = ["Windows"]

aten = torch.ops.aten

_REACHES = (0, 1, 2, 3)  # blocks before its own that a block may see
_MORE = 4  # blocks, beyond those, that a trial is long
_DIVIDES = {"CleanDiv", "FloorDiv", "IntTrueDiv", "Mod", "PythonMod"}
_SHORTEST = 11  # positions
_BATCH = 2
_LONGEST = 2**22  # elements of an operand in a trial
_TOLERANCE = 1e-9


class Windows:
    """Gathers pieces of one graph; remembers which were tried."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self._tried: set[tuple[bool, fx.Node]] = set()

    def gather_around(self, facts: Facts, node: fx.Node, *, token_wise: bool = False) -> bool:
        """Gather the piece around a node that cannot be split, if it works in blocks.

        Args:
            facts: of the graph.
            node: of it.
            token_wise: whether the block to try is a single position.

        Returns:
            Whether the graph was changed: then facts have to be found anew.
        """
        if facts.sequence is None or (token_wise, node) in self._tried:
            return False
        constants = _constants(facts)
        members = _between(facts, node, constants)
        self._tried.update((token_wise, member) for member in members)
        blocks = [1] if token_wise else _blocks(facts, members)
        outputs = [
            n
            for n in members
            if _along(facts, n) and n not in constants and any(u not in members for u in n.users)
        ]
        if not blocks or len(outputs) != 1 or any(draws_random(n) for n in members):
            return False
        try:
            piece, operands, symbols = write_piece(self._lowered, sorted(members), outputs)
        except ValueError:
            return False
        (output,) = outputs
        dims = [_along(facts, operand) for operand in operands]
        if any(len(found) > 1 for found in (*dims, _along(facts, output))) or not any(dims):
            return False
        if piece.in_double is None or not output.meta["val"].is_floating_point():
            return False
        trial = _Trial(facts, piece.in_double, operands, symbols)
        with disable_proxy_modes_tracing(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            found = trial.find(blocks, dims, _along(facts, output)[0])
            if found is None and not token_wise:
                order = trial.as_linear_attention(blocks, dims, output)
                if order is not None:
                    call = (linear_attention, [operands[i] for i in order], [])
                    return self._replace(facts, output, members, call)
        if found is None or (token_wise and found.reach):
            return False
        target = piece if token_wise else _function(piece, found)
        return self._replace(facts, output, members, (target, operands, symbols))

    def _replace(
        self,
        facts: Facts,
        output: fx.Node,
        members: set[fx.Node],
        call: tuple[Callable, list[fx.Node], list[sympy.Symbol]],
    ) -> bool:
        target, operands, symbols = call
        lowered = self._lowered
        graph, sizes = lowered.graph, SizeWriter(lowered)
        # Some of what was gathered may come after users of the output, which it does not lead to.
        if any(output < operand for operand in operands):
            return False
        with graph.inserting_after(output):
            new = graph.call_function(target, (*operands, *map(sizes.symbol, symbols)))
        place = ("stack_trace", "nn_module_stack")
        new.meta = {key: output.meta[key] for key in place if key in output.meta}
        new.meta |= {"region": Contexts(), "val": output.meta["val"]}
        known = windowed_of(target) is not None or target in SCANS
        if not known and not has_rows(facts, new):
            graph.erase_node(new)
            sizes.take_back()
            return False
        output.replace_all_uses_with(
            new, delete_user_cb=lambda user: user not in members and user is not new
        )
        for node in sorted(members, reverse=True):
            if not node.users:
                graph.erase_node(node)
        graph.lint()
        return True


def _function(piece: Callable, found: WindowedPiece) -> Callable:
    """The piece as a node's target; its rows are in ``rows``, both in float64 in ``in_double``."""

    def windowed(*operands: Any) -> Tensor:
        return piece(*operands)

    def windowed_rows(start: int, first: int, end: int, *operands: Any) -> Tensor:
        return found.rows(piece, start, first, end, operands)

    def windowed_rows_in_double(start: int, first: int, end: int, *operands: Any) -> Tensor:
        return found.rows(piece.in_double, start, first, end, operands)

    windowed.__module__ = windowed_rows.__module__ = __name__
    windowed.windowed, windowed.rows = found, windowed_rows
    windowed.in_double, windowed_rows.in_double = piece.in_double, windowed_rows_in_double
    windowed.fingerprint = windowed_rows.fingerprint = ("windowed", found, piece.fingerprint)
    return windowed


# -- candidates ----------------------------------------------------------------------------------


def _along(facts: Facts, node: fx.Node) -> list[int]:
    """The dims of a tensor that are the sequence itself."""
    if not facts.is_tensor(node):
        return []
    return [dim for dim, size in enumerate(facts.shape(node)) if size == facts.sequence]


def _between(facts: Facts, node: fx.Node, constants: set[fx.Node]) -> set[fx.Node]:
    """What lies between values along the sequence, around a node, with the values that come out."""
    members: set[fx.Node] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        if node in members or node.op != "call_function" or not is_value(node):
            continue
        members.add(node)
        for operand in node.all_input_nodes:
            inside = not _along(facts, operand) and facts.sequence_dims(operand)
            if is_value(operand) and (inside or operand in constants):
                stack.append(operand)
        if not _along(facts, node) and node not in constants:  # others may share a mask
            stack.extend(user for user in node.users if is_value(user))
    # A value along the sequence that only others of its kind go into is no part of it.
    return {
        n
        for n in members
        if not _along(facts, n)
        or n in constants
        or any(i in members and not _along(facts, i) for i in n.all_input_nodes)
    }


def _constants(facts: Facts) -> set[fx.Node]:
    """What is made of numbers alone, as positions and a mask within a block are."""
    found: set[fx.Node] = set()
    for node in facts.lowered.graph.nodes:
        plain = isinstance(node.target, torch._ops.OpOverload) and facts.is_tensor(node)
        if plain and all(operand in found for operand in node.all_input_nodes if is_value(operand)):
            found.add(node)
    return found


def _blocks(facts: Facts, members: set[fx.Node]) -> list[int]:
    """Numbers that the sequence is divided by: they may be the size of a block."""
    sizes = {size for node in members if facts.is_tensor(node) for size in facts.shape(node)}
    found: set[sympy.Expr] = set()
    for size in filter(facts.is_sequence, sizes):
        found |= {sympy.Integer(number.q) for number in size.atoms(sympy.Rational)}
        for part in sympy.preorder_traversal(size):
            if part.func.__name__ in _DIVIDES and facts.is_sequence(part.args[0]):
                found.add(part.args[1])
    return sorted(int(number) for number in found if number.is_Integer and number > 1)


# -- proof ---------------------------------------------------------------------------------------


class _Trial:
    def __init__(
        self, facts: Facts, run: Callable, operands: list[fx.Node], symbols: list[sympy.Symbol]
    ) -> None:
        self._facts, self._run = facts, run
        self._operands, self._symbols = operands, symbols

    def find(self, blocks: list[int], dims: list[list[int]], out_dim: int) -> WindowedPiece | None:
        """The smallest block and reach for which chunks of it are right."""
        sequence = self._facts.sequence
        length_at = self._symbols.index(sequence) if sequence in self._symbols else None
        operand_dims = tuple(found[0] if found else None for found in dims)
        for block, reach in itertools.product(blocks, _REACHES):
            found = WindowedPiece(
                block, reach * block, operand_dims, out_dim, len(self._symbols), length_at
            )
            try:
                if self._holds(found):
                    return found
            except Exception:  # whatever it says to such windows
                continue
        return None

    def _holds(self, found: WindowedPiece) -> bool:
        more = max(_MORE, -(-_SHORTEST // found.block))
        length = found.reach + more * found.block  # whole blocks: the code may take nothing else
        sizes = [self._number(symbol, length) for symbol in self._symbols]
        values = [self._random(operand, length) for operand in self._operands]
        wanted = [value for value in values if value.requires_grad]
        block, dim = found.block, found.out_dim
        far = found.reach + 2 * block
        bounds = {0, 1, block - 1, block, far - 1, far + 1, length - block, length - 1, length}
        bounds = sorted(bounds)
        with torch.enable_grad():
            whole = self._run(*values, *sizes)
            cotangent = torch.randn_like(whole)
            pieces = []
            for start, end in zip(bounds, bounds[1:]):
                first = max(0, start - found.window + 1)
                windows = [
                    v if d is None else v.narrow(d, first, end - first)
                    for v, d in zip(values, found.operand_dims)
                ]
                pieces.append(found.rows(self._run, start, first, end, [*windows, *sizes]))
            rows = torch.cat(pieces, dim)
            grads = [
                torch.autograd.grad(side, wanted, cotangent, allow_unused=True)
                for side in (rows, whole)
            ]
        return _close(rows, whole) and all(
            _close(*(torch.zeros_like(v) if g is None else g for g in pair))
            for v, pair in zip(wanted, zip(*grads))
        )

    def as_linear_attention(
        self, blocks: list[int], dims: list[list[int]], output: fx.Node
    ) -> tuple[int, ...] | None:
        """Which operands are query, key, value and logarithm of the decay, if it is that."""
        ranks = [len(self._facts.shape(operand)) for operand in self._operands]
        if sorted(ranks) != [3, 4, 4, 4] or any(found != [1] for found in dims):
            return None
        dtypes = {node.meta["val"].dtype for node in (*self._operands, output)}
        if _along(self._facts, output) != [1] or not blocks or len(dtypes) > 1:
            return None
        decay = ranks.index(3)
        for order in itertools.permutations(i for i in range(4) if i != decay):
            with contextlib.suppress(Exception):  # whatever either says to such operands
                if self._is_linear_attention((*order, decay), 3 * max(blocks)):
                    return (*order, decay)
        return None

    def _is_linear_attention(self, order: tuple[int, ...], length: int) -> bool:
        sizes = [self._number(symbol, length) for symbol in self._symbols]
        values = [self._random(operand, length) for operand in self._operands]
        query, key, value, decay = (values[i] for i in order)
        if query.shape != key.shape or not query.shape[:3] == value.shape[:3] == decay.shape:
            return False
        with torch.no_grad():
            decay.abs_().neg_()  # what grows instead would drown what is compared
        with torch.enable_grad():
            sides = [linear_attention(query, key, value, decay), self._run(*values, *sizes)]
            cotangent = torch.randn_like(sides[1])
            grads = [torch.autograd.grad(side, values, cotangent) for side in sides]
        return _close(*sides) and all(_close(*pair) for pair in zip(*grads))

    def _number(self, size: sympy.Expr, length: int) -> int:
        hints = self._facts.lowered.hints
        numbers = {s: min(hints.get(s, _BATCH), _BATCH) for s in size.free_symbols}
        return int(size.xreplace(numbers | {self._facts.sequence: length}))

    def _random(self, node: fx.Node, length: int) -> Tensor:
        like = node.meta["val"]
        shape = [self._number(size, length) for size in self._facts.shape(node)]
        if torch.Size(shape).numel() > _LONGEST:
            raise ValueError("too long to be tried")
        if not like.is_floating_point():
            return torch.randint(0, 2, shape, device=like.device).to(like.dtype)
        return torch.randn(shape, dtype=torch.float64).to(like.device).requires_grad_()


def _close(have: Tensor, want: Tensor) -> bool:
    if have.shape != want.shape or not bool(want.isfinite().all()):
        return False
    return bool((have - want).abs().max() <= _TOLERANCE * want.abs().max().clamp_min(1e-30))
