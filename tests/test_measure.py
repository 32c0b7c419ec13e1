"""The measuring instrument: exact to the byte, repeatable, and open about what it counts."""

import dataclasses
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from memopt_compile.measure import measure, tensor_bytes
from memopt_compile.reporting.timeline import draw

MIB = 2**20


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


class Holder:
    """Keeps a tensor alive under a name that the measured function can let go of."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor: torch.Tensor | None = tensor


def training(tied: bool = False):
    torch.manual_seed(0)
    first, last = nn.Linear(64, 64), nn.Linear(64, 64)
    if tied:
        last.weight = first.weight
    model = nn.Sequential(first, nn.BatchNorm1d(64), nn.Sequential(last))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = torch.randn(16, 64)
    step(batch)  # creates the optimizer's state
    return model, optimizer, step, batch


def test_peak_is_exact_to_the_byte():
    def one_after_the_other_then_two():
        first = block(MIB)
        del first
        second = block(MIB)
        third = block(1_000_003)  # no rounding up: bytes are those asked for
        del second
        return third

    found = measure(one_after_the_other_then_two, resident=())
    assert found.peak_bytes == found.transient_peak_bytes == MIB + 1_000_003
    assert (found.resident_bytes, found.end_bytes, found.allocations) == (0, 1_000_003, 3)
    assert found.by_category == {"transient": MIB + 1_000_003}
    live = [size for _, size in found.timeline]
    assert live == [0, MIB, 0, MIB, MIB + 1_000_003, 1_000_003]
    assert found.result.numel() == 1_000_003
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.peak_bytes = 0  # type: ignore[misc]


def test_release_of_a_resident_block_makes_room():
    holder = Holder(block(MIB))

    def replace():
        holder.tensor = None
        holder.tensor = block(MIB // 2)
        return holder.tensor

    # An iterator lets go of the tensor once it is read, also where the caller's frame would keep
    # an argument: Dynamo leaves its frame hook installed after a backend's error, and then it does.
    found = measure(replace, resident=iter([holder.tensor]))
    assert [size for _, size in found.timeline] == [MIB, 0, MIB // 2]
    assert (found.peak_bytes, found.end_bytes) == (MIB, -MIB // 2)


def test_release_of_a_block_outside_the_account_does_not_count():
    holder = Holder(block(MIB))

    def drop():
        holder.tensor = None
        return block(64)

    assert [size for _, size in measure(drop, resident=()).timeline] == [0, 64]


def test_release_of_a_block_known_from_an_earlier_measurement_counts_once():
    holder = Holder(measure(block, MIB, resident=()).result)

    def drop():
        holder.tensor = None

    assert [size for _, size in measure(drop, resident=iter([holder.tensor])).timeline] == [MIB, 0]


def test_repeated_measurement_is_identical_and_categories_add_up():
    model, optimizer, step, batch = training()
    found = [measure(step, batch, resident=(model, optimizer)) for _ in range(3)]
    for each in found:
        assert [size for _, size in each.timeline] == [size for _, size in found[0].timeline]
        assert each.by_category == found[0].by_category
    held = found[0].by_category
    parameters = sum(p.nbytes for p in model.parameters())
    assert held["parameters"] == parameters
    steps = 4 * len(list(model.parameters()))
    assert held["optimizer state"] == 2 * parameters + steps
    assert held["buffers"] == 2 * 64 * 4 + 8
    assert held["inputs"] == batch.nbytes
    assert sum(held.values()) == found[0].peak_bytes == max(size for _, size in found[0].timeline)
    assert found[0].end_bytes == 4  # the loss
    over_time = found[0].categories
    assert [(seconds, sum(held.values())) for seconds, held in over_time] == list(found[0].timeline)
    assert min(min(held.values()) for _, held in over_time) == 0


def test_gradients_alive_before_the_call_are_resident_until_dropped():
    model, _, _, batch = training()
    torch.sum(model(batch)).backward()
    gradients = sum(p.nbytes for p in model.parameters())
    found = measure(model.zero_grad, resident=model)
    assert found.by_category["gradients"] == gradients
    assert found.end_bytes == -gradients
    left = [held["gradients"] for _, held in found.categories]
    assert left[0] == gradients and left[-1] == 0 and left == sorted(left, reverse=True)


def test_tied_weights_views_and_state_count_once():
    model, optimizer, _, _ = training(tied=True)
    tied = next(model.parameters())
    weight, small = 64 * 64 * 4, 64 * 4
    parameters = weight + 4 * small  # one weight, two biases, the norm's scale and shift
    buffers = 2 * small + 8
    state = 2 * parameters + 5 * 4
    assert tensor_bytes(model) == parameters + buffers
    assert tensor_bytes({"all": (model, [optimizer]), "again": tied.t()}) == (
        parameters + buffers + state
    )
    assert tensor_bytes(tied[:1]) == weight  # a view keeps its whole storage
    assert tensor_bytes([None, 3, "text"]) == 0
    with pytest.raises(TypeError, match="object holds no tensors"):
        tensor_bytes([object()])
    sparse = torch.tensor([0.0, 1.0, 0.0, 2.0]).to_sparse()
    assert tensor_bytes(sparse) == 2 * 8 + 2 * 4


def test_resident_found_by_the_garbage_collector():
    model, optimizer, step, batch = training()
    before = measure(int).resident_bytes
    extra = nn.Parameter(torch.zeros(1000))
    extra.grad = torch.zeros(1000)
    view = torch.zeros(500)[:10]
    found = measure(int)
    assert found.resident_bytes - before == 4000 + 4000 + 2000
    assert found.peak_bytes == found.resident_bytes and found.transient_peak_bytes == 0
    named = measure(step, batch, resident=(model, optimizer))
    alive = measure(step, batch)
    assert alive.transient_peak_bytes == named.transient_peak_bytes
    assert alive.by_category["parameters"] >= named.by_category["parameters"]
    del extra, view


def test_exceptions_propagate_and_leave_no_recording_behind():
    def fail():
        block(MIB)
        raise ValueError("from the call")

    with pytest.raises(ValueError, match="from the call"):
        measure(fail)
    assert measure(block, 10, resident=()).peak_bytes == 10


def test_what_is_recorded_is_read_as_it_is(monkeypatch):
    """The profiler's own list of operators takes ten times as long to make as the call takes to record."""
    monkeypatch.setattr(torch.autograd.profiler.profile, "_parse_kineto_results",
                        lambda *_: pytest.fail("made for nothing"))
    assert measure(lambda: block(MIB)).peak_bytes >= MIB


def test_a_tensor_is_resident_by_itself():
    kept = torch.ones(3)
    assert measure(block, 10, resident=kept).resident_bytes == 12


def test_arguments_pass_through():
    assert measure(lambda a, *, b: a + b, 1, b=2, resident=()).result == 3


@pytest.mark.inductor
def test_buffers_of_inductor_are_seen():
    def product(a, b):
        return (a @ b).relu() @ b

    a = torch.randn(256, 256)
    eager = measure(product, a, a, resident=())
    compiled = torch.compile(product, backend="inductor")
    compiled(a, a)
    found = [measure(compiled, a, a, resident=()) for _ in range(2)]
    size = a.nbytes
    # Eager holds the product beside its relu; Inductor writes the relu over the product.
    assert eager.transient_peak_bytes == found[0].transient_peak_bytes == 2 * size
    assert (eager.allocations, found[0].allocations) == (3, 2)
    assert found[0].by_category == found[1].by_category == {"inputs": size, "transient": 2 * size}


def test_picture_is_well_formed_and_says_the_numbers(tmp_path):
    before = measure(lambda: (block(3 * MIB), block(2 * MIB))[0], resident=())
    after = measure(lambda: (block(MIB), block(2 * MIB))[0], resident=())
    path = tmp_path / "memory.svg"
    draw({"before": before, "after <it>": after}, path, budget_bytes=4 * MIB, title="A & B")
    root = ElementTree.parse(path).getroot()
    text = " ".join("".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text"))
    for part in ("A & B", "before", "after <it>", "5.0 MiB", "3.0 MiB", "budget 4.0 MiB"):
        assert part in text
    source = path.read_text()
    assert "<script" not in source and "href" not in source
    assert "prefers-color-scheme: dark" in source


def test_picture_of_a_planned_timeline_and_of_many_points(tmp_path):
    planned = [(index, (index % 7) * MIB) for index in range(100_000)]
    draw({"planned": planned, "flat": [(0, 0)]}, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "progress through the call" in page and "6.0 MiB" in page
    assert len(page) < 200_000  # thinned to what can be seen
    ElementTree.fromstring(page[page.index("<svg") : page.index("</body>")])
    draw(measure(block, MIB, resident=()), tmp_path / "one.svg")
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn.count('class="band"') == 1 and ">transient<" in drawn and ">parameters<" not in drawn
    with pytest.raises(ValueError, match="no timeline"):
        draw({}, tmp_path / "none.svg")


def test_a_view_that_autograd_forbids_to_ask_is_no_hindrance():
    base = torch.zeros(4)
    with torch.no_grad():
        view = base.view(2, 2)
    base.mul_(torch.ones(4, requires_grad=True))
    with pytest.raises(RuntimeError, match="view was created in no_grad"):
        view.is_leaf  # noqa: B018
    assert measure(lambda: torch.zeros(256).sum()).transient_peak_bytes >= 1024
