"""How far compressed activations move the gradients, and the user's bound on it."""

import sys
from pathlib import Path

import pytest
import torch

import memopt_compile as memopt
from memopt_compile import shadow

sys.path.insert(0, str(Path(__file__).parent / "passes"))
from graphs import two_layers, values_for  # noqa: E402

from memopt_compile.memory_plan import MemoryPlan  # noqa: E402
from memopt_compile.passes.compress import Compress  # noqa: E402
from memopt_compile.shadow import GradientError, gradient_error, gradients, shadowed  # noqa: E402


def versions(form):
    exact, lossy = two_layers(), two_layers()
    lossy.plan = MemoryPlan(0, 0, 0.0, 0.0, (), frozenset(), (("tanh", form),))
    Compress().run(lossy)
    return exact, lossy, values_for(exact)


@pytest.mark.parametrize(("form", "least", "most"), [("int8", 1e-5, 0.01), ("int4", 1e-3, 0.15)])
def test_error_of_the_gradients(form, least, most):
    """The gradient that the value enters is off, the other is not; inputs stay as they are."""
    exact, lossy, values = versions(form)
    before = [v.clone() for v in values]
    error = gradient_error(exact, lossy, values)
    assert least < error.relative <= error.worst_relative < most and 0.98 < error.cosine < 1
    expected, got = gradients(exact, values), gradients(lossy, values)
    (same,) = (name for name in expected if torch.equal(expected[name], got[name]))
    assert same != error.worst in expected
    ((name, lost),) = error.activations
    assert name == "tanh" and least < lost < most and f"lose up to {lost:.2%} (tanh)" in str(error)
    assert all(torch.equal(a, b) for a, b in zip(before, values))


def test_of_equal_steps_there_is_none():
    exact, _, values = versions("int8")
    error = gradient_error(exact, exact, values)
    assert (error.cosine, error.relative, error.worst_relative) == (pytest.approx(1), 0.0, 0.0)
    assert error.activations == ()


def test_a_gradient_of_rounding_alone_is_not_the_worst(monkeypatch):
    """That of a key's bias is 0 in exact arithmetic, and any difference in it some million times as large."""
    exact = {"weight": torch.ones(4), "key_bias": torch.full((4,), 1e-9)}
    lossy = {"weight": torch.full((4,), 1.1), "key_bias": torch.full((4,), 1e-3)}
    monkeypatch.setattr(shadow, "gradients", lambda step, *_: step)
    error = gradient_error(exact, lossy, ())
    assert (error.worst, error.worst_relative) == ("weight", pytest.approx(0.1))


def test_beyond_the_bound_nothing_of_the_step_runs():
    exact, lossy, values = versions("int4")
    seen, ran = [], []
    run = shadowed(ran.append, exact, lossy, 1e-6, "train.py:3", seen.append)
    with pytest.raises(memopt.NumericsError, match="max_gradient_error is") as refusal:
        run(values)
    assert not ran and refusal.value.where == "train.py:3" and isinstance(seen[0], GradientError)
    run = shadowed(ran.append, exact, lossy, 0.2, "train.py:3", seen.append)
    run(values)
    run(values)
    assert len(ran) == 2 and len(seen) == 2  # compared once
