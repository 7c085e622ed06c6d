"""How long from starting `eaglejax generate` to its first text: with an empty compilation cache, and again with what
that start left.

    python tools/measure_start.py
    python tools/measure_start.py --install .        # first installs from that folder into a fresh environment

Times are wall seconds of whole processes: interpreter, imports, reading the weights, compiling or reading programs,
prefill, first tokens. The built-in model is taken from the user's cache folder, and fetched there by the first start
if it is missing. Exit code 1 when the second start takes --second_limit seconds or more, or installing and the first
start together --first_limit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT = "What is the capital of France?"


def install(folder: str, place: Path) -> tuple[float, str]:
    """Seconds to make an environment and install the project of `folder` with its demo extra; and its interpreter."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = str(place / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"{folder}[demo]"], check=True)
    return time.perf_counter() - begin, python


def first_text(python: str, cache: Path, arguments: list[str]) -> tuple[float, float, str]:
    """Seconds to the first piece of text on standard output, seconds to the end, and the text."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
    environment.pop("XLA_FLAGS", None)
    command = [
        python,
        "-m",
        "eaglejax",
        "generate",
        f"--prompt={PROMPT}",
        "--chat",
        "--stream",
        "--max_new_tokens=16",
        *arguments,
    ]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        text = process.stdout.read(1)
        first = time.perf_counter() - begin
        text += process.stdout.read()
    if process.returncode:
        raise SystemExit(f"eaglejax generate ended with exit code {process.returncode}")
    return first, time.perf_counter() - begin, text.decode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", help="folder of the project, to install into a fresh environment first")
    parser.add_argument("--second_limit", type=float, default=20.0)
    parser.add_argument("--first_limit", type=float, default=300.0)
    parser.add_argument("rest", nargs="*", help="more flags for eaglejax generate, after --")
    args = parser.parse_args()
    python, setup = sys.executable, 0.0
    with tempfile.TemporaryDirectory() as scratch:
        if args.install:
            setup, python = install(args.install, Path(scratch) / "environment")
            print(f"install: {setup:.1f} s", flush=True)
        starts = []
        for name in ("first start (empty compilation cache)", "second start"):
            first, whole, text = first_text(python, Path(scratch) / "compiled", args.rest)
            starts.append(first)
            print(
                f"{name}: first text after {first:.1f} s, end after {whole:.1f} s: {text.splitlines()[0]!r}", flush=True
            )
    load = f", load average {os.getloadavg()[0]:.1f}"
    print(f"{os.cpu_count()} cores{load}")
    slow = starts[1] >= args.second_limit or setup + starts[0] >= args.first_limit
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
