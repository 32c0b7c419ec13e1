"""Steps as `torch.optim` does, in every configuration of its own test list, and shares checkpoints."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db
from training import difference, give_gradients, saved_and_loaded, states, train

import memopt_compile as memopt

NAMES = ["SGD", "Adam", "AdamW", "Adafactor"]
INFOS = {info.optim_cls.__name__: info for info in optim_db}
INPUTS = [(name, i.desc, i.kwargs) for name in NAMES
          for i in INFOS[name].optim_inputs_func(device="cpu")]
ERRORS = [(name, i.optimizer_error_input.desc, i) for name in NAMES
          for i in INFOS[name].optim_error_inputs_func(device="cpu", dtype=torch.float32)
          if i.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR]


def pair(name, **settings):
    """The class here and torch's, which is told to go one tensor at a time."""
    return (lambda p: getattr(memopt.optim, name)(p, **copy.deepcopy(settings)),
            lambda p: getattr(torch.optim, name)(p, foreach=False, **copy.deepcopy(settings)))


def doubled(settings):
    """A float32 learning rate would make torch's Adafactor compute in float32."""
    return {k: v.double() if torch.is_tensor(v) else v for k, v in settings.items()}


@pytest.mark.parametrize(("name", "desc", "settings"), INPUTS)
def test_equal_in_float64(name, desc, settings):
    (ps, ours), (qs, theirs) = (train(make) for make in pair(name, **doubled(settings)))
    assert difference(ps, qs) <= 1e-12
    for p, q in zip(ps, qs):
        for state, value in theirs.state[q].items():
            assert value is None or difference([ours.state[p][state]], [value]) <= 1e-12, state


@pytest.mark.parametrize(("name", "desc", "case"), ERRORS)
def test_refuses_what_torch_refuses(name, desc, case):
    given = case.optimizer_error_input
    params = given.params if given.params is not None else [torch.nn.Parameter(torch.ones(2, 2))]
    with warnings.catch_warnings(), pytest.raises(case.error_type):
        warnings.simplefilter("error")
        getattr(memopt.optim, name)(params, **given.kwargs)


numbers = st.floats(0, 0.999)


@given(betas=st.tuples(numbers, numbers), eps=st.floats(1e-10, 1), decay=st.floats(0, 1),
       amsgrad=st.booleans(), maximize=st.booleans(), name=st.sampled_from(["Adam", "AdamW"]))
def test_adam_is_bitwise(betas, eps, decay, amsgrad, maximize, name):
    makers = pair(name, betas=betas, eps=eps, weight_decay=decay, amsgrad=amsgrad,
                  maximize=maximize)
    (ours, _), (theirs, _) = (train(make, 3, shapes=[(3, 2)], dtype=torch.float32)
                              for make in makers)
    assert torch.equal(ours[0], theirs[0])


@given(momentum=numbers, damp=st.floats(0, 1), decay=st.floats(0, 1), nesterov=st.booleans())
def test_sgd_is_bitwise(momentum, damp, decay, nesterov):
    nesterov = nesterov and momentum > 0
    makers = pair("SGD", lr=0.1, momentum=momentum, weight_decay=decay, nesterov=nesterov,
                  dampening=0.0 if nesterov else damp)
    (ours, _), (theirs, _) = (train(make, 3, shapes=[(3, 2)], dtype=torch.float32)
                              for make in makers)
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("there", [True, False], ids=["to torch", "from torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("name", "settings"), [
    ("SGD", {"lr": 0.1, "momentum": 0.9}), ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    ("SGD", {"lr": 0.1}), ("Adam", {"amsgrad": True, "weight_decay": 0.1}), ("AdamW", {}),
    ("Adafactor", {"weight_decay": 0.1})])
def test_checkpoint_goes(there, dtype, name, settings):
    """Training goes on in the other class as it would have in its own."""
    saving, loading = pair(name, **settings)[:: 1 if there else -1]
    ps, old = train(saving, dtype=dtype)
    copies, new = saved_and_loaded(ps, old, loading)
    for i in range(3):
        for some, opt in ((ps, old), (copies, new)):
            give_gradients(some, i)
            opt.step()
    assert difference(ps, copies) <= (1e-12 if dtype is torch.float64 else 1e-2)


@pytest.mark.parametrize("bits", [16, 8, 4, 1])
@pytest.mark.parametrize(("name", "settings"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("AdamW", {})])
def test_torchs_checkpoint_loads_into_few_bits(bits, name, settings):
    make, _ = pair(name, **settings)
    ps, old = train(pair(name, **settings)[1], dtype=torch.float32, shapes=[(64, 64)])
    full = saved_and_loaded(ps, old, make)
    runs = [saved_and_loaded(*start, pair(name, state_bits=bits, **settings)[0]) for start in ((ps, old), full)]
    for ps, opt in runs:
        give_gradients(ps, 1)
        opt.step()
    assert difference(runs[0][0], runs[1][0]) == 0 == difference(*(states(opt) for _, opt in runs))


def test_settings_of_how_torch_ran_are_dropped():
    _, old = train(lambda p: torch.optim.AdamW(p, fused=True), dtype=torch.float32)
    ps, new = train(lambda p: memopt.optim.AdamW(p), dtype=torch.float32)
    new.load_state_dict(old.state_dict())
    assert new.param_groups[0]["fused"] is None
    give_gradients(ps, 1)
    new.step()


def test_adam_of_decoupled_decay_is_adamw():
    ours = train(lambda p: memopt.optim.Adam(p, weight_decay=0.1, decoupled_weight_decay=True))
    assert difference(ours[0], train(lambda p: torch.optim.AdamW(p, weight_decay=0.1))[0]) <= 1e-12
