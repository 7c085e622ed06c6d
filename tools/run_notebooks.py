"""Runs the notebooks: `python tools/run_notebooks.py` keeps what they show, `--small NAME ...` only looks whether they run.

Needs `pip install '.[notebooks]'`.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "notebooks"


def run(path: Path, seconds: int) -> Any:
    """The notebook, executed from its top in a fresh kernel of this Python. Raises CellExecutionError with the cell that failed."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=seconds, record_timing=False, coalesce_streams=True, resources=resources).execute()
    return notebook


def keep(notebook: Any, path: Path) -> None:
    """Writes the notebook with what it showed, without the paths of this machine."""
    import nbformat

    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                output.text = output.text.replace(f"{FOLDER.parent}/", "").replace(str(Path.home()), "~")
    nbformat.write(notebook, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="file names in notebooks/; default: all")
    parser.add_argument("--small", action="store_true", help="few tokens, and nothing is written")
    parser.add_argument("--seconds", type=int, default=3600, help="limit of one cell")
    given = parser.parse_args()
    paths = [FOLDER / name for name in given.names] or sorted(FOLDER.glob("*.ipynb"))
    if given.small:
        os.environ["EAGLEJAX_NOTEBOOKS"] = "small"
    for path in paths:
        if not path.is_file():
            print(f"no such notebook: {path}", file=sys.stderr)
            return 2
        begin = time.monotonic()
        notebook = run(path, given.seconds)
        if not given.small:
            keep(notebook, path)
        print(f"{path.name}: {time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
