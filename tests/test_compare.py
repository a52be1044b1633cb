"""The comparison itself: a wrong gradient is caught, rounding and exact zeros are not."""

import pytest
import torch

from compare import differences, every_output, gradient_differences, relative_error


class Result:
    def __init__(self, goal, outputs, gradients, requires_grad=True):
        self.goal, self.requires_grad = torch.tensor(goal), requires_grad
        self.outputs, self.gradients = outputs, gradients


def gradients(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    make = {"generator": generator, "dtype": torch.float64}
    return {"a": torch.randn(5, **make), "b": scale * 1e-3 * torch.randn(7, **make), "c": None}


def test_equal_gradients_agree():
    assert gradient_differences(gradients(), gradients()) == []


@pytest.mark.parametrize("factor", [1 + 1e-6, 1 + 2e-9, -1.0, 0.0, float("nan"), float("inf")])
def test_a_wrong_gradient_is_named(factor):
    (problem,) = gradient_differences(gradients(), gradients(factor))
    assert problem.startswith("gradient of b: relative error")


def test_rounding_is_not_an_error():
    assert gradient_differences(gradients(), gradients(1 + 1e-12)) == []


def test_rounding_noise_in_place_of_zero_is_not_an_error_but_a_small_value_is():
    zero = gradients() | {"z": torch.zeros(3, dtype=torch.float64)}
    assert gradient_differences(zero, zero | {"z": torch.full((3,), 1e-17).double()}) == []
    assert gradient_differences(zero, zero | {"z": torch.full((3,), 1e-13).double()})


@pytest.mark.parametrize("name, value", [("a", None), ("c", torch.zeros(3))])
def test_none_is_not_zero(name, value):
    (problem,) = gradient_differences(gradients(), gradients() | {name: value})
    assert problem.startswith(f"gradient of {name}:") and "None" in problem


def test_missing_and_misshapen_gradients():
    assert gradient_differences(gradients(), {"a": gradients()["a"]})
    assert gradient_differences(gradients(), gradients() | {"a": torch.zeros(1, 5).double()})
    assert gradient_differences(gradients(), gradients() | {"a": gradients()["a"].float()})


def test_nan_equals_nan_only_in_the_same_place():
    nan = float("nan")
    left, right = torch.tensor([1.0, nan, 2.0]), torch.tensor([1.0, 2.0, nan])
    assert relative_error(left, left) == 0
    assert relative_error(left, right) == float("inf")


def test_infinities():
    inf = float("inf")
    left, right = torch.tensor([1.0, inf]), torch.tensor([1.0, -inf])
    assert relative_error(left, left) == 0
    assert not relative_error(left, right) <= 1e-9


def test_losses_and_outputs_are_compared():
    good = Result(1.0, {"x": torch.ones(2)}, {})
    assert differences(good, good) == []
    assert differences(good, Result(1.0 + 1e-6, {"x": torch.ones(2)}, {}))
    assert differences(good, Result(1.0, {"x": torch.ones(2) + 1e-6}, {}))
    assert differences(good, Result(1.0, {}, {}))
    assert differences(good, Result(1.0, {"x": torch.ones(2)}, {}, requires_grad=False))


def test_every_output_has_its_own_cotangent():
    a, b = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    every_output((a, {"b": b})).backward()
    assert not torch.allclose(a.grad, b.grad)
    assert a.grad.unique().numel() == 6
