"""Run tests that need a CUDA device, or a script of this folder, on a machine without one.

    python tests/without_gpu/run.py -m gpu [arguments of pytest]
    python tests/without_gpu/run.py --script launches.py [arguments]

The device of `device.c` has memory, and `device_operators` computes on it with the CPU's kernels. So capture, passes,
numbers of the eager lowering, what PyTorch's CUDA allocator counts, and Inductor's code up to compiled Triton
kernels are as on a GPU. Not so: numbers of Inductor's lowering (its kernels do nothing, and losses stay zero;
with TRITON_INTERPRET=1 they are interpreted in place of compiled, slowly, and have true numbers), workspace of cuBLAS
and cuDNN, times, streams that overlap. It found what no run on a CPU could; it is no measurement of a GPU.

Needs Linux, gcc, binutils, a build of torch for CUDA (2.11 has been tried), and a CUDA toolkit's headers in
`CUDA_HOME`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE, CUDA_HOME = Path(__file__).parent, os.environ.get("CUDA_HOME")
FUNCTION = re.compile(r" (?:_*cuda[A-Z]\w*|cu[A-Z](?!blas|File)\w*)")


def symbols(library: Path | str, *flags: str) -> set[str]:
    """The names of CUDA's functions among the symbols of `library`."""
    listed = subprocess.run(["nm", *flags, library], capture_output=True, text=True).stdout
    return {name.strip() for name in FUNCTION.findall(listed)}


def build(folder: Path) -> Path:
    """The device as a library: functions that `device.c` has not are there, and return 0."""
    made, rest, library = folder / "device.o", folder / "rest.c", folder / "libcuda.so.1"
    subprocess.run(["gcc", "-c", "-O1", "-fPIC", f"-I{CUDA_HOME}/include", "-o", made, HERE / "device.c"], check=True)
    triton = (Path(torch.__file__).parents[1] / "triton" / "backends" / "nvidia").glob("driver.*")
    wanted = {name.strip() for source in triton for name in FUNCTION.findall(source.read_text())}
    wanted |= {"cuInit", "cudaLaunchKernel"}
    for each in (Path(torch.__file__).parent / "lib").glob("*.so"):
        wanted |= symbols(each, "-D", "--undefined-only")
    missing = sorted(wanted - symbols(made, "--defined-only"))
    rest.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in missing))
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-o", library, made, rest, "-ldl"], check=True)
    (folder / "libcuda.so").symlink_to(library)
    return library


def main() -> None:
    if torch.version.cuda is None or CUDA_HOME is None:
        sys.exit("needs a build of torch for CUDA, and CUDA_HOME")
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        environment = {**os.environ, "WITHOUT_GPU": "1", "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": folder,
                       "TRITON_LIBCUDA_PATH": folder, "PYTHONPATH": os.pathsep.join(
                           [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])}
        command, given = ["-m", "pytest", "-p", "device_operators"], sys.argv[1:]
        if given[:1] == ["--script"]:
            command, given = [str(HERE / given[1])], given[2:]
        sys.exit(subprocess.run([sys.executable, *command, *given], env=environment).returncode)


if __name__ == "__main__":
    main()
