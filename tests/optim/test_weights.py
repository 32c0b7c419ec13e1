"""Parameters in bfloat16 that are updated in float32: rounded at random, or with 8 or 16 bits more."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loops import plain
from test_capture import in_one_graph
from training import difference, give_gradients, parameters, saved_and_loaded, states, train

from memopt_compile import optim
from memopt_compile.errors import OptimizerError
from memopt_compile.optim import slabs
from memopt_compile.optim.low_bit import CORRECTION, read_weight
from memopt_compile.quantization.rounding import LOW, Rounded, from_bytes, joined, split

SHAPES = [(80, 60), (9, 1000), (7,), (4, 3, 3, 3), ()]
MAKERS = {
    "SGD": lambda p, **kw: optim.SGD(p, lr=0.1, **kw),
    "SGD momentum": lambda p, **kw: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, **kw),
    "AdamW": lambda p, **kw: optim.AdamW(p, lr=0.02, amsgrad=True, **kw),
    "AdamA": lambda p, **kw: optim.AdamA(p, lr=0.02, weight_decay=0.1, **kw),
    "CAME": lambda p, **kw: optim.CAME(p, lr=0.02, weight_decay=0.1, **kw),
    "Adafactor": lambda p, **kw: optim.Adafactor(p, lr=0.02, eps=(1e-7, 1e-3), **kw),
}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
widths = pytest.mark.parametrize("bits", [16, 24, 32])
values = st.floats(-(2.0**99), 2.0**99, width=32)


def masters(opt):
    """Every parameter as the optimizer reads it; one that has no state yet as it is."""
    return [read_weight(p, opt.state[p], None, opt.weight_format(p, group)) if opt.state[p] else p
            for group in opt.param_groups for p in group["params"]]


# ------------------------------------------------------------------ the format of 24 bits


@given(value=values, seed=st.integers(0, 2**32 - 1), step=st.integers(1, 10**7))
def test_24_bits_are_a_neighbour_and_right_in_the_mean(value, seed, step):
    x = torch.full((1 << 14,), value)
    high, low = split(x, Rounded(seed, 24), step)
    got = joined(high, low)
    bits, given_bits = got.view(torch.int32), x.view(torch.int32)
    assert not (bits & 255).any() and ((bits - given_bits).abs() < 256).all()
    share, up = (int(given_bits[0]) & 255) / 256, (bits > (given_bits & ~255)).double().mean()
    assert abs(float(up) - share) <= 6 * (share * (1 - share)) ** 0.5 / 2**7 + 1e-12
    # What the model sees is the bfloat16 nearest to it, and taking apart again changes nothing.
    distance = (got.double() - high.double()).abs()
    nearest = (got.double() - got.bfloat16().double()).abs()
    assert torch.equal(distance, nearest)
    again = split(got, Rounded(seed + 1, 24), step + 1)
    assert torch.equal(again[0], high) and torch.equal(again[1], low)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=99))
def test_32_bits_are_all_of_a_float32(given_bits):
    x = torch.tensor(given_bits, dtype=torch.int32).view(torch.float32)
    high, low = split(x, Rounded(0, 32), 0)
    assert torch.equal(joined(high, low)[~x.isnan()].view(torch.int32), x[~x.isnan()].view(torch.int32))
    assert joined(high, low)[x.isnan()].isnan().all()
    tie = x.view(torch.int32) & 0xFFFF == 0x8000  # away from zero, where bfloat16() takes the even one
    assert torch.equal(high[~x.isnan() & ~tie], x.bfloat16()[~x.isnan() & ~tie])


@pytest.mark.parametrize("bits", [24, 32])
def test_what_is_no_number(bits):
    x = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0])
    assert torch.equal(joined(*split(x, Rounded(0, bits), 1)), x)
    # All bits set, as some devices make it, and a payload in bits that are dropped.
    nan = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert joined(*split(nan, Rounded(0, bits), 1)).isnan().all()


def test_a_zero_from_elsewhere_stays_a_number():
    """A parameter that the user pruned, with the correction of its former value."""
    low = torch.tensor([-128, -1, 0, 127], dtype=torch.int8)
    assert (joined(torch.zeros(4).bfloat16(), low).abs() < 1e-38).all()


# ------------------------------------------------------------------ optimizers with it


@every
@widths
def test_follows_float32(make, bits):
    """Within the rounding errors that its steps add up to; without a format it strays further."""
    start = parameters([(80, 60)], torch.bfloat16)[0].detach()
    runs = {}
    for name, dtype, given_bits in (("exact", torch.float32, None), ("ours", torch.bfloat16, bits),
                                    ("torch's", torch.bfloat16, None)):
        p = torch.nn.Parameter(start.to(dtype, copy=True))
        opt = make([p], weight_bits=given_bits)
        opt.param_groups[0]["lr"] = 1e-4
        for i in range(40):
            generator = torch.Generator().manual_seed(i)
            p.grad = (torch.randn(p.shape, generator=generator) + 1).bfloat16().to(dtype)
            opt.step()
        runs[name] = masters(opt)[0].detach().double()
    moved = (runs["exact"] - start.double()).mean()
    errors = {name: abs(float((runs[name] - runs["exact"]).mean() / moved)) for name in runs}
    assert errors["ours"] <= {16: 0.2, 24: 0.02, 32: 0}[bits] and errors["ours"] < errors["torch's"]


@every
@widths
@pytest.mark.parametrize("state_bits", [32, 16, 8])
def test_goes_on_bit_by_bit_from_a_checkpoint(make, bits, state_bits):
    def build(ps):
        return make(ps, weight_bits=bits, state_bits=state_bits, rounding_seed=5)

    ps, old = train(build, 3, shapes=SHAPES, dtype=torch.bfloat16)
    copies, new = saved_and_loaded(ps, old, lambda p: make(
        p, weight_bits=bits, state_bits=state_bits))  # the seed is of the checkpoint
    train(lambda _: old, 3, ps=ps)
    train(lambda _: new, 3, ps=copies)
    assert difference(ps, copies) == 0 == difference(states(old), states(new))
    assert {p.dtype for p in ps} == {torch.bfloat16}
    corrections = [state[CORRECTION] for state in old.state.values() if CORRECTION in state]
    assert len(corrections) == (len(ps) if bits in LOW else 0)
    assert all(c.dtype == LOW[bits] and c.any() for c in corrections if c.numel() > 100)


@every
@pytest.mark.parametrize(("saved", "loaded"), [(24, 16), (24, None), (None, 24), (16, 24), (32, 16),
                                                 (None, 32)])
def test_checkpoint_is_of_any_format(make, saved, loaded):
    ps, old = train(lambda p: make(p, weight_bits=saved), 2, shapes=SHAPES, dtype=torch.bfloat16)
    copies, new = saved_and_loaded(ps, old, lambda p: make(p, weight_bits=loaded))
    before = masters(new)
    assert difference(before, ps) == 0 and new.param_groups[0]["weight_bits"] == loaded
    train(lambda _: new, 1, ps=copies)  # (plain SGD has no state to save, and makes its own now)
    assert all((CORRECTION in state) == (loaded in LOW) for state in new.state.values())


@every
@pytest.mark.parametrize(("saved", "loaded"), [(24, 32), (32, 24)])
def test_checkpoints_of_24_and_32_bits_keep_what_both_have(make, saved, loaded):
    ps, old = train(lambda p: make(p, weight_bits=saved), 2, shapes=SHAPES, dtype=torch.bfloat16)
    _, new = saved_and_loaded(ps, old, lambda p: make(p, weight_bits=loaded))
    if not old.state_dict()["state"]:  # plain SGD in 32 bits counts no steps
        return
    for mine, theirs in zip(masters(old), masters(new)):
        assert ((mine.view(torch.int32) - theirs.view(torch.int32)).abs() < (1 if saved == 24 else 256)).all()


@every
def test_32_bits_are_training_in_float32(make):
    """Bit by bit, states too, where gradients agree; the model sees the bfloat16 nearest to each weight."""
    start = parameters(SHAPES, torch.bfloat16)
    runs = []
    for dtype, bits in ((torch.bfloat16, 32), (torch.float32, None)):
        ps = [torch.nn.Parameter(p.detach().to(dtype, copy=True)) for p in start]
        opt = make(ps, weight_bits=bits)
        for i in range(4):
            generator = torch.Generator().manual_seed(i)
            for p in ps:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(dtype)
            opt.step()
        runs.append((ps, opt))
    (ps, ours), (exact, theirs) = runs
    assert all(torch.equal(a, b) for a, b in zip(masters(ours), exact))
    for p, each in zip(ps, exact):  # at a tie the other neighbour is as near
        assert torch.equal((each - p.float()).abs(), (each - each.bfloat16().float()).abs())
    assert all(torch.equal(a[name], b[name]) for a, b in zip(ours.state.values(), theirs.state.values()) for name in b)


def test_a_checkpoint_of_24_bits_for_torch_and_back():
    ps, ours = train(lambda p: optim.AdamW(p, weight_bits=24), 2, shapes=SHAPES, dtype=torch.bfloat16)
    theirs = torch.optim.AdamW(ps, foreach=False)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    back = optim.AdamW(ps, weight_bits=24)
    back.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert difference(masters(back), masters(ours)) == 0
    give_gradients(ps, 0)
    theirs.step()
    assert all(p.isfinite().all() for p in ps)


@every
@pytest.mark.parametrize("bits", [16, 24])
@pytest.mark.parametrize("state_bits", [32, 8])
@pytest.mark.parametrize("shape", [(128, 64), (40, 16, 4, 4)])
def test_slabs_draw_what_the_whole_draws(make, bits, state_bits, shape, monkeypatch):
    def build(ps):
        return make(ps, weight_bits=bits, state_bits=state_bits)

    whole, one = train(build, 1, shapes=[shape], dtype=torch.bfloat16)
    monkeypatch.setattr(slabs, "ELEMENTS", 600)
    parts, other = train(build, 1, shapes=[shape], dtype=torch.bfloat16)
    a, b = (masters(opt)[0].double() for opt in (one, other))
    # Sums in another order change what is rounded by a bit or so, and few elements' neighbour.
    assert (a != b).double().mean() <= 0.01
    assert len(other.slabs(parts[0], other.param_groups[0])) > 1


@every
def test_other_types_stay_as_they_are(make):
    plain_ps, one = train(make, 3)
    ps, other = train(lambda p: make(p, weight_bits=24), 3)
    assert difference(plain_ps, ps) == 0 == difference(states(one), states(other))
    parameters_16, _ = train(lambda p: make(p, weight_bits=16), 1, dtype=torch.float16)
    assert all(p.dtype == torch.float16 for p in parameters_16)


@widths
@pytest.mark.parametrize(("name", "state_bits"), [("AdamA", 8), ("CAME", 8), ("SGD momentum", 16),
                                                  ("Adafactor", 32)])
@pytest.mark.table(6)
def test_captured_whole(name, state_bits, bits):
    """One graph over a schedule. A last bit that fusion rounds otherwise may choose the other
    neighbour of one element in many, and the steps that follow start from there."""
    def build():
        model = torch.nn.Sequential(torch.nn.Linear(12, 400), torch.nn.GELU(),
                                    torch.nn.Linear(400, 4)).bfloat16()
        opt = MAKERS[name](model.parameters(), state_bits=state_bits, weight_bits=bits)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
        return plain(model, opt, after=lambda i: schedule.step())

    def with_masters(result):
        """Bytes of a correction are no numbers to compare: next to a carry they are far apart."""
        for weight, state in zip(result["state"][0].values(), result["optimizers"][0].values()):
            if CORRECTION in state:
                state[CORRECTION] = joined(weight, from_bytes(state[CORRECTION]))
        return result

    in_one_graph(build, torch.bfloat16, 0.1, seen=with_masters)


def test_refuses_other_widths():
    with pytest.raises(OptimizerError, match="weight_bits is 8"):
        optim.AdamW(parameters(), weight_bits=8)
