"""Single graphs as Inductor compiles them for memopt: numbers, layouts, order of kernels and their bytes."""

import contextlib
import copy
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor import memory
from torch.fx.experimental.proxy_tensor import make_fx

import memopt_compile as memopt
from memopt_compile.backends import inductor
from memopt_compile.compat import dry_run, kernels
from memopt_compile.compat import inductor as compat_inductor

pytestmark = [
    pytest.mark.inductor,
    pytest.mark.skipif(not inductor.compiler_available(), reason="no C++ compiler"),
]


def test_number_of_a_whole_loop_is_computed_once():
    """As the bias correction of Adam: not again for every few elements of the loop."""
    def correct(moment: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        return moment * 0.9**count, moment * moment[3]

    given = torch.randn(64), torch.tensor(3.0)
    made, source = compat_inductor.compile_graph(make_fx(correct, tracing_mode="fake")(*given))
    torch.testing.assert_close(tuple(made(list(given))), correct(*given))
    assert "empty_strided_cpu((), ()" in source


def test_one_channel_reaches_a_convolution_as_it_was_traced():
    """Its strides fit two layouts, and the convolution's kernel goes by them: channels-last needs no copy."""
    def convolve(image: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (F.conv2d(image.clone(memory_format=torch.channels_last), weight, padding=1),)

    given = torch.randn(4, 1, 28, 28), torch.randn(16, 1, 3, 3)
    made, source = compat_inductor.compile_graph(make_fx(convolve, tracing_mode="fake")(*given))
    (got,), (expected,) = made(list(given)), convolve(*given)
    assert got.stride() == expected.stride() and torch.equal(got, expected)
    call = source[source.index("def call"):source.index("return (")]
    assert call.count("= empty_strided_cpu(") == 1


def test_volumes_reach_a_transposed_convolution_as_they_were_traced():
    """In the ordinary layout, which Inductor would choose, its backward needs a workspace."""
    def convolve(volume: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (F.conv_transpose3d(volume.clone(memory_format=torch.channels_last_3d), weight),)

    given = torch.randn(2, 4, 3, 4, 5), torch.randn(4, 5, 3, 3, 3)
    made, source = compat_inductor.compile_graph(make_fx(convolve, tracing_mode="fake")(*given))
    (got,), (expected,) = made(list(given)), convolve(*given)
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected)
    assert "= empty_strided_cpu((2, 4, 3, 4, 5), (240, 1, 80, 20, 4)" in source


def test_loops_of_a_cpu_are_freed_between():
    """None of these loops can be one with the next: Inductor would hold the results of all of them."""

    def pooled_again_and_again(x):
        for _ in range(4):
            x = F.avg_pool1d(x.sum(0, keepdim=True) * x, 3, 1, 1)
        return (x.sum(),)

    module = make_fx(pooled_again_and_again, decomposition_table=inductor.decompositions(),
                     tracing_mode="fake")(torch.randn(8, 64))
    peaks = []
    for scope in (contextlib.nullcontext, kernels.as_memopt_wants):
        with mock.patch.object(compat_inductor, "as_memopt_wants", scope), \
                inductor_config.patch(force_disable_caches=True):
            _, source = compat_inductor.compile_graph(copy.deepcopy(module))
            with dry_run.FakeTensorMode(), dry_run.AllocationWatch(
                    (), lambda *_: 0) as watch:
                dry_run.dry_call(source)([torch.empty(8, 64)])
        peaks.append(watch.peak_bytes)
    assert peaks[1] < 0.7 * peaks[0]


def test_caches_on_disk_know_the_processor(monkeypatch):
    tags = set()
    for width in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", width.lower)
        tags.add(kernels.cache_tag())
    assert len(tags) == 2


def test_caches_on_disk_know_the_version_of_what_changes_inductor():
    before = torch.compiler.config.cache_key_tag
    with kernels.as_memopt_wants():
        assert torch.compiler.config.cache_key_tag.startswith(before)
        assert kernels.cache_tag() in torch.compiler.config.cache_key_tag
    assert torch.compiler.config.cache_key_tag == before


@torch.library.custom_op("memopt_tests::write", mutates_args=("into",))
def write(into: list[Tensor]) -> None:
    for each in into:
        each.fill_(-1)


def test_what_reads_an_input_is_computed_before_an_operator_writes_to_it():
    """As a parameter is decoded for backward, then updated where it is, and then the product is taken."""
    def product(parameter: Tensor, x: Tensor) -> tuple[Tensor]:
        decoded = (parameter * 2).view(8, 8)
        write([parameter])
        return (x @ decoded,)

    given = torch.randn(64), torch.randn(4, 8)
    expected, = product(given[0].clone(), given[1])
    with inductor_config.patch(force_disable_caches=True):
        made, _ = compat_inductor.compile_graph(make_fx(product, tracing_mode="fake")(*given))
    (got,) = made(list(given))
    torch.testing.assert_close(got, expected)
    assert bool((given[0] == -1).all())


def test_a_loop_may_write_over_what_a_fused_one_has_made():
    """The gradient of a norm over several dims, and the update of its input, in one loop over the batch."""
    def update(gradient: Tensor, x: Tensor, scale: Tensor, moment: Tensor) -> tuple[()]:
        through = (gradient * x).sum((1, 2, 3), True)
        total = gradient * scale + (through * scale).expand(4, 2, 2, 5) * x
        new = moment + (total - moment) * 0.1
        moment.copy_(new)
        x.copy_(x * 0.9 - new)
        return ()

    torch.manual_seed(0)
    given = [torch.tensor(1.0), torch.randn(4, 2, 2, 5), torch.rand(4, 1, 1, 1), torch.randn(4, 2, 2, 5)]
    expected = [t.clone() for t in given]
    update(*expected)
    module = make_fx(update, tracing_mode="fake")(*given)
    made, _ = compat_inductor.compile_graph(module)
    made(list(given))
    torch.testing.assert_close(given, expected)


def test_an_update_is_not_put_off():
    """What a loop keeps in registers is no reason to hold the gradients of three parameters until the end."""
    def update(*given: Tensor) -> tuple[()]:
        for x, weight, gradient, first, second in zip(*[iter(given)] * 5):
            new = torch.ops.aten.convolution_backward(
                gradient, x, weight, [5], [1], [0], [1], True, [0], 1, [False, True, False])[1]
            mean, square = first + 0.1 * (new - first), second * 0.9 + 0.1 * new * new
            first.copy_(mean)
            second.copy_(square)
            weight.copy_(weight - mean / (square.sqrt() + 1e-8))
        return ()

    sizes = [(2, 4, 3), (4, 5, 3), (2, 5, 5), (4, 5, 3), (4, 5, 3)] * 3
    module = make_fx(update, tracing_mode="fake")(*map(torch.rand, sizes))
    _, source = compat_inductor.compile_graph(module)
    calls = re.findall(r"= torch.ops.aten.convolution_backward|cpp_fused\w*(?=\()", source[source.index("def call("):])
    assert [call[:3] for call in calls] == ["= t", "cpp"] * 3


def test_a_loop_may_write_over_what_an_update_waits_for():
    """The matrix product reads the weight, and so has to come before its update: that is no use of the product."""
    def step(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        result = torch.mm(x, weight).tanh()
        weight.copy_(weight * 0.9)
        return (result,)

    x, weight = torch.rand(6, 8), torch.rand(8, 8)
    run_step, source = compat_inductor.compile_graph(make_fx(step, tracing_mode="fake")(x, weight))
    assert source.count("= empty_strided_cpu(") == 1
    (expected,) = step(x, updated := weight.clone())
    torch.testing.assert_close(run_step([x, weight])[0], expected)
    torch.testing.assert_close(weight, updated)


def test_what_is_written_over_its_operand_hides_no_peak():
    """Counted twice, the hyperbolic tangent would need more than all that comes after it in any order."""
    def step(*args: Tensor) -> tuple[()]:
        x, first, second, third, narrow = args
        hidden = torch.mm(x, first).tanh()
        gradient = torch.mm(hidden.permute(1, 0), x)
        third.copy_(third - torch.mm(torch.mm(hidden, narrow).permute(1, 0), x))
        second.copy_(second - gradient)
        return ()

    given = [torch.rand(n, m) for n, m in ((64, 16), (16, 64), (64, 16), (16, 16), (64, 16))]
    run_step, source = compat_inductor.compile_graph(make_fx(step, tracing_mode="fake")(*given))
    calls = re.findall(r"extern_kernels\.mm|cpp_fused_\w*(?=\()", source[source.index("def call("):])
    assert [call[:3] for call in calls] == ["ext", "cpp", "ext", "cpp", "ext", "ext", "cpp"]
    step(*(expected := [value.clone() for value in given]))
    run_step(list(given))
    torch.testing.assert_close(given, expected)


def test_weight_decay_takes_no_second_gradient():
    """It is added to the gradient in the loop of the update, where `addmm` would need it as a tensor."""
    def update(x: Tensor, gradient: Tensor, weight: Tensor) -> tuple[()]:
        weight.copy_(weight - 0.5 * torch.add(torch.mm(x.permute(1, 0), gradient), weight, alpha=0.1))
        return ()

    given = [torch.rand(6, 8), torch.rand(6, 5), torch.rand(8, 5)]
    run_step, source = compat_inductor.compile_graph(make_fx(update, tracing_mode="fake")(*given))
    assert source.count("= empty_strided_cpu(") == 1
    update(*(expected := [value.clone() for value in given]))
    run_step(list(given))
    torch.testing.assert_close(given, expected)


def gradient_of_softmax(y: Tensor) -> Tensor:
    return y.sgn() * y - y * (y.sgn() * y).sum(-1, keepdim=True)


def test_loops_that_take_turns_are_not_joined():
    """Forward and backward of one softmax, with what only forward reads: it is dead when the gradient comes."""
    def softmax(x: Tensor, weight: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        y = (x @ weight).softmax(-1)
        gradient = gradient_of_softmax(y)
        return (y * other).sum(), x.t() @ gradient, gradient.sum(0)

    given = torch.randn(64, 32), torch.randn(32, 48), torch.randn(64, 48)
    without, with_rule = peaks_by_rule("_freed_before_needed", softmax, *given)
    assert without - with_rule > 0.5 * 64 * 48 * 4


def test_a_loop_is_not_joined_with_a_later_one_that_reads_its_result():
    """Another loop of the softmax's result lies between them."""
    def softmax(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = (x @ weight).softmax(-1)
        return y.abs().pow(2).sum(), x.t() @ gradient_of_softmax(y)

    with mock.patch.object(kernels, "_freed_before_needed", contextlib.nullcontext):
        without, with_rule = peaks_by_rule("_made_when_needed", softmax, torch.randn(64, 32), torch.randn(32, 48))
    assert with_rule < 0.8 * without


def test_a_product_is_not_made_sooner_for_a_loop_with_another_operand_in_common():
    """An attention's chances, what dropout makes of them for one gradient, and the other gradient: all three would be there."""
    def attention(q: Tensor, k: Tensor, kept: Tensor, v: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        chances = (q @ k).softmax(-1)
        of_v = (chances * kept).t() @ dy
        gradient = (dy @ v) * kept
        return of_v.sin(), (chances * (gradient - (gradient * chances).sum(-1, keepdim=True))) @ q

    given = (torch.randn(size) for size in ((96, 4), (4, 96), (96, 96), (4, 96), (96, 4)))
    _, with_rule = peaks_by_rule("_made_when_needed", attention, *given)
    assert with_rule < 3.3 * 96 * 96 * 4


def test_what_is_computed_again_is_not_made_in_forward():
    """It reads what forward's loop reads, is needed two matrix products later, and is as large as its operand."""
    def step(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.mm(x, first)
        wide = torch.mm(hidden.tanh(), second)
        gradient = torch.mm(wide.abs(), second.permute(1, 0)).permute(1, 0)
        return torch.mm(gradient, hidden.sin()), torch.mm(gradient, hidden)

    given = (torch.randn(size, dtype=torch.float64) for size in ((64, 32), (32, 48), (48, 96)))
    without, with_rule = peaks_by_rule("_made_when_needed", step, *given)
    assert without - with_rule == 64 * 48 * 8


def test_what_the_inputs_tell_is_made_for_its_reader(monkeypatch):
    """The cast of a weight that is read last, which an order of Inductor's may have first.

    (Inputs named so are the caller's.)
    """
    reorder = memory.reorder_for_peak_memory

    def casts_first(nodes: list, *given: Any, **methods: Any) -> list:
        order = reorder(nodes, *given, **methods)
        return order if methods else sorted(order, key=lambda node: bool(node.mpi_node.pred_nodes))

    def step(arg0: Tensor, arg1: Tensor, arg2: Tensor) -> tuple[Tensor]:
        chances = (arg0 @ arg1.double()).softmax(-1)
        return ((chances - chances.square()) @ arg2.double(),)

    monkeypatch.setattr(memory, "reorder_for_peak_memory", casts_first)
    given = torch.randn(64, 32, dtype=torch.float64), torch.randn(32, 96), torch.randn(96, 16)
    without, with_rule = peaks_by_rule("_past_peaks", step, *given)
    assert without - with_rule == 96 * 16 * (8 - 4)  # the weight itself goes with its cast here


def test_peak_of_branches_and_loops_is_predicted():
    def step(x: Tensor) -> tuple[Tensor]:
        y, = torch.cond(x.sum() > 0, lambda x: (x @ x,), lambda x: (x.sin() @ x.cos(),), (x,))
        _, z = torch.ops.higher_order.while_loop(
            lambda i, z: i < 3, lambda i, z: (i + 1, (z @ z).tanh()), (torch.zeros((), dtype=torch.int64), y), ())
        return (z + 1,)

    x = torch.randn(64, 64)
    module = make_fx(step, decomposition_table=inductor.decompositions(), tracing_mode="fake")(x)
    with inductor_config.patch(force_disable_caches=True):
        made, source = compat_inductor.compile_graph(module)
    assert dry_run.branches(source) == (True, False)
    for branch, given in ((True, x.abs()), (False, -x.abs())):
        with dry_run.FakeTensorMode():
            x = torch.empty(64, 64)
            with dry_run.AllocationWatch([x], lambda *_: 0) as watch:
                dry_run.dry_call(source, branch)([x])
        assert watch.peak_bytes == memopt.measure(made, [given]).transient_peak_bytes
        torch.testing.assert_close(made([given]), step(given))


def peaks_by_rule(name: str, step: Callable, *given: Tensor) -> tuple[int, int]:
    """Peak bytes of `step` as one graph, without a rule and with it, after its numbers were compared."""
    module = make_fx(step, decomposition_table=inductor.decompositions(), tracing_mode="fake")(*given)
    peaks = []
    for rule in (contextlib.nullcontext, getattr(kernels, name)):
        with mock.patch.object(kernels, name, rule), inductor_config.patch(force_disable_caches=True):
            made, source = compat_inductor.compile_graph(copy.deepcopy(module))
        with dry_run.FakeTensorMode(), dry_run.AllocationWatch((), lambda *_: 0) as watch:
            dry_run.dry_call(source)([torch.empty(value.shape, dtype=value.dtype) for value in given])
        peaks.append(watch.peak_bytes)
        torch.testing.assert_close(tuple(made(list(given))), step(*given))
    return tuple(peaks)
