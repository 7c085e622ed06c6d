"""Files that are not what their name says: empty, a Git-LFS pointer, a web page in place of the download."""

from __future__ import annotations

import re
from pathlib import Path

from eaglejax.errors import CheckpointError

LFS_MAGIC = b"version https://git-lfs"
FETCH_AGAIN = "download the file again"


def file_size(file: Path) -> int:
    """Bytes of `file`; a CheckpointError where it is missing, a folder, empty or a stand-in for the real file."""
    try:
        with open(file, "rb") as f:
            head = f.read(512)
        size = file.stat().st_size
    except FileNotFoundError as e:
        raise CheckpointError("no such file", where=file, fix=FETCH_AGAIN) from e
    except OSError as e:
        raise CheckpointError(f"cannot be read: {e.strerror or e}", where=file) from e
    refuse_pointer(file, head)
    return size


def refuse_pointer(file: Path, head: bytes) -> None:
    """Refuses a file whose first bytes `head` show that it is only a stand-in for the real one."""
    if not head:
        raise CheckpointError("is empty", where=file, found="0 bytes", fix=FETCH_AGAIN)
    if head.startswith(LFS_MAGIC):
        size = re.search(rb"^size (\d+)", head, re.MULTILINE)
        raise CheckpointError(
            "is a Git-LFS pointer, not the file itself",
            where=file,
            expected=f"a file of {int(size[1])} bytes" if size else None,
            fix="fetch the file: run 'git lfs pull' in its folder, or download it directly",
        )
    if re.match(rb"\s*<(!doctype|html|\?xml)", head, re.IGNORECASE):
        raise CheckpointError("is a web page, not the file itself", where=file, fix=FETCH_AGAIN)
