"""The runner: `eaglejax COMMAND --flag=value`. One file per command; `main.py` dispatches."""
