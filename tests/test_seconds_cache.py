"""The cache of measured seconds: what its key has, and that nothing on disk can break it."""

import json
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memopt_compile import devices, seconds_cache
from memopt_compile.lowering.pieces import label
from memopt_compile.seconds_cache import SecondsCache

CPU = torch.device("cpu")
CALLS = st.dictionaries(st.text(), st.floats(1e-9, 1e3), max_size=5)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))


def fresh(tmp_path_factory):
    return SecondsCache(tmp_path_factory.mktemp("cache") / "new" / "seconds.json", {"device": "one"})


@given(first=CALLS, second=CALLS)
def test_what_is_written_is_read_and_the_first_stays(tmp_path_factory, first, second):
    cache = fresh(tmp_path_factory)
    assert cache.read() == {}
    assert cache.add(first) == first == cache.read()
    assert cache.add(second) == {**second, **first} == cache.read()
    assert [p.name for p in cache.path.parent.iterdir()] == ["seconds.json"]
    assert SecondsCache(cache.path, {"device": "another"}).read() == {}


@given(damage=st.binary(max_size=60) | st.sampled_from([
    b"[]", b"{}", b'{"setup": {"device": "one"}}', b'{"setup": {"device": "one"}, "seconds": [1]}',
    b"[" * 100_000]), found=CALLS)
def test_a_damaged_file_counts_as_empty_and_is_replaced(tmp_path_factory, damage, found):
    cache = fresh(tmp_path_factory)
    cache.path.parent.mkdir()
    cache.path.write_bytes(damage)
    assert cache.read() == {}
    assert cache.add(found) == found == cache.read()


@given(cut=st.floats(0, 1, exclude_max=True))
def test_half_a_file_counts_as_empty(tmp_path_factory, cut):
    cache = fresh(tmp_path_factory)
    cache.add({"mm": 1.0, "gelu": 2.0})
    whole = cache.path.read_bytes()
    cache.path.write_bytes(whole[:int(cut * len(whole))])
    assert cache.read() == {}


@pytest.mark.parametrize("wrong", ["1.0", "null", "true", "-1.0", "0.0", "NaN", "Infinity", "1", "[1.0]"])
def test_what_is_no_time_is_left_out(tmp_path, wrong):
    cache = SecondsCache(tmp_path / "seconds.json", {})
    text = '{"setup": {}, "seconds": {"good": 0.5, "bad": %s}}'
    cache.path.write_text(text % (f'"{wrong}"' if wrong == "1.0" else wrong))
    assert cache.read() == {"good": 0.5}


def test_writers_at_the_same_time_leave_a_whole_file(tmp_path):
    cache = SecondsCache(tmp_path / "seconds.json", {})
    seen = []

    def write(number):
        for turn in range(20):
            cache.add({f"{number}.{turn}": 1.0})
            seen.append(json.loads(cache.path.read_text())["setup"])

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [{}] * 80 and cache.read() and list(tmp_path.iterdir()) == [cache.path]


def test_a_folder_that_cannot_be_written_leaves_the_seconds_to_the_process(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    cache = SecondsCache(tmp_path / "file" / "seconds.json", {})
    assert cache.add({"mm": 1.0}) == {"mm": 1.0} == cache.read()
    assert cache.add({"mm": 2.0, "gelu": 3.0}) == {"mm": 1.0, "gelu": 3.0} == cache.read()
    assert "not kept for the next run" in caplog.text
    (tmp_path / "file").unlink()
    assert cache.add({}) == {"mm": 1.0, "gelu": 3.0}
    assert cache.path.exists() and cache.path not in seconds_cache._unwritten


def test_the_file_differs_by_threads_version_and_device():
    here = SecondsCache.of(CPU).path
    assert here == SecondsCache.of(CPU).path
    threads = torch.get_num_threads()
    with (mock.patch.object(torch, "get_num_threads", return_value=threads + 1)):
        assert SecondsCache.of(CPU).path != here
    with mock.patch.object(torch, "__version__", "9.9"):
        assert SecondsCache.of(CPU).path != here
    with mock.patch.object(seconds_cache, "device_name", return_value="another"):
        assert SecondsCache.of(CPU).path != here
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if precision != "medium" else "high")
    try:
        assert SecondsCache.of(CPU).path != here
    finally:
        torch.set_float32_matmul_precision(precision)


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64])


def call(shape, dtype, transposed, number):
    """The text of one operator's call."""
    graph = torch.fx.Graph()
    value = torch.empty(shape, dtype=dtype, device="meta")
    operand = graph.placeholder("x")
    operand.meta["val"] = value.transpose(0, -1) if transposed else value
    node = graph.call_function(torch.ops.aten.mul.Scalar, (operand, number))
    node.meta["val"] = torch.empty_like(operand.meta["val"])
    value = operand.meta["val"]
    return label(node), (tuple(value.shape), value.stride(), dtype, type(number), number)


one_call = st.builds(call, shapes, dtypes, st.booleans(), st.sampled_from([2, 3, 2.0]))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(one_call, one_call)
def test_calls_are_equal_where_shape_strides_dtype_and_constants_are(one, other):
    assert (one[0] == other[0]) == (one[1] == other[1])


def test_the_folder_follows_the_environment_then_the_system(monkeypatch):
    monkeypatch.setenv("MEMOPT_CACHE_DIR", "/given")
    assert seconds_cache.folder() == Path("/given")
    monkeypatch.delenv("MEMOPT_CACHE_DIR")
    monkeypatch.setattr(seconds_cache.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert seconds_cache.folder() == Path("/caches/memopt_compile")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert seconds_cache.folder() == Path("/home/someone/.cache/memopt_compile")
    monkeypatch.setattr(seconds_cache.sys, "platform", "darwin")
    assert seconds_cache.folder() == Path("/home/someone/Library/Caches/memopt_compile")


def test_the_processor_has_a_name():
    assert devices.device_name(CPU) and devices.device_name(CPU) == devices.device_name(CPU)
