"""What a piece writes over: sums that go from piece to piece, of which it is the last reader."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from memopt_compile.backends import inductor
from memopt_compile.compat import dry_run
from memopt_compile.errors import MemoptError
from memopt_compile.lowering.compiled_pieces import Compiled, Pieces
from memopt_compile.lowering.donating import Owners, donating, given_away
from memopt_compile.lowering.pieces import pieces
from memopt_compile.measure import measure
from memopt_compile.step_graph import StepGraph

TURNS, WIDTH = 4, 128


def traced(step, *given) -> StepGraph:
    return StepGraph(make_fx(step, tracing_mode="fake")(*given), ())


def summed(all_of_them: bool = False):
    """Sums of products over turns that are equal pieces: the last of them, or every one."""
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        sums = []
        for _ in range(TURNS):
            for _ in range(16):
                x = torch.mm(x.sin(), w).cos()
            product = torch.mm(x.permute(1, 0), x).double()
            sums.append(sums[-1] + product if sums else product)
        return tuple(sums) if all_of_them else tuple(sums[-1:])

    torch.manual_seed(0)
    return step, (torch.randn(8, WIDTH), torch.randn(WIDTH, WIDTH) / WIDTH)


def of_the_sum(parts):
    """The inputs of a sum's geometry that each piece has, and whether it gives them away."""
    return [place in given_away(part.graph) for part in parts for place, node in enumerate(part.inputs)
            if node.op != "placeholder" and tuple(node.meta["val"].shape) == (WIDTH, WIDTH)]


def test_a_sum_is_there_once(monkeypatch):
    step, given = summed()
    graph = traced(step, *given)
    parts = pieces(graph)
    giving = donating(graph, pieces(graph))
    assert any(of_the_sum(giving)) and not any(of_the_sum(parts))
    assert len({p.key for p in giving}) == len({p.key for p in parts})  # as many are compiled
    lowered = inductor.lower(graph)
    (result,) = lowered(list(given))
    torch.testing.assert_close(result, step(*given)[0], rtol=1e-5, atol=1e-5)
    measured = measure(lowered, list(given), resident=list(given)).transient_peak_bytes
    monkeypatch.setattr(inductor, "donating", lambda step, parts: parts)
    without = inductor.predicted_transient_peak(inductor.lower(graph))
    assert inductor.predicted_transient_peak(lowered) == measured == without - result.nbytes


def test_what_one_call_of_a_piece_keeps_none_gives_away():
    step, given = summed(all_of_them=True)
    graph = traced(step, *given)
    assert not any(of_the_sum(donating(graph, pieces(graph))))
    for result, expected in zip(inductor.lower(graph)(list(given)), step(*given), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_nothing_goes_from_piece_to_piece():
    graph = traced(lambda x: (x.sin(),), torch.randn(4))
    assert all(not given_away(part.graph) for part in donating(graph, pieces(graph)))


def test_shared_bytes_are_refused():
    value = torch.randn(4)
    view = value[1:]
    owners = Owners([value, view, 3])
    with pytest.raises(MemoptError, match="shares its bytes"):
        owners.give(value)
    del view
    owners.give(value)


TEXT = "\n".join((
    "def run(inputs):", "    [a] = make([])", "    given = [a]", "    del a", "    [b, *c] = piece(given)",
    "    given = [b]", "    del b", "    [d, *e] = piece(given)", "    return (c, d, e)"))


@pytest.mark.parametrize("more, piece_bytes, between_bytes", [
    (lambda: [], 16, 16),
    (lambda: [3, *torch.empty(8).split(4)], 80, 80),  # two halves of one storage
    (lambda: [torch.empty(16)[2:6]], 144, 144),  # a part of a larger one
])
def test_results_are_in_the_storages_that_a_piece_has_them_in(monkeypatch, more, piece_bytes, between_bytes):
    """The first is a view of the operand in a dry run, where another shape is written over it: that holds it no longer."""
    def piece(given):
        (first,) = given
        given.clear()
        return [torch.as_strided(first, (2, 2), (2, 1)), *more()]

    monkeypatch.setattr(dry_run, "dry_call", lambda source, branch: piece)
    made = Pieces({}, on_cpu=True, begin=False)
    made.bound["piece"] = Compiled(None, "", None)
    for call in (made._noted("piece", True), lambda given: made.results["piece"](given)):
        calls = {"make": lambda given: [torch.empty(4)], "piece": call}
        assert inductor._dry_peaks(TEXT, {}, calls, [], {"make": [], "piece": [0]}) == {
            "": between_bytes, "make": 16, "piece": piece_bytes}
