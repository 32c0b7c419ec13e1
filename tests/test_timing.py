"""Measured seconds: what is run, what is not, and that plans by them are as good as any."""

import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "passes"))
from graphs import by_hand, mlp, ordinary_step, training_step  # noqa: E402

import memopt_compile as memopt  # noqa: E402
from memopt_compile import timing  # noqa: E402
from memopt_compile.lowering.pieces import label  # noqa: E402
from memopt_compile.planning.rematerialization import Means, problem  # noqa: E402
from memopt_compile.seconds import computes, roofline  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))


def nodes_of(step):
    return [n for n in step.computing() if computes(n)]


@pytest.fixture(scope="module")
def layers():
    return nodes_of(training_step(mlp(layers=4)))


def measured(nodes, device=CPU, **settings):
    """The seconds of `nodes`, asked for once each."""
    seconds = timing.Measured(device, **settings)
    for node in nodes:
        seconds(node)
    return seconds


def runs():
    """Counts the operators that are run."""
    return mock.patch.object(timing, "_seconds", side_effect=timing._seconds)


def test_equal_operators_are_run_once_and_have_equal_seconds(layers):
    distinct = {label(n) for n in layers}
    assert len(distinct) < len(layers)
    with runs() as count:
        seconds = measured(layers)
    assert count.call_count == len(distinct)
    by_label = {}
    for node in layers:
        assert 0 < seconds(node) < 1 and seconds(node) == by_label.setdefault(label(node), seconds(node))
    assert f"{len(distinct)} of {len(distinct)} distinct operators measured" in seconds.source
    assert "roofline" not in seconds.source


def test_what_is_on_disk_is_not_run_again(layers):
    first = measured(layers)
    with runs() as count:
        again = measured(layers)
    assert not count.called and first.source == again.source
    assert [first(n) for n in layers] == [again(n) for n in layers]


def test_views_take_nothing(layers):
    seconds = measured([])
    view = next(n for n in layers[0].graph.nodes if n.target is torch.ops.aten.t.default)
    assert seconds(view) == 0.0 and "0 of 0" in seconds.source


def test_more_work_takes_longer():
    step = by_hand(lambda x, y: (x @ x, y @ y), ("x", torch.rand(16, 16)), ("x", torch.rand(512, 512)))
    small, large = nodes_of(step)
    seconds = measured([small, large])
    assert seconds(large) > 5 * seconds(small)


def test_no_time_left_keeps_the_roofline(layers):
    none = measured(layers, seconds_left=0.0)
    assert [none(n) for n in layers] == [roofline(CPU)(n) for n in layers]
    assert none.source.startswith("0 of ") and none.source.endswith("by the CPU roofline")


def test_time_runs_out_for_good_and_the_next_plan_goes_on(layers):
    def slow(node, device):
        time.sleep(0.03)
        return 1.0

    with mock.patch.object(timing, "_seconds", side_effect=slow) as count:
        some = measured(layers, seconds_left=0.05)
        values = [some(n) for n in layers]
    assert count.call_count == 2 and values == [some(n) for n in layers]
    for node, value in zip(layers, values):
        assert value == (1.0 if label(node) in {label(n) for n in layers[:2]} else roofline(CPU)(node))
    with runs() as count:
        measured(layers)
    assert count.call_count == len({label(n) for n in layers}) - 2


def test_what_packs_activations_is_measured_too():
    seconds = timing.Measured(CPU)
    problem(training_step(mlp(layers=2), batch=64), seconds, means=Means(compress="int8"))
    assert any("memopt.compress" in call for call in seconds.timed) and not seconds.others


def test_what_does_not_fit_is_not_run(layers):
    with mock.patch.object(timing, "free_bytes", return_value=0), runs() as count:
        seconds = measured(layers)
    assert not count.called and seconds(layers[0]) == roofline(CPU)(layers[0])


def test_unknown_free_memory_is_taken_to_be_a_little(layers):
    unknown = memopt.OptionError("the free memory is not known")
    with mock.patch.object(timing, "free_bytes", side_effect=unknown):
        assert "roofline" not in measured(layers).source


def test_refused_stand_ins_keep_the_roofline():
    def positive_definite_only(x):
        return torch.ops.aten.cholesky(x), torch.tanh(x)

    factor, tanh = nodes_of(by_hand(positive_definite_only, ("x", torch.eye(8))))
    seconds = measured([factor, tanh])
    assert seconds(factor) == roofline(CPU)(factor) and seconds(tanh) != roofline(CPU)(tanh)
    assert seconds.source.startswith("1 of 2")


@torch.library.custom_op("memopt_test::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    counted_runs.append(1)
    return x.clone()


counted_runs: list[int] = []
counted.register_fake(torch.empty_like)


def test_a_users_operator_is_never_run():
    step = by_hand(lambda x: (torch.ops.memopt_test.counted(x),), ("x", torch.rand(4)))
    counted_runs.clear()
    (node,) = nodes_of(step)
    assert measured([node])(node) == roofline(CPU)(node)
    assert not counted_runs


def test_random_numbers_stay_where_they_were(layers):
    step = by_hand(lambda x: (torch.ops.aten.native_dropout(x, 0.5, True)[0],), ("x", torch.rand(64)))
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    measured(nodes_of(step))
    assert torch.equal(torch.rand(4), expected)


def test_a_device_that_is_not_there_has_the_roofline(layers):
    with mock.patch.object(torch.cuda, "is_available", return_value=False), runs() as count:
        seconds = timing.cost_model("measured", torch.device("cuda", 0))
        assert seconds(layers[0]) == roofline("cuda")(layers[0])
    assert not count.called and seconds.source == "A100 roofline"


def test_sizes_that_are_not_settled_are_not_run():
    node = mock.Mock(all_input_nodes=[])
    node.target.namespace = "aten"
    size = mock.Mock(spec=torch.SymInt, __str__=lambda self: "s77")
    value = mock.Mock(spec=torch.Tensor, shape=(size, 4))
    node.meta = {"val": value}
    assert timing.Measured(CPU)._reason(node) == "its sizes are not settled"


def stack():
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2))]
    model = nn.Sequential(*layers, nn.Linear(32, 4)).double()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    return ordinary_step(model, opt), (torch.randn(256, 32, dtype=torch.float64), torch.randint(4, (256,))), model


def trained(**options):
    torch._dynamo.reset()
    step, args, model = stack()
    fast = memopt.compile(step, lowering="eager", **options)
    losses = [fast(*args).item() for _ in range(3)]
    return losses, list(model.parameters()), memopt.report(fast)


def test_a_plan_by_measured_seconds_keeps_its_budget_bit_by_bit():
    losses, expected, free = trained()
    budget = int(0.8 * free.measured_peak_bytes)
    got_losses, got, found = trained(memory_budget=budget, costs="measured")
    assert found.measured_peak_bytes <= budget and found.plan.chosen("recompute")
    assert got_losses == losses and all(torch.equal(a, b) for a, b in zip(expected, got))
    assert "distinct operators measured on" in str(found) and found.plan.seconds > 0
    with runs() as count:
        again = trained(memory_budget=budget, costs="measured")[2].plan
    assert not count.called and again == found.plan


def test_a_step_that_fits_is_not_measured():
    with runs() as count:
        assert trained(memory_budget="1GiB", costs="measured")[2].plan is None
    assert not count.called


def test_the_frontier_says_whose_seconds_it_has():
    step, args, _ = stack()
    found = memopt.explain(step, *args, lowering="eager", memory_budget=[1.0, 0.8], costs="measured")
    assert "measured on" in found.costs and found.costs in str(found) and found.step_seconds > 0
    by_rates = memopt.explain(step, *args, lowering="eager", memory_budget=[1.0])
    assert by_rates.costs == "CPU roofline"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_more_work_takes_longer():
    device = torch.device("cuda", 0)
    step = by_hand(lambda x, y: (x @ x, y @ y), ("x", torch.rand(64, 64, device=device)),
                   ("x", torch.rand(8192, 8192, device=device)))
    small, large = nodes_of(step)
    seconds = measured([small, large], device)
    assert seconds(large) > 5 * seconds(small) > 0
