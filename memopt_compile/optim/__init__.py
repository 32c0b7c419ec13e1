"""Optimizers whose step can be captured whole, and whose states are small.

Each is a `torch.optim.Optimizer`. `Adam`, `AdamW`, `SGD` and `Adafactor` step as torch's classes
of those names do, and exchange checkpoints with them; `CAME` and `AdamA` are what torch lacks.
"""

from .adafactor import Adafactor
from .adam import Adam, AdamW
from .adama import AdamA
from .came import CAME
from .sgd import SGD

__all__ = ["CAME", "SGD", "Adafactor", "Adam", "AdamA", "AdamW"]
