"""Makes `graphs`, the helpers that tests of passes share, importable from here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
