"""The EAGLE-3 cycle: draft extend, tree growth, verify, accept, commit. Start reading at `loop.py`."""
