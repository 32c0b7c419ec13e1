"""The command line: `python -m memopt_compile explain | fit | bench train.py:make`.

Each command loads what it needs when it runs, as Dynamo takes three seconds of a processor.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .bench import TITLES, answer, compare
from .errors import MemoptError, OptionError
from .options import Options

# memopt counts bytes with torch's profiler, which announces each start and stop on stderr.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

TARGET = """a file and a function in it that takes nothing and returns (step, args): the training
step, not compiled, and a tuple of example arguments to call it with"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for a refusal, 2 for wrong usage."""
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except MemoptError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m memopt_compile", description="Plan the memory of a training step.")
    commands = parser.add_subparsers(metavar="command", required=True)

    command = _command(commands, "explain", _explain, "print what memopt would do with a step, "
                       "without running it")
    command.add_argument("--dump", metavar="FOLDER", help="write every graph, the plan, the program "
                         "and the report to a new numbered folder in FOLDER")
    command.add_argument("--svg", metavar="FILE", help="draw predicted memory before and after the "
                         "passes")
    command.add_argument("--ranks", metavar="N", type=int, help="plan what each of N ranks would run, "
                         "without their memory: the function runs as on the first of them")
    command.add_argument("--layers", metavar="N", type=int, help="plan N equal layers without tracing them "
                         "all: the function is called with numbers of layers")

    command = _command(commands, "fit", _fit, "find the largest batch with which a step fits a "
                       "number of bytes, without running it")
    command.add_argument("--memory", metavar="SIZE", required=True, help="bytes of peak, as 6GiB")
    command.add_argument("--multiple-of", metavar="N", type=int, default=1,
                         help="try multiples of N only")
    command.add_argument("--budgeted", action="store_true", help="plan with these bytes as "
                         "memory_budget: activations are computed again, or what else the options allow")

    command = _command(commands, "bench", _bench, "compare bytes and seconds of a step in eager, "
                       "under torch.compile and under memopt, each in a process of its own")
    command.add_argument("--svg", metavar="FILE", help="draw the memory of each over one step")
    command.add_argument("--measure", choices=TITLES, help=argparse.SUPPRESS)  # one such process
    return parser


def _command(commands: Any, name: str, run: Callable, purpose: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=purpose, description=f"{purpose.capitalize()}.")
    command.add_argument("target", metavar="script.py:function", help=TARGET)
    command.add_argument("-o", "--option", metavar="NAME=VALUE", action="append", default=[],
                         type=_option, help="a field of memopt.Options, such as memory_budget=6GiB "
                         "or lowering=eager; may be given several times")
    command.set_defaults(run=run)
    return command


def _explain(parsed: argparse.Namespace) -> int:
    from .distributed.planned import planned_ranks
    from .report import explain
    from .reporting.layered import explain_layers

    options = dict(parsed.option)
    if parsed.dump is not None:
        options["dump"] = parsed.dump
    if parsed.layers is not None and parsed.svg is not None:
        raise OptionError("there is no picture of layers that are not traced", where="--svg, --layers",
                          do="leave one of them out")
    with planned_ranks(parsed.ranks) if parsed.ranks is not None else contextlib.nullcontext():
        make = _function(parsed.target)
        if parsed.layers is None:
            step, args = _made(make)
            report: Any = explain(step, *args, **options)
        else:
            report = explain_layers(partial(_made, make), parsed.layers, **options)
    print(report, end="")
    if parsed.svg is not None:
        try:
            report.draw(parsed.svg)
        except (OSError, ValueError) as error:
            raise OptionError(f"the picture cannot be written: {error}", where=f"--svg {parsed.svg}",
                              do="name a file in a folder that exists") from error
    return 0


def _fit(parsed: argparse.Namespace) -> int:
    from .reporting.fitting import fit

    step, args = _load(parsed.target)
    print(fit(step, args, parsed.memory, multiple_of=parsed.multiple_of, budgeted=parsed.budgeted,
              progress=partial(print, file=sys.stderr, flush=True), **dict(parsed.option)))
    return 0


def _bench(parsed: argparse.Namespace) -> int:
    Options.from_dict(dict(parsed.option))
    if parsed.measure is None:
        options = [part for name, value in parsed.option for part in ("-o", f"{name}={value}")]
        compare([sys.executable, "-m", "memopt_compile", "bench", parsed.target, *options], svg=parsed.svg)
        return 0
    step, args = _load(parsed.target)
    if parsed.measure == "inductor":
        step = torch.compile(step)
    elif parsed.measure == "memopt":
        step = torch.compile(step, backend="memopt", options=dict(parsed.option))
    answer(step, args, parsed.measure)
    return 0


def _option(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`, the value read as Python if it is Python, else as text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name.strip(), ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name.strip(), value


def _load(target: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The step and its arguments that `script.py:function` makes."""
    return _made(_function(target))


def _function(target: str) -> Callable[..., Any]:
    file, colon, name = target.rpartition(":")
    path = Path(file)
    if not colon or not name.isidentifier():
        raise OptionError("no function is named", where=target,
                          do="write script.py:function, such as train.py:make")
    if not path.is_file():
        raise OptionError(f"there is no file {file!r}", where=target, do="give the script's path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{file!r} is no Python file", where=target, do="give a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))  # As when Python runs the script itself.
    spec.loader.exec_module(module)
    make = getattr(module, name, None)
    if not callable(make):
        functions = [key for key, value in vars(module).items()
                     if callable(value) and getattr(value, "__module__", "") == module.__name__]
        raise OptionError(f"{file!r} has no function {name!r}", where=target,
                          do=f"choose from {', '.join(functions) or 'functions that you add'}")
    return make


def _made(make: Callable[..., Any], *layers: int) -> tuple[Callable[..., Any], Sequence[Any]]:
    made = make(*layers)
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])
            and isinstance(made[1], tuple | list)):
        raise OptionError("the function returned no (step, args)", where=getattr(make, "__qualname__", make),
                          do="return the step and a tuple of its arguments: return step, (x, y)")
    return made[0], made[1]


if __name__ == "__main__":
    sys.exit(main())
