import pytest
import torch
from graphs import by_hand, captured, check, gradient, mlp, seed, training_step, values_for
from torch.nn import functional as F

from memopt_compile.backends import eager
from memopt_compile.liveness import timeline
from memopt_compile.measure import measure
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.release_gradients import ReleaseGradients
from memopt_compile.passes.reuse_buffers import POINTWISE, ReuseBuffers
from memopt_compile.step_graph import Phase

STORY = Canonicalize(), ReleaseGradients(), ReuseBuffers()


def doubles(*shape):
    return torch.rand(shape, dtype=torch.float64)


def test_golden():
    def update(p, m, x):
        gradient = torch.mm(x.t(), x)
        new_m = m * 0.9 + gradient
        denominator = torch.sqrt(torch.abs(new_m)) + 1e-8
        new_p = p - new_m / denominator
        m.copy_(new_m)
        p.copy_(new_p)
        return gradient

    step = by_hand(update, ("p", doubles(4, 4)), ("s", doubles(4, 4)), ("x", doubles(2, 4)))
    assert check(step, ReuseBuffers()) == (512, 256)
    assert (
        step.text()
        == """\
p0: f64[4, 4]  # parameter trained
s0: f64[4, 4]  # state
x0: f64[2, 4]  # batch
forward:
  t_0: f64[4, 2] = t(x0)
  mm_0: f64[4, 4] = mm(t_0, x0)
  mul_0: f64[4, 4] = mul_(s0, 0.9)
  add_0: f64[4, 4] = add_(mul_0, mm_0)
  abs_0: f64[4, 4] = abs(add_0)
  sqrt_0: f64[4, 4] = sqrt_(abs_0)
  add_1: f64[4, 4] = add_(sqrt_0, 1e-08)
  div_0: f64[4, 4] = div.out(add_0, add_1, out=add_1)
  sub_0: f64[4, 4] = sub_(p0, div_0)
return mm_0
"""
    )


SETTINGS = [
    {},
    {"clip": 0.1},
    {"keep_gradients": True},
    {"micro_batches": 2},
    {"optimizer": torch.optim.SGD, "momentum": 0.9},
    {"optimizer": torch.optim.SGD},
    {"optimizer": torch.optim.Adam, "amsgrad": True},
    {"optimizer": torch.optim.RMSprop},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.table(4)
def test_no_more_bytes_than_eager(settings):
    step = training_step(mlp(2), **settings)
    check(step, *STORY)
    values = values_for(step)
    inputs = [v.clone() for v in values]
    ours = measure(eager.lower(step), inputs, resident=()).transient_peak_bytes
    assert ours <= timeline(step).transient_peak_bytes
    assert ours <= eager_peak(**settings)
    counts = step.op_counts()
    assert counts.get("copy_", 0) <= 1, "state is updated in place"


def eager_peak(
    optimizer=torch.optim.AdamW, clip=None, micro_batches=1, keep_gradients=False, **settings
):
    model = mlp(2)
    opt = optimizer(model.parameters(), lr=0.1, **settings)
    x, y = torch.randn(4, 32, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)

    def step():
        for xs, ys in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            F.cross_entropy(model(xs), ys).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()

    step()
    opt.zero_grad()
    return measure(step, resident=(model, opt)).transient_peak_bytes


@pytest.mark.parametrize(
    "body",
    [
        lambda x, a: torch.relu(a) + a,  # read again
        lambda x, a: a + a.t(),  # another geometry of the same storage
        lambda x, a: (a, torch.relu(a)),  # returned
        lambda x, a: torch.relu(a) + a.t().contiguous(),  # read through a view
        lambda x, a: torch.relu(x),  # an input that nothing overwrites
        lambda x, a: (x[0] * 2).expand(2, 2) + a[:1],  # broadcast
        lambda x, a: torch.gt(a, x),  # another dtype
    ],
    ids=["read", "turned", "returned", "view", "input", "broadcast", "dtype"],
)
def test_values_that_are_still_needed_stay(body):
    check(by_hand(lambda x: body(x, x * 2), ("x", doubles(2, 2))), ReuseBuffers())


def test_a_parameter_read_after_its_new_value_is_computed():
    def update(p, x):
        new = p * 0.9
        loss = torch.mm(x, p.t()).sum()
        p.copy_(new)
        return loss

    step = by_hand(update, ("p", doubles(2, 2)), ("x", doubles(2, 2)))
    check(step, ReuseBuffers())
    assert step.op_counts()["copy_"] == 1


def test_an_accumulated_gradient_is_read_and_returned_after_its_write():
    def accumulate(g, p, x):
        total = g + x
        written = g.copy_(total)
        p.copy_(p - total)
        return written

    step = by_hand(accumulate, ("g", doubles(2)), ("p", doubles(2)), ("x", doubles(2)))
    values = values_for(step)
    expected = [v.clone() for v in values]
    eager.lower(step)(list(expected))
    ReuseBuffers().run(step)
    step.verify()
    assert step.op_counts() == {"add_": 1, "sub_": 1}
    (returned,) = eager.lower(step)(list(values))
    assert all(torch.equal(a, b) for a, b in zip(expected, values, strict=True))
    assert returned is values[0]


def test_a_broken_chain_and_a_swap():
    def update(p, q, x):
        scratch = p * 0.9
        turned = torch.mm(scratch, x)
        new_q = p.new_ones(2, 2) * 2 + q
        p.copy_(turned)
        q.copy_(new_q)
        return x.sum()

    check(
        by_hand(update, ("p", doubles(2, 2)), ("p", doubles(2, 2)), ("x", doubles(2, 2))),
        ReuseBuffers(),
    )

    def swap(p, q):
        a, b = p * 2, q * 2
        p.copy_(b)
        q.copy_(a)
        return a.sum()

    check(by_hand(swap, ("p", doubles(2, 2)), ("p", doubles(2, 2))), ReuseBuffers())


def test_a_new_parameter_that_is_also_returned_keeps_its_own_storage():
    def update(p, x):
        new = p - x
        p.copy_(new)
        return new

    step = by_hand(update, ("p", doubles(2, 2)), ("x", doubles(2, 2)))
    check(step, ReuseBuffers())
    assert step.op_counts() == {"sub": 1, "copy_": 1}


@pytest.mark.parametrize("name", sorted(POINTWISE))
def test_every_listed_operator_writes_the_same_numbers(name):
    """Each form of each operator, with its first operand dead."""
    cases = {
        "addcdiv": lambda f, a, b: f(a, b, b + 1),
        "addcmul": lambda f, a, b: f(a, b, b),
        "clamp": lambda f, a, b: f(a, 0.2, 0.6),
        "clamp_max": lambda f, a, b: f(a, 0.5),
        "clamp_min": lambda f, a, b: f(a, 0.5),
        "hardtanh": lambda f, a, b: f(a, -0.5, 0.5),
        "lerp": lambda f, a, b: f(a, b, 0.3),
        "leaky_relu": lambda f, a, b: f(a, 0.1),
        "pow": lambda f, a, b: f(a, 2.5),
        "threshold_backward": lambda f, a, b: f(a, b, 0.5),
        "where": lambda f, a, b: f(b > 0.5, a, b),
        "gelu_backward": lambda f, a, b: f(a, b),
    }
    packet = getattr(torch.ops.aten, name)

    def body(x, y):
        a = x + 0
        if name in cases:
            return cases[name](packet, a, y)
        try:
            return packet(a, y)
        except RuntimeError:
            return packet(a)

    step = by_hand(body, ("x", doubles(4, 4)), ("x", doubles(4, 4)))
    before = len(list(step.computing()))
    check(step, ReuseBuffers())
    assert len(list(step.computing())) == before
    last = list(step.computing())[-1]
    assert last.target._schema.is_mutable, f"{name} found no form that writes into its operand"


def test_nothing_to_do():
    step = by_hand(lambda x: torch.mm(x, x), ("x", doubles(2, 2)))
    text = step.text()
    check(step, ReuseBuffers())
    assert step.text() == text


def test_of_gradients_but_not_half_of_two_updates():
    """The first is part of the next forward, and could not move into the parameter behind the second."""
    def twice(p, x):
        now = p
        for _ in range(2):
            now = now - gradient(torch.mm(x.t(), seed(torch.mm(x, now)) * 3)) * 0.1
        p.copy_(now)

    step = by_hand(twice, ("p", doubles(4, 4)), ("x", doubles(2, 4)))
    check(step, Canonicalize())
    before = step.text()
    check(step, ReuseBuffers(of_gradients=True))
    assert step.text() == before
    check(step, ReuseBuffers())
    assert step.text().count(" sub_(") == 2


def test_of_gradients():
    """They are added up, and states are written, where they are; the rest is left as it is."""
    def update(p, m, x):
        loss = torch.exp(torch.mm(x, p) * 2)
        there = seed(loss) * loss
        total = gradient(torch.mm(x.t(), there) + torch.mm(x.t(), there * 3))
        new_m = m * 0.9 + total
        m.copy_(new_m)
        p.copy_(p - new_m)

    step = by_hand(update, ("p", doubles(4, 4)), ("s", doubles(4, 4)), ("x", doubles(2, 4)))
    check(step, Canonicalize(), ReuseBuffers(of_gradients=True))
    assert step.text() == """\
p0: f64[4, 4]  # parameter trained
s0: f64[4, 4]  # state
x0: f64[2, 4]  # batch
forward:
  mm_0: f64[2, 4] = mm(x0, p0)
  mul_0: f64[2, 4] = mul(mm_0, 2)
  exp_0: f64[2, 4] = exp(mul_0)
backward:
  t_0: f64[4, 2] = t(x0)
  mm_1: f64[4, 4] = mm(t_0, exp_0)
  mul_1: f64[2, 4] = mul(exp_0, 3)
  mm_2: f64[4, 4] = mm(t_0, mul_1)
  add_0: f64[4, 4] = add_(mm_1, mm_2)
update:
  mul_2: f64[4, 4] = mul_(s0, 0.9)
  add_1: f64[4, 4] = add_(mul_2, add_0)
  sub_0: f64[4, 4] = sub_(p0, add_1)
return None
"""


def test_of_backward():
    """Operators of backward write into what backward made. What forward made stays, and what it reads behind backward."""
    def update(p, x):
        hidden = torch.exp(torch.mm(x, p) * 2)
        twice = seed(hidden) * hidden * 3 * 2
        there = twice * hidden
        return gradient(torch.cos(torch.addmm(torch.mm(x.t(), there), x.t(), hidden))), torch.neg(torch.neg(twice))

    step = by_hand(update, ("p", doubles(4, 4)), ("x", doubles(2, 4)))
    for node in step.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default):
        step.phases[node] = Phase.FORWARD
    check(step, ReuseBuffers(of_backward=True))
    assert step.text() == """\
p0: f64[4, 4]  # parameter trained
x0: f64[2, 4]  # batch
forward:
  mm_0: f64[2, 4] = mm(x0, p0)
  mul_0: f64[2, 4] = mul(mm_0, 2)
  exp_0: f64[2, 4] = exp(mul_0)
backward:
  full_0: f64[2, 4] = full([2, 4], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  mul_1: f64[2, 4] = mul_(full_0, exp_0)
  mul_2: f64[2, 4] = mul_(mul_1, 3)
  mul_3: f64[2, 4] = mul_(mul_2, 2)
  mul_4: f64[2, 4] = mul(mul_3, exp_0)
  t_0: f64[4, 2] = t(x0)
  mm_1: f64[4, 4] = mm(t_0, mul_4)
  t_1: f64[4, 2] = t(x0)
  addmm_0: f64[4, 4] = addmm_(mm_1, t_1, exp_0)
  cos_0: f64[4, 4] = cos_(addmm_0)
forward:
  neg_0: f64[2, 4] = neg(mul_3)
  neg_1: f64[2, 4] = neg(neg_0)
return cos_0, neg_1
"""


def test_a_piece_that_is_still_needed_keeps_the_whole():
    def fused(x):
        whole = x * 2
        a, b = whole.chunk(2)
        return torch.relu(whole).sum() + a.sum() + b.sum()

    check(by_hand(fused, ("x", doubles(2, 2) - 0.5)), Canonicalize(), ReuseBuffers())


def test_what_is_written_into_moves_to_another_buffer():
    def body(x, y):
        moved = x + y
        return (moved / y).mul_(2).sum()

    step = by_hand(body, ("x", doubles(4, 4)), ("x", doubles(4, 4)))
    check(step, ReuseBuffers())
    assert "div_0: f64[4, 4] = div_(add_0, x1)" in step.text()


def test_hidden_views_are_refused():
    step = by_hand(lambda x: torch.split(x + 1, 1)[0] + 1, ("x", doubles(2, 2)))
    assert "split" in ReuseBuffers().requires(step)


def test_a_product_is_added_where_the_sum_is():
    def sums(p, q, x):
        total = torch.mm(x.t(), x)
        own = torch.addmm(total, x.t(), p)  # in the place of total
        both = torch.addmm(own, own, q)  # reads what it would write
        return torch.addmm(p[0], x, q), torch.cos(both)  # adds the same row to all

    step = by_hand(sums, ("p", doubles(8, 4)), ("p", doubles(4, 4)), ("x", doubles(8, 4)))
    check(step, ReuseBuffers())
    names = [str(n.target) for n in step.computing() if "addmm" in str(n.target)]
    assert names == ["aten.addmm_.default", "aten.addmm.default", "aten.addmm.default"]


def test_a_copy_in_another_layout_is_made_where_it_is_to_be():
    """As autograd makes the gradient of a transposed weight."""
    def body(p, x):
        return torch.ops.aten.copy(torch.empty_like(p), x * 2) + 1

    step = by_hand(body, ("p", doubles(4, 3).t()), ("x", doubles(3, 4)))
    assert check(step, ReuseBuffers()) == (288, 192)
    assert "copy_(empty_like_0, mul_0)" in step.text()


WRITTEN = {
    "index_add": lambda total, rows, x: total.index_add(0, rows, x),
    "index_copy": lambda total, rows, x: total.index_copy(0, rows, x),
    "index_fill": lambda total, rows, x: total.index_fill(0, rows, 2.0),
    "index_put": lambda total, rows, x: total.index_put((rows,), x, accumulate=True),
    "masked_scatter": lambda total, rows, x: total.masked_scatter(total > 0, x),
    "scatter": lambda total, rows, x: total.scatter(0, rows[:, None].expand_as(x), x),
    "scatter_add": lambda total, rows, x: total.scatter_add(0, rows[:, None].expand_as(x), x),
    "scatter_reduce": lambda total, rows, x: total.scatter_reduce(0, rows[:, None].expand_as(x), x, "amax"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_rows_are_written_where_the_others_are(name):
    """Unless what is written lives there too, or the old values are read again."""
    write = WRITTEN[name]

    def body(x, rows):
        sums = write(x * 2, rows, x)
        total = sums + 1
        return sums.exp(), write(total, rows, total if name != "masked_scatter" else total[:]), write(x, rows, x)

    step = by_hand(body, ("x", doubles(4, 3)), ("x", torch.tensor([2, 0, 3, 1])))
    check(step, ReuseBuffers())
    names = [str(n.target).split(".")[1] for n in step.computing() if name in str(n.target)]
    own = name in ("index_fill",)  # which has no other operand
    assert names == [f"{name}_", f"{name}_" if own else name, name]


def test_gradients_of_a_weight_that_is_used_twice_are_added_up_where_the_first_is():
    """Results of one operator (`convolution_backward`) have storages of their own."""
    weight = torch.nn.Parameter(doubles(3, 3, 3, 3))

    def step(x):
        loss = F.conv2d(F.conv2d(x, weight), weight).square().mean()
        loss.backward()
        return loss.detach()

    graph = captured(step, doubles(2, 3, 8, 8))
    check(graph, *STORY)
    (added,) = [n for n in graph.computing() if str(n.target).startswith("aten.add")]
    assert added.target is torch.ops.aten.add_.Tensor and "getitem" in str(added.args[0])
