"""Trial 15: damaged files, met through the engine."""

import struct
import time
from pathlib import Path

import kit_m
import pairs
import pytest

from eaglejax.errors import CheckpointError

P = kit_m.sharp(pairs.around())
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "4c" * 32 + "\nsize 84977953\n"


def change(file: Path, edit) -> None:
    file.write_bytes(edit(file.read_bytes()))


FAULTS = {
    "a last KB cut": ("model.safetensors", lambda b: b[:-1024], r"incomplete: \d+ bytes expected, \d+ found"),
    "b first 200 bytes": ("model.safetensors", lambda b: b[:200], "incomplete: .* 200 found"),
    "c LFS pointer": ("model.safetensors", lambda _: POINTER.encode(), "(?i)lfs"),
    "d empty": ("model.safetensors", lambda _: b"", "found 0|empty"),
    "e 16 bytes more": ("model.safetensors", lambda b: b + bytes(16), "16 extra bytes at the end"),
    "f header of 2^40": ("model.safetensors", lambda b: struct.pack("<Q", 2**40) + b[8:], "1099511627776|header"),
    "g half a config": ("config.json", lambda b: b[: len(b) // 2], "JSON|json"),
}


@pytest.mark.parametrize("part", ["target", "draft"])
@pytest.mark.parametrize("fault", FAULTS)
def test_trial_15_damaged_files(tmp_path, monkeypatch, fault, part):
    """One line that names the file and what is wrong, in under 5 s, before anything is compiled."""
    folders = dict(zip(("target", "draft"), pairs.write_ring(tmp_path, P, P), strict=True))
    name, edit, match = FAULTS[fault]
    file = Path(folders[part]) / name
    change(file, edit)
    monkeypatch.setattr("jax.jit", lambda *_, **__: pytest.fail("a program was made"))
    begin = time.perf_counter()
    with pytest.raises(CheckpointError, match=match) as caught:
        pairs.load(folders["target"], folders["draft"])
    assert time.perf_counter() - begin < 5
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
