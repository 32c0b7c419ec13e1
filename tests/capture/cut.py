"""The same way of writing a step with a place in it that ends Dynamo's graph.

    build = cut(rows.ROWS["clip_grad_norm"], 2)        # before the third statement of the functions inside

Run as a script it cuts every row at every statement and prints what is not as in eager:

    python tests/capture/cut.py [row ...]
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator

import torch

INNER = (ast.FunctionDef, ast.ClassDef)


def places(build: Callable) -> int:
    """How many statements there are in the functions inside of `build`."""
    return len(list(_statements(_definition(build))))


def cut(build: Callable, place: int) -> Callable:
    """`build` with a graph break before statement `place` of the functions inside."""
    definition = _definition(build)
    body, i = list(_statements(definition))[place]
    body.insert(i, ast.parse("torch._dynamo.graph_break()").body[0])
    module = ast.fix_missing_locations(ast.Module([definition], []))
    names = {**inspect.getmodule(build).__dict__, "torch": torch}
    exec(compile(module, f"<{build.__name__} cut at {place}>", "exec"), names)
    return names[build.__name__]


def _definition(build: Callable) -> ast.FunctionDef:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(build))).body
    definition.decorator_list = []
    return definition


def _statements(node: ast.AST, inside: bool = False) -> Iterator[tuple[list, int]]:
    for _, value in ast.iter_fields(node):
        if not (isinstance(value, list) and value and isinstance(value[0], ast.stmt)):
            continue
        for i, each in enumerate(value):
            if inside and not isinstance(each, (*INNER, ast.Nonlocal, ast.Global)):
                yield value, i
            yield from _statements(each, inside or isinstance(each, ast.FunctionDef))


def main() -> None:
    import logging

    import loops
    import rows
    from harness import compiled, largest_difference, train

    logging.disable(logging.WARNING)
    builds = {"plain": loops.plain, **rows.ROWS, **rows.ORDINARY}
    for name in sys.argv[1:] or builds:
        build = builds[name]
        expected = train(build)
        for place in range(places(build)):
            try:
                difference, where = largest_difference(expected, compiled(cut(build, place))[0])
                print(name, place, f"{difference:.0e}", where if difference > 1e-9 else "", flush=True)
            except Exception as error:
                print(name, place, type(error).__name__, str(error).splitlines()[0], flush=True)


if __name__ == "__main__":
    main()
