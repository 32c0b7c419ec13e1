"""A rank that dies: what the others say, and what is left of a checkpoint that was being written.
And a checkpoint of two ranks on three."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import server
from ranks import on_ranks, once, place
from test_sharding import DOUBLE, compiled, load, state_of
from torch._dispatch.python import enable_python_dispatcher
from torch.distributed.checkpoint.state_dict import get_state_dict

from memopt_compile.compat import trace
from memopt_compile.errors import RankError

TIMEOUT_SECONDS = 60


def dies(rank, folder):
    """Rank 1 ends while a second checkpoint is being written; rank 0 tries one more step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/found", rank=rank, world_size=2,
                            timeout=timedelta(seconds=TIMEOUT_SECONDS))
    model, opt, _, run = compiled(rank, 2, 3)
    batch = next(cases.batches(rank, 2, DOUBLE))

    def save(name):
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, opt))),
                 checkpoint_id=folder / name)

    run(*batch)
    save("first")
    torch.save((cases.whole(model), state_of(model, opt)), folder / f"saved {rank}")
    run(*batch)
    if rank == 1:
        dcp.FileSystemWriter.write_data = lambda *_: os._exit(9)
    with pytest.raises(Exception):  # noqa: B017  (whatever gloo says)
        save("second")
    start = time.monotonic()
    try:
        run(*batch)
    except RankError as error:
        (folder / "said").write_text(f"{time.monotonic() - start}\n{error}")
    os._exit(0)  # a group without one of its ranks cannot be destroyed


def one_dies(folder):
    both = [server().Process(target=dies, args=(rank, folder)) for rank in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(3 * TIMEOUT_SECONDS)
    assert [process.exitcode for process in both] == [0, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    once(tmp_path_factory, "one dies", one_dies)
    return place(tmp_path_factory) / "one dies"


def test_the_one_that_is_left_names_the_one_that_is_gone(folder):
    seconds, said = (folder / "said").read_text().split("\n", 1)
    assert float(seconds) < TIMEOUT_SECONDS
    assert "MEMOPT-E901: rank 1 of 2 has ended" in said and "where: cases.py" in said


def loaded(rank, ranks, folder):
    """In stages 3 and 1, on ranks whose number divides no parameter."""
    found = []
    for stage in (3, 1):
        model, opt, _, _ = compiled(rank, ranks, stage)
        load(model, opt, folder)
        found.append((cases.whole(model), state_of(model, opt)))
    return found


def test_the_checkpoint_before_is_whole_and_loads_on_three_ranks(folder, tmp_path):
    assert (folder / "first" / ".metadata").exists()
    assert not (folder / "second" / ".metadata").exists()
    first, second = (torch.load(folder / f"saved {rank}") for rank in (0, 1))
    for in_3, in_1 in on_ranks(3, tmp_path, loaded, 3, Path(folder / "first")):
        for kind in (0, 1):
            for found in (second[kind], in_3[kind], in_1[kind]):
                assert found.keys() == first[kind].keys()
                assert all(torch.equal(found[name], value) for name, value in first[kind].items())


def test_ranks_talk_without_holding_pythons_lock():
    """AOTAutograd has Python dispatch operators while it compiles, which holds the lock that gloo's thread waits
    for, with a mutex that the next collective waits for."""
    asked = partial(torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PythonDispatcher)
    with enable_python_dispatcher():
        with trace.dispatched_by_cpp():
            assert not asked()
        assert asked()
