"""pytorch_model.bin is read as torch wrote it, without torch, and nothing in it is executed."""

import json
import os
import pickle
import shutil
import zipfile

import numpy as np
import pytest

from eaglejax.checkpoint.reader import open_checkpoint
from eaglejax.errors import CheckpointError


def repack(source, target, change):
    """A copy of a .bin file whose members went through `change(name, data)`."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return target


def test_every_tensor_is_what_torch_wrote(data):
    reader = open_checkpoint(data / "checkpoint" / "pytorch_model.bin")
    expected = open_checkpoint(data / "checkpoint" / "expected.safetensors")
    assert reader.tensors.keys() == expected.tensors.keys()
    for name, info in expected.tensors.items():
        got, want = reader.read(name), expected.read(name)
        assert (reader.tensors[name].dtype, got.dtype, got.shape) == (info.dtype, want.dtype, want.shape), name
        assert got.tobytes() == want.tobytes(), name
        if want.ndim:
            rows = len(want)
            assert reader.read_rows(name, rows // 2, rows).tobytes() == want[rows // 2 :].tobytes(), name
            index = (slice(rows // 2, rows), *(slice(0, n - n // 2) for n in want.shape[1:]))
            assert reader.read_block(name, index).tobytes() == want[index].tobytes(), name
            flat = (slice(want.size // 2, want.size),)
            assert (
                reader.read_block(name, flat, shape=(want.size,)).tobytes()
                == want.reshape(-1)[want.size // 2 :].tobytes()
            ), name


def test_state_dict_of_a_module(data):
    reader = open_checkpoint(data / "checkpoint" / "linear.bin")
    assert {name: info.shape for name, info in reader.tensors.items()} == {"weight": (2, 3), "bias": (2,)}


def test_folder_and_index(tmp_path, data):
    shutil.copy(data / "checkpoint" / "linear.bin", tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).read("bias").shape == (2,)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "pytorch_model-00001-of-00001.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(["weight", "bias"], "pytorch_model-00001-of-00001.bin")}))
    assert open_checkpoint(tmp_path).read("bias").shape == (2,)
    index.write_text(json.dumps({"weight_map": {"weight": "pytorch_model-00001-of-00001.bin"}}))
    with pytest.raises(CheckpointError, match="lacks 1 tensors that its files hold: bias"):
        open_checkpoint(tmp_path)


def test_safetensors_go_first(tmp_path, data):
    shutil.copy(data / "checkpoint" / "linear.bin", tmp_path / "pytorch_model.bin")
    shutil.copy(data / "checkpoint" / "expected.safetensors", tmp_path / "model.safetensors")
    assert "bf16" in open_checkpoint(tmp_path).tensors


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda p: {"a": Hostile(p / "owned")}, "asks for posix.mkdir|asks for nt.mkdir"),
        (lambda p: {"a": print}, "asks for builtins.print"),
        (lambda p: {"model": {"a": 1}}, "no flat state dict"),
        (lambda p: [1, 2], "no flat state dict"),
    ],
)
def test_pickle_of_anything_else_is_refused(tmp_path, value, message):
    file = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value(tmp_path)))
    with pytest.raises(CheckpointError, match=f"cannot be read without torch: .*({message}).*convert it") as e:
        open_checkpoint(tmp_path)
    assert str(file) in str(e.value) and "\n" not in str(e.value)
    assert not (tmp_path / "owned").exists()


def test_old_format_cut_and_pointer(tmp_path, data):
    with pytest.raises(CheckpointError, match="before version 1.6.*convert it where torch is installed"):
        open_checkpoint(data / "checkpoint" / "old_format.bin")
    whole = (data / "checkpoint" / "pytorch_model.bin").read_bytes()
    file = tmp_path / "pytorch_model.bin"
    for size in (0, 100, len(whole) - 1024):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="is incomplete|is empty"):
            open_checkpoint(tmp_path)


def test_storage_that_does_not_fit(tmp_path, data):
    source = data / "checkpoint" / "linear.bin"
    short = repack(source, tmp_path / "short.bin", lambda n, d: d[:-4] if n.endswith("data/0") else d)
    with pytest.raises(CheckpointError, match="storage of 'weight' is compressed or too short"):
        open_checkpoint(short)
    big = repack(source, tmp_path / "big.bin", lambda n, d: b"big" if n.endswith("byteorder") else d)
    with pytest.raises(CheckpointError, match="not little-endian"):
        open_checkpoint(big)
    same = repack(source, tmp_path / "same.bin", lambda n, d: d)
    assert np.array_equal(open_checkpoint(same).read("weight"), open_checkpoint(source).read("weight"))
