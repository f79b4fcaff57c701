from __future__ import annotations

import sys
from pathlib import Path

# real.py, which finds the data beside the checkout
sys.path.insert(0, str(Path(__file__).parents[1]))
