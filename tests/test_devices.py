"""The heap keeps what a step frees, and gives it back when asked."""

import platform
import subprocess
import sys

import pytest
import torch

import memopt_compile as memopt
from memopt_compile import devices

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")

TWENTY_CALLS = """
import resource, torch
from memopt_compile import devices
def faults():
    torch.ones(2**20)  # 4 MiB, freed at once
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [torch.ones(2**20) for _ in range(8)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start
devices.keep_freed_bytes(2**20)  # less than a step needs
little = faults()
devices.keep_freed_bytes(2**26)
faults()
kept = faults()
devices.give_freed_bytes_back()
print(little, kept, faults())
"""


def page_faults(**environment: str) -> list[int]:
    """Of twenty calls: with little kept, with enough kept, and given back."""
    result = subprocess.run([sys.executable, "-c", TWENTY_CALLS], capture_output=True, text=True, check=True,
                            env={"PATH": "", **environment})
    return [int(number) for number in result.stdout.split()]


@glibc
def test_freed_bytes_are_kept_for_the_next_call_and_given_back():
    little, kept, back = page_faults()
    assert min(little, back) > max(100, 10 * kept)


@glibc
def test_what_the_environment_says_stays():
    _, kept, _ = page_faults(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert kept > 100


def test_a_step_that_is_only_planned_leaves_the_heap_as_it_is(monkeypatch):
    asked = []
    monkeypatch.setattr(devices, "keep_freed_bytes", asked.append)
    weight = torch.nn.Parameter(torch.ones(8))
    opt = torch.optim.SGD([weight], lr=0.1)

    def step(x):
        (weight * x).sum().backward()
        opt.step()
        opt.zero_grad()

    memopt.explain(step, torch.ones(8), lowering="eager", memory_budget=1.0)
    assert not asked
    memopt.compile(step, lowering="eager", memory_budget=1.0)(torch.ones(8))
    assert len(asked) == 1
