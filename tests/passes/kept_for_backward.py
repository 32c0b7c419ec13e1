"""What free rematerialization keeps from forward to backward, beside torch's min-cut partitioner.

    python tests/passes/kept_for_backward.py [name ...]

The GPT and the ResNet of the examples, and the Hugging Face architectures of the coverage set, in float32:
bytes of the storages that backward reads and forward made, those that the step returns aside.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.functional import cross_entropy

from memopt_compile import driver, pipelines
from memopt_compile.backends import inductor
from memopt_compile.compat import aot_module_simplified
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.rematerialize_free import RematerializeFree
from memopt_compile.step_graph import Phase, StepGraph, nbytes, storage_roots

TESTS = Path(__file__).parents[1]
Loss = Callable[[], Tensor]


class _Captured(BaseException):
    """Carries the step past Dynamo's handlers."""


def captured(loss: Loss, model: nn.Module) -> StepGraph:
    """The step of `loss` with plain SGD, as no pass has seen it."""
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        loss().backward()
        opt.step()
        opt.zero_grad()

    def rewritten(step: StepGraph, *_: object) -> None:
        raise _Captured(step)

    torch._dynamo.reset()
    with mock.patch.object(pipelines, "rewritten", rewritten):
        try:
            torch.compile(step, backend=driver.backend)()
        except _Captured as carrier:
            return carrier.args[0]
    raise RuntimeError("the step was not captured whole")


def kept_bytes(step: StepGraph) -> int:
    roots = storage_roots(step.graph)
    returned = {r for v in step.graph.output_node().all_input_nodes for r in roots[v]}
    kept = {r for n in step.computing() if step.phase(n) is Phase.BACKWARD for v in n.all_input_nodes
            for r in roots[v] if r.op != "placeholder" and step.phase(r) is Phase.FORWARD}
    return sum(nbytes(r.meta["val"]) for r in kept - returned)


def ours(loss: Loss, model: nn.Module) -> int:
    step = captured(loss, model)
    Canonicalize().run(step)
    RematerializeFree().run(step)
    return kept_bytes(step)


def the_partitioners(loss: Loss) -> int:
    """Bytes that torch's min-cut partitioner keeps, with Inductor's decompositions."""
    kept = []

    def partition(joint, inputs, *, num_fwd_outputs, **settings):
        forward, backward = min_cut_rematerialization_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, **settings)
        results = forward.graph.output_node().args[0]
        roots = storage_roots(forward.graph)
        given, saved = ({r for v in part if isinstance(v, torch.fx.Node) for r in roots[v]}
                        for part in (results[:num_fwd_outputs], results[num_fwd_outputs:]))
        kept.append(sum(nbytes(r.meta["val"]) for r in saved - given if r.op != "placeholder"))
        return forward, backward

    def backend(module, inputs):
        return aot_module_simplified(
            module, inputs, fw_compiler=lambda m, _: m, bw_compiler=lambda m, _: m,
            partition_fn=partition, decompositions=inductor.decompositions())

    torch._dynamo.reset()
    torch.compile(loss, backend=backend)().backward()
    return sum(kept)


def _examples():
    spec = importlib.util.spec_from_file_location("example_models", TESTS.parent / "examples" / "models.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gpt() -> tuple[Loss, nn.Module]:
    models = _examples()
    model = models.GPT(models.GPTConfig(65, layers=2, width=64, dropout=0.1))
    text = torch.randint(65, (4, 129))
    return lambda: cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()), model


def resnet() -> tuple[Loss, nn.Module]:
    model = _examples().ResNet()
    images, labels = torch.randn(8, 1, 28, 28), torch.randint(10, (8,))
    return lambda: cross_entropy(model(images), labels), model


def hugging_face(name: str) -> tuple[Loss, nn.Module]:
    import models

    training = models.build(name)
    (batch,) = training.batch(0)
    return lambda: training.modules[0](**batch).loss, training.modules[0]


def main() -> None:
    sys.path.insert(0, str(TESTS / "coverage"))
    import models

    warnings.simplefilter("ignore")
    made = {"GPT": gpt, "ResNet": resnet, **{name: partial(hugging_face, name) for name in models.ARCHITECTURES}}
    rows = []
    for name in sys.argv[1:] or made:
        torch.manual_seed(0)
        loss, model = made[name]()
        try:
            kept, theirs = ours(loss, model), the_partitioners(loss)
        except Exception as error:
            rows.append((name, type(error).__name__))
            continue
        rows.append((name, f"{kept:,}", f"{theirs:,}", f"{kept / theirs:.3f}"))
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(tabulate(rows, ("model", "memopt keeps", "the partitioner", "ratio"), tablefmt="github",
                   disable_numparse=True))


if __name__ == "__main__":
    main()
