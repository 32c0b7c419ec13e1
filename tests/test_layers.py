"""Who may import whom, where PyTorch's private parts may be used, and how long a file may be.

Read from the source by `ast`, so that an import inside a function counts too.
"""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "memopt_compile": "memopt_compile",
    "passes": "memopt_compile.passes",
    "backends": "memopt_compile.backends",
}
LONGEST = 400  # lines

# From the bottom up: a module imports from its own layer or from those above it in this list.
# Subpackages stand here as one name. A new module needs its place here.
LAYERS = [
    {"errors", "options", "memory_plan", "host_part", "progress", "compat"},
    {"step_graph", "aliases", "data_sizes", "inner_results", "second_derivative", "unused_outputs", "devices", "measure", "optim", "quantization", "distributed", "collectives", "arena", "replaced", "old_gradients", "ctc", "checks"},
    {"planning", "lowering", "liveness", "metadata", "stand_ins", "transfers", "in_slabs", "costs", "seconds", "seconds_cache", "timing", "shadow", "compression", "finiteness", "margin_loss", "gaussian_loss", "partition", "ordering", "fusing", "recordable", "structure", "loops", "folding", "rowwise", "row_regions", "row_classes", "row_loops", "row_splits", "row_slices", "row_twice"},
    {"step_pass", "pass_runs"},
    {"passes", "backends"},
    {"reporting", "capture", "build", "zero", "pipelines", "report", "records", "bench", "verification", "programs", "kinds"},
    {"driver", "api", "low_precision"},
    {"__init__", "__main__"},
]
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}
APART = [("passes", "backends"), ("backends", "passes"), ("passes", "passes")]


def files(*folders: str) -> list[Path]:
    return [
        Path(folder, file)
        for top in folders
        for folder, _, names in os.walk(ROOT / top, followlinks=False)
        for file in sorted(names)
        if file.endswith(".py")
    ]


PACKAGE = files(*FOLDERS)


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(path: Path) -> str:
    """The module that a file is, `__init__` kept as a name: passes/a.py -> memopt_compile.passes.a."""
    top, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS.get(top, top), *rest])


def imports(tree: ast.AST, module: str) -> Iterator[tuple[str, str, int]]:
    """(local name, dotted path, line) of every import; relative ones are resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.asname or name.name.split(".")[0], name.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            parent = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            for name in node.names:
                yield name.asname or name.name, f"{base}.{name.name}", node.lineno


def layer_of(path: str) -> str | None:
    """The name in LAYERS that an import reaches, None outside the package."""
    top, *rest = path.split(".")
    if top != "memopt_compile":
        return None
    # `from memopt_compile import Options` reads a public name: it loads `__init__`.
    return rest[0] if rest and (rest[0] in RANK or known_module(rest[0])) else "__init__"


def known_module(name: str) -> bool:
    return (ROOT / "memopt_compile" / f"{name}.py").exists()


def wrong_imports(source: str, module: str) -> list[str]:
    here = layer_of(module)
    found = []
    for _, path, line in imports(ast.parse(source), module):
        there = layer_of(path)
        if path.split(".")[0] in ("passes", "backends"):
            found.append(f"{line}: {path} would load twice: import memopt_compile.{path}")
        elif there and here and ((here, there) in APART or RANK[there] > RANK[here]):
            found.append(f"{line}: {here} may not import {there}")
    return found


def private_uses(source: str) -> list[str]:
    """Names of torch or functorch with a private part, imported or reached by attribute."""
    tree = ast.parse(source)
    names = {"torch": "torch", "functorch": "functorch"}
    found = []
    for local, path, line in imports(tree, ""):
        top = path.split(".")[0]
        if top in names.values():
            # `import torch.fx` binds torch, `import torch.fx as fx` and `from` bind the whole path.
            names[local] = top if local == top else path
            if is_private(path):
                found.append(f"{line}: {path}")
    for node in ast.walk(tree):
        path = attribute_path(node)
        if isinstance(node, ast.Attribute) and path and path.split(".")[0] in names:
            top, _, rest = path.partition(".")
            full = f"{names[top]}.{rest}"
            # Once, at the private part itself: a._b.c also holds the node a._b.
            if is_private(full) and full.split(".")[-1].startswith("_"):
                found.append(f"{node.lineno}: {full}")
    return found


def is_private(path: str) -> bool:
    # What follows torch.ops is the name of an operator; aten._to_copy is as public as aten.mm.
    if path.startswith("torch.ops."):
        return False
    return any(p.startswith("_") and not p.endswith("__") for p in path.split("."))


def attribute_path(node: ast.AST) -> str | None:
    """ "a.b.c" for that chain of attributes, else None."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if parts and isinstance(node, ast.Name) else None


# One test for all files: pytest took 40 seconds for one of each.


def test_has_a_layer():
    homeless = [short(path) for path in PACKAGE if layer_of(dotted(path)) not in RANK]
    assert homeless == [], "give them their place in LAYERS"


def test_dependencies_point_one_way():
    assert [(short(path), wrong) for path in PACKAGE if (wrong := wrong_imports(path.read_text(), dotted(path)))] == []


def test_nothing_is_loaded_twice():
    def tops(path: Path) -> set[str]:
        return {name.split(".")[0] for _, name, _ in imports(ast.parse(path.read_text()), "tests.x")}

    assert [short(path) for path in files("tests", "examples") if tops(path) & {"passes", "backends"}] == []


def test_private_torch_only_in_compat():
    others = [path for path in (*PACKAGE, *files("examples")) if not dotted(path).startswith("memopt_compile.compat")]
    assert [(short(path), uses) for path in others if (uses := private_uses(path.read_text()))] == []


def test_file_is_short_enough():
    lines = {short(path): len(path.read_text().splitlines()) for path in (*PACKAGE, *files("tests", "examples"))}
    assert {path: length for path, length in lines.items() if length > LONGEST} == {}


@pytest.mark.parametrize("name", ["passes", "backends"])
def test_folder_is_flat(name):
    assert {path.parent for path in files(name)} == {ROOT / name}


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("memopt_compile.passes.a", "from memopt_compile.passes.b import B", True),
        ("memopt_compile.passes.a", "from . import b", True),
        ("memopt_compile.passes.a", "from memopt_compile.backends import eager", True),
        ("memopt_compile.passes.a", "import passes.b", True),
        ("memopt_compile.passes.a", "from memopt_compile import Options", True),
        ("memopt_compile.passes.a", "from memopt_compile import costs, step_pass", False),
        ("memopt_compile.step_graph", "def f():\n    from .driver import backend", True),
        ("memopt_compile.step_graph", "from .errors import VerifyError", False),
        ("memopt_compile.driver", "from memopt_compile.passes.b import B", False),
    ],
)
def test_import_rules(module, source, wrong):
    assert bool(wrong_imports(source, module)) is wrong


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("import torch._dynamo", True),
        ("import torch._dynamo as dynamo", True),
        ("from torch import _C", True),
        ("from torch.utils import _pytree as pytree", True),
        ("from torch._functorch.aot_autograd import aot_module", True),
        ("import torch\ntorch._dynamo.reset()", True),
        ("import torch.fx as fx\nfx.node._side_effectful_functions", True),
        ("from torch import optim as o\no.adam._single_tensor_adam", True),
        ("from functorch import _C", True),
        ("import torch\ntorch.__version__", False),
        ("import torch\ntorch.ops.aten._to_copy.default", False),
        ("from torch.fx.experimental.proxy_tensor import make_fx", False),
        ("from functorch.compile import make_boxed_func", False),
    ],
)
def test_private_rules(source, private):
    assert bool(private_uses(source)) is private
