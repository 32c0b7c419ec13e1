"""For every test: property tests draw the same examples each time, so that CI needs no luck, what is
measured stays out of the user's cache, the garbage collector leaves alone what imports have made, and
torch writes no logs that nobody reads.

The collector would go through a million objects of torch's again and again, a quarter of the time of all
tests. And every measurement collects all garbage, among what tests have left for good (torch's caches, and a few
objects for each guard): what is there before a test is left alone, and its garbage goes from time to time.

pytest captures loggers that do not propagate by handlers of its own: then the structured trace is on, and every
graph is printed for it several times. And Dynamo makes a text of each side effect with its whole stack, which is
deep in a test, whether or not it is logged: with the trace, 4 of 100 seconds.

Tables are long: of a test marked `table(n)` every n-th case runs and one marked `thorough` does not, unless `--thorough`
is given or a test is asked for by name. So it is with what ranks run (`ranks.thinned`).

In every process that compiles kernels, Inductor builds a library for each vector extension of the processor and loads
it in another process, to see whether the compiler knows the extension: up to ten seconds. Here it is taken at its word.
"""

import gc
import itertools
import logging
import os
from collections import Counter

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # read when torch is imported, here and in processes started

import pytest
import torch._inductor.compile_fx  # noqa: F401  (what the first compilation imports)
from forked import spare_time
from hypothesis import settings

import memopt_compile.driver  # noqa: F401

spare_time()

trace = logging.getLogger("torch.__trace")
trace.handlers.clear()
trace.propagate = True  # then pytest leaves it alone
torch._dynamo.config.side_effect_replay_policy = "silent"

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


TESTS = itertools.count(1)


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="run every case of every table too, much longer")


def pytest_configure(config):
    if config.getoption("thorough") or any("::" in argument for argument in config.args):
        os.environ["MEMOPT_THOROUGH"] = "1"  # of what ranks run too


def pytest_collection_modifyitems(config, items):
    if "MEMOPT_THOROUGH" in os.environ:
        return
    cases, chosen, left_out = Counter(), [], []
    for item in items:
        table, test = item.get_closest_marker("table"), item.nodeid.partition("[")[0]
        there = not item.get_closest_marker("thorough") and (table is None or cases[test] % table.args[0] == 0)
        cases[test] += 1
        (chosen if there else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


def pytest_runtest_setup(item):
    if next(TESTS) % 50 == 0:
        gc.unfreeze()
        gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMOPT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
