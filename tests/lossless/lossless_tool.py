"""tools/check_lossless.py as a module."""

import importlib.util
import sys
from pathlib import Path

PATH = Path(__file__).parents[2] / "tools" / "check_lossless.py"
_spec = importlib.util.spec_from_file_location("check_lossless", PATH)
assert _spec is not None and _spec.loader is not None
tool = importlib.util.module_from_spec(_spec)
sys.modules["check_lossless"] = tool  # its dataclasses look for their module
_spec.loader.exec_module(tool)
