"""Frames of Python on their way to Dynamo: for which backend each is, and what is in force while it is traced.

Checked against torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame
from torch._dynamo.exc import InternalTorchDynamoError, UserError
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.types import ConvertFrameReturn

from . import undecorated, with_optimized_original
from .sizes import GuardOnDataDependentSymNode

_AROUND = wrap_inline(len).__code__


def backend_of(frame_converter: Any) -> tuple[Any, Any]:
    """The function the user named as backend, below torch's wrappers around it, and the options
    that go with it."""
    backend, options = frame_converter._torchdynamo_orig_backend, None
    while True:
        options = options or getattr(backend, "kwargs", {}).get("options")
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "compiler_fn", None)
        if inner is None:
            return backend, options
        backend = inner


def users_code(frame: Any) -> Any:
    """The code of the user's function that a frame is of. Around functions of torch's own files, as decorators of torch's
    make of a step, Dynamo puts one frame of its own, the same code for all."""
    code = frame.f_code
    if code is _AROUND:
        code = getattr(undecorated(with_optimized_original(frame.f_locals["fn"])), "__code__", code)
    return code


def frame_hook(wrap: Callable[[Any, Any, Any, Any], Any]) -> Callable[[], None]:
    """Convert every frame of the process inside ``wrap(backend, options, converter, frame)``, or
    leave it to Python where that is None; returns the undo.

    The converter is one object for each `torch.compile`, whatever frames it comes to."""
    original = convert_frame.ConvertFrameAssert.__call__

    def convert(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        # Where a function called by the frame asks for a number or a size that only the data tell (``names[i.item()]``),
        # Dynamo finds no way out. First numbers behind the step are not followed, then none, and no such size.
        for behind, other in ((True, True), (False, True), (False, False)):
            scope = wrap(*backend_of(self), self, frame)
            if scope is None:  # For this call: others may want to compile the same code.
                return ConvertFrameReturn(apply_to_code=False)
            if self._one_graph or isinstance(scope, contextlib.nullcontext):
                with scope:
                    return original(self, frame, *args, **kwargs)
            try:
                with scope as notes, dynamo_config.patch(capture_dynamic_output_shape_ops=other):
                    notes.reads_behind_later, notes.reads_later = behind, other
                    try:
                        return original(self, frame, *args, **kwargs)
                    except (UserError, GuardOnDataDependentSymNode) as error:
                        if not other or "data-dependent expression" not in str(error):
                            raise
                        notes.again = True
            except InternalTorchDynamoError:  # of the tracer; an error of the step's own Python raises too
                return ConvertFrameReturn()
        raise AssertionError("the last one returns or raises")

    convert_frame.ConvertFrameAssert.__call__ = convert

    def undo() -> None:
        convert_frame.ConvertFrameAssert.__call__ = original

    return undo
