"""Schedulers that the step calls: what is behind the call reads their rates, or does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from loops import Loop, both_and, loop, mlp, ordinary, row

import memopt_compile as memopt

schedules = torch.optim.lr_scheduler
READS: dict[str, Callable[[], Loop]] = {}


def reads(function: Callable[[], Loop]) -> Callable[[], Loop]:
    """A row whose graph ends at the scheduler's step: the step is whole by then."""
    READS[function.__name__] = function
    return function


def scheduled(behind: Callable, ahead: Callable = lambda *_: None, made: Callable | None = None) -> Loop:
    """A step in which `ahead` and `behind` are given optimizer and scheduler, there ahead of and behind the update."""
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = made(opt) if made else schedules.ExponentialLR(opt, 0.9)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        ahead(opt, schedule)
        opt.step()
        found = behind(opt, schedule)
        opt.zero_grad()
        return loss.detach(), found

    return loop(model, opt, step, wrap=both_and(lambda: [schedule.last_epoch, *schedule.get_last_lr()]))


@row
def schedulers_in_a_list() -> Loop:
    """Where Dynamo cannot end a graph."""
    def behind(opt, schedule):
        for each in [schedule, schedule]:
            each.step()

    return scheduled(behind)


@contextlib.contextmanager
def managed():
    yield


@row
def scheduler_within_a_context() -> Loop:
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = schedules.SequentialLR(opt, [schedules.LinearLR(opt, 0.1, 1.0, 2), schedules.CosineAnnealingLR(opt, 4)], [2])

    def step(x, y):
        with managed():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            schedule.step()
            opt.zero_grad()
        return loss.detach()

    return loop(model, opt, step, wrap=both_and(lambda: schedule.get_last_lr()))


@ordinary
def scheduler_ahead_of_the_update() -> Loop:
    return scheduled(lambda *_: None, lambda opt, schedule: schedule.step())


@reads
def scheduler_between_two_updates() -> Loop:
    def behind(opt, schedule):
        schedule.step()
        opt.step()

    return scheduled(behind)


@reads
def rate_read_behind_a_scheduler() -> Loop:
    def behind(opt, schedule):
        schedule.step()
        return opt.param_groups[0]["lr"]

    return scheduled(behind)


@reads
def rates_of_a_group_known_ahead() -> Loop:
    groups = []

    def behind(opt, schedule):
        group = groups[0]
        schedule.step()
        return group["lr"] * 2, group.get("lr"), {k: v for k, v in group.items() if k != "params"}

    result = scheduled(behind)
    groups.extend(result.optimizers[0].param_groups)
    return result


@reads
def rates_set_behind_a_scheduler() -> Loop:
    def behind(opt, schedule):
        schedule.step()
        for group in opt.param_groups:
            group["lr"] = group["lr"] + 0.01
            group["momentum"] = 0.5

    return scheduled(behind)


@reads
def rate_put_behind_a_scheduler() -> Loop:
    """It is not read first."""
    groups = []

    def behind(opt, schedule):
        group = groups[0]
        schedule.step()
        group["lr"] = 0.05

    result = scheduled(behind)
    groups.extend(result.optimizers[0].param_groups)
    return result


@reads
def scheduler_that_is_asked() -> Loop:
    def behind(opt, schedule):
        schedule.step()
        return schedule.get_last_lr(), schedule.last_epoch

    return scheduled(behind)


@reads
def scheduler_that_is_changed() -> Loop:
    def behind(opt, schedule):
        schedule.step()
        schedule.gamma = 0.5

    return scheduled(behind)


@reads
def scheduler_in_a_chain_that_is_asked() -> Loop:
    inner = []

    def made(opt):
        inner[:] = [schedules.ConstantLR(opt, 0.5, 3), schedules.ExponentialLR(opt, 0.9)]
        return schedules.ChainedScheduler(inner)

    def behind(opt, schedule):
        before = inner[0].last_epoch
        schedule.step()
        return before, inner[0].last_epoch

    result = scheduled(behind, made=made)
    result.wrap = both_and(lambda: [each.last_epoch for each in inner])
    return result


@ordinary
def scheduler_of_each_micro_batch() -> Loop:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = schedules.ExponentialLR(opt, 0.9)

    def step(x, y):
        for inputs, labels in memopt.micro_batches(6, x, y):
            F.cross_entropy(model(inputs), labels).backward()
            schedule.step()
        opt.step()
        opt.zero_grad()

    return loop(model, opt, step, wrap=both_and(lambda: schedule.last_epoch))


@row
def plateau_of_the_loss() -> Loop:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = schedules.ReduceLROnPlateau(opt, patience=1, threshold=0.5)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        schedule.step(loss.detach())
        opt.zero_grad()

    return loop(model, opt, step, wrap=both_and(lambda: schedule.get_last_lr()))
