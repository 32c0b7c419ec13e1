"""A step that is compiled again and again, until torch leaves it to eager."""

import contextlib
import logging
import types

import pytest
import torch

import memopt_compile as memopt


@pytest.mark.parametrize("cut", ["", "ahead", "behind"])
def test_a_step_compiled_too_often_has_no_budget(caplog, cut):
    """A text is another constant in each call; torch leaves the step to eager, where no budget holds. Of a rest of it that
    is not the step, this is said only."""
    model = torch.nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    log = types.SimpleNamespace(step="")

    def changing(x, scale):
        if cut == "ahead":
            torch._dynamo.graph_break()
        loss = model(x).mean() * (1.0 if cut == "behind" else float(scale))
        loss.backward()
        opt.step()
        opt.zero_grad()
        if cut == "behind":
            torch._dynamo.graph_break()
            log.step = scale  # so that it looks like a part of the step
        return loss * float(scale)

    for budget in (None, "1GiB")[cut != "":]:
        torch._dynamo.reset()
        fast = memopt.compile(changing, lowering="eager", memory_budget=budget)
        with torch._dynamo.config.patch(recompile_limit=2), caplog.at_level(logging.WARNING, "memopt_compile"):
            for scale in ("1", "2"):
                fast(torch.ones(3, 4), scale)
            with contextlib.nullcontext() if budget is None or cut == "behind" else pytest.raises(
                    memopt.OptionError, match="compiled 2 times"):
                fast(torch.ones(3, 4), "3")
    told = [r.getMessage() for r in caplog.records if "compiled 2 times" in r.getMessage()]
    assert told and all("test_compiled_too_often.py" in line and "recompiles" in line for line in told)
    assert all(("what follows the step" in line) == (cut == "behind") for line in told)
