"""The pairs of the engine's tests, whatever folder the tests run in."""

import sys
from pathlib import Path

for folder in ("", "engine"):
    path = str(Path(__file__).parents[1] / folder)
    if path not in sys.path:
        sys.path.insert(0, path)
