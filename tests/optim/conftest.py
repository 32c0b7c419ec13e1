"""Makes `training`, the helpers that tests of optimizers share, importable from here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
