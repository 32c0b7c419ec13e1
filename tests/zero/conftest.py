"""Makes `cases` importable, and `ranks` of the tests of optimizers, here and in the processes started."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "optim")]
