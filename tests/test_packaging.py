"""The built wheel holds exactly the tree's modules, each once, and registers the backend."""

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "memopt_compile": "memopt_compile",
    "passes": "memopt_compile/passes",
    "backends": "memopt_compile/backends",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: a build leaves folders behind that a later one would pack."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-w", out, source], check=True)
    (path,) = out.glob("memopt_compile-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def modules_of_the_tree() -> list[str]:
    """Paths that the wheel should have; the two symlinked folders are walked only as themselves."""
    return [
        (Path(package) / Path(folder, file).relative_to(ROOT / name)).as_posix()
        for name, package in FOLDERS.items()
        for folder, _, files in os.walk(ROOT / name, followlinks=False)
        for file in files
        if file.endswith(".py")
    ]


def test_every_module_is_in_the_wheel_exactly_once(wheel):
    packed = [name for name in wheel.namelist() if name.endswith(".py")]
    assert sorted(packed) == sorted(modules_of_the_tree())


def test_nothing_else_is_installed_at_the_top(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"memopt_compile"}


def test_backend_is_registered_under_its_name(wheel):
    (path,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(path).decode())
    assert dict(entries["torch_dynamo_backends"]) == {"memopt": "memopt_compile.driver:backend"}


@pytest.mark.parametrize("name", ["passes", "backends"])
def test_symlinks_are_relative(name):
    assert os.readlink(ROOT / "memopt_compile" / name) == f"../{name}"
