"""Where a call runs as several graphs, `explain` names the line that broke it and a way out."""

import inspect

import pytest
import torch
from torch import nn

import seqsplit
from compare import Pair
from seqsplit import errors
from zoo import batches, probe

CHUNK, LENGTH = 5, 13


class Branching(nn.Module):
    """Decides by the values of its activations."""

    def __init__(self):
        super().__init__()
        self.body = probe.build(layers=2)

    def forward(self, ids):
        hidden = self.body.hidden(ids)
        if hidden.sum() > 0:  # decides
            hidden = hidden * 2
        return self.body.head(hidden)


class Speaking(nn.Module):
    """Does something that cannot be captured, in a function of its own."""

    def __init__(self):
        super().__init__()
        self.body = probe.build(layers=2)

    def forward(self, ids):
        hidden = self.body.hidden(ids)
        aside(hidden)
        return self.body.head(hidden)


def aside(hidden):
    torch._dynamo.graph_break()  # speaks


class Looping(nn.Module):
    """Breaks inside of a loop, after which nothing of the function is captured."""

    def __init__(self):
        super().__init__()
        self.body = probe.build(layers=2)

    def forward(self, ids):
        hidden = self.body.embed(ids)
        for layer in self.body.layers:
            hidden = layer(hidden)
            torch._dynamo.graph_break()  # loops
        return self.body.head(hidden)


def line_of(function, mark):
    """Where the line with a mark stands: number and code."""
    lines, first = inspect.getsourcelines(function)
    index = next(i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}"))
    return f"{__file__}:{first + index}"


def explained(model):
    compiled = seqsplit.compile(model, chunk_size=CHUNK)
    return seqsplit.explain(compiled, batches.tokens(2, LENGTH))


@pytest.mark.parametrize(
    "build, where, fix",
    [
        (Branching, line_of(Branching.forward, "decides"), "torch.where"),
        (Speaking, line_of(aside, "speaks"), "graph_break"),
    ],
)
def test_a_break_is_named_with_a_reason_and_a_way_out(build, where, fix):
    report = explained(build())
    assert report.num_graphs == 2
    (found,) = report.breaks
    assert found.line.startswith(where + "  "), found
    assert fix in found.fix, found
    for text in (found.line, found.why, found.fix):
        assert text and text in str(report)


def test_a_call_that_is_one_graph_names_no_break():
    report = explained(probe.build())
    assert report.num_graphs == 1 and report.breaks == ()
    assert "break" not in str(report)


def test_a_break_is_named_again_when_nothing_is_captured_anew():
    model = seqsplit.compile(Branching(), chunk_size=CHUNK)
    first, second = (seqsplit.explain(model, batches.tokens(2, LENGTH)) for _ in range(2))
    assert first.breaks == second.breaks != ()


def test_where_the_place_is_not_known_the_report_says_how_to_find_it():
    report = explained(Looping())
    assert report.num_graphs > 1 and not report.breaks
    assert "strict=True names it" in str(report)
    model = seqsplit.compile(Looping(), chunk_size=CHUNK, strict=True)
    with pytest.raises(errors.CaptureError) as caught:
        model(batches.tokens(2, LENGTH))
    assert line_of(Looping.forward, "loops") in str(caught.value)


@pytest.mark.parametrize("build", [Branching, Speaking, Looping])
def test_the_pieces_are_exact(build):
    Pair(build, chunk_size=CHUNK, streamed=False).check(batches.tokens(2, LENGTH))


class Counting(nn.Module):
    """Works a number out, breaks, and goes on with it: one graph has no sequence."""

    def __init__(self):
        super().__init__()
        self.body = probe.build(layers=2)
        self.register_buffer("sizes", torch.arange(4.0))

    def forward(self, ids):
        size = self.sizes.max() / 3
        torch._dynamo.graph_break()
        return self.body(ids) * size


def test_a_graph_without_gradients_and_sequence_is_nothing_left_whole():
    report = explained(Counting())
    assert report.num_graphs == 2
    assert report.fully_streamed, report


class Scaling(Counting):
    """The same, and the number is learned."""

    def __init__(self):
        super().__init__()
        sizes = self._buffers.pop("sizes")
        self.sizes = nn.Parameter(sizes)


def test_a_graph_without_a_sequence_that_learns_is_named():
    report = explained(Scaling())
    assert report.num_graphs == 2
    assert [reason for _, reason in report.whole] == ["no dim of the inputs is a sequence"]


def test_strict_names_the_line_and_a_way_out():
    model = seqsplit.compile(Branching(), chunk_size=CHUNK, strict=True)
    with pytest.raises(errors.CaptureError, match="torch.where") as caught:
        model(batches.tokens(2, LENGTH))
    assert line_of(Branching.forward, "decides") in str(caught.value)
