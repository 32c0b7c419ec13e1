"""Steps replayed as CUDA graphs: what stands in the way, and on a device the same numbers as without."""

from __future__ import annotations

import copy
import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import memopt_compile as memopt
from memopt_compile.compat.dry_run import FakeTensorMode
from memopt_compile.lowering.replaying import RECORDINGS, WARM, Replayed, rehearse
from memopt_compile.recordable import obstacle
from memopt_compile.step_graph import Input, Role, StepGraph

# ------------------------------------------------------------------------ what stands in the way


def step_of(function, *inputs: tuple[Role, str, tuple[int, ...]]) -> StepGraph:
    """`function` of fake inputs, each (role, device, shape); labels are a, b, .."""
    with FakeTensorMode():
        values = [torch.empty(shape, device=device) for _, device, shape in inputs]
        module = make_fx(function)(*values)
    given = [Input(node.name, role, "abc"[i], 4)
             for i, (node, (role, _, _)) in enumerate(zip(module.graph.find_nodes(op="placeholder"), inputs))]
    return StepGraph(module, tuple(given))


WEIGHT, BATCH, RATE = (Role.PARAMETER, "cuda", (4,)), (Role.BATCH, "cuda", (4,)), (Role.NUMBER, "cpu", ())


def test_a_step_of_the_device_and_numbers_can_be_recorded():
    assert obstacle(step_of(lambda w, x, rate: (w.sub_(x * rate),), WEIGHT, BATCH, RATE)) is None


def test_a_number_is_filled_in_by_a_mask():
    """``w[x > 0] = 0``"""
    assert obstacle(step_of(lambda w, x: (torch.ops.aten.index_put(w, [x > 0], torch.zeros(())),), WEIGHT, BATCH)) is None


@pytest.mark.parametrize(("function", "inputs", "reason"), [
    (lambda w, x: (w * 2, x * 2), (WEIGHT, (Role.BATCH, "cpu", (4,))), "b is on the host: move it"),
    (lambda w, n: (w * 2, n.add_(1)), (WEIGHT, (Role.STATE, "cpu", ())), "b is on the host.*capturable=True"),
    (lambda w, x: (w + x.mul_(2),), (WEIGHT, BATCH), "writes into b.*write into a copy"),
    (lambda w: (torch.ops.memopt.to_host(w),), (WEIGHT,), "to_host.* needs the host"),
    (lambda w: (w * torch.rand(()),), (WEIGHT,), "rand.* draws on the host"),
    (lambda w, x: (torch.ops.aten.index_put(w, [x > 0], x.sum()),), (WEIGHT, BATCH), "index_put.* has the host wait"),
], ids=["batch", "count", "written", "transfer", "drawn", "mask"])
def test_what_stands_in_the_way_is_said(function, inputs, reason):
    assert re.search(reason, obstacle(step_of(function, *inputs)) or "")


def test_an_obstacle_leaves_the_step_as_it_was(caplog):
    step = step_of(lambda w, n: (w * 2, n.add_(1)), WEIGHT, (Role.STATE, "cpu", ()))
    with caplog.at_level(logging.WARNING, "memopt_compile"):
        run = Replayed(lambda inputs: len(inputs), step, torch.device("cuda"), "train.py:3", 100)
    assert [run([1, 2]) for _ in range(5)] == [2] * 5 and run.state.startswith("off: b is on the host")
    assert len(caplog.records) == 1 and "train.py:3" in caplog.text


def test_not_on_a_cpu():
    model = torch.nn.Linear(4, 4)

    def step(x):
        model(x).sum().backward()

    with pytest.raises(memopt.OptionError, match="no CUDA graphs"):
        memopt.compile(step, lowering="eager", cuda_graphs=True)(torch.randn(2, 4))


# ------------------------------------------------------------------------ on a device


def trained(lowering="eager", calls=10, cuda_graphs=True, build=None, sizes=(8,), change=None,
            dynamic=None, **options):
    """Losses, parameters and how the step ran, of a small net with dropout."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(0.2),
                                torch.nn.Linear(32, 4)).cuda()
    opt = (build or (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)))(model.parameters())

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    step.__code__ = step.__code__.replace()  # of its own: a report is of all that was compiled of one
    run = torch.compile(step, backend="memopt", dynamic=dynamic,
                        options={"lowering": lowering, "cuda_graphs": cuda_graphs, **options})
    kept = []
    for call in range(calls):
        size = sizes[call % len(sizes)]
        generator = torch.Generator().manual_seed(call)
        x = torch.randn(size, 16, generator=generator).cuda()
        if change:
            change(call, model, opt)
        kept.append(run(x, x.argmax(1) % 4))
    return [float(loss) for loss in kept], list(model.parameters()), memopt.report(run)


def same(cuda_graphs=True, tolerance=0.0, **settings):
    losses, parameters, report = trained(cuda_graphs=cuda_graphs, **settings)
    plain = trained(cuda_graphs=False, **settings)
    torch.testing.assert_close((losses, parameters), plain[:2], rtol=tolerance, atol=0.1 * tolerance)
    return report


def rate(call, model, opt):
    opt.param_groups[0]["lr"] = 1e-2 / (1 + call)


def rate_in_a_tensor(call, model, opt):
    opt.param_groups[0]["lr"].fill_(1e-2 / (1 + call))


def reloaded(call, model, opt):
    if call == 6:
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def always_reloaded(call, model, opt):
    if call:
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnDevice:
    @pytest.mark.parametrize("lowering", ["eager", "inductor"])
    def test_numbers_are_the_same(self, lowering):
        report = same(lowering=lowering)
        assert report.replayed.startswith(f"recorded 1 times, the last time in call {WARM + 1}")
        assert "CUDA graph" in str(report)

    def test_short_batches_have_graphs_of_their_own(self):
        report = same(sizes=(8, 8, 8, 5), calls=24, dynamic=False)
        assert all(each.replayed.startswith("recorded 1") for each in (report, *report.others))

    def test_sizes_that_are_symbols_are_told(self):
        assert "dynamic=False" in same(dynamic=True).replayed

    def test_a_rate_in_a_tensor_changes_without_recording_again(self):
        report = same(build=lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2).cuda(), capturable=True),
                      change=rate_in_a_tensor)
        assert report.replayed.startswith("recorded 1 times")

    @pytest.mark.parametrize(("build", "tolerance"), [
        (None, 0.0), (lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False), 1e-5),
        (lambda p: memopt.optim.AdamW(p, lr=1e-2, state_bits=8), 1e-5)])
    def test_counts_and_rates_on_the_host_go_ahead(self, build, tolerance):
        """To rounding: a kernel that the host gives a number is another one than that which reads it on the device."""
        assert same(change=rate, build=build, tolerance=tolerance).replayed.startswith("recorded 1 times")

    def test_loaded_states_are_recorded_again(self):
        assert same(change=reloaded).replayed.startswith("recorded 2 times")

    def test_what_moves_again_and_again_is_given_up(self):
        assert f"changed again after {RECORDINGS} recordings" in same(change=always_reloaded).replayed

    def test_a_budget_holds_the_graphs_memory_too(self):
        peak = trained(calls=1)[2].predicted_peak_bytes
        assert "the budget is" in same(memory_budget=peak).replayed

    @pytest.mark.parametrize("room", [2**40, 0])
    def test_unasked_only_where_that_is_little(self, room, monkeypatch):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (room, 2**40))
        report = same(cuda_graphs="auto")
        assert report.replayed.startswith("recorded 1 times" if room else "off: a graph would keep ")

    def test_measured_it_runs_unrecorded(self):
        step = step_of(lambda w, x: (w * 2 + x,), WEIGHT, BATCH)
        run = Replayed(lambda given: [given[0] * 2 + given[1]], step, torch.device("cuda", 0), "train.py:3", 100)
        w, x = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
        for _ in range(5):
            run([w, x])
        peaks = [memopt.measure(call, [w, x], resident=[w, x]).peak_bytes for call in (run, run.run)]
        assert run.recorded == 1 and peaks[0] == peaks[1] > 32

    @pytest.mark.parametrize("end", [Tensor.item, lambda made: 1 / 0])
    def test_a_recording_that_fails_leaves_no_trace(self, end):
        device, expected = torch.device("cuda", torch.cuda.current_device()), []
        ones = torch.ones(1000, device=device)
        for failing in (False, True):
            torch.manual_seed(0)
            if failing:
                with pytest.raises(ZeroDivisionError if end is not Tensor.item else RuntimeError):
                    rehearse(lambda held: end((held[0] + torch.rand_like(held[0])).sum()), [ones], device)
            expected.append(torch.rand(3, device=device))
        assert torch.equal(*expected) and torch.cuda.current_stream() == torch.cuda.default_stream()
