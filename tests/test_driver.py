"""What the user sees of the backend: options, errors, the ordinary path, and its undo."""

from __future__ import annotations

import logging
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt_compile as memopt
from memopt_compile import driver
from memopt_compile.errors import OptionError


def training(width: int = 8, **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    options = {"lowering": "eager", **kwargs}
    return model, torch.compile(step, backend="memopt", options=options), (
        torch.randn(4, width), torch.randint(3, (4,)))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def test_unknown_option_names_the_nearest():
    _, step, batch = training(memory_bugdet="1GiB")
    with pytest.raises(memopt.OptionError, match="memory_budget"):
        step(*batch)


def test_wrong_unit():
    _, step, batch = training(memory_budget="6 gigs")
    with pytest.raises(memopt.OptionError, match="GiB"):
        step(*batch)


def test_offload_on_the_cpu_is_refused():
    _, step, batch = training(offload=True, memory_budget=0.9)
    with pytest.raises(memopt.OptionError, match="in the host's memory as it is"):
        step(*batch)


def prepared(again: bool, compiled: dict | None):
    """The model after three steps that print what they make of the batch first, and `again` behind the forward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)).double()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, y):
        x = x / x.std()
        print("largest", x.max().item())
        loss = F.cross_entropy(model(x), y)
        if again:
            print("loss", loss)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    fast = step if compiled is None else memopt.compile(step, lowering="eager", **compiled)
    for _ in range(3):
        fast(torch.randn(64, 8).double(), torch.randint(3, (64,)))
    return fast, list(model.parameters())


WHOLE_ONLY = [{"memory_budget": "64KiB"}, {"accumulate": "optimizer_states"}]


@pytest.mark.parametrize("options", WHOLE_ONLY, ids=str)
def test_the_step_may_follow_a_graph_that_ends_before_it(options):
    fast, parameters = prepared(False, options)
    report = memopt.report(fast)
    assert report.kind == "step" and report.predicted_peak_bytes == report.measured_peak_bytes
    torch.testing.assert_close(parameters, prepared(False, None)[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", WHOLE_ONLY, ids=str)
def test_what_follows_it_is_whole_or_refused(options):
    with pytest.raises(memopt.OptionError, match="test_driver.py:.*print"):
        prepared(True, options)


def tried(model, opt, x, y):
    """torch goes on behind the line that cuts this, but in Python."""
    x = x / x.std()
    try:
        print("largest", x.max().item())
        F.cross_entropy(model(x), y).backward()
    finally:
        opt.step()


def evaluated(model, opt, x, y):
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y)
    print("loss", loss.item())


@pytest.mark.parametrize("options", WHOLE_ONLY, ids=str)
@pytest.mark.parametrize("step", [tried, evaluated])
def test_no_step_follows_it(step, options):
    model = nn.Linear(8, 3)
    opt = torch.optim.AdamW(model.parameters())
    before = model.weight.clone()
    with pytest.raises(memopt.OptionError, match="compiled function"):
        memopt.compile(step, lowering="eager", **options)(model, opt, torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))
    assert torch.equal(model.weight, before) and model.weight.grad is None


def test_mode_is_refused():
    with pytest.raises(memopt.OptionError, match="mode"):
        torch.compile(lambda x: x + 1, backend="memopt", mode="reduce-overhead")(torch.ones(2))


def test_budget_below_the_parameters():
    model, step, batch = training(memory_budget=64)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(memopt.InfeasibleBudget, match="parameters"):
        step(*batch)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_budgets_that_fit():
    for budget in ("1GiB", 2**30, 1.0, "auto"):
        _, step, batch = training(memory_budget=budget)
        step(*batch)
        report = memopt.report(step)
        assert report.measured_peak_bytes <= report.budget_bytes


def test_a_graph_without_a_loss_runs_in_model_mode():
    compiled = torch.compile(lambda x: x.sin() + 1, backend="memopt", options={"lowering": "eager"})
    x = torch.randn(3, requires_grad=True)
    torch.testing.assert_close(compiled(x), x.sin() + 1)
    assert memopt.report(compiled).kind == "model"


def test_model_mode_trains_in_somebody_elses_loop():
    def train(compile):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        run = torch.compile(model, backend="memopt", options={"lowering": "eager"}) if compile else model
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            opt.zero_grad()
            run(torch.randn(6, 5)).square().mean().backward()
            opt.step()
        return [v.clone() for v in model.state_dict().values()]

    for a, b in zip(train(False), train(True), strict=True):
        torch.testing.assert_close(a, b)


def test_backward_twice_is_eagers_error():
    model = nn.Linear(3, 1)

    def step(x):
        loss = model(x).square().sum()
        loss.backward()
        loss.backward()

    with pytest.raises(RuntimeError, match="second time|does not require grad"):
        torch.compile(step, backend="memopt", options={"lowering": "eager"})(torch.ones(2, 3))


def complex_parameters():
    p = nn.Parameter(torch.randn(4, dtype=torch.complex128))
    return [p], torch.optim.AdamW([p], lr=0.1), lambda x: (p * x).abs(), torch.arange(4).to(p.dtype)


def sparse_gradients():
    table = nn.Embedding(10, 4, sparse=True)
    return [table.weight], torch.optim.SparseAdam(table.parameters(), lr=0.1), table, torch.tensor([1, 2, 2])


def sparse_parameters():
    p = nn.Parameter(torch.eye(4).to_sparse())
    return [p], torch.optim.SGD([p], lr=0.1), lambda x: torch.sparse.mm(p, x), torch.randn(4, 3)


def sparse_parameters_of_a_module():
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(torch.eye(4).to_sparse())
    model.forward = lambda x: torch.sparse.mm(model.weight, x)
    return [model.weight], torch.optim.SGD([model.weight], lr=0.1, momentum=0.9), model, torch.randn(4, 3)


def odd_step(make):
    """A step over a parameter of another kind, its batch, and the parameter."""
    torch.manual_seed(0)
    (p,), opt, model, x = make()

    def step(x):
        loss = model(x).square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step, x, p


@pytest.mark.parametrize("make, told", [(complex_parameters, "whole-step mode"),
                                        (sparse_gradients, "not captured whole"),
                                        (sparse_parameters, "not captured whole"),
                                        (sparse_parameters_of_a_module, "not captured whole")],
                         ids=lambda v: getattr(v, "__name__", v))
def test_parameters_and_gradients_of_other_kinds_equal_eager(make, told, caplog):
    caplog.set_level("INFO", "memopt_compile")
    step, x, expected = odd_step(make)
    losses = [step(x) for _ in range(4)]
    step, x, got = odd_step(make)
    run = torch.compile(step, backend="memopt", options={"lowering": "eager"})
    torch.testing.assert_close([run(x) for _ in range(4)], losses)
    torch.testing.assert_close(got.detach().to_dense(), expected.detach().to_dense())
    (line,) = [r.getMessage() for r in caplog.records if told in r.getMessage()]
    assert told in line and "test_driver.py" in line
    assert told == "whole-step mode" or "sparse Tensor" in line


def test_a_budget_of_a_step_of_which_nothing_is_compiled():
    step, x, p = odd_step(sparse_parameters)
    before = p.detach().clone()
    with pytest.raises(OptionError, match=r"budget cannot be kept: test_driver\.py:\d+ `.*sparse"):
        torch.compile(step, backend="memopt", options={"memory_budget": "1GiB"})(x)
    assert torch.equal(p.detach().to_dense(), before.to_dense())


def test_verify_reports_the_difference():
    _, step, batch = training(verify=True)
    step(*batch)
    assert memopt.report(step).largest_difference < 1e-6
    assert "verified" in str(memopt.report(step))


def test_verify_catches_a_wrong_lowering():
    lower = driver.eager.lower

    def wrong(graph):
        run = lower(graph)

        def spoiled(inputs):
            parameter = max((i for i in inputs if isinstance(i, torch.Tensor)), key=torch.numel)
            result = run(inputs)
            parameter.detach().mul_(1.01)
            return result

        spoiled._boxed_call = True
        return spoiled

    with mock.patch.object(driver.eager, "lower", wrong):
        _, step, batch = training(verify=True)
        with pytest.raises(memopt.NumericsError, match="differs from eager"):
            step(*batch)


def test_says_which_mode_it_runs_in(caplog):
    with caplog.at_level(logging.INFO, "memopt_compile"):
        _, step, batch = training()
        step(*batch)
    assert sum("whole-step mode: traced 1 backward(s), AdamW" in r.message for r in caplog.records) == 1


UNTOUCHED = """
import sys, types, warnings, torch, torch._dynamo.config, torch._functorch.config, torch._inductor.compile_fx
warnings.simplefilter("ignore")  # looking at deprecated names warns

def grads(x):
    (x * 2).sum().backward()
    found, x.grad = x.grad, None
    return found

def train(x):
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()

def torchs():
    "Every function of torch's modules and classes, and every setting of the compiler's."
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "functorch"):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType):
                found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {(name, key, own): method for own, method in vars(value).items()
                          if callable(method) or isinstance(method, property | classmethod | staticmethod)}
    settings = [getattr(torch, name).config.get_config_copy() for name in ("_dynamo", "_inductor", "_functorch")]
    return found, settings

def changed():
    found, settings = torchs()
    assert settings == before[1]
    return {key for key, value in before[0].items() if found.get(key) is not value}

x = torch.ones(3, requires_grad=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
opt = torch.optim.AdamW(model.parameters())
torch.compile(grads, backend="eager")(x)
torch._dynamo.reset()
before = torchs()
import memopt_compile
assert not changed(), "the bare import touched torch"
import memopt_compile.driver
torch.compile(train, backend="memopt", options={"lowering": "eager"})(torch.ones(2, 4))
assert changed() == {("torch._dynamo.convert_frame", "ConvertFrameAssert", "__call__")}
assert torch.equal(torch.compile(grads, backend="eager")(x), torch.full((3,), 2.0))
from torch.distributed.tensor import DTensor
methods = dict(vars(DTensor))
with memopt_compile.planned_ranks(2) as mesh:
    shared = torch.nn.Linear(4, 4)
    memopt_compile.shard_(shared, torch.optim.AdamW(shared.parameters()), mesh)
wrapped = {name for name, method in vars(DTensor).items() if method is not methods.get(name)}
assert wrapped == {"redistribute", "__deepcopy__", "__reduce_ex__", "__create_write_items__",
                   "__create_chunk_list__"}
memopt_compile.driver.uninstall()
assert not changed() and dict(vars(DTensor)) == methods
torch.compiler.reset()
try:
    torch.compile(train, backend="memopt", options={"lowering": "eager"})(torch.ones(2, 4))
except memopt_compile.CaptureError as error:
    assert "uninstalled" in str(error)
    print("clean")
"""


def test_importing_and_compiling_change_nothing_for_others_and_are_undone():
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "clean", done.stderr[-800:]


IMPORT_TIME = """
import sys, time, torch
loaded = set(sys.modules)
for _ in range(3):
    sys.modules.pop("memopt_compile", None)
    start = time.perf_counter()
    import memopt_compile
    print(time.perf_counter() - start)
assert not {"torch._dynamo", "scipy", "sympy"} & (set(sys.modules) - loaded)
"""


def test_import_is_quick():
    times = subprocess.run([sys.executable, "-c", IMPORT_TIME], capture_output=True, text=True, check=True).stdout
    assert min(map(float, times.split())) < 0.3


def test_entry_point_registers_the_backend():
    assert "memopt" in torch._dynamo.list_backends()


def test_backward_twice_on_one_graph_is_eagers_own_error(caplog):
    model = torch.nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        loss.backward()
        opt.step()

    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="second time"):
        torch.compile(step, backend="memopt", options={"lowering": "eager"})(torch.ones(3, 4))
    (line,) = [r.getMessage() for r in caplog.records if "not captured whole" in r.getMessage()]
    assert "used up" in line and "retain_graph=True" in line and "test_driver.py" in line
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
