"""Models and steps compiled by memopt in other people's loops: Hugging Face's Trainer, Lightning, Accelerate.

    python tests/coverage/frameworks.py

Each trains a small model in float64 twice from one seed, as it is and behind ``model.compile(backend="memopt")``, or with
the whole step compiled, and prints a row: how many graphs were made, and the largest difference of any parameter. A framework that is not installed is skipped.
Not collected by pytest.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from memopt_compile import driver

VOCABULARY, LENGTH = 50, 16


def sequences(count: int = 32) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def points() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, generator=generator, dtype=torch.float64), torch.randint(3, (), generator=generator))
            for _ in range(48)]


class Network(nn.Module):
    """(Of `nn.Sequential` itself `compile` compiles nothing, with any backend.)"""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def trainer(prepare: Callable, **settings: object) -> nn.Module:
    """Gradients accumulated and clipped, evaluation and a checkpoint after each epoch."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)).double()
    prepare(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2, learning_rate=1e-2,
            max_grad_norm=0.5, eval_strategy="epoch", save_strategy="epoch", report_to=[], use_cpu=True, disable_tqdm=True,
            **settings)
        training = Trainer(model=model, args=arguments, train_dataset=sequences(), eval_dataset=sequences(8))
        with mock.patch("builtins.print"):
            training.train()
    return model


def trainer_with_checkpoints(prepare: Callable) -> nn.Module:
    """The same with labels smoothed, and a checkpoint around each layer."""
    return trainer(prepare, label_smoothing_factor=0.1, gradient_checkpointing=True)


def lightning(prepare: Callable) -> nn.Module:
    """Gradients accumulated and clipped by a `LightningModule` that holds the compiled network."""
    import lightning as framework

    class Module(framework.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()
            prepare(self.network)

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.network(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    module = Module()
    framework.Trainer(max_epochs=2, accelerator="cpu", accumulate_grad_batches=2, gradient_clip_val=0.5, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False).fit(
        module, DataLoader(points(), batch_size=8))
    return module.network


def accelerate(prepare: Callable) -> nn.Module:
    """Gradients accumulated and clipped by an `Accelerator`."""
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), Network()
    prepare(model)
    model, opt, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), DataLoader(points(), batch_size=8))
    for _ in range(2):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                opt.step()
                opt.zero_grad()
    return model


def accelerate_whole_step(prepare: Callable) -> nn.Module:
    """A step of Accelerate's as its documentation has it, compiled whole, with a scheduler."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), Network()
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    model, opt, scheduler, batches = accelerator.prepare(model, opt, scheduler, DataLoader(points(), batch_size=8))

    def step(x: Tensor, y: Tensor) -> Tensor:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            scheduler.step()
            opt.zero_grad()
        return loss.detach()

    run = prepare(step) or step
    for _ in range(2):
        for x, y in batches:
            run(x, y)
    return model


def fabric_whole_step(prepare: Callable) -> nn.Module:
    """A step of Lightning Fabric's, compiled whole."""
    from lightning_fabric import Fabric

    fabric, model = Fabric(accelerator="cpu", precision="64-true"), Network()
    model, opt = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, opt, max_norm=0.5)
        opt.step()
        return loss.detach()

    run = prepare(step) or step
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=8):
            run(x, y)
    return model


WAYS = {"transformers, accelerate": (trainer, trainer_with_checkpoints), "lightning": (lightning,), "accelerate": (accelerate, accelerate_whole_step),
        "lightning_fabric": (fabric_whole_step,)}


def row(train: Callable) -> str:
    found, graphs = [], []
    original = driver.remember

    def remember(frame: object, record: object) -> None:
        graphs.append(record)
        original(frame, record)

    def compile_it(what: nn.Module | Callable) -> Callable | None:
        how = {"backend": "memopt", "options": {"lowering": "eager"}}
        return what.compile(**how) if isinstance(what, nn.Module) else torch.compile(what, **how)

    for prepare in (lambda what: None, compile_it):
        torch.compiler.reset()
        torch.manual_seed(0)
        with mock.patch.object(driver, "remember", remember):
            model = train(prepare)
        found.append([p.detach() for p in model.parameters()])
    assert graphs, "nothing was compiled"
    largest = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True))
    whole = "whole_step" not in train.__name__ or {(each.kind, each.reason) for each in graphs} == {("step", None)}
    return f"| {train.__name__.replace('_', ' ')} | {len(graphs)}{'' if whole else ', not whole'} | {largest:.1e} |"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print("| loop | graphs | largest difference |\n| --- | --- | --- |")
    for needed, ways in WAYS.items():
        if all(map(importlib.util.find_spec, needed.split(", "))):
            for train in ways:
                print(row(train), flush=True)
        else:
            print(f"skipped: {needed} is not installed")


if __name__ == "__main__":
    main()
