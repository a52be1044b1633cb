"""Run a model in eager and compiled, on the same weights and inputs, and compare everything.

`compare` is the one-call form. `Pair` keeps the compiled model, so that several inputs share one
capture:

    pair = Pair(build, chunk_size=2)
    pair.check(ids, labels=labels)
    pair.check(other_ids, labels=other_labels)

Everything is float64 unless told otherwise. What is compared: every output, and for every parameter
and every input that requires a gradient whether the gradient is None and, if not, its value.
"""

import copy
import itertools
from collections.abc import Mapping

import torch

import seqsplit
from seqsplit.deferred import DeferredTensor
from zoo import batches

OUTPUT_TOLERANCE = 1e-12
GRADIENT_TOLERANCE = 1e-9
# A gradient that is zero in exact arithmetic (a key bias under softmax) comes out as rounding
# noise. Gradients are therefore never judged against less than this part of the largest one.
FLOOR = 1e-6


class Mismatch(AssertionError):
    """The compiled run differs from eager; the message lists every difference."""


def compare(build, *args, step=None, streamed=True, objective=None, explain=False, **options):
    """Compile a fresh model, run it on `args` and compare with eager. Returns the `Pair`.

    `options` are those of `seqsplit.compile`, plus `kwargs`, a dict of keyword inputs.
    """
    kwargs = options.pop("kwargs", {})
    pair = Pair(build, step=step, streamed=streamed, **options)
    pair.check(*args, objective=objective, explain=explain, **kwargs)
    return pair


class Pair:
    """An eager model and its compiled twin.

    build: a function without arguments that returns an `nn.Module`.
    step: None compiles the module itself; a function `step(module, *args, **kwargs)` compiles
        that function, bound to the module.
    streamed: compile with `strict=True`, so that falling back to an unsplit run is an error
        and not a pass.
    """

    def __init__(self, build, *, step=None, streamed=True, dtype=torch.float64, **options):
        self.eager = build() if dtype is None else build().to(dtype)
        self.mine = copy.deepcopy(self.eager)
        self.streamed = streamed
        self.dtype = dtype
        self.options = {"strict": streamed, **options}
        if step is None:
            self.run_eager = self.eager
            self.run_mine = seqsplit.compile(self.mine, **self.options)
        else:
            self.run_eager = _bind(step, self.eager)
            self.run_mine = seqsplit.compile(_bind(step, self.mine), **self.options)

    def both(self, *args, objective=None, seed=0, **kwargs):
        """Run forward and backward on both sides; returns (eager, compiled) records."""
        records = []
        for module, run in ((self.eager, self.run_eager), (self.mine, self.run_mine)):
            module.zero_grad(set_to_none=True)
            own_args, own_kwargs = self.inputs((args, kwargs))
            torch.manual_seed(seed)
            outputs = run(*own_args, **own_kwargs)
            goal = (objective or default_objective)(outputs)
            if goal.requires_grad:
                goal.backward()
            records.append(Record(outputs, goal, module, (own_args, own_kwargs)))
        return records

    def check(self, *args, objective=None, explain=False, seed=0, **kwargs):
        """Run both sides and raise `Mismatch` unless outputs and gradients agree.

        explain: also ask `seqsplit.explain` that nothing stays whole.
        """
        eager, mine = self.both(*args, objective=objective, seed=seed, **kwargs)
        problems = differences(eager, mine)
        if problems:
            shapes = [tuple(t.shape) for _, t in tensors((args, kwargs))]
            head = f"compiled with {self.options} on inputs of shapes {shapes}:"
            raise Mismatch("\n  ".join([head, *problems]))
        if explain:
            own_args, own_kwargs = self.inputs((args, kwargs))
            assert_streamed(seqsplit.explain(self.run_mine, *own_args, **own_kwargs))
        return mine

    def check_lengths(self, lengths, batch=2):
        """Check on token ids with labels, of these lengths. Returns the report on the last: that
        everything is streamed, exactly if that was asked for."""
        for length in lengths:
            args = batches.with_labels(batch, length)
            self.check(*args)
        report = seqsplit.explain(self.run_mine, *args)
        assert report.fully_streamed == self.streamed, report
        return report

    def inputs(self, tree):
        """Fresh leaf copies of all tensors in `tree`, floating ones in the pair's dtype."""

        def fresh(tensor):
            copied = tensor.detach().clone()
            if self.dtype is not None and tensor.is_floating_point():
                copied = copied.to(self.dtype)
            return copied.requires_grad_(tensor.requires_grad)

        return map_tensors(fresh, tree)


class Record:
    """What one run produced: its objective, its outputs, and the gradients by name."""

    def __init__(self, outputs, goal, module, inputs):
        self.goal = goal.detach()
        self.requires_grad = goal.requires_grad
        self.outputs = {name: computed(t).detach() for name, t in tensors(outputs)}
        self.gradients = {name: _grad(p) for name, p in module.named_parameters()}
        for name, tensor in tensors(inputs):
            if tensor.requires_grad:
                self.gradients[f"input {name}"] = _grad(tensor)


def differences(eager, mine, *, outputs=OUTPUT_TOLERANCE, gradients=GRADIENT_TOLERANCE):
    """The list of sentences that say where two records differ; empty when they agree."""
    problems = []
    if eager.requires_grad != mine.requires_grad:
        problems.append(f"requires_grad {mine.requires_grad}, eager {eager.requires_grad}")
    problems += _judge("loss", eager.goal, mine.goal, outputs)
    if eager.outputs.keys() != mine.outputs.keys():
        problems.append(f"outputs {sorted(mine.outputs)}, eager {sorted(eager.outputs)}")
    for name in eager.outputs.keys() & mine.outputs.keys():
        problems += _judge(f"output {name}", eager.outputs[name], mine.outputs[name], outputs)
    return problems + gradient_differences(eager.gradients, mine.gradients, gradients)


def gradient_differences(eager, mine, tolerance=GRADIENT_TOLERANCE):
    """Compare two dicts of gradients (tensors or None) by name; returns sentences."""
    if eager.keys() != mine.keys():
        return [f"gradients of {sorted(mine)}, eager {sorted(eager)}"]
    norms = [g.double().norm().item() for g in eager.values() if g is not None]
    floor = FLOOR * max(norms, default=0.0)
    problems = []
    for name, expected in eager.items():
        actual = mine[name]
        if (expected is None) != (actual is None):
            kinds = ["None" if g is None else "a tensor" for g in (actual, expected)]
            problems.append(f"gradient of {name}: {kinds[0]}, eager {kinds[1]}")
        elif expected is not None:
            problems += _judge(f"gradient of {name}", expected, actual, tolerance, floor)
    return problems


def relative_error(expected, actual, floor=0.0):
    """Norm-wise relative error of `actual`; infinite where the NaNs are not in the same places."""
    expected, actual = expected.double(), actual.double()
    if not torch.equal(expected.isnan(), actual.isnan()):
        return float("inf")
    expected, actual = expected.nan_to_num(nan=0.0), actual.nan_to_num(nan=0.0)
    distance = torch.where(expected == actual, 0.0, expected - actual).norm().item()
    if distance == 0.0:
        return 0.0
    scale = max(expected.norm().item(), floor)
    return distance / scale if scale else float("inf")


def assert_streamed(report):
    """Fail with the scopes and reasons unless the report says that everything is streamed."""
    whole = "\n  ".join(f"{scope}: {reason}" for scope, reason in report.whole)
    assert report.fully_streamed, f"not fully streamed:\n  {whole}\n{report}"
    assert not report.whole, f"fully streamed, and yet whole:\n  {whole}"


def default_objective(outputs):
    """The loss if the outputs hold exactly one scalar, else a weighted sum of all outputs."""
    scalars = [t for _, t in tensors(outputs) if t.is_floating_point() and t.ndim == 0]
    return scalars[0] if len(scalars) == 1 else every_output(outputs)


def every_output(outputs):
    """A sum of all floating outputs with fixed random weights: each gets its own cotangent."""
    generator = torch.Generator().manual_seed(5)
    total = 0.0
    for _, tensor in tensors(outputs):
        if tensor.is_floating_point():
            weight = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            total = total + (tensor * weight.to(tensor.dtype)).sum()
    return total


def computed(tensor):
    """An output as an ordinary tensor: it is going to be looked at as a whole."""
    return tensor.materialize() if isinstance(tensor, DeferredTensor) else tensor


def tensors(tree, prefix=""):
    """All tensors in nested tuples, lists and mappings, as (name, tensor)."""
    if isinstance(tree, torch.Tensor):
        yield prefix or "0", tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tensors(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, (tuple, list)):
        for index, value in enumerate(tree):
            yield from tensors(value, f"{prefix}.{index}" if prefix else str(index))


def map_tensors(function, tree):
    """`tree` with `function` applied to each tensor."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree


def grids(**axes):
    """All combinations of the named axes, as dicts."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _judge(what, expected, actual, tolerance, floor=0.0):
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        kinds = [f"{t.dtype} of shape {tuple(t.shape)}" for t in (actual, expected)]
        return [f"{what}: {kinds[0]}, eager {kinds[1]}"]
    error = relative_error(expected, actual, floor)
    if error <= tolerance:
        return []
    norm = expected.double().norm().item()
    return [f"{what}: relative error {error:.2e} > {tolerance:.0e} (norm {norm:.2e})"]


def _bind(step, module):
    def bound(*args, **kwargs):
        return step(module, *args, **kwargs)

    return bound


def _grad(tensor):
    return None if tensor.grad is None else tensor.grad.detach().clone()
