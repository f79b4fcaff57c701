from __future__ import annotations

import sys
from pathlib import Path

# The small traces live beside the tests of the analysis.
sys.path.insert(0, str(Path(__file__).parents[1] / "analysis"))
