"""A captured step of a sharded model: is it as `options={"zero": ...}` says, and what it needs besides.

The graph that Dynamo traced knows this rank's rows. In stages 1 and 2 every rank also keeps whole
parameters (`distributed.storage`); they become further inputs here, which `with_wholes` passes in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from . import compat
from .compat import data, trace
from .distributed import agreement, meeting
from .distributed.lost import naming_the_lost
from .distributed.reading import lost
from .distributed.storage import Kept, Storage, any_known, note, refresh, storage_of
from .errors import MemoptError, OptionError, RankError
from .options import Options
from .records import Compilation
from .step_graph import Input, Role, StepGraph, Window, nbytes

Origin = Sequence[tuple[str, Any, bool]]


def check(options: Options, origin: Origin, optimizers: Sequence[Any], where: str) -> list[Storage]:
    """How the parameters of a step are stored.

    Raises:
        OptionError: not as the stage of the options needs it, or another option does not go with it.
    """
    stage = options.zero
    if stage and options.accumulate != "gradients" and any(
            group.get("max_norm") for opt in optimizers for group in opt.param_groups):
        raise OptionError(f"accumulate={options.accumulate!r} would clip by the norm of this rank's rows",
                          where=f"{where}, zero={stage}, max_norm", do="use memopt.optim.AdamA, which clips "
                          "each micro-batch by the norm over all ranks")
    found = [storage_of(example) for _, example, _ in origin]
    storages = [s for s in found if s is not None]
    if storages and options.partition_activations:
        raise OptionError("parameters are sharded by memopt.shard_, whose ranks do not share layers",
                          where=f"{where}, partition_activations=True", do="leave partition_activations out")
    for (label, example, trained), storage in zip(origin, found):
        if stage and trained and storage is None:
            raise _strange(label, stage, where) if isinstance(example, DTensor) else _unshared(
                f"the parameter {label} is", stage, where)
    by_stage = {s.stage: s.name for s in reversed(storages)}
    if len(by_stage) > 1:
        (one, name), (other, another) = sorted(by_stage.items())[:2]
        raise OptionError(f"{name} was sharded for stage {one} and {another} for stage {other}", where=f"{where}, zero={stage}",
                          do="call memopt.shard_ with one stage for all modules of a step")
    for storage in storages:
        if storage.stage != stage:
            raise OptionError(
                f"the parameter {storage.name} was sharded for stage {storage.stage}",
                where=f"{where}, zero={stage}",
                do=f'compile the step with options={{"zero": {storage.stage}}}')
    return storages


def _unshared(what: str, stage: int, where: str) -> OptionError:
    return OptionError(f"{what} not sharded", where=f"{where}, zero={stage}",
                       do="after making the optimizer, and before the first step, call on every rank\n"
                       f"    memopt.shard_(model, opt, mesh, stage={stage})\n  with mesh = "
                       "torch.distributed.device_mesh.init_device_mesh('cpu', (world_size,))")


def _strange(label: str, stage: int, where: str) -> OptionError:
    return OptionError(
        f"the parameter {label} is a DTensor that memopt.shard_ did not make: a copy of one (copy.deepcopy), or what "
        "load_state_dict(.., assign=True) put in the place of one", where=f"{where}, zero={stage}",
        do="call load_state_dict without assign=True: the optimizer has the parameters that were there before. A copy is for eager "
        f"code: to train it, build a model and its optimizer anew, call\n    memopt.shard_(model, opt, mesh, stage={stage})\n"
        "    model.load_state_dict(copy.state_dict())\n  (layers that are cut in another way, as by parallelize_module, go "
        "without zero)")


def check_model(stage: int, origin: Origin, where: str) -> None:
    """The same for a model that is compiled alone, or a part of a step, with results to be differentiated.

    Raises:
        OptionError: its gradients would be this rank's.
    """
    for label, example, _ in origin:
        if stage and type(example) is torch.nn.Parameter and example.requires_grad and storage_of(example) is None:
            raise _unshared(f"the parameter {label} is", stage, where)


def check_ordinary(stage: int, where: str) -> None:
    """And for a step of which nothing is compiled, so that its parameters are not known here.

    Raises:
        OptionError: `shard_` has not been called at all. (Optimizers look at what they train: `replaced`.)
    """
    if stage and not any_known():
        raise _unshared("the model is", stage, where)


def check_writes(gm: fx.GraphModule, quoted: Callable[[fx.Node], str]) -> None:
    """Refuse a step that writes into what a module gives out for a parameter that ranks share.

    Raises:
        OptionError: it does, in the line that `quoted` gives.
    """
    if (found := data.write_of_gathered(gm.graph)) is not None:
        written, parameter = found
        storage = storage_of(parameter.meta.get("example_value"))
        raise lost(storage.name if storage else "", quoted(written))


@contextlib.contextmanager
def naming_mixtures(where: str) -> Iterator[None]:
    """A scope in which a function is traced, with an `OptionError` where PyTorch says that it mixes rows and whole tensors."""
    try:
        yield
    except RuntimeError as error:
        if "got mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise OptionError(
            "a loss is computed from whole tensors and from p of model.parameters(), of which this rank has its rows",
            where=where, do="read parameters from their modules, which gather them (layer.weight), or make what is computed from "
            "rows whole: sum(p.square().sum() for p in ..).full_tensor()") from error


def add_wholes(step: StepGraph, origin: Origin) -> list[Storage]:
    """Give `step` the whole parameters that are kept beside their rows as inputs behind its own."""
    inputs, windows, storages = list(step.inputs), [], []
    left: dict[int, list[Kept]] = {}  # of each parameter, what is kept of its further tensors
    for i, node in enumerate(step.placeholders):
        index = compat.input_descriptor_index(node)
        storage = storage_of(origin[index][1]) if index is not None else None
        if storage is None or not storage.kept:
            continue
        if index not in left:
            left[index] = list(storage.kept)
            storages.append(storage)
        if not left[index]:
            continue  # the draws of one in low precision
        kept = left[index].pop(0)
        whole = _input(step, f"whole_{node.name}", node.meta["val"].fake_mode.from_tensor(
            kept.full, static_shapes=True))
        inputs.append(Input(whole.name, Role.PARAMETER, inputs[i].label,
                            nbytes(whole.meta["val"]), inputs[i].trained))
        inputs[i] = replace(inputs[i], nbytes=0)  # they are a part of the whole
        windows.append(Window(node.name, whole.name, kept.start, kept.each, storage.mesh.size(),
                              storage.mesh.get_group().group_name))
    step.inputs, step.windows = tuple(inputs), tuple(windows)
    return storages


def _input(step: StepGraph, name: str, value: Any) -> Any:
    with step.graph.inserting_after(step.placeholders[-1]):
        node = step.graph.placeholder(name)
    node.meta["val"] = value
    return node


_agreed: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by code, and then options: sequences that ranks agreed on


def together(lower: Callable[[], Callable], record: Compilation, mesh: Any, frame: Any) -> Callable:
    """`lower` the step of `record`, and have all ranks compare the collectives that it came to.

    A step that one rank compiles again for itself (its batch has another shape) is not compared: it
    makes the collectives that it made before. With other options all ranks compile it anew. A rank that
    refuses its step tells the others.

    Raises:
        RankError: they are not the same on all ranks.
        MemoptError: what `lower` raises.
    """
    if mesh is None:
        return lower()
    known = _agreed.setdefault(frame, {}).setdefault(repr(record.options), [])

    def compare(lines: list[str]) -> None:
        with trace.real_tensors(), naming_the_lost(mesh, record.where):  # torch is tracing
            meeting.come_together(f"compiles the step {record.where}", mesh, record.where, "compiles")
            agreement.compare(lines, mesh, "the collectives of the step", record.where,
                              "compile the same step, with the same options, on every rank")

    try:
        run = lower()
    except MemoptError as error:
        with contextlib.suppress(RankError):
            compare(agreement.refused(error.what))
        raise
    lines = agreement.sequence(record.step.graph, mesh)
    record.collectives = "\n".join(lines)
    if lines not in known:
        compare(lines)
        known.append(lines)
    return run


def with_wholes(run: Callable[[list], Any], storages: list[Storage]) -> Callable[[list], Any]:
    """`run`, a boxed callable, given the whole parameters behind its other inputs."""

    def run_with_wholes(inputs: list) -> Any:
        inputs.extend(kept.full for storage in storages for kept in storage.kept)
        return run(inputs)

    run_with_wholes._boxed_call = True  # type: ignore[attr-defined]
    return torch.compiler.disable(run_with_wholes)


def together_as_a_model(run: Callable, origin: Origin, record: Compilation) -> Callable:
    """`run`, a model or a part of a step as it is called: where it gathers parameters, after all ranks have said that
    they run it."""
    storages = [s for _, example, _ in origin if (s := storage_of(example)) is not None]
    if not storages:
        return run
    mesh, where = storages[0].all_ranks, record.where
    names = " ".join(storage.name for storage in storages)

    def run_in_agreement(*inputs: Any) -> Any:
        with naming_the_lost(mesh, where):
            said = (f"runs a part of the step {where} by the ordinary path" if record.reason else f"runs the model {where}")
            meeting.come_together(said, mesh, where, f"runs {where} with {names}")
        return run(*inputs)

    return run_in_agreement


def together_with_others(run: Callable, storages: list[Storage], wholes: list[Storage],
                         record: Compilation) -> Callable:
    """`run`, the step as it is called, with whole parameters that agree with the rows of all ranks, and
    an error if another rank is about to do something else, or is gone: it names that rank."""
    mesh, where = storages[0].all_ranks, record.where

    def run_in_agreement(*inputs: Any) -> Any:
        with naming_the_lost(mesh, where):
            meeting.come_together(f"runs the step {where}", mesh, where, f"runs {record.collectives}")
            refresh(wholes)
            results = run(*inputs)
        note(wholes)
        return results

    return run_in_agreement
