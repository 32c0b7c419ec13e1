"""Each stage of ZeRO gives the numbers of plain data parallel, and of one process with all data."""

from __future__ import annotations

import cases
import pytest
import torch
from ranks import on_ranks, once, thinned
from test_sharding import begun

SOME, MOST = thinned([1, 3]), thinned([2, 3])


def of_two(rank, ranks):
    found = {("uneven", stage): cases.trained(rank, ranks, stage, cases.Uneven) for stage in (0, *SOME)}
    found["ahead", 3] = cases.trained(rank, ranks, 3, cases.Uneven, budget="1GiB")
    for stage in SOME:
        found["clipped", stage] = cases.trained(rank, ranks, stage, cases.Tied, torch.float64,
                                                cases.adamw, micro=2, clip=0.5)
    return found


def of_four(rank, ranks):
    found = {("even", stage): cases.trained(rank, ranks, stage, cases.even, measured=3)
             for stage in (0, *MOST)}
    for stage in SOME:
        found["replicas", stage] = cases.trained(rank, ranks, stage, cases.Tied, torch.float64, cases.adamw,
                                                 replicas=2, micro=2, clip=0.5)  # two of them, each of two ranks
    return found, [begun(rank, ranks, stage, replicas=2) for stage in (2, 3)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return once(tmp_path_factory, "stages of two", lambda folder: on_ranks(2, folder, of_two, 2))


@pytest.fixture(scope="module")
def all_of_four(tmp_path_factory):
    return once(tmp_path_factory, "stages of four", lambda folder: on_ranks(4, folder, of_four, 4))


@pytest.fixture(scope="module")
def four(all_of_four):
    return [found for found, _ in all_of_four]


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("stage", SOME)
def test_is_data_parallel_bit_for_bit_on_two_ranks(pair, stage):
    for rank in pair:
        assert same_bits(rank["uneven", stage]["parameters"], rank["uneven", 0]["parameters"])
        assert rank["uneven", stage]["losses"] == rank["uneven", 0]["losses"]


@pytest.mark.parametrize("stage", MOST)
def test_is_data_parallel_bit_for_bit_on_four_ranks(four, stage):
    for rank in four:
        assert same_bits(rank["even", stage]["parameters"], rank["even", 0]["parameters"])
        assert rank["even", stage]["losses"] == rank["even", 0]["losses"]


@pytest.mark.parametrize("stage", SOME)
def test_is_one_process_on_the_whole_batch(pair, stage):
    """With tied weights, two micro-batches and clipping by the norm of all gradients."""
    expected = cases.alone(cases.Tied, 2, clip=0.5)
    losses, wanted = (torch.tensor(given, dtype=torch.float64) for given in (
        [rank["clipped", stage]["losses"] for rank in pair], expected["losses"]))
    assert float((losses.mean(0) - wanted).abs().max()) <= 1e-12
    for rank in pair:
        for name, value in expected["parameters"].items():
            assert float((rank["clipped", stage]["parameters"][name] - value).abs().max()) <= 1e-11


def test_a_budget_with_room_has_parameters_gathered_ahead(pair):
    """With the same numbers, and on all ranks in the same order, though they have other rows."""
    for rank in pair:
        assert rank["ahead", 3]["ahead"] > rank["uneven", 3]["ahead"]
        assert rank["ahead", 3]["calls"] == rank["uneven", 3]["calls"]
        assert rank["ahead", 3]["losses"] == rank["uneven", 3]["losses"]
        assert same_bits(rank["ahead", 3]["parameters"], rank["uneven", 3]["parameters"])


@pytest.mark.parametrize("stage", SOME)
def test_replicas_of_a_shared_model_are_one_process(four, stage):
    """With tied weights, two micro-batches, and rows that differ in number between ranks that share."""
    expected = cases.alone(cases.Tied, 4, clip=0.5)
    found = [rank["replicas", stage] for rank in four]
    losses, wanted = (torch.tensor(given, dtype=torch.float64) for given in (
        [each["losses"] for each in found], expected["losses"]))
    assert float((losses.mean(0) - wanted).abs().max()) <= 1e-12
    for each in found:
        assert same_bits(each["parameters"], found[0]["parameters"])
        for name, value in expected["parameters"].items():
            assert float((each["parameters"][name] - value).abs().max()) <= 1e-11


@pytest.mark.parametrize("stage", SOME)
def test_replicas_all_reduce_what_has_been_scattered(four, stage):
    """In stage 1 once a mini-batch, else once a micro-batch."""
    sent = four[0]["replicas", stage]["sent"]
    assert sent.count("reduce_scatter_tensor") == (7 if stage == 1 else 2 * 7)
    assert sent.count("all_reduce") == (7 if stage == 1 else 2 * 7) + 1  # and the norm


def test_replicas_begin_with_what_the_first_rank_has(all_of_four):
    _, first = all_of_four[0]
    for _, found in all_of_four:
        for mine, wanted in zip(found, first):
            assert all(torch.equal(mine[name], value) for name, value in wanted.items())


def test_steps_are_captured_whole(pair, four):
    assert {(r["kind"], r["reason"]) for rank in (*pair, *four) for r in rank.values()} == {("step", None)}


@pytest.mark.parametrize("stage", [0, *MOST])
def test_predicted_peak_is_the_measured_one(four, stage):
    """See cases.peaks: the least counts."""
    predicted, = {rank["even", stage]["predicted"] for rank in four}
    assert min(bytes_ for rank in four for bytes_ in rank["even", stage]["measured"]) == predicted


@pytest.mark.parametrize("stage", MOST)
def test_resident_bytes(four, stage):
    """Parameters and one momentum in float32, in stage 2 with the parameters whole."""
    count = sum(p.numel() for p in cases.even().parameters())
    whole = 4 * count * (1 if stage == 2 else 1 / 4)
    assert {rank["even", stage]["resident"] for rank in four} == {whole + 4 * count / 4}


@pytest.mark.parametrize("stage", SOME)
def test_collectives_of_a_mini_batch(pair, stage):
    """Seven parameters, one of them read twice; two micro-batches; the norm of all gradients."""
    sent = pair[0]["clipped", stage]["sent"]
    counts = {name: sent.count(name) for name in set(sent)}
    again = 2  # of four weights: the first is not read by backward, the last is still there
    assert counts == {"all_reduce": 1, "reduce_scatter_tensor": 7 if stage == 1 else 2 * 7,
                      "all_gather_into_tensor": 7 if stage == 1 else 2 * (8 + again)}


@pytest.mark.parametrize("stage", MOST)
def test_biases_travel_together(four, stage):
    """The weights of three layers go alone, the three biases at once, gathered and scattered."""
    found = four[0]["even", stage]
    assert len(found["calls"]) == len(found["sent"]) - 2 * 2


def test_ranks_make_the_same_calls(pair, four):
    for ranks in (pair, four):
        for case in ranks[0]:
            assert all(rank[case]["calls"] == ranks[0][case]["calls"] for rank in ranks)
