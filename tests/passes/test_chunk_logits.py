import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from graphs import by_hand, captured, check, gradient, outcome, seed, training_step, values_for
from torch import nn

import memopt_compile as memopt
from memopt_compile.backends import eager
from memopt_compile.liveness import timeline
from memopt_compile.passes.canonicalize import Canonicalize
from memopt_compile.passes.chunk_logits import ChunkLogits
from memopt_compile.passes.release_gradients import ReleaseGradients
from memopt_compile.passes.reuse_buffers import ReuseBuffers
from memopt_compile.passes.schedule_for_peak import ScheduleForPeak
from memopt_compile.step_graph import Phase, Role, nbytes

VOCABULARY, WIDTH = 50, 4
MODELS_OF_EXAMPLES = Path(__file__).parents[2] / "examples" / "models.py"


def loss_layer(loss_of=F.cross_entropy, *, shape=(12,), bias=False, more=lambda logits, loss: ()):
    """Hidden states to a loss, and back to the gradients of weight, bias and hidden states."""
    def layer(w, b, x, y):
        leaves = [torch.tanh(x).detach().requires_grad_(), w.detach().requires_grad_()]
        leaves += [b.detach().requires_grad_()] if bias else []
        logits = F.linear(*leaves)
        loss = loss_of(logits, y)
        grads = torch.autograd.grad(loss, leaves, seed(loss.detach()))
        results = [m.detach() for m in more(logits, loss)]
        return loss.detach(), torch.cos(grads[0]), *map(gradient, grads[1:]), *results

    step = by_hand(layer, ("p", doubles(VOCABULARY, WIDTH)), ("p", doubles(VOCABULARY)),
                   ("x", doubles(*shape, WIDTH)), ("x", torch.ones(shape, dtype=torch.int64)))
    Canonicalize().run(step)
    return step


def doubles(*shape):
    return torch.rand(shape, dtype=torch.float64)


def chunk(step, parts=(4,), ignored=False, relative=1e-12):
    """Rewrite `step`; its numbers stay what they were up to rounding. Transient peaks."""
    values = values_for(step)
    numbers = [i for i, given in enumerate(step.inputs) if given.role is Role.BATCH
               and values[i].dtype == torch.int64]
    for i in numbers:
        values[i] = torch.randint(VOCABULARY, values[i].shape)
    if ignored:
        values[numbers[-1]].view(-1)[::3] = -100
    expected, before = outcome(eager.lower(step), values), timeline(step).transient_peak_bytes
    each = ChunkLogits(0, parts)
    assert each.requires(step) is None
    each.run(step)
    step.verify()
    for a, b in zip(expected, outcome(eager.lower(step), values), strict=True):
        if isinstance(a, torch.Tensor):
            assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
            torch.testing.assert_close(b, a, rtol=relative, atol=relative)
    return before, timeline(step).transient_peak_bytes


def refusal(step):
    text = step.text()
    reason = ChunkLogits(0).requires(step)
    assert step.text() == text
    return reason


def widest(step):
    """Numbers of float64 in the largest storage that the step makes."""
    return max(nbytes(n.meta["val"]) for n in step.computing()) // 8


def test_golden():
    step = loss_layer(shape=(5,))
    chunk(step, (2,))
    assert step.text() == """\
p0: f64[50, 4]  # parameter trained
p1: f64[50]  # parameter trained
x0: f64[5, 4]  # batch
x1: i64[5]  # batch
forward:
  tanh_0: f64[5, 4] = tanh(x0)
  t_0: f64[4, 50] = t(p0)
  ne_0: bool[5] = ne.Scalar(x1, -100)
  sum_0: i64[] = sum(ne_0)
  to_copy_0: f64[] = _to_copy(sum_0, dtype=torch.float64)
backward:
  full_0: f64[] = full([], 1, device=cpu, dtype=torch.float64, pin_memory=False)
  slice_0: f64[3, 4] = slice(tanh_0, 0, 0, 3)
  mm_0: f64[3, 50] = mm(slice_0, t_0)
  log_softmax_0: f64[3, 50] = _log_softmax(mm_0, -1, False)
  slice_1: i64[3] = slice(x1, 0, 0, 3)
  nll_loss_forward_0: 2 values = nll_loss_forward(log_softmax_0, slice_1, None, 0, -100)
  getitem_0: f64[3] = getitem(nll_loss_forward_0, 0)
  sum_1: f64[] = sum(getitem_0)
  nll_loss_backward_0: f64[3, 50] = nll_loss_backward(full_0, log_softmax_0, slice_1, None, 1, -100, to_copy_0)
  log_softmax_backward_data_0: f64[3, 50] = _log_softmax_backward_data(nll_loss_backward_0, log_softmax_0, -1, torch.float64)
  t_1: f64[50, 3] = t(log_softmax_backward_data_0)
  mm_1: f64[50, 4] = mm(t_1, slice_0)
  mm_2: f64[3, 4] = mm(log_softmax_backward_data_0, p0)
  slice_2: f64[2, 4] = slice(tanh_0, 0, 3, 5)
  mm_3: f64[2, 50] = mm(slice_2, t_0)
  log_softmax_1: f64[2, 50] = _log_softmax(mm_3, -1, False)
  slice_3: i64[2] = slice(x1, 0, 3, 5)
  nll_loss_forward_1: 2 values = nll_loss_forward(log_softmax_1, slice_3, None, 0, -100)
  getitem_1: f64[2] = getitem(nll_loss_forward_1, 0)
  sum_2: f64[] = sum(getitem_1)
  add_0: f64[] = add(sum_1, sum_2)
  nll_loss_backward_1: f64[2, 50] = nll_loss_backward(full_0, log_softmax_1, slice_3, None, 1, -100, to_copy_0)
  log_softmax_backward_data_1: f64[2, 50] = _log_softmax_backward_data(nll_loss_backward_1, log_softmax_1, -1, torch.float64)
  t_2: f64[50, 2] = t(log_softmax_backward_data_1)
  addmm_0: f64[50, 4] = addmm(mm_1, t_2, slice_2)
  mm_4: f64[2, 4] = mm(log_softmax_backward_data_1, p0)
  cat_0: f64[5, 4] = cat([mm_2, mm_4], 0)
forward:
  div_0: f64[] = div(add_0, to_copy_0)
backward:
  cos_0: f64[5, 4] = cos(cat_0)
return div_0, cos_0, addmm_0
"""


def by_gather(logits, y):
    """Cross-entropy as people write it by hand, with a penalty on large normalizers."""
    logs = torch.logsumexp(logits, -1)
    of_target = logits.gather(1, y.clamp(min=0)[:, None])[:, 0]
    return (logs - of_target).mean() + 1e-2 * (logs**2).mean()


def batched(loss_of=F.cross_entropy):
    """Of logits [batch, tokens, vocabulary] in float32 and back, as Hugging Face has them."""
    return lambda logits, y: loss_of(logits.to(torch.float32).flatten(0, 1), y.flatten()).double()


LOSSES = {
    "mean": (F.cross_entropy, {}),
    "sum": (lambda z, y: F.cross_entropy(z, y, reduction="sum"), {}),
    "divided by the targets": (
        lambda z, y: F.cross_entropy(z, y, reduction="sum") / (y != -100).sum(), {}),
    "a loss for each token": (lambda z, y: F.cross_entropy(z, y, reduction="none").mean(), {}),
    "smoothed": (lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1), {}),
    "capped": (lambda z, y: F.cross_entropy(9 * torch.tanh(z / 9), y), {}),
    "scaled": (lambda z, y: F.cross_entropy(z * 0.1, y) / 4, {}),
    "by gather": (by_gather, {}),
    "squares": (lambda z, y: (z * z).sum(), {}),
    "bias": (F.cross_entropy, {"bias": True}),
    "batched": (batched(), {"shape": (3, 8)}),
    "with metrics": (F.cross_entropy, {
        "more": lambda z, loss: (z.argmax(-1), torch.logsumexp(z, -1).mean(), loss * 2)}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_numbers_and_peak(name):
    loss_of, settings = LOSSES[name]
    step = loss_layer(loss_of, **{"shape": (24,), **settings})
    short = name == "batched"
    before, after = chunk(step, ignored=True, relative=1e-6 if short else 1e-12)
    assert after < 0.6 * before
    assert widest(step) < 24 * VOCABULARY


@pytest.mark.parametrize("parts", [2, 3, 5, 7, 12])
def test_any_number_of_parts(parts):
    chunk(loss_layer(), (parts,))


def test_short_numbers_are_summed_in_float32():
    def layer(w, x, y):
        h, w = (v.detach().requires_grad_() for v in (torch.tanh(x), w))
        loss = F.cross_entropy(F.linear(h, w).float(), y)
        of_h, of_w = torch.autograd.grad(loss, (h, w), seed(loss.detach()))
        return loss.detach(), torch.cos(of_h), gradient(of_w)

    step = by_hand(layer, ("p", doubles(VOCABULARY, WIDTH).bfloat16()),
                   ("x", doubles(24, WIDTH).bfloat16()), ("x", torch.ones(24, dtype=torch.int64)))
    Canonicalize().run(step)
    chunk(step, relative=2e-2)
    total = next(n for n in step.gradients)
    assert total.meta["val"].dtype == torch.bfloat16
    assert total.args[0].target is torch.ops.aten.add.Tensor
    assert total.args[0].meta["val"].dtype == torch.float32


def test_returned_logits_are_refused():
    step = loss_layer(more=lambda logits, loss: (logits,))
    assert refusal(step) == "the step's result needs all rows of mm at once"


@pytest.mark.parametrize("kind", ["mean", "sum", "none"])
def test_class_weights(kind):
    chunk(loss_layer(lambda z, y: F.cross_entropy(z, y, torch.arange(50.0).double(), reduction=kind).sum()), ignored=True)


def test_normalizing_over_the_rows_is_refused():
    step = loss_layer(lambda z, y: F.cross_entropy(z / z.amax(0), y))
    assert "needs all rows of mm at once" in refusal(step)


def test_random_numbers_are_refused():
    step = loss_layer(lambda z, y: F.cross_entropy(F.dropout(z, 0.5), y))
    assert "needs all rows of mm at once" in refusal(step)


def test_nothing_to_do():
    step = training_step(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).double())
    Canonicalize().run(step)
    assert "no loss" in refusal(step)


def test_without_backward():
    step = by_hand(lambda p, x, y: F.cross_entropy(x @ p, y), ("p", doubles(4, 50)),
                   ("x", doubles(12, 4)), ("x", torch.ones(12, dtype=torch.int64)))
    chunk(step, (4,))
    assert widest(step) == 3 * 50


def test_a_step_that_fits_is_left_alone():
    step = loss_layer()
    text = step.text()
    ChunkLogits(timeline(step).peak_bytes).run(step)
    assert step.text() == text


def test_the_fewest_parts_that_fit():
    peaks = {}
    for parts in (2, 4, 8):
        step = loss_layer(shape=(64,))
        chunk(step, (parts,))
        peaks[parts] = timeline(step).peak_bytes
    assert peaks[2] > peaks[4] > peaks[8]
    for parts, peak in peaks.items():
        step = loss_layer(shape=(64,))
        ChunkLogits(peak).run(step)
        assert timeline(step).peak_bytes == peak, parts


def test_no_parts_where_they_gain_nothing():
    step = loss_layer(shape=(2,))  # the gradient of the weight is most of it
    text = step.text()
    ChunkLogits(0).run(step)
    assert step.text() == text


def test_gradients_and_phases():
    step = loss_layer(bias=True)
    numbers = sorted(step.gradients.values())
    chunk(step)
    assert sorted(step.gradients.values()) == numbers == [1, 1]
    assert [n.meta["val"].shape for n in step.gradients] == [(VOCABULARY, WIDTH), (VOCABULARY,)]
    assert all(step.phase(n) is Phase.BACKWARD for n in step.gradients)


def test_sums_stay_in_their_place():
    step = loss_layer(shape=(64,))
    chunk(step, (8,))
    check(step, ReuseBuffers())
    assert sum("addmm_" in str(n.target) for n in step.computing()) == 7


def test_two_losses_of_one_backward():
    """Both regions need the 1 that backward starts from in front of them."""
    def layer(w, v, x, y):
        leaves = [w.detach().requires_grad_(), v.detach().requires_grad_()]
        loss = F.cross_entropy(x @ leaves[0], y) + F.cross_entropy(x @ leaves[1], y)
        grads = torch.autograd.grad(loss, leaves, seed(loss.detach()))
        return loss.detach(), *map(gradient, grads)

    step = by_hand(layer, ("p", doubles(WIDTH, VOCABULARY)), ("p", doubles(WIDTH, VOCABULARY)),
                   ("x", doubles(64, WIDTH)), ("x", torch.ones(64, dtype=torch.int64)))
    Canonicalize().run(step)
    chunk(step)
    assert widest(step) < 64 * VOCABULARY


def test_micro_batches():
    torch.manual_seed(0)
    step = training_step(nn.Linear(8, VOCABULARY).double(), batch=48, width=8, micro_batches=2)
    Canonicalize().run(step)
    before, after = chunk(step)
    assert after < before and widest(step) < 24 * VOCABULARY


def test_frozen_weights():
    """As with adapters: no gradient is as wide as the logits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, VOCABULARY)).double()
    model[1].requires_grad_(False)
    step = training_step(model, batch=24, width=8)
    Canonicalize().run(step)
    before, after = chunk(step)
    assert after < before and widest(step) < 24 * VOCABULARY


def gpt():
    found = importlib.util.spec_from_file_location("examples_models", MODELS_OF_EXAMPLES)
    models = importlib.util.module_from_spec(found)
    sys.modules[found.name] = models  # its dataclasses look themselves up there
    found.loader.exec_module(models)
    model = models.GPT(models.GPTConfig(101, layers=1, width=16, heads=2, context=8))
    return model, lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def hugging_face(kind, **settings):
    import transformers

    config = getattr(transformers, f"{kind}Config")(vocab_size=101, **settings)
    names = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Bert": "BertForMaskedLM"}
    model = getattr(transformers, names[kind])(config)
    return model, lambda x, y: model(input_ids=x, labels=y).loss


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "gpt": gpt,
    "gpt2": lambda: hugging_face("GPT2", n_positions=8, n_embd=16, n_layer=1, n_head=2),
    "llama": lambda: hugging_face("Llama", **SMALL, num_key_value_heads=2, use_cache=False),
    "bert": lambda: hugging_face("Bert", **SMALL, max_position_embeddings=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.table(6)
def test_language_models(name, lowering):
    torch.manual_seed(0)
    model, loss_of = MODELS[name]()
    model.double().eval()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        loss = loss_of(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    graph = captured(step, *torch.randint(101, (2, 8, 8)), lowering=lowering)
    for each in (Canonicalize(), ReleaseGradients(), ScheduleForPeak()):
        each.run(graph)
    logits = 64 * 101
    assert widest(graph) == logits
    short = name in ("gpt2", "llama")  # transformers takes these losses of float32 logits
    before, after = chunk(graph, ignored=True, relative=1e-6 if short else 1e-12)
    assert after < before and widest(graph) < logits


def test_a_budget():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(512, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 512))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = F.cross_entropy(model(x), x)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    x = torch.randint(512, (256,))
    free = memopt.compile(step, lowering="eager")
    free(x)
    budget = memopt.report(free).predicted_peak_bytes // 2
    held = memopt.compile(step, lowering="eager", memory_budget=budget, recompute=False)
    held(x)
    report = memopt.report(held)
    assert report.measured_peak_bytes == report.predicted_peak_bytes <= budget
    (record,) = [p for p in report.passes if p.name == "chunk_logits"]
    assert dict(record.op_changes)["nll_loss_forward"] > 0


def test_the_update_of_a_large_embedding_is_not_in_the_way_of_a_plan():
    """Its two gradients are added up in place and its update runs in slabs: what is left are the logits, to be cut."""
    embedding, layer = nn.Embedding(4096, 256), nn.Linear(256, 256)
    opt = torch.optim.AdamW([*embedding.parameters(), *layer.parameters()])

    def step(x, y):
        loss = F.cross_entropy(F.linear(F.gelu(layer(embedding(x))), embedding.weight), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    args = torch.randint(4096, (2, 1536))
    resident = memopt.explain(step, *args, lowering="eager").resident_bytes
    fast = memopt.compile(step, lowering="eager", memory_budget=resident + 3 * embedding.weight.nbytes)
    fast(*args)
    report = memopt.report(fast)
    assert report.predicted_peak_bytes == report.measured_peak_bytes <= report.budget_bytes
    assert "chunk_logits" in {p.name for p in report.passes if p.op_changes}
