"""States of 8 and 4 bits: the formats, and optimizers that keep their moments in them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loops import plain
from test_capture import in_one_graph
from training import difference, give_gradients, parameters, states, train

from memopt_compile import optim, report
from memopt_compile.errors import OptimizerError
from memopt_compile.lowering import slab_kernels
from memopt_compile.measure import measure
from memopt_compile.optim import slabs
from memopt_compile.quantization import arithmetic, tables
from memopt_compile.quantization.formats import decode, encode
from memopt_compile.quantization.named import moment
from memopt_compile.quantization.rounding import Rounded

MAPS = {key: moment(*key) for key in itertools.product((8, 4), (True, False))}  # test_factored has the others
forms = pytest.mark.parametrize("key", MAPS, ids=str)
BIG, SMALL = (80, 60), (7,)
MAKERS = {
    "SGD": lambda p, **kw: optim.SGD(p, lr=0.1, momentum=0.9, **kw),
    "Adam": lambda p, **kw: optim.Adam(p, lr=0.02, amsgrad=True, **kw),
    "AdamW": lambda p, **kw: optim.AdamW(p, lr=0.02, **kw),
    "AdamA": lambda p, **kw: optim.AdamA(p, lr=0.02, **kw),
    "CAME": lambda p, **kw: optim.CAME(p, lr=0.02, **kw),
}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
bits = pytest.mark.parametrize("bits", [16, 8, 4, 1])


def values(shape, signed=True, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x if signed else x.square()


def kept(x, form):
    return decode(*encode(x, form), form, x.numel(), x.dtype).view(x.shape)


def test_maps_are_those_of_others():
    """Of bitsandbytes and torchao: 256 or 16 ascending points, of known ends."""
    for (width, signed), form in MAPS.items():
        assert len(form.points) == 2**width and list(form.points) == sorted(set(form.points))
        assert form.points[-1] == 1 and (form.points[0] < 0) == signed
    assert MAPS[8, True].points[0] == pytest.approx(-0.99297, abs=1e-5)
    assert MAPS[4, True].points[8:12] == pytest.approx([0.0055, 0.0325, 0.0775, 0.2125])
    assert [0 in form.points for form in MAPS.values()] == [True, False, True, False]


@forms
@given(shape=st.lists(st.integers(0, 30), min_size=1, max_size=3).map(tuple),
       seed=st.integers(0, 99), scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e9]))
def test_every_element_is_its_nearest_point(key, shape, seed, scale):
    form, x = MAPS[key], values(shape, key[1], seed) * scale
    codes, scales = encode(x, form)
    assert (codes.numel(), scales.numel()) == form.sizes(x.numel())
    flat, got = x.view(-1), kept(x, form).view(-1)
    points = torch.tensor(form.points, dtype=x.dtype)
    for i in range(0, x.numel(), form.block):
        block, largest = flat[i:i + form.block], scales[i // form.block].double()
        assert largest.abs() == block.abs().max().float().double()
        nearest = (block[:, None] - largest * points).abs().min(1).values
        assert ((got[i:i + form.block] - block).abs() <= nearest + 1e-6 * largest.abs()).all()


@forms
@given(seed=st.integers(0, 999), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_encoding_again_changes_nothing(key, seed, dtype):
    form, x = MAPS[key], values((7, 61), key[1], seed).to(dtype)
    codes, scales = encode(x, form)
    again = encode(kept(x, form), form)
    assert torch.equal(codes, again[0]) and torch.equal(scales, again[1])


def shares_near_boundaries(key, seed, power):
    """Float32 shares: random ones, and the middles of neighbouring points with floats around."""
    points = torch.tensor(MAPS[key].points, dtype=torch.float64)
    ends = (points[1:] + points[:-1]) / 2
    x = torch.rand(2000, generator=torch.Generator().manual_seed(seed)) ** power
    near = ends.float()
    x = torch.cat([x, near, near.nextafter(near + 1), near.nextafter(near - 1)]).clamp(-1, 1)
    return (torch.cat([x, -x]) if key[1] else x.clamp(min=0)), points, ends


@forms
@given(seed=st.integers(0, 99), power=st.floats(0.1, 30))
def test_table_gives_the_codes_of_the_arithmetic(key, seed, power):
    """So eager and captured steps store the same."""
    x, _, _ = shares_near_boundaries(key, seed, power)
    assert torch.equal(tables.codes(x, MAPS[key]), arithmetic.codes(x, MAPS[key]))


@forms
def test_table_changes_code_where_the_arithmetic_does(key):
    """The last float of each code and the first of the next, found by bisection, are the table's."""
    form, low = MAPS[key], torch.zeros(2**key[0] - 1, dtype=torch.int64)
    codes, high = torch.arange(2**key[0] - 1), torch.full_like(low, 2**31)

    def ordered(number):  # ascending in the floats of [−1, 1], or of [0, 1]
        bits = (number - 2**30).to(torch.int32) if key[1] else (number // 2).to(torch.int32)
        bits = torch.where(bits < 0, ~bits | -(2**31), bits)
        return bits.view(torch.float32).clamp(-1 if key[1] else 0, 1)

    for _ in range(33):
        middle = (low + high) // 2
        above = arithmetic.codes(ordered(middle), form) > codes
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    for x in (ordered(low), ordered(high)):
        assert torch.equal(tables.codes(x, form), arithmetic.codes(x, form))


@forms
@given(seed=st.integers(0, 99), power=st.floats(0.1, 30))
def test_arithmetic_gives_the_codes_of_a_search(key, seed, power):
    """But for elements so near to the middle of two points that either is as good."""
    x, points, ends = shares_near_boundaries(key, seed, power)
    got, wanted = arithmetic.codes(x, MAPS[key]).long(), torch.bucketize(x.double(), ends)
    lower = torch.minimum(got, wanted).clamp(max=len(ends) - 1)
    near = (x.double() - ends[lower]).abs() <= 2**-14 * (points[lower + 1] - points[lower])
    assert ((got == wanted) | (near & ((got - wanted).abs() == 1))).all()


@forms
def test_arithmetic_has_the_points_of_the_map(key):
    """All codes to a few units in the last place, the largest point and 0 exactly."""
    form = MAPS[key]
    codes = torch.arange(2**form.bits, dtype=torch.uint8)
    rows = codes.view(-1, 256) if form.bits == 8 else torch.arange(256, dtype=torch.uint8).view(4, 64)
    for dtype, error in ((torch.float32, 5e-7), (torch.float64, 2e-15)):
        points, got = torch.tensor(form.points, dtype=dtype), arithmetic.of_numbers(codes, form, dtype)
        assert torch.equal(tables.points(rows, form, dtype), arithmetic.points(rows, form, dtype))
        assert got[-1] == 1
        assert ((got - points).abs() <= error * points.abs()).all()
        assert torch.equal(arithmetic.codes(got.float(), form), codes)


@forms
def test_zeros_stay_zeros(key):
    assert not kept(torch.zeros(300), MAPS[key]).any()


@pytest.mark.parametrize(("key", "largest"), [((8, True), 0.012), ((8, False), 0.007),
                                              ((4, True), 0.20), ((4, False), 0.20)])
def test_error_of_a_normal_tensor(key, largest):
    x = values((1 << 16,), key[1])
    assert float((kept(x, MAPS[key]) - x).norm() / x.norm()) <= largest


@every
@bits
@torch.no_grad()
def test_state_is_small_and_close(make, bits):
    full, _ = train(make, shapes=[BIG, SMALL], dtype=torch.float32)
    ps, opt = train(lambda p: make(p, state_bits=bits), shapes=[BIG, SMALL], dtype=torch.float32)
    moved = full[0] - parameters([BIG], torch.float32)[0]
    assert float((ps[0] - full[0]).norm() / moved.norm()) <= {16: 0.01, 8: 0.05, 4: 0.6, 1: 1.2}[bits]
    assert difference(ps[1:], full[1:]) == 0  # too small to be encoded
    size = sum(v.nbytes for k, v in opt.state[ps[0]].items() if "sq_" not in k and "res" not in k)
    wide = [32 if bits == 16 and not opt.moments[k] else bits
            for k in opt.state[ps[0]] if k in opt.moments]
    assert size <= ps[0].numel() * sum(wide) / 8 * {16: 1, 1: 2.8}.get(bits, 1.08) + 4


@every
@bits
def test_goes_on_bit_by_bit(make, bits):
    dtype, rounding = (torch.float32, 1e-5) if bits == 1 else (torch.bfloat16, 0)
    ps, old = train(lambda p: make(p, state_bits=bits), shapes=[BIG, SMALL], dtype=dtype)
    copies = copy.deepcopy(ps)
    new = make(copies, state_bits=bits)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    train(lambda _: old, 3, ps=ps)
    train(lambda _: new, 3, ps=copies)
    assert difference(ps, copies) <= rounding and difference(states(old), states(new)) <= rounding


@every
@pytest.mark.parametrize(("saved", "loaded"), [(8, 32), (32, 8), (8, 4), (16, 32), (32, 16), (8, 16), (8, 1)])
def test_checkpoint_is_of_any_format(make, saved, loaded):
    ps, old = train(lambda p: make(p, state_bits=saved), shapes=[BIG, SMALL])
    checkpoint = copy.deepcopy(old.state_dict())
    new = make(copy.deepcopy(ps), state_bits=loaded)
    new.load_state_dict(checkpoint)
    assert new.param_groups[0]["state_bits"] == loaded
    for index, p in enumerate(new.param_groups[0]["params"]):
        names = new.state_dict()["state"][index].keys()
        assert names - checkpoint["state"][index].keys() <= {"step"}  # what 16 bits need
        for name, value in checkpoint["state"][index].items():
            got = new.state_dict()["state"][index][name]
            form = new.formats(p, new.param_groups[0]).get(name)
            if isinstance(form, Rounded):
                assert torch.equal(got, value.bfloat16().to(got.dtype))
            else:
                assert torch.equal(got, kept(value, form) if form else value)


def test_checkpoint_for_torch():
    ps, ours = train(lambda p: optim.AdamW(p, state_bits=8), shapes=[BIG])
    theirs = torch.optim.AdamW(ps, foreach=False)
    theirs.load_state_dict(ours.state_dict())
    give_gradients(ps, 0)
    theirs.step()
    assert ps[0].isfinite().all()


@every
@bits
@pytest.mark.parametrize("shape", [(128, 64), (5000,), (40, 16, 4, 4), (256, 96)])
def test_slabs_change_nothing_but_rounding(make, bits, shape, monkeypatch):
    """One bit of rounding may choose the other of two neighbouring codes."""
    whole, one = train(lambda p: make(p, state_bits=bits), 3, shapes=[shape])
    monkeypatch.setattr(slabs, "ELEMENTS", 600)
    parts, other = train(lambda p: make(p, state_bits=bits), 3, shapes=[shape])
    assert difference(whole, parts) <= (1e-9 if make is not MAKERS["CAME"] else 1e-2)
    assert len(other.slabs(parts[0], other.param_groups[0])) > 1
    assert [s.shape for s in states(one)] == [s.shape for s in states(other)]


@every
def test_temporaries(make, monkeypatch):
    monkeypatch.setattr(slabs, "ELEMENTS", 1 << 12)
    ps, opt = train(lambda p: make(p, state_bits=8), 1, shapes=[(256, 256)], dtype=torch.float32)
    give_gradients(ps, 0)
    assert measure(opt.step).transient_peak_bytes <= 16 * 4 * slabs.ELEMENTS
    assert 16 * 4 * (1 << 19) <= 32 * 2**20


@pytest.mark.parametrize(("name", "bits"), [("SGD", 4), ("AdamA", 8), ("CAME", 8), ("AdamW", 8),
                                              ("SGD", 16), ("AdamW", 16), ("CAME", 16), ("AdamA", 1), ("CAME", 1)])
@pytest.mark.table(6)
def test_captured_whole(name, bits):
    """One graph in 12 steps of a schedule, and the codes of eager.

    The optimizer's numbers around the codes are fused and so rounded otherwise, by units in the
    last place of float64. Neighbouring points are a million times the tolerance apart.
    """
    def build():
        model = torch.nn.Sequential(torch.nn.Linear(12, 400), torch.nn.GELU(),
                                    torch.nn.Linear(400, 4))
        opt = MAKERS[name](model.parameters(), state_bits=bits)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
        return plain(model, opt, after=lambda i: schedule.step())

    in_one_graph(build, tolerance=1e-13)


@pytest.mark.parametrize(("bits", "lowering"), [
    (16, "eager"), (8, "eager"), (4, "eager"), (1, "eager"),
    # Momentum in 8 bits goes through Inductor in test_low_precision.
    pytest.param(16, "inductor", marks=pytest.mark.inductor),
    pytest.param(4, "inductor", marks=pytest.mark.inductor),
    pytest.param(1, "inductor", marks=pytest.mark.inductor)])
@pytest.mark.table(6)
def test_captured_peak(lowering, bits):
    """As predicted; under Inductor the gradient beside the states and, of few bits, slabs of any size."""
    torch._dynamo.reset()
    p, grad = torch.nn.Parameter(torch.randn(512, 512)), torch.randn(512, 512)
    opt = optim.AdamW([p], lr=0.1, state_bits=bits)

    def step(grad):
        loss = (p * grad).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = torch.compile(step, backend="memopt", options={"lowering": lowering})
    for _ in range(2):
        compiled(grad)
    found = report(compiled)
    assert found.measured_peak_bytes == pytest.approx(found.predicted_peak_bytes, rel=0.01)
    if lowering == "inductor":
        # With 16 bits the gradient is fused, and torch 2.11 stores new codes before it copies them.
        most = p.nbytes * 0.55 if bits == 16 else grad.nbytes + 8 * 4 * slab_kernels.ELEMENTS
        assert found.predicted_peak_bytes - found.resident_bytes <= most


@every
@bits
def test_gradient_of_other_strides(make, bits):
    ps, qs = parameters([(80, 64)]), parameters([(80, 64)])
    a, b = make(ps, state_bits=bits), make(qs, state_bits=bits)
    for i in range(2):
        give_gradients(ps, i)
        qs[0].grad = ps[0].grad.t().contiguous().t()
        a.step()
        b.step()
    assert difference(ps, qs) <= 1e-12


@every
@bits
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_gradient_is_skipped_when_asked(make, bits, bad):
    ps, opt = train(lambda p: make(p, state_bits=bits, skip_nonfinite=True), 2, shapes=[BIG, SMALL])
    before = copy.deepcopy((ps, states(opt)))
    give_gradients(ps, 0)
    for p in ps:
        p.grad.view(-1)[3] = bad
    opt.step()
    assert difference([*ps, *states(opt)], [*before[0], *before[1]]) == 0


def test_refuses_other_widths():
    with pytest.raises(OptimizerError, match="state_bits is 12"):
        optim.AdamW(parameters(), state_bits=12)
    with pytest.raises(OptimizerError, match="rounding_seed is -1"):
        optim.AdamW(parameters(), state_bits=16, rounding_seed=-1)
