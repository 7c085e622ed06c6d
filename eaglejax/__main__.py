"""`python -m eaglejax` is the `eaglejax` runner."""

import sys

from eaglejax.cli.main import run

if __name__ == "__main__":
    sys.exit(run())
