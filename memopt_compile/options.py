"""What the user may ask for, and the parsing and printing of byte counts."""

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from memopt_compile.errors import OptionError

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}

CHOICES: dict[str, tuple[object, ...]] = {
    "recompute": (True, False),
    "compress": (None, "int8", "int4", "auto"),
    "offload": (False, True),
    "partition_activations": (False, True),
    "accumulate": ("gradients", "optimizer_states"),
    "zero": (0, 1, 2, 3),
    "arena": (False, True),
    "adapt": (False, True),
    "costs": ("roofline", "measured"),
    "lowering": ("inductor", "eager"),
    "pieces": (True, False),
    "cuda_graphs": ("auto", True, False),
    "verify": (False, True),
}


FOR_A_BUDGET = ("compress", "max_gradient_error", "offload", "partition_activations")  # without one they do nothing


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `torch.compile(step, backend="memopt", options={...})`.

    Attributes:
        memory_budget: peak device bytes of the whole step, parameters and optimizer state
            included. None: every saving that costs no time. An int of bytes, text such as
            "6GiB" or "500MB", a float in (0, 1] (a share of the unoptimized captured step's
            peak), or "auto" (free device memory less a reserve).
        recompute: the planner may run operations again instead of keeping their results.
        compress: None, "int8", "int4" or "auto": the planner may keep activations in fewer bits.
        max_gradient_error: a share of the gradient's norm, such as 0.05. Formats with larger errors are
            not used, and with `verify` the first step is refused if its gradients are further off.
        offload: for a budget, activations may wait for backward in the host's memory (CUDA).
        partition_activations: for a budget, ranks that share layers by tensor parallelism may each keep a
            part of the activations that all of them have (ZeRO's P_a).
        accumulate: micro-batches add up in "gradients" (exact) or in "optimizer_states" (AdamA:
            each gradient goes into Adam's moments at once; every `backward()` is a micro-batch).
        zero: ZeRO stage, 0 to 3; the model is sharded for it by `memopt.shard_`.
        arena: with `zero`, gathered parameters and gradients on their way have planned places in one buffer
            that is kept between steps (ZeRO's M_D and C_B).
        adapt: plan again during training as the outliers in compressed activations come and go.
        costs: seconds by which plans are compared: by the "roofline" of the device, or "measured" by
            running the step's operators on made-up tensors, kept on disk.
        lowering: "inductor", or "eager", an interpreter that frees each value at its last use.
        pieces: Inductor compiles each distinct piece of the step once and keeps the planned order between
            them; False: the step as one big graph, ordered by Inductor, which takes longer to compile.
        cuda_graphs: on CUDA, record the step as one CUDA graph and launch that from the third call on, which
            keeps the memory that the step frees: "auto" where nothing forbids it and that is little (see `replaying`).
        verify: run one shadow step against eager and report the largest difference.
        dump: a folder to write every graph, the plan and the report to, or None.

    Raises:
        OptionError: a value is not among those accepted.
    """

    memory_budget: int | float | str | None = None
    recompute: bool = True
    compress: str | None = None
    max_gradient_error: float | None = None
    offload: bool = False
    partition_activations: bool = False
    accumulate: str = "gradients"
    zero: int = 0
    arena: bool = False
    adapt: bool = False
    costs: str = "roofline"
    lowering: str = "inductor"
    pieces: bool = True
    cuda_graphs: bool | str = "auto"
    verify: bool = False
    dump: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name, accepted in CHOICES.items():
            _check_choice(name, getattr(self, name), accepted)
        _check_budget(self.memory_budget)
        if self.adapt and (self.memory_budget is None or self.compress not in ("int4", "auto")):
            raise _wrong("adapt", True, "give memory_budget and compress='int4' or 'auto' too: formats of 4 "
                         "bits are what adapts")
        if self.adapt and self.cuda_graphs is True:
            raise _wrong("cuda_graphs", True, "leave adapt out: what is recorded once is not planned again")
        for name in FOR_A_BUDGET:
            if getattr(self, name) and self.memory_budget is None:
                raise _wrong(name, getattr(self, name), "give memory_budget too: it says how much has to go")
        if self.arena and not self.zero:
            raise _wrong("arena", True, "give zero=1, 2 or 3 too: a step of one process gathers nothing")
        error = self.max_gradient_error
        if error is not None and not (isinstance(error, float) and 0 < error < 1):
            raise _wrong("max_gradient_error", error, "give a share between 0.0 and 1.0, or None")
        if self.dump is not None and not (isinstance(self.dump, str | os.PathLike) and self.dump):
            raise _wrong("dump", self.dump, "give the path of a folder, or None")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any] | None) -> "Options":
        """The options as `torch.compile` hands them over; None means all defaults.

        Raises:
            OptionError: a key is no option (the nearest one is named), or a value is wrong.
        """
        names = [field.name for field in fields(cls)]
        for key in options or {}:
            if key not in names:
                nearest = difflib.get_close_matches(str(key).lower(), names, n=1, cutoff=0.0)[0]
                raise OptionError(
                    f"there is no option {key!r}; the nearest is {nearest!r}",
                    where="options={...}",
                    do=f"choose from {', '.join(names)}",
                )
        return cls(**(options or {}))


def parse_bytes(text: str) -> int:
    """Bytes in text such as "6GiB", "1.5 GB" or "512B"; a fraction of a byte is dropped.

    A number needs its unit: "6" is far more often six GiB than six bytes.

    Raises:
        OptionError: no number, no unit or an unknown one, or less than one byte.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if not match:
        raise _wrong("size", text, 'write a positive number and a unit, such as "6GiB"')
    number, unit = match.groups()
    if unit not in UNITS:
        problem = f"{unit!r} is not a unit" if unit else "the unit is missing"
        raise _wrong("size", text, f"{problem}; the units are {', '.join(UNITS)}")
    size = int(Fraction(number) * UNITS[unit])
    if size < 1:
        raise _wrong("size", text, "give at least one byte")
    return size


def format_bytes(size: int, enough: bool = False) -> str:
    """`size` bytes for people: whole bytes below 1 KiB, else two decimals of KiB to TiB; with `enough` rounded up,
    so that it can be given as a budget."""
    sign, size = ("-" if size < 0 else ""), abs(size)
    if size < 1024:
        return f"{sign}{size} B"
    number, unit = 0.0, ""
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        hundredths = Fraction(100 * size, UNITS[unit])
        number = float((math.ceil if enough else round)(hundredths) / 100)
        if number < 1024:  # after rounding, so that 1024.00 MiB is printed as 1.00 GiB
            break
    return f"{sign}{number:.2f} {unit}"


def _check_choice(name: str, value: object, accepted: tuple[object, ...]) -> None:
    # Types are compared too: True is not stage 1, and 1 is not True.
    if not any(type(value) is type(choice) and value == choice for choice in accepted):
        raise _wrong(name, value, f"choose from {', '.join(map(repr, accepted))}")


def _check_budget(budget: object) -> None:
    name = "memory_budget"
    if budget is None:
        return
    if isinstance(budget, str):
        if budget == "auto":
            return
        try:
            parse_bytes(budget)
        except OptionError as error:
            raise _wrong(name, budget, f'{error.do}; or give an int of bytes, or "auto"') from None
    elif isinstance(budget, float):
        if not 0 < budget <= 1:
            do = 'a float is a share of the peak, in (0, 1]; for bytes give an int or "6GiB"'
            raise _wrong(name, budget, do)
    elif isinstance(budget, bool) or not isinstance(budget, int):
        do = 'give an int of bytes, text such as "6GiB", a share in (0, 1], "auto" or None'
        raise _wrong(name, budget, do)
    elif budget < 1:
        raise _wrong(name, budget, "give at least one byte, or None for no budget")


def _wrong(name: str, value: object, do: str) -> OptionError:
    return OptionError(f"{name} cannot be {value!r}", where=f"{name}={value!r}", do=do)
