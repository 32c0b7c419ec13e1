"""Reports of steps that ran, plans of steps that did not, and the files and logs about both."""

import logging
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache

from memopt_compile import costs, records
from memopt_compile.errors import CaptureError, InfeasibleBudget, OptionError
from memopt_compile.liveness import Point, Timeline
from memopt_compile.measure import measure
from memopt_compile.options import Options
from memopt_compile.records import Compilation
from memopt_compile.report import Report, explain, report
from memopt_compile.step_graph import Phase
from memopt_compile.step_pass import PassRecord

WIDTH = 32
DOCS = Path(__file__).parents[1] / "docs" / "reading_a_report.md"


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    records._compilations.clear()
    torch.manual_seed(0)


def batch(size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, WIDTH), torch.randint(0, 4, (size,))


class Trainer:
    """A step as a method. Dropout makes it draw random numbers."""

    def __init__(self, optimizer=torch.optim.AdamW):
        self.model = nn.Sequential(
            nn.Linear(WIDTH, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 4))
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)

    def step(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def snapshot(self):
        state = {k: {n: t.clone() for n, t in s.items()} for k, s in self.optimizer.state.items()}
        weights = [p.detach().clone() for p in self.model.parameters()]
        return weights, state, [p.grad for p in self.model.parameters()], torch.get_rng_state()


def same(a, b) -> bool:
    weights, state, gradients, random = zip(a, b, strict=True)
    return (all(map(torch.equal, *weights)) and all(x is y for x, y in zip(*gradients, strict=True))
            and torch.equal(*random) and state[0].keys() == state[1].keys()
            and all(torch.equal(state[0][k][n], state[1][k][n]) for k in state[0] for n in state[1][k]))


def compiled(step, **options):
    return torch.compile(step, backend="memopt", options={"lowering": "eager", **options})


# --------------------------------------------------------------------------- report


def test_report_of_a_step_that_ran():
    step = compiled(Trainer().step)
    x, y = batch()
    step(x, y)
    found = report(step)
    assert (found.kind, found.lowering, found.reason) == ("step", "eager", None)
    assert found.measured_peak_bytes == pytest.approx(found.predicted_peak_bytes, rel=0.02)
    assert sum(found.inputs.values()) == found.resident_bytes < found.predicted_peak_bytes
    weights = 4 * (WIDTH * 128 + 128 + 128 * 4 + 4)
    assert found.inputs["parameters"] == weights
    assert found.inputs["optimizer state"] == 2 * weights + 4 * 4  # m and v; a step count each
    assert found.inputs["batch"] == x.nbytes + y.nbytes
    assert found.before_peak_bytes >= found.predicted_peak_bytes


def test_largest_add_up_to_the_peak():
    found = explain(Trainer().step, *batch(), lowering="eager")
    sizes = [each.bytes for each in found.largest]
    assert sizes == sorted(sizes, reverse=True)
    # What is alive, and workspace that one operator may hold besides.
    assert found.resident_bytes + sum(sizes) <= found.predicted_peak_bytes
    first = found.largest[0]
    dropped = 64 * 128 * 4  # Dropout's result; its mask is a tensor of its own.
    assert (first.bytes, first.phase, first.kind) == (dropped, "forward", "activations")
    assert first.line.startswith("test_report.py:") and "self.model(x)" in first.line


def test_text_names_what_matters():
    step = compiled(Trainer().step)
    step(*batch())
    text = str(report(step))
    for part in ("test_report.py", "predicted", "measured", "optimizer state", "activation"):
        assert part in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_measured_only_once(monkeypatch):
    trainer = Trainer()
    step = compiled(trainer.step)
    step(*batch())
    measured = report(step).measured_peak_bytes
    monkeypatch.setattr("memopt_compile.records.measure", None)  # A second use would fail.
    step(*batch())
    assert report(step).measured_peak_bytes == measured


def test_users_profiler_is_left_alone(monkeypatch, caplog):
    """Also by the plan, which runs operators that it does not know under a profiler of its own."""
    monkeypatch.setattr(costs, "_known", {})
    costs._tell_of_profiler.cache_clear()
    step = compiled(Trainer().step)
    x, y = batch()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recording:
        x.sigmoid()
        step(x, y)
        with pytest.raises(RuntimeError, match="one is recording already"):
            measure(step, x, y)
    assert "aten::sigmoid" in {event.name for event in recording.events()}
    assert "planned while a profiler records" in caplog.text
    assert report(step).measured_peak_bytes is None
    step(x, y)
    assert report(step).measured_peak_bytes is not None


def test_two_shapes_are_two_reports():
    step = compiled(Trainer().step)
    step(*batch(64))
    step(*batch(32))
    found = report(step)
    assert found.predicted_peak_bytes < found.others[0].predicted_peak_bytes
    assert isinstance(found.predicted_peak_bytes, int)  # Also where the sizes were symbolic.
    assert "other graphs of this function" in str(found)


def test_parts_around_a_graph_break_belong_to_the_function():
    trainer = Trainer()

    def step(x, y):
        loss = trainer.step(x, y)
        torch._dynamo.graph_break()
        return loss * 2

    run = compiled(step)
    run(*batch())
    found = report(run)
    assert found.kind == "step"
    assert len(found.others) == 1 and found.others[0].kind == "model"


@pytest.mark.parametrize("step", [Trainer().step, compiled(Trainer().step), 7])
def test_nothing_to_report(step):
    def other(x):
        return x

    with pytest.raises(OptionError) as error:
        report(step if step == 7 else compiled(other))
    assert error.value.do


# --------------------------------------------------------------------------- explain


@pytest.mark.parametrize("steps_before", [0, 1])
def test_explain_changes_nothing(steps_before):
    trainer = Trainer()
    x, y = batch()
    for _ in range(steps_before):
        trainer.step(x, y)
    F.cross_entropy(trainer.model(x), y).backward()
    before = trainer.snapshot()
    found = explain(trainer.step, x, y, lowering="eager")
    assert found.predicted_peak_bytes > found.resident_bytes
    assert found.measured_peak_bytes is None
    assert same(trainer.snapshot(), before)


def test_explain_predicts_what_the_step_then_does():
    trainer = Trainer()
    planned = explain(trainer.step, *batch(), lowering="eager")
    step = compiled(trainer.step)
    with pytest.raises(OptionError):  # The plan is no compilation of the step.
        report(step)
    step(*batch())
    assert report(step).predicted_peak_bytes == planned.predicted_peak_bytes


@pytest.mark.inductor
@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_explain_does_without_the_compiler(budget, monkeypatch):
    def no_compiler(*given):
        pytest.fail("the compiler was called")

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", no_compiler)
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", no_compiler)
    assert explain(Trainer().step, *batch(), lowering="inductor", memory_budget=budget).predicted_peak_bytes > 0


def test_explain_leaves_no_trace_in_dynamo():
    trainer = Trainer()
    for size in (16, 32, 48):
        found = explain(trainer.step, *batch(size), lowering="eager")
        assert not any(re.search(r"\bs\d", each.value) for each in found.largest)  # No symbols.
    step = compiled(trainer.step)
    step(*batch(64))
    assert report(step).others == ()


def test_explain_takes_a_compiled_step():
    trainer = Trainer()
    step = compiled(trainer.step)
    x, y = batch()
    step(x, y)
    before = trainer.snapshot()
    assert explain(step, x, y, lowering="eager").kind == "step"
    assert same(trainer.snapshot(), before)


@pytest.mark.parametrize("break_graph", [torch._dynamo.graph_break, lambda: None])
def test_explain_runs_nothing_where_there_is_no_graph(break_graph):
    seen = []

    def step(x, y):
        break_graph()
        seen.append(x)

    with pytest.raises(CaptureError):
        explain(step, *batch(), lowering="eager")
    assert seen == []


def test_explain_runs_nothing_when_compiling_is_off():
    trainer = Trainer()
    x, y = batch()
    before = trainer.snapshot()
    with torch.compiler.set_stance("force_eager"):
        assert explain(trainer.step, x, y, lowering="eager").kind == "step"
    with torch._dynamo.config.patch(disable=True), pytest.raises(CaptureError):
        explain(trainer.step, x, y, lowering="eager")
    assert same(trainer.snapshot(), before)


def test_explain_of_a_model():
    model = Trainer().model
    found = explain(model, batch()[0], lowering="eager")
    assert found.kind == "model"
    assert "model only" in str(found)


def test_explain_refuses_as_compiling_would():
    trainer = Trainer()
    with pytest.raises(InfeasibleBudget):
        explain(trainer.step, *batch(), lowering="eager", memory_budget=10)
    with pytest.raises(OptionError, match="nearest"):
        explain(trainer.step, *batch(), lowring="eager")


# --------------------------------------------------------------------------- files and logs


def test_dump(tmp_path):
    step = compiled(Trainer().step, dump=tmp_path, memory_budget="1GiB")
    step(*batch(64))
    step(*batch(32))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["00", "01"]
    folder = tmp_path / "00"
    names = {each.name for each in folder.iterdir()}
    assert names >= {"plan.txt", "program.py", "report.txt", "timeline.svg"}
    assert "measured" in (folder / "report.txt").read_text()
    assert "def run(inputs):" in (folder / "program.py").read_text()
    picture = (folder / "timeline.svg").read_text()
    assert "before passes" in picture and "budget 1,024.0 MiB" in picture


def test_dump_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="dump"):
        compiled(Trainer().step, dump=tmp_path / "file")(*batch())


class Graph:
    """Enough of a StepGraph for `observe`."""

    def text(self):
        return "p0: f32[1]\n"


def test_graphs_are_dumped_as_they_come(tmp_path):
    (tmp_path / "00").mkdir()  # Of an earlier process: left alone.
    record = Compilation("step", Options(dump=tmp_path), "eager")
    for name in ("captured", "first", "second"):
        record.observe(name, Graph())
    names = ["00_captured", "01_first", "02_second"]
    assert sorted(each.stem for each in (tmp_path / "01").iterdir()) == names == list(record.texts)
    record.dump()
    assert {each.name for each in tmp_path.iterdir()} == {"00", "01"}


def test_graph_texts_are_not_made_unless_wanted(monkeypatch):
    monkeypatch.setattr("memopt_compile.compat.trace.artifact", lambda name, text: None)
    monkeypatch.setattr(Graph, "text", None)
    record = Compilation("step", Options(), "eager")
    record.observe("captured", Graph())
    assert record.texts == {}


def test_debug_log_shows_graphs(caplog):
    record = Compilation("step", Options(), "eager", where="train.py:3")
    with caplog.at_level(logging.DEBUG, logger="memopt_compile"):
        record.observe("captured", Graph())
        record.observe("reorder", Graph())
    assert "train.py:3: graph before:\np0: f32[1]" in caplog.text
    assert "graph after_reorder" in caplog.text


def test_structured_trace_has_the_artifacts(monkeypatch):
    found = {}
    monkeypatch.setattr("memopt_compile.compat.trace.artifact",
                        lambda name, text: found.update({name: text()}))
    record = Compilation("step", Options(), "eager")
    for name in ("captured", "reorder"):
        record.observe(name, Graph())
    record.dump()
    assert list(found) == ["memopt_before", "memopt_after_reorder", "memopt_report"]


def test_a_record_without_a_step_can_be_printed():
    record = Compilation("ordinary", Options(), "inductor", "train.py:3", reason="a hook")
    assert "a hook" in str(Report.of(record)) and "ordinary path" in str(Report.of(record))


def test_prediction_error_is_signed():
    node = torch.fx.Graph().placeholder("x")
    line = Timeline(100, (Point(node, Phase.FORWARD, 10),))
    record = Compilation("step", Options(), "eager", before=line, predicted_peak_bytes=110,
                         measured_peak_bytes=100)
    assert Report.of(record).error_percent == pytest.approx(10)
    assert "off by +10.00%" in str(Report.of(record))


def test_pass_table():
    node = torch.fx.Graph().placeholder("x")
    line = Timeline(2**20, (Point(node, Phase.FORWARD, 10),))
    passes = (PassRecord("reorder", (), 3 * 2**20, 2**20, 0.25),
              PassRecord("recompute", (("mm", 2), ("add", -1)), 2**20, 2**20, 0.5),
              PassRecord("compress", (), 2**20, 2**20, 0.0, refusal="not asked for"))
    text = str(Report.of(Compilation("step", Options(), "eager", after=line, passes=passes)))
    rows = [re.split(r"\s{2,}", row.strip()) for row in text.splitlines()]
    assert ["reorder", "4.00 MiB", "2.00 MiB", "2.00 MiB", "0.25", "same operators, reordered"] in rows
    assert ["recompute", "2.00 MiB", "2.00 MiB", "0 B", "0.50", "+1: mm +2, add -1"] in rows
    assert ["compress", "2.00 MiB", "2.00 MiB", "0 B", "0.00", "not run: not asked for"] in rows


# --------------------------------------------------------------------------- the page about it


def test_the_page_runs(tmp_path, capsys):
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        path = tmp_path / "train.py"  # A file, because the report quotes its lines.
        path.write_text(block)
        runpy.run_path(str(path))
    printed = capsys.readouterr().out
    assert "train.py:9 loss = F.cross_entropy" in printed and "measured" in printed


def test_a_step_left_to_python_is_explained_and_reported():
    """What ends its graph within a loop leaves all of it uncompiled; the reason is there all the same."""
    trainer, seen = Trainer(), []
    x, y = batch()

    def step(x, y):
        loss = trainer.step(x, y)
        for each in (loss, loss + 1):
            torch._dynamo.graph_break()
            seen.append(each.item())

    fast = torch.compile(step, backend="memopt", options={"lowering": "eager"})
    fast(x, y)
    for found in (report(fast), explain(step, x, y, lowering="eager")):
        assert found.kind == "ordinary" and "graph_break" in found.reason and "graph_break" in str(found)
    assert len(seen) == 2
