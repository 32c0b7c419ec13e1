"""The front door: `torch.compile(step, backend="memopt")` ends here."""

from __future__ import annotations

import logging
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import fx

from . import build, capture, compat
from .backends import eager
from .options import Options

log = logging.getLogger("memopt_compile")


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], *,
            options: Mapping[str, Any] | None = None, mode: str | None = None) -> Callable:
    opts = Options.from_dict(options or {})
    origin = build.dynamo_inputs(gm)
    notes = capture.notes()
    detach_outputs(gm)

    def lower(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        step = build.step_graph(module, origin)
        step.verify()
        last.append(step)
        return eager.lower(step)

    return compat.aot_module_simplified(
        gm, example_inputs, fw_compiler=lower, inference_compiler=lower,
        keep_inference_input_mutations=True)

last = []

def detach_outputs(gm: fx.GraphModule) -> None:
    """Return used-up tensors without their autograd graph, so that the graph is whole."""
    output = gm.graph.output_node()
    results = []
    for value in output.args[0]:
        fake = value.meta.get("example_value") if isinstance(value, fx.Node) else None
        if isinstance(fake, torch.Tensor) and fake.requires_grad and fake.grad_fn is not None:
            with gm.graph.inserting_before(output):
                detached = gm.graph.call_method("detach", (value,))
            detached.meta["example_value"] = fake.detach()
            value = detached
        results.append(value)
    output.args = (tuple(results),)
    gm.recompile()


_uninstall = capture.install(lambda fn: fn is backend)
