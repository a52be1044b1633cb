"""Attention kernels that come as packages or as torch's own op with functions, on a GPU.

The gradients of a decoder that calls them, in bfloat16 and split, are compared with float64 (by
plain attention) and with eager's own error. What is not installed is skipped with a message.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqsplit

from . import common
from .batches import make_batch
from .models import SHAPES, Decoder, rotate

LENGTH, CHUNKS, ALLOWED = 257, (64, 100), 1.5  # times eager's own error
DOCUMENTS = (0, 70, 71, 200, LENGTH)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, documents: bool = False) -> Tensor:
    """``[B, T, H, E]`` attention by a mask, in any dtype."""
    place = torch.arange(q.shape[1], device=q.device)
    mask = place[:, None] >= place
    if documents:
        owner = torch.searchsorted(starts(q.device), place, right=True)
        mask = mask & (owner[:, None] == owner)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


def starts(device: torch.device) -> Tensor:
    return torch.tensor(DOCUMENTS, dtype=torch.int32, device=device)


class Attention(nn.Module):
    """A decoder's attention with another kernel."""

    def __init__(self, own: nn.Module, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.own, self.attend = own, attend

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        own = self.own
        q, k, v = (
            linear(x).unflatten(-1, (heads, -1))
            for linear, heads in ((own.q, own.heads), (own.k, own.kv_heads), (own.v, own.kv_heads))
        )
        q, k = (rotate(z.transpose(1, 2), rotary).transpose(1, 2) for z in (q, k))
        return own.out(self.attend(q, k, v).flatten(-2))


def package(name: str) -> dict[str, tuple[Attend, bool]]:
    """The functions of a package, each with whether it keeps documents apart."""
    kernels = importlib.import_module(name)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _output(kernels.flash_attn_func(q, k, v, causal=True))

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bounds = starts(q.device)  # one tensor twice is no capture of an autograd function
        out = kernels.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)), bounds, bounds.clone(), 129, 129, causal=True
        )
        return _output(out).unflatten(0, q.shape[:2])

    return {f"{name}, dense": (dense, False), f"{name}, documents": (packed, True)}


def _output(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def with_functions(device: torch.device) -> dict[str, tuple[Attend, bool]]:
    """torch's op with functions for mask and scores."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    op = torch.compile(flex_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: bool) -> Tensor:
        owner = torch.searchsorted(
            starts(q.device), torch.arange(q.shape[1], device=q.device), right=True
        )

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (owner[i] == owner[j]) if documents else i >= j

        blocks = create_block_mask(mask, None, None, q.shape[1], q.shape[1], device=q.device)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return op(q, k, v, block_mask=blocks, enable_gqa=True).transpose(1, 2)

    return {
        "functions, causal": (lambda q, k, v: attend(q, k, v, False), False),
        "functions, documents": (lambda q, k, v: attend(q, k, v, True), True),
    }


def check_kernels(screen: common.Screen, device: str) -> list[dict]:
    """Errors of each kernel that is there, eager's and ours; ``ok`` if ours is like eager's."""
    cases: dict[str, tuple[Attend, bool]] = {}
    for name in ("flash_attn", "flash_attn_interface"):
        try:
            cases |= package(name)
        except ImportError as error:
            screen.say(f"skipped: {name}: {error}")
    cases |= with_functions(torch.device(device))
    rows = []
    for name, (attend, documents) in cases.items():
        rows += compare_kernel(name, attend, documents, device)
    screen.table(
        "Relative error of all gradients with other kernels, bfloat16, and × eager's own",
        ["", "chunk", "error", "×", ""],
        [
            [
                row["case"],
                row["chunk"],
                f"{row['error']:.1e}",
                f"{row['error'] / row['eager']:.2f}",
                "ok" if row["ok"] else "WRONG",
            ]
            for row in rows
        ],
    )
    return rows


def compare_kernel(name: str, attend: Attend, documents: bool, device: str) -> list[dict]:
    """Every chunk size, with everything split (``strict``)."""
    rounded = common.make_model(SHAPES["tiny"], torch.bfloat16, device)
    batch = make_batch(SHAPES["tiny"], LENGTH, batch=1, device=device)
    exact = copy.deepcopy(rounded).to(torch.float64)
    reference = _gradients(_with(exact, lambda *qkv: plain(*qkv, documents)), batch)
    eager = _error(_gradients(_with(copy.deepcopy(rounded), attend), batch), reference)
    rows = []
    for chunk in CHUNKS:
        model = seqsplit.compile(
            _with(copy.deepcopy(rounded), attend), chunk_size=chunk, strict=True
        )
        error = _error(_gradients(model, batch), reference)
        rows.append(
            {
                "case": name,
                "chunk": chunk,
                "eager": eager,
                "error": error,
                "ok": error <= ALLOWED * eager,
            }
        )
    return rows


def _with(model: Decoder, attend: Attend) -> Decoder:
    for layer in model.layers:
        layer.attention = Attention(layer.attention, attend)
    return model


def _gradients(model: nn.Module, batch: tuple) -> list[Tensor]:
    model(*batch).backward()
    return [parameter.grad.double() for parameter in model.parameters()]


def _error(found: list[Tensor], exact: list[Tensor]) -> float:
    wrong = sum((a - b).square().sum() for a, b in zip(found, exact, strict=True))
    return float((wrong / sum(b.square().sum() for b in exact)).sqrt())
