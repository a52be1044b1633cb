"""Weights in a packed form: tensors of a class of their own, and plain integers with a scale."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import seqsplit
from test_trial import check
from zoo import batches, probe

aten = torch.ops.aten
WIDTH = 20
LEVELS = 7  # few, so that no difference in the last place decides between two


class Packed(torch.Tensor):
    """Integers and a scale. It acts below autograd, where it also rounds what it multiplies: traced
    through, that would have no gradient.

    mixes: whether all tokens are rounded by the size of the largest, or each by its own.
    """

    @staticmethod
    def __new__(cls, integers, scale, mixes, transposed=False):
        shape = integers.shape[::-1] if transposed else integers.shape
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype)

    def __init__(self, integers, scale, mixes, transposed=False):
        self.integers, self.scale = integers, scale
        self.mixes, self.transposed = mixes, transposed

    def __tensor_flatten__(self):
        return ["integers", "scale"], (self.mixes, self.transposed)

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        return Packed(inner["integers"], inner["scale"], *context)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op in (aten.detach.default, aten.alias.default):
            (self,) = args
            return Packed(self.integers, self.scale, self.mixes, self.transposed)
        if op is aten.t.default:
            (self,) = args
            return Packed(self.integers, self.scale, self.mixes, not self.transposed)
        if op is aten.mm.default and isinstance(args[1], Packed):
            x, self = args
            size = x.abs().amax() if self.mixes else x.abs().amax(-1, keepdim=True)
            weight = self.integers.to(x.dtype) * self.scale.to(x.dtype)
            size = size.clamp_min(1e-9)
            rounded = (x / size * LEVELS).round() * size / LEVELS
            return rounded @ (weight.T if self.transposed else weight)
        return NotImplemented


def integers():
    return torch.randint(-100, 100, (WIDTH, WIDTH), dtype=torch.int8)


class Mapped(nn.Module):
    """A decoder with a frozen map after each layer."""

    def __init__(self, make_map):
        super().__init__()
        self.inner = probe.build(width=WIDTH)
        self.maps = nn.ModuleList(make_map() for _ in self.inner.layers)

    def forward(self, ids):
        x = self.inner.embed(ids)
        for layer, frozen in zip(self.inner.layers, self.maps):
            x = x + frozen(layer(x))
        return self.inner.head(self.inner.norm(x))


class OfAClass(nn.Module):
    def __init__(self, mixes=False):
        super().__init__()
        packed = Packed(integers(), torch.tensor(3e-3), mixes)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight)


def test_a_class_of_its_own():
    check(lambda: Mapped(OfAClass), strict=True)


def test_a_class_that_mixes_tokens():
    report = check(lambda: Mapped(lambda: OfAClass(mixes=True)))
    assert len(report.whole) == 2


class Written(nn.Module):
    """Integers that become a weight in the forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("integers", integers())
        self.register_buffer("scale", torch.full((WIDTH, 1), 3e-3))

    def forward(self, x):
        return F.linear(x, self.integers.data.to(x.dtype) * self.scale)


class Rebound(Written):
    """The buffer is given other memory in each forward, and then read."""

    def __init__(self):
        super().__init__()
        self.others = [integers(), integers()]

    def forward(self, x):
        self.others.reverse()
        self.integers.data = self.others[0]
        return super().forward(x)


@pytest.mark.parametrize("kind", [Written, Rebound])
def test_plain_integers(kind):
    check(lambda: Mapped(kind), strict=True)


def test_other_memory_stays():
    model = Mapped(Rebound)
    buffer = model.maps[0].integers
    step = seqsplit.compile(lambda ids, labels: probe.step(model, ids, labels), strict=True)
    for _ in range(2):
        step(*batches.with_labels(2, 13)).backward()
        assert buffer.data_ptr() == model.maps[0].others[0].data_ptr()
        assert model.maps[0].integers is buffer


class Unpackings(TorchDispatchMode):
    """Counts conversions of integers to floating-point weights."""

    def __init__(self):
        super().__init__()
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is aten._to_copy.default and args[0].dtype == torch.int8:
            self.count += 1
        return op(*args, **(kwargs or {}))


def test_unpacked_once_per_chunk():
    """Not once for all of them, which would be kept until the backward."""
    model, chunks = Mapped(Written), 3
    step = seqsplit.compile(
        lambda ids, labels: probe.step(model, ids, labels), chunk_size=5, head_chunk_size=5
    )
    inputs = batches.with_labels(2, 13)
    step(*inputs).backward()
    layers = len(model.maps)
    with Unpackings() as forward:
        loss = step(*inputs)
    assert forward.count == layers * chunks
    with Unpackings() as backward:
        loss.backward()
    in_the_loss = chunks  # the last map is in the segment of the loss: differentiated already
    assert backward.count == layers * chunks - in_the_loss
