"""The command line: `python -m memopt_compile explain train.py:make`."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import MemoptError, OptionError
from .report import explain

TARGET = """a file and a function in it that takes nothing and returns (step, args): the training
step, not compiled, and a tuple of example arguments to call it with"""
PLANNED = {
    "fit": "find the largest batch that fits a number of bytes",
    "bench": "compare memory and speed with eager and with plain torch.compile",
}


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

    command = commands.add_parser(
        "explain", help="print what memopt would do with a step, without running it",
        description="Print what memopt would do with a step, without running it.")
    command.add_argument("target", metavar="script.py:function", help=TARGET)
    command.add_argument("-o", "--option", metavar="NAME=VALUE", action="append", default=[],
                         type=_option, help="a field of memopt.Options, such as memory_budget=6GiB "
                         "or lowering=eager; may be given several times")
    command.add_argument("--dump", metavar="FOLDER", help="write every graph, the plan, the program "
                         "and the report to a new numbered folder in FOLDER")
    command.add_argument("--svg", metavar="FILE", help="draw predicted memory before and after the "
                         "passes")
    command.set_defaults(run=_explain)

    for name, purpose in PLANNED.items():
        command = commands.add_parser(name, help=f"planned: {purpose}")
        command.add_argument("ignored", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        command.set_defaults(run=_refuse_planned, name=name)
    return parser


def _explain(parsed: argparse.Namespace) -> int:
    options = dict(parsed.option)
    if parsed.dump is not None:
        options["dump"] = parsed.dump
    step, args = _load(parsed.target)
    report = explain(step, *args, **options)
    print(report, end="")
    if parsed.svg is not None:
        try:
            report.draw(parsed.svg)
        except (OSError, ValueError) as error:
            raise OptionError(f"the picture cannot be written: {error}", where=f"--svg {parsed.svg}",
                              do="name a file in a folder that exists") from error
    return 0


def _refuse_planned(parsed: argparse.Namespace) -> int:
    raise OptionError(f"{parsed.name} is planned and not in this version: {PLANNED[parsed.name]}",
                      where=f"python -m memopt_compile {parsed.name}",
                      do="use explain, or memopt.measure from Python")


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
    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])
            and isinstance(made[1], tuple | list)):
        raise OptionError(f"{name} returned no (step, args)", where=target,
                          do="return the step and a tuple of its arguments: return step, (x, y)")
    return made[0], made[1]


if __name__ == "__main__":
    sys.exit(main())
