"""Updates traced once for a kind of parameter: the graph is that of all traced one by one."""


import pytest
import torch
from torch import nn

from memopt_compile.capture import update_copies, update_operator

EAGER = {"lowering": "eager"}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.LayerNorm(6), nn.Linear(6, 2)).double()


def groups(model: nn.Module) -> list[dict]:
    return [{"params": model[:2].parameters(), "lr": 0.02}, {"params": model[2:].parameters(), "weight_decay": 0.1}]


OPTIMIZERS = {
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adamw, groups": lambda m: torch.optim.AdamW(groups(m), lr=0.01, maximize=True),
    "adamw, rate in a tensor": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), fused=False),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "sgd, no momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.9, centered=True),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
}


def trained(make, monkeypatch, one_by_one: bool, **options):
    """(parameters after three steps, kinds of parameter folded)."""
    torch.compiler.reset()
    model, kinds = net(), []
    opt = make(model)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    made = update_operator.Update
    with monkeypatch.context() as patch:
        if one_by_one:
            patch.setattr(update_copies, "each_kind_once", lambda trace, tx, args, gaps: trace(args))
        patch.setattr(update_operator, "Update", lambda *args: kinds.append(made(*args)) or kinds[-1])
        fast = torch.compile(step, backend="memopt", options={**EAGER, **options}, fullgraph=True)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            fast(torch.randn(4, 6, dtype=torch.float64, generator=generator))
    return [p.detach().clone() for p in model.parameters()], kinds


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.table(4)
def test_the_graph_is_that_of_all_traced_one_by_one(name, monkeypatch, tmp_path):
    folded = trained(OPTIMIZERS[name], monkeypatch, False, dump=str(tmp_path / "folded"))
    single = trained(OPTIMIZERS[name], monkeypatch, True, dump=str(tmp_path / "single"))
    assert folded[1] and not single[1]
    texts = [(tmp_path / way / "00" / "00_captured.txt").read_text() for way in ("folded", "single")]
    assert texts[0] == texts[1] or name == "radam"  # whose casts would come first, of all parameters
    assert all(torch.equal(a, b) for a, b in zip(folded[0], single[0]))


def test_a_comparison_with_eager_runs_the_update_itself(monkeypatch):
    parameters, kinds = trained(OPTIMIZERS["adamw, groups"], monkeypatch, False, verify=True)
    plain, _ = trained(OPTIMIZERS["adamw, groups"], monkeypatch, True)
    assert kinds and all(torch.equal(a, b) for a, b in zip(parameters, plain))


def test_buffers_that_the_first_step_makes_are_kept(monkeypatch):
    def make(model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, dampening=0.5)

    folded, _ = trained(make, monkeypatch, False)
    single, _ = trained(make, monkeypatch, True)
    assert all(torch.equal(a, b) for a, b in zip(folded, single))


def test_states_that_share_memory_are_another_kind(monkeypatch):
    """One parameter's two means are one tensor: what is written into one is read from the other."""
    def make(model):
        opt = torch.optim.Adadelta(model.parameters(), lr=0.1)
        for i, p in enumerate(model.parameters()):
            mean = torch.zeros_like(p)
            opt.state[p] = {"step": torch.tensor(0.0), "square_avg": mean,
                            "acc_delta": mean if i == 2 else torch.zeros_like(p)}
        return opt

    folded, kinds = trained(make, monkeypatch, False)
    single, _ = trained(make, monkeypatch, True)
    assert kinds and all(torch.equal(a, b) for a, b in zip(folded, single))


def test_one_step_of_models_of_several_sizes():
    """The second model's states have sizes that may vary, as far as the trace knows."""
    def step(model, opt, x):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def trained(step):
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(4, n), nn.Tanh(), nn.Linear(n, n), nn.Linear(n, 4)).double() for n in (5, 6, 7)]
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in models]
        x = torch.randn(3, 4, dtype=torch.float64)
        losses = [step(m, o, x) for _ in range(3) for m, o in zip(models, optimizers)]
        return [*losses, *(p.detach() for m in models for p in m.parameters())]

    torch.compiler.reset()
    got = trained(torch.compile(step, backend="memopt", options=EAGER))
    torch.testing.assert_close(got, trained(step), rtol=1e-12, atol=1e-12)


def test_numbers_of_asgd_are_as_exact_as_pythons(monkeypatch):
    """Its state has them in float32, of which 1 - lambd * eta would be a rounding off in each step."""
    found, _ = trained(lambda m: torch.optim.ASGD(m.parameters(), lr=0.01), monkeypatch, False)
    model, generator = net(), torch.Generator().manual_seed(1)
    opt = torch.optim.ASGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(4, 6, dtype=torch.float64, generator=generator)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    assert max(float((p - q).abs().max()) for p, q in zip(found, model.parameters())) <= 1e-14


def test_an_update_in_a_function_of_its_own_is_compiled_once():
    """Each backward makes new gradients, and Dynamo found them by the keys of the optimizer's state, whose identity counts."""
    torch.compiler.reset()
    model = nn.Linear(4, 2)
    opt = torch.optim.Adam(model.parameters())

    @torch.compile(backend="memopt", options={"lowering": "eager"})
    def update():
        opt.step()

    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            opt.zero_grad()
            model(torch.ones(3, 4)).pow(2).sum().backward()
            update()
