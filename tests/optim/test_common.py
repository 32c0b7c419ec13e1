"""What every optimizer owes: groups, schedules, closures, hooks, copies, checkpoints, refusals."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch.optim import lr_scheduler
from training import (
    MAKERS,
    difference,
    give_gradients,
    parameters,
    saved_and_loaded,
    states,
    train,
)

from memopt_compile import optim
from memopt_compile.errors import OptimizerError

every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
CLASSES = [optim.SGD, optim.Adam, optim.AdamW, optim.Adafactor, optim.CAME, optim.AdamA]
every_class = pytest.mark.parametrize("kind", CLASSES)


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_goes_on_bit_by_bit_from_a_checkpoint(make, dtype):
    ps, old = train(make, dtype=dtype)
    copies, new = saved_and_loaded(ps, old, make)
    train(lambda _: old, 3, ps=ps)
    train(lambda _: new, 3, ps=copies)
    assert difference(ps, copies) == 0 == difference(states(old), states(new))


@every
@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_go_their_own_way(make, how):
    ps, opt = train(make)
    other = how(opt)
    theirs = other.param_groups[0]["params"]
    before = [p.clone() for p in theirs]
    train(lambda _: opt, 2, ps=ps)
    assert difference(theirs, before) == 0
    train(lambda _: other, 2, ps=theirs)
    assert difference(ps, theirs) == 0


@every
def test_groups_have_their_own_settings(make):
    together = parameters()
    alone = copy.deepcopy(together)
    opt = make([{"params": together[:3], "lr": 0.3}, {"params": together[3:]}])
    opts = [make([{"params": alone[:3], "lr": 0.3}]), make(alone[3:])]
    for i in range(3):
        give_gradients(together, i)
        give_gradients(alone, i)
        for o in (opt, *opts):
            o.step()
    assert difference(together, alone) == 0


@every
def test_max_norm_clips_each_parameter(make):
    clipped, plain = parameters(), parameters()
    a, b = make(clipped), make(plain)
    a.param_groups[0]["max_norm"] = 1.5
    for i in range(4):
        give_gradients(clipped, i)
        give_gradients(plain, i)
        for p in plain:
            p.grad *= min(1.0, 1.5 / float(p.grad.norm()))
        a.step()
        b.step()
    assert difference(clipped, plain) <= 1e-12


def test_max_norm_is_safe_at_the_ends():
    """Zeros have no direction; the norm of 16 bits may be beyond their range."""
    ps = parameters([(3,), (2, 400)], torch.float16)
    opt = optim.SGD(ps, lr=1.0, max_norm=1.0)
    before = [p.detach().clone() for p in ps]
    ps[0].grad, ps[1].grad = torch.zeros_like(ps[0]), torch.full_like(ps[1], 60000.0)
    opt.step()
    assert torch.equal(ps[0], before[0])
    assert float((before[1].float() - ps[1].detach().float()).norm()) == pytest.approx(1, rel=0.02)
    with pytest.raises(OptimizerError, match="max_norm is 0"):
        optim.SGD(ps, max_norm=0.0)


@every
def test_group_added_later(make):
    ps = parameters()
    opt = make(ps[:2])
    opt.add_param_group({"params": iter(ps[2:]), "lr": 0.5})
    with pytest.raises(OptimizerError, match="lr is -1"):
        opt.add_param_group({"params": parameters([(2,)]), "lr": -1})
    assert len(opt.param_groups) == 2
    before = [p.clone() for p in ps]
    train(lambda _: opt, 1, ps=ps)
    assert all(difference([p], [b]) > 0 for p, b in zip(ps, before))


@every
def test_nothing_happens_without_gradients(make):
    ps = parameters()
    opt = make(ps)
    before = copy.deepcopy(opt.state_dict())
    opt.step()
    assert opt.state_dict() == before and difference(ps, parameters()) == 0


@every
def test_closure(make):
    ps, qs = parameters([(3, 2)]), parameters([(3, 2)])
    a, b = make(ps), make(qs)

    def closure():
        a.zero_grad()
        loss = ps[0].square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        loss = a.step(closure)
        b.zero_grad()
        expected = qs[0].square().sum()
        expected.backward()
        b.step()
        assert torch.equal(loss, expected)
    assert difference(ps, qs) == 0


@every
def test_step_hooks_and_repr(make):
    seen = []
    _, opt = train(make, 0)
    opt.register_step_pre_hook(lambda o, args, kwargs: seen.append("before"))
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append("after"))
    opt.step()
    assert seen == ["before", "after"] and "lr" in repr(opt)


@every
def test_zero_grad(make):
    ps, opt = train(make, 0)
    give_gradients(ps, 0)
    opt.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in ps)
    opt.zero_grad()
    assert all(p.grad is None for p in ps)


SCHEDULES = [
    lambda o: lr_scheduler.ExponentialLR(o, 0.9), lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
    lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=20, cycle_momentum=False)]


@every
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensor_rate_follows_a_schedule_as_a_number_does(make, schedule):
    results = []
    for shape in (None, (), (1,)):
        ps = parameters()
        opt = make(ps)
        if shape is not None:
            opt.param_groups[0]["lr"] = torch.full(shape, opt.param_groups[0]["lr"],
                                                   dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of `step` before the optimizer's, at the start
            chosen = schedule(opt)
            for i in range(4):
                give_gradients(ps, i)
                opt.step()
                chosen.step()
        results.append([p.detach() for p in ps])
    assert difference(results[0], results[1]) <= 1e-12 >= difference(results[0], results[2])


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "CAME", "AdamA"])
def test_one_cycle_moves_the_momentum(name):
    ps = parameters()
    opt = MAKERS[name](ps)
    schedule = lr_scheduler.OneCycleLR(opt, 0.05, total_steps=20)
    before = opt.param_groups[0].get("momentum", opt.param_groups[0].get("betas"))
    give_gradients(ps, 0)
    opt.step()
    schedule.step()
    assert before != opt.param_groups[0].get("momentum", opt.param_groups[0].get("betas"))


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_gradient_is_skipped_when_asked(make, bad):
    ps, opt = train(make)
    opt.param_groups[0]["skip_nonfinite"] = True
    before = copy.deepcopy((ps, opt.state[ps[1]]))
    give_gradients(ps, 0)
    ps[1].grad[3] = bad
    opt.step()
    # The others took their step.
    assert [torch.equal(p, b) for p, b in zip(ps, before[0])] == [p is ps[1] for p in ps]
    assert all(torch.equal(v, before[1][k]) for k, v in opt.state[ps[1]].items())


@every
def test_not_finite_gradient_is_used_unless_asked(make):
    ps, opt = train(make)
    give_gradients(ps, 0)
    ps[1].grad[3] = float("nan")
    opt.step()
    assert ps[1].isnan().any()


@every
def test_empty_and_strided_parameters(make):
    base = parameters([(6, 4)])[0].detach()
    ps = [torch.nn.Parameter(base.t()), torch.nn.Parameter(torch.zeros(0, 3)),
          torch.nn.Parameter(torch.randn(2, 3, 4, 4).double().to(memory_format=torch.channels_last))]
    qs = [torch.nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in ps]
    for some in (ps, qs):
        opt = make(some)
        opt.param_groups[0]["skip_nonfinite"] = True
        train(lambda _, o=opt: o, 3, ps=some)
    assert difference(ps, qs) <= 1e-12


# ------------------------------------------------------------------ refusals


@every_class
@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable", "differentiable"])
def test_ways_to_run(kind, flag):
    kind(parameters(), lr=0.1, **{flag: False})
    with pytest.raises(OptimizerError, match=f"{flag}=True"):
        kind(parameters(), lr=0.1, **{flag: True})
    with pytest.raises(TypeError, match="has no setting lerning_rate"):
        kind(parameters(), lr=0.1, lerning_rate=1)


@every_class
@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"lr": float("nan")}, {"lr": torch.ones(2)},
                                 {"weight_decay": -1.0}, {"rounding_seed": 1.5}, {"rounding_seed": None},
                                 {"lr": None}, {"lr": "x"}, {"max_norm": "x"}, {"weight_decay": None}])
def test_settings_out_of_range(kind, bad):
    with pytest.raises(OptimizerError) as caught:
        kind(parameters(), **{"lr": 0.1, **bad})
    assert isinstance(caught.value, ValueError) and kind.__name__ in caught.value.where


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.AdamA])
@pytest.mark.parametrize("bad", [
    {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"betas": (0.9,)}, {"betas": 0.9}, {"betas": None},
    {"eps": -1.0},
    {"betas": (torch.tensor(0.9), torch.tensor(0.99))}])
def test_moments_out_of_range(kind, bad):
    with pytest.raises(OptimizerError):
        kind(parameters(), **bad)


@pytest.mark.parametrize("kind", [optim.CAME, optim.Adafactor])
@pytest.mark.parametrize("bad", [1e-8, (1e-8,), (-1.0, 0.0)])
def test_two_eps(kind, bad):
    with pytest.raises(OptimizerError, match="eps is"):
        kind(parameters(), lr=0.1, eps=bad)


@pytest.mark.parametrize("bad", [{"momentum": -0.1}, {"nesterov": True},
                                 {"nesterov": True, "momentum": 0.9, "dampening": 0.1}])
def test_momentum_out_of_range(bad):
    with pytest.raises(OptimizerError):
        optim.SGD(parameters(), **bad)


@every_class
def test_complex_and_sparse(kind):
    with pytest.raises(OptimizerError, match="complex"):
        kind([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)
    table = torch.nn.Embedding(4, 3, sparse=True)
    dense = torch.nn.Parameter(torch.ones(3))
    opt = kind([dense, *table.parameters()], lr=0.1)
    (table(torch.tensor([1])) * dense).sum().backward()
    with pytest.raises(OptimizerError, match="sparse"):
        opt.step()
    assert torch.equal(dense, torch.ones(3))  # refused before anything moved


FOREIGN = [
    (torch.optim.SGD, optim.Adam, "has no amsgrad, betas"), (torch.optim.NAdam, optim.Adam, "has no amsgrad"),
    (torch.optim.Adam, optim.SGD, "has no dampening"), (optim.CAME, optim.Adam, "has no amsgrad"),
    (torch.optim.Adam, optim.CAME, "has no clip_threshold"),
    (torch.optim.RMSprop, optim.Adafactor, "has no beta2_decay"),
    *((torch.optim.RAdam, kind, "has no amsgrad") for kind in (optim.Adam, optim.AdamW, optim.AdamA)),
]


@pytest.mark.parametrize(("saving", "loading", "message"), FOREIGN)
def test_checkpoint_of_another_optimizer(saving, loading, message):
    _, old = train(lambda p: saving(p, lr=0.1))
    _, new = train(lambda p: loading(p, lr=0.1))
    before = copy.deepcopy(new.state_dict())
    with pytest.raises(OptimizerError, match=message):
        new.load_state_dict(old.state_dict())
    assert str(new.state_dict()) == str(before)


def test_decay_that_a_checkpoint_of_adam_adds_to_gradients_is_not_decoupled_in_silence():
    new = optim.AdamW(parameters())
    for decay in (0.0, 0.1):
        _, old = train(lambda p, decay=decay: torch.optim.Adam(p, weight_decay=decay))
        if decay:
            with pytest.raises(OptimizerError, match="weight decay is added to gradients"):
                new.load_state_dict(old.state_dict())
        else:
            new.load_state_dict(old.state_dict())


@every_class
@pytest.mark.parametrize("saved", [{}, {"state": {}}])
def test_what_is_no_checkpoint(kind, saved):
    with pytest.raises(OptimizerError, match="the checkpoint has no param_groups"):
        kind(parameters(), lr=0.1).load_state_dict(saved)


def test_checkpoint_with_an_unknown_state():
    ps, opt = train(MAKERS["Adam"])
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][1]["mu_product"] = torch.ones(())
    with pytest.raises(OptimizerError, match="has a state mu_product"):
        opt.load_state_dict(saved)


@every
def test_checkpoint_of_other_shapes(make):
    _, old = train(make, shapes=[(3, 2)])
    _, new = train(make, shapes=[(2, 5)])
    if states(old):
        with pytest.raises(OptimizerError, match="has shape"):
            new.load_state_dict(old.state_dict())


def test_hooks_of_the_user_see_and_change_the_checkpoint():
    ps, opt = train(MAKERS["Adam"])
    opt.register_load_state_dict_pre_hook(
        lambda o, state: {**state, "param_groups": [{**state["param_groups"][0], "lr": 0.7}]})
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0]["lr"] == 0.7 and len(opt._optimizer_load_state_dict_pre_hooks) == 1
