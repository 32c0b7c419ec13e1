"""The Inductor lowering: eager's numbers, one piece for all depths, and the predicted peak."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch.fx.experimental.proxy_tensor import make_fx

import memopt_compile as memopt
from memopt_compile.backends import eager, inductor
from memopt_compile.compat import dry_run, kernels
from memopt_compile.compat import inductor as compat_inductor
from memopt_compile.lowering import compiled_pieces
from memopt_compile.measure import measure
from memopt_compile.step_graph import Input, Phase, Role, StepGraph, nbytes

WIDTH, BATCH = 32, 24

pytestmark = [
    pytest.mark.inductor,
    pytest.mark.skipif(not inductor.compiler_available(), reason="no C++ compiler"),
]


def layer(x: Tensor, turned: Tensor, bias: Tensor, drop: float) -> Tensor:
    hidden = F.gelu(torch.mm(F.layer_norm(x, (WIDTH,)), turned) + bias)
    if drop:
        hidden = hidden * (torch.rand_like(hidden) >= drop) / (1 - drop)
    return x + hidden


def adamw(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> None:
    """One update (betas 0.9 and 0.999, bias corrections left out)."""
    mean.copy_(0.9 * mean + 0.1 * gradient)
    square.copy_(0.999 * square + 0.001 * gradient * gradient)
    parameter.copy_(parameter * 0.99 - 0.01 * mean / (square.sqrt() + 1e-3))


def inputs(depth: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(BATCH, WIDTH, generator=generator, dtype=dtype)]
    for _ in range(depth):
        weight = torch.randn(WIDTH, WIDTH, generator=generator, dtype=dtype) / WIDTH**0.5
        bias = torch.randn(WIDTH, generator=generator, dtype=dtype)
        found += [weight, torch.zeros_like(weight), torch.zeros_like(weight),
                  bias, torch.zeros_like(bias), torch.zeros_like(bias)]
    return found


def training(depth: int, drop: float = 0.0, dynamic: bool = False) -> StepGraph:
    """Forward, then layer by layer backward and update: gradients are released early, and each
    layer's backward still reads the ``weight.t()`` that its forward made."""

    def step(x: Tensor, *state: Tensor) -> tuple[Tensor, Tensor]:
        layers = [state[i:i + 6] for i in range(0, len(state), 6)]
        saved = []
        for weight, _, _, bias, _, _ in layers:
            read, turned = x.detach().requires_grad_(), weight.t().detach().requires_grad_()
            bias = bias.detach().requires_grad_()
            x = layer(read, turned, bias, drop)
            saved.append((x, read, turned, bias))
        loss = x.square().mean()
        (gradient,) = torch.autograd.grad(loss, [x], retain_graph=True)
        for (result, *leaves), (weight, m, v, bias, bm, bv) in zip(saved[::-1], layers[::-1]):
            gradient, of_turned, of_bias = torch.autograd.grad(result, leaves, gradient)
            adamw(weight, of_turned.t(), m, v)
            adamw(bias, of_bias, bm, bv)
        return loss.detach(), x.detach()[:2]

    module = make_fx(step, tracing_mode="symbolic" if dynamic else "fake",
                     decomposition_table=inductor.decompositions())(*inputs(depth))
    module = inductor.prepare(module)
    roles = [Input(n.name, Role.PARAMETER, n.name, nbytes(n.meta["val"]))
             for n in module.graph.find_nodes(op="placeholder")]
    step = StepGraph(module, tuple(roles))
    step.phases = {n: Phase.FORWARD for n in step.computing()}
    step.verify()
    return step


def run(lowered, depth: int, steps: int = 3, given: list[Tensor] | None = None) -> list[Tensor]:
    """Results of all steps, then everything that the steps changed."""
    state, results = given or inputs(depth), []
    torch.manual_seed(3)
    for _ in range(steps):
        boxed = list(state)
        results += lowered(boxed)
        assert boxed == []
    return results + state


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.fixture(scope="module")
def four():
    step = training(4)
    return step, inductor.lower(step)


def test_equals_eager_and_one_big_graph(four):
    step, lowered = four
    got, whole = run(lowered, 4), inductor.lower(step, whole=True)
    torch.testing.assert_close(got, run(eager.lower(step), 4), rtol=1e-5, atol=1e-5)
    assert equal(got, run(whole, 4))
    assert len(lowered.called) > 1 == len(whole.called)


def test_depth_costs_no_compilation(four):
    deep = training(8)
    lowered = inductor.lower(deep)
    assert lowered.distinct == four[1].distinct < len(lowered.called)
    assert len(lowered.compiled) <= 1
    torch.testing.assert_close(run(lowered, 8), run(eager.lower(deep), 8), rtol=1e-5, atol=1e-5)


def test_second_capture_compiles_nothing(four):
    again = inductor.lower(training(4))
    assert again.compiled == () and again.called == four[1].called
    assert again.source == four[1].source


def test_one_big_graph_by_an_option():
    model = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> None:
        model(x).square().sum().backward()
        opt.step()
        opt.zero_grad()

    with mock.patch.object(inductor, "one_piece", wraps=inductor.one_piece) as made:
        for pieces, times in ((True, 0), (False, 1)):
            torch.compile(step, backend="memopt", options={"pieces": pieces})(torch.randn(2, 4))
            assert made.call_count == times


def test_forget_compiles_anew(four, monkeypatch):
    monkeypatch.setattr(compiled_pieces, "_cache", dict(compiled_pieces._cache))
    monkeypatch.setattr(inductor.compat_inductor, "compile_graph", lambda module, **how: (None, ""))
    inductor.forget()
    assert len(inductor.lower(four[0]).compiled) == four[1].distinct


@pytest.mark.parametrize("whole", [False, True])
def test_predicted_peak_is_what_is_measured(four, whole):
    lowered = inductor.lower(four[0], whole=whole)
    state = inputs(4)
    lowered(list(state))
    measured = measure(lowered, list(state), resident=state).transient_peak_bytes
    assert inductor.predicted_transient_peak(lowered) == pytest.approx(measured, rel=0.03)


def test_workspace_of_what_inductor_has_no_code_for():
    given = torch.randn(6, 7), torch.randn(5, 7, 8), torch.randn(6, 8)
    module = make_fx(lambda a, w, b: (F.bilinear(a, b, w),), tracing_mode="fake")(*given)
    lowered = inductor.lower(StepGraph(module, ()))
    lowered(list(given))
    measured = measure(lowered, list(given), resident=())
    result = 6 * 5 * 4
    assert inductor.predicted_transient_peak(lowered) == measured.transient_peak_bytes > result


def test_program_frees_at_last_use(four):
    source = four[1].source
    made = {name for line in source.splitlines() if " = piece_" in line
            for name in line.split(" = ")[0].strip(" []").split(", ")}
    freed = {name for line in source.splitlines() if line.strip().startswith("del ")
             for name in line.strip().removeprefix("del ").split(", ")}
    returned = source.splitlines()[-1]
    assert all(name in freed or name in returned for name in made)


def test_dropout_draws_the_same_numbers_in_pieces_and_whole():
    step = training(3, drop=0.5)
    lowered = inductor.lower(step)
    assert lowered.distinct < len(lowered.called)
    got = run(lowered, 3)
    assert equal(got, run(inductor.lower(step, whole=True), 3))
    assert not torch.equal(got[0], got[2])


def test_dropout_equals_eager_with_fallback_random():
    with inductor_config.patch(fallback_random=True):
        step = training(3, drop=0.5)
        got = run(inductor.lower(step), 3)
    torch.testing.assert_close(got, run(eager.lower(step), 3), rtol=1e-5, atol=1e-5)


def test_alpha_of_an_add_to_a_matmul_is_kept():
    def step(a, b, c):
        return torch.add(a @ b, c, alpha=0.01), torch.sub(a @ b, c, alpha=3)

    given = [torch.randn(WIDTH, WIDTH) for _ in range(3)]
    lowered = inductor.lower(StepGraph(make_fx(step, tracing_mode="fake")(*given), ()))
    torch.testing.assert_close(lowered(list(given)), step(*given))


def test_casts_that_a_pass_has_put_in_are_written_out():
    def step(x: Tensor) -> tuple[Tensor]:
        return (x.to(torch.bfloat16).exp().to(torch.float64),)

    module = make_fx(step, tracing_mode="fake")(*inputs(0))  # with `_to_copy`, as Inductor takes none
    traced = StepGraph(module, (Input("x", Role.BATCH, "x", BATCH * WIDTH * 4),))
    traced.phases = dict.fromkeys(traced.computing(), Phase.FORWARD)
    assert traced.op_counts()["_to_copy"] == 2
    (expected,), (got,) = (lower(traced)(inputs(0)) for lower in (eager.lower, inductor.lower))
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=0)


def test_dynamic_sizes_are_lowered_whole():
    step = training(2, dynamic=True)
    lowered = inductor.lower(step)
    assert len(lowered.called) == 1
    assert inductor.predicted_transient_peak(lowered) > 0
    torch.testing.assert_close(run(lowered, 2), run(eager.lower(step), 2), rtol=1e-5, atol=1e-5)


def test_compiler_available_says_no():
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert not inductor.compiler_available("cpu")
    assert inductor.compiler_available("cpu")


def test_kernels_that_fail_to_compile_are_not_kept(monkeypatch):
    """The compiler works while the next piece is lowered; its error comes, and spoils no cache."""
    inductor.forget()
    step = training(1)

    def broken(self, scope):
        raise RuntimeError("g++ says no")

    with monkeypatch.context() as patch:
        patch.setattr(AsyncCompile, "wait", broken)
        with pytest.raises(RuntimeError, match="g\\+\\+ says no"):
            inductor.lower(step)
        assert AsyncCompile.wait is broken  # put back as it was
    assert inductor.lower(training(1)).compiled  # compiled anew


@pytest.mark.parametrize("forward", [True, False], ids=["out of forward's own", "out of inputs"])
def test_a_tight_program_has_the_order_that_needs_less(forward):
    """Gradients of weights that are handed on, with activations that are computed again. Behind their forward
    Inductor's order has several of these alive at once; by themselves the schedule's order has more in one loop.

    (Orders are Inductor's own here: ours puts off by itself what these gradients need.)"""
    def step(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        layers, states, gradient, gradients = [weights[i:i + 3] for i in range(0, 9, 3)], [x, x, x], x, []
        if forward:
            for i, (small, _, _) in enumerate(layers):
                states[i] = torch.mm(states[i - 1], small).tanh()
            gradient = torch.mm(torch.mm(states[-1], layers[0][1].repeat(1, 4)).tanh(), layers[0][2].repeat(4, 1))
        for state, (_, up, down) in zip(states[::-1], layers[::-1]):
            hidden = torch.mm(state, up)
            wide = torch.mm(gradient, down.t()) * hidden.cos()
            gradients.append(torch.mm(hidden.sin().t(), gradient))
            gradient = torch.mm(wide, up.t())
        return gradient, *gradients

    given = [torch.randn(size, dtype=torch.float64) for size in ((256, 8), *((8, 8), (8, 32), (32, 8)) * 3)]
    step_of = make_fx(step, decomposition_table=inductor.decompositions(), tracing_mode="fake")
    with inductor_config.patch(force_disable_caches=True), mock.patch.object(kernels, "_past_peaks", contextlib.nullcontext):
        plain, too_large = (inductor.lower(StepGraph(step_of(*given), ()), within=limit) for limit in (None, 0))
        tight = too_large.lowered()
        peaks = [lowered.transient_peak_bytes() for lowered in (plain, tight)]
        assert peaks[1] < 0.9 * peaks[0] if forward else peaks[1] == peaks[0]
        assert too_large.least_bytes <= peaks[1]
        for limit, peak in ((peaks[0], peaks[0]), (peaks[1], peaks[1])):  # no second order where the first fits
            fitting = inductor.lower(StepGraph(step_of(*given), ()), within=limit, later=True)
            assert fitting.transient_peak_bytes() == peak
    tight.finish()
    for got, expected in zip(tight(list(given)), step(*given)):
        torch.testing.assert_close(got, expected)


def test_a_program_that_is_too_large_is_seen_in_its_largest_piece(four):
    peak = inductor.predicted_transient_peak(four[1])
    inductor.forget()
    with mock.patch.object(compat_inductor, "compile_graph", wraps=compat_inductor.compile_graph) as lowering:
        too_large = inductor.lower(four[0], within=peak // 2, later=True)
        assert peak // 2 < too_large.least_bytes <= peak and lowering.call_count < four[1].distinct
        assert too_large.lowered().transient_peak_bytes() <= peak


def test_a_program_of_which_only_the_peak_is_asked_needs_no_compiler(four, monkeypatch):
    inductor.forget()
    with monkeypatch.context() as patch:
        patch.setattr(AsyncCompile, "cpp_pybinding", lambda *given: pytest.fail("the compiler was called"))
        lowered = inductor.lower(four[0], later=True)
        peak = inductor.predicted_transient_peak(lowered)
    assert peak == inductor.predicted_transient_peak(four[1])
    assert lowered.source == four[1].source and lowered.compiled
    lowered.finish()
    assert equal(run(lowered, 4), run(four[1], 4))


def test_kernels_that_fail_later_are_not_kept(four, monkeypatch):
    inductor.forget()
    lowered = inductor.lower(four[0], later=True)
    with monkeypatch.context() as patch:
        patch.setattr(AsyncCompile, "cpp_pybinding", mock.Mock(side_effect=RuntimeError("g++ says no")))
        inductor.lower(four[0], later=True)  # of pieces that are there
        with pytest.raises(RuntimeError, match="g\\+\\+ says no"):
            lowered.finish()
    assert len(inductor.lower(four[0]).compiled) == four[1].distinct


def test_a_dry_run_reads_no_number_for_a_triton_kernel():
    source = ("def call(args):\n    x, = args\n    buf = empty_strided_cpu((3,), (1,), torch.float32)\n"
              "    kernel.run(buf, x.item(), 3, stream=stream0)\n    return (buf,)\n")
    with dry_run.FakeTensorMode():
        made, = dry_run.dry_call(source)([torch.empty(())])
    assert made.shape == (3,)


@pytest.mark.parametrize("draw", [
    lambda h: F.dropout(h, 0.1),
    lambda h: h * torch.randint(3, h.shape),
    lambda h: h + torch.multinomial(h.detach().softmax(-1), 1),
], ids=["a kernel that holds more than its results", "no operand is a tensor", "zeros are refused"])
def test_what_draws_eagers_numbers_is_counted(draw):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 2))

    def step(x):
        loss = model[1](draw(model[0](x))).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    made = memopt.compile(step)
    with inductor_config.patch(fallback_random=True):
        made(torch.randn(512, 16))
    report = memopt.report(made)
    assert report.predicted_peak_bytes == report.measured_peak_bytes
