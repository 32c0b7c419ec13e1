"""Hold memopt against eager on PyTorch's own database of operators, `op_db`.

    python tests/coverage/operators.py [--names ...] [--samples 3] [--whole-numbers] [--seconds 1500]

For every operator that is differentiable in float64: some of the inputs that the database has for it, trained by one
step of SGD in eager and under memopt with the eager lowering. With --whole-numbers the inputs are rounded first, so
that zeros, ties and values on a boundary are common, where a kernel and what is compiled in its place may differ.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import check
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

TOLERANCE = 1e-9  # relative to the largest value of a tensor


def samples(operator: Any, most: int, whole_numbers: bool) -> Iterator[tuple[list, Any, list[int]]]:
    """(leaves of the arguments, their structure, places of those to train), spread over what there is."""
    found = list(operator.sample_inputs("cpu", torch.float64, requires_grad=True))
    for sample in found[::max(1, len(found) // most)][:most]:
        leaves, form = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        trained = [i for i, t in enumerate(leaves)
                   if isinstance(t, torch.Tensor) and t.requires_grad and t.is_floating_point()]
        if whole_numbers:
            leaves = [t.detach().round() if i in trained else t for i, t in enumerate(leaves)]
        if trained:
            yield leaves, form, trained


def step_of(operator: Any, leaves: list, form: Any, trained: list[int]) -> tuple[Callable, list]:
    """A training step, and the tensors that it trains."""
    mine = [t.detach().clone().requires_grad_(i in trained) if isinstance(t, torch.Tensor) else t
            for i, t in enumerate(leaves)]
    opt = torch.optim.SGD([mine[i] for i in trained], lr=1.0)

    def step() -> torch.Tensor:
        copies = [t.clone() if isinstance(t, torch.Tensor) and t.requires_grad else t for t in mine]
        given, args, kwargs = pytree.tree_unflatten(copies, form)
        loss = 0.0
        for result in pytree.tree_leaves(operator(given, *args, **kwargs)):
            if isinstance(result, torch.Tensor) and result.requires_grad:
                result = torch.view_as_real(result) if result.is_complex() else result
                loss = loss + (result * result * 0.5 + result).sum()
        loss.backward()
        opt.step()
        return loss.detach()

    return step, [mine[i] for i in trained]


def compared(operator: Any, sample: tuple) -> str | None:
    """What is wrong with memopt's step on a sample, "" if nothing, None if eager cannot run it."""
    torch.manual_seed(0)
    try:
        step, trained = step_of(operator.op, *sample)
        expected = [step(), *trained]
    except Exception:
        return None
    check.forget()
    torch.manual_seed(0)
    try:
        step, trained = step_of(operator.op, *sample)
        got = [torch.compile(step, backend="memopt", options={"lowering": "eager"})(), *trained]
    except Exception as error:
        return check.describe(error)
    difference, _ = check.largest_difference(check.plain(expected), check.plain(got))
    return "" if difference <= TOLERANCE else f"differs by {difference:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--samples", type=int, default=3, help="of an operator, at most")
    parser.add_argument("--whole-numbers", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # what is not captured whole would say so
    end, ran, wrong, seen = time.monotonic() + given.seconds, 0, 0, 0
    operators = [o for o in op_db if o.supports_autograd and torch.float64 in o.dtypes
                 and (not given.names or o.name in given.names)]
    for operator in operators:
        if time.monotonic() > end:
            print("no more time at", operator.name)
            break
        seen += 1
        for i, sample in enumerate(samples(operator, given.samples, given.whole_numbers)):
            said = compared(operator, sample)
            ran += said is not None
            if said:
                wrong += 1
                print(f"{operator.name} {operator.variant_test_name} [{i}]: {said}", flush=True)
        if seen % 50 == 0:
            print(f"{seen}/{len(operators)}: {ran} samples, {wrong} not equal", flush=True)
    print(f"{seen} of {len(operators)} operators, {ran} samples, {wrong} not equal")


if __name__ == "__main__":
    main()
