"""Orders of kernels that Inductor has planned the memory of, made up here: what a peak does not need comes after it."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from memopt_compile.compat import kernel_order


class Kernel:
    """Makes one result of `made` bytes of those of `reads`, and of inputs that may be freed."""

    def __init__(self, name: str, made: int, reads: list[Kernel], inputs: list[SimpleNamespace] = ()):
        self.name = name
        self.result = buffer(name, made)
        self.mpi_node = SimpleNamespace(pred_nodes=set(reads), succ_nodes=set(), pred_buffers={*(r.result for r in reads), *inputs})
        for read in reads:
            read.mpi_node.succ_nodes.add(self)
        for each in self.mpi_node.pred_buffers:
            each.mpi_buffer.succ_nodes.add(self)

    def get_outputs(self) -> list[Buffer]:
        return [self.result]

    def get_operation_names(self) -> set[str]:
        return {self.name}

    def __repr__(self) -> str:
        return self.name


class Buffer(SimpleNamespace):
    __hash__ = object.__hash__

    def get_name(self) -> str:
        return self.name


def buffer(name: str, size: int) -> Buffer:
    return Buffer(name=name, mpi_buffer=SimpleNamespace(size_alloc=size, size_free=size, succ_nodes=set()))


def peak_of(order: list[Kernel], outputs: set[str]) -> int:
    """By a run: each result is there from its kernel on, until its last reader has run."""
    left = {b: set(b.mpi_buffer.succ_nodes) for k in order for b in k.mpi_node.pred_buffers}
    live = {b for b in left if b.name not in {k.name for k in order}}
    peak = 0
    for kernel in order:
        live.add(kernel.result)
        peak = max(peak, sum(b.mpi_buffer.size_alloc for b in live))
        for b in kernel.mpi_node.pred_buffers:
            left[b].discard(kernel)
        live -= {b for b in live if not left.get(b) and b.name not in outputs}
    return peak


def test_what_a_peak_does_not_need_is_put_off():
    """Attention that is computed again for its own backward, before the feed-forward layer's, which is larger."""
    given = buffer("x", 4)
    again = Kernel("again", 10, [], [given])
    wide = Kernel("wide", 30, [], [given])
    narrow = Kernel("narrow", 4, [wide])
    attention = Kernel("attention", 4, [again, narrow])
    given_order = [again, wide, narrow, attention]
    assert kernel_order.past_peaks(given_order, {"attention"}) == [wide, narrow, again, attention]
    assert kernel_order.past_peaks(given_order, {"attention"}, worth=20) == given_order  # it is 6 bytes lower
    alone = [wide, narrow, again, attention]
    assert kernel_order.past_peaks(alone, {"attention"}) == alone


def test_what_frees_bytes_goes_before_a_peak():
    """The gradient of a weight, after which the widest value is gone."""
    wide = Kernel("wide", 30, [])
    gradient = Kernel("gradient", 20, [])
    weight = Kernel("weight", 2, [wide])
    rest = Kernel("rest", 4, [gradient])
    order = kernel_order.past_peaks([wide, gradient, rest, weight], {"weight", "rest"})
    assert order.index(weight) < order.index(gradient)
    assert peak_of(order, {"weight", "rest"}) == 32


@pytest.mark.parametrize("seed", range(40))
def test_orders_are_allowed_and_no_higher(seed):
    chosen = random.Random(seed)
    inputs = [buffer(f"x{i}", chosen.randint(0, 20)) for i in range(3)]
    kernels: list[Kernel] = []
    for i in range(chosen.randint(2, 25)):
        reads = chosen.sample(kernels, min(len(kernels), chosen.randint(0, 3)))
        kernels.append(Kernel(f"k{i}", chosen.choice((0, 1, 10, 50)), reads, chosen.sample(inputs, chosen.randint(0, 1))))
    outputs = {kernel.name for kernel in kernels if not kernel.mpi_node.succ_nodes and chosen.random() < 0.7}
    order = kernel_order.past_peaks(kernels, outputs)
    assert sorted(map(repr, order)) == sorted(map(repr, kernels))
    assert all(order.index(read) < i for i, kernel in enumerate(order) for read in kernel.mpi_node.pred_nodes)
    assert kernel_order._estimate(order, outputs)[0] == peak_of(order, outputs) <= peak_of(kernels, outputs)
