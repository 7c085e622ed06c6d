"""Safetensors files: every dtype, exact byte ranges, and refusals of broken files before anything is read."""

import struct
import time

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import DTYPE_NAMES, LFS_POINTER, header_of, write_raw, write_safetensors
from safetensors.numpy import save_file

from eaglejax.checkpoint import tensors as tensors_module
from eaglejax.checkpoint.reader import open_checkpoint
from eaglejax.errors import CheckpointError

PLAIN = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(1000, dtype=np.int32)}


@pytest.fixture
def sound(tmp_path):
    return write_safetensors(tmp_path / "model.safetensors", PLAIN)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.values())
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    values = (np.arange(24).reshape(4, 6) % 7 - (0 if dtype.kind in "ub" else 3)).astype(dtype)
    # an odd number of bytes before it: the array must be usable all the same
    reader = open_checkpoint(write_safetensors(tmp_path / "x.safetensors", {"odd": np.ones(3, np.uint8), "w": values}))
    info = reader.tensors["w"]
    assert (info.dtype, info.stored, info.shape, info.nbytes) == (DTYPE_NAMES[dtype], info.dtype, (4, 6), values.nbytes)
    got = reader.read("w")
    assert got.dtype == dtype and got.shape == (4, 6) and got.tobytes() == values.tobytes()
    assert got.flags.aligned and got.flags.writeable
    assert reader.read_rows("w", 1, 3).tobytes() == values[1:3].tobytes()


def test_file_of_the_formats_own_library(tmp_path):
    tensors = {"s": np.array(3.5, np.float32), "none": np.zeros((0, 4), np.float16), **PLAIN}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    reader = open_checkpoint(str(tmp_path / "x.safetensors"))
    assert reader.metadata == {"format": "pt"}
    assert reader.tensors.keys() == tensors.keys()
    for name, array in tensors.items():
        got = reader.read(name)
        assert got.shape == array.shape and got.dtype == array.dtype and np.array_equal(got, array)


def test_only_the_bytes_asked_for_are_read(sound, monkeypatch):
    reads = []
    real = tensors_module.read_bytes
    monkeypatch.setattr(tensors_module, "read_bytes", lambda f, at, n: reads.append(n) or real(f, at, n))
    reader = open_checkpoint(sound)
    assert reads == []
    assert np.array_equal(reader.read_rows("b", 10, 12), [10, 11])
    assert np.array_equal(reader.read("a"), PLAIN["a"])
    assert reads == [8, 24]


def test_rows_outside_the_tensor(sound):
    reader = open_checkpoint(sound)
    assert reader.read_rows("a", 2, 2).shape == (0, 3)
    for start, stop in ((-1, 1), (0, 3), (2, 1)):
        with pytest.raises(IndexError, match="'a', which has 2"):
            reader.read_rows("a", start, stop)


def test_missing_tensor(sound):
    with pytest.raises(CheckpointError, match="model.safetensors: tensor 'c' is missing"):
        open_checkpoint(sound).read("c")


def test_file_cut_after_it_was_opened(sound):
    reader = open_checkpoint(sound)
    sound.write_bytes(sound.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="became shorter"):
        reader.read("b")


def cut(raw):
    return raw[:-1024], rf"incomplete: {len(raw)} bytes expected, {len(raw) - 1024} found"


def first_bytes(raw):
    long = struct.pack("<Q", 5000) + raw[8:200]
    return long, "incomplete: at least 5008 bytes expected, 200 found .*header itself"


BROKEN = {
    "last KB cut": cut,
    "first 200 bytes": first_bytes,
    "LFS pointer": lambda raw: (LFS_POINTER.encode(), "Git-LFS pointer.*a file of 84977953 bytes.*git lfs pull"),
    "zero length": lambda raw: (b"", "is empty; found 0 bytes"),
    "5 bytes": lambda raw: (raw[:5], "incomplete: 8 bytes expected, 5 found"),
    "16 extra bytes": lambda raw: (
        raw + bytes(16),
        f"16 extra bytes.*{len(raw)} bytes expected, {len(raw) + 16} found",
    ),
    "header of 2^40": lambda raw: (
        struct.pack("<Q", 1 << 40) + raw[8:],
        "header length is absurd; found 1099511627776",
    ),
    "web page": lambda raw: (b"<!DOCTYPE html><html>Not found</html>", "is a web page"),
    "header no JSON": lambda raw: (raw.replace(b'{"a"', b'?"a"'), "corrupt header: no valid JSON"),
    "header not UTF-8": lambda raw: (raw.replace(b'{"a"', b'{"\xff'), "corrupt header: no valid JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_refused_in_one_line(sound, name):
    broken, message = BROKEN[name](sound.read_bytes())
    sound.write_bytes(broken)
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=message) as e:
        open_checkpoint(sound.parent)
    assert time.perf_counter() - start < 5
    assert str(sound) in str(e.value) and "\n" not in str(e.value)


def entry(**changes):
    return {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}}


BAD_HEADERS = {
    "not an object": (b"[1]", "no JSON object; found list"),
    "entry not an object": ({"a": 3}, "entry of tensor 'a'"),
    "entry without offsets": ({"a": {"dtype": "F32", "shape": [6]}}, "entry of tensor 'a'.*expected dtype, shape"),
    "unknown dtype": (entry(dtype="F3"), "unknown dtype of tensor 'a'; found 'F3'; expected one of F64, F32"),
    "dtype no text": (entry(dtype=4), "unknown dtype of tensor 'a'; found 4"),
    "negative size": (entry(shape=[-2, -3]), "shape of tensor 'a'"),
    "size no number": (entry(shape=[True, 24]), "shape of tensor 'a'"),
    "fewer bytes than shape": (entry(shape=[3, 3]), "'a' of shape .3, 3. and dtype F32; found 24 bytes; expected 36"),
    "offsets reversed": (entry(data_offsets=[24, 0]), "data_offsets of tensor 'a'"),
    "offsets negative": (entry(data_offsets=[-24, 0]), "data_offsets of tensor 'a'"),
    "gap before": (entry(data_offsets=[8, 32]), "8 bytes before tensor 'a' belong to no tensor"),
    "overlap": (
        {**entry(), "b": {"dtype": "U8", "shape": [8], "data_offsets": [20, 28]}},
        "tensors 'a' and 'b' overlap by 4 bytes",
    ),
    "twice": (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', "'a' appears twice"),
    "metadata no text": ({"__metadata__": {"n": 3}, **entry()}, "__metadata__ must map text to text"),
    "deep": (b"[" * 100_000, "no valid JSON"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_header_that_contradicts_itself_is_refused(tmp_path, name):
    header, message = BAD_HEADERS[name]
    file = write_raw(tmp_path / "x.safetensors", header, bytes(24))
    with pytest.raises(CheckpointError, match=message) as e:
        open_checkpoint(file)
    assert "download" in str(e.value) or "convert" in str(e.value)


def test_tensors_may_be_listed_in_any_order(tmp_path):
    header = dict(reversed(header_of(PLAIN).items()))
    file = write_raw(tmp_path / "x.safetensors", header, b"".join(a.tobytes() for a in PLAIN.values()))
    assert np.array_equal(open_checkpoint(file).read("a"), PLAIN["a"])


def test_bfloat16_and_float8_need_no_torch(tmp_path):
    values = np.array([1.5, -2.0, 448.0])
    file = tmp_path / "x.safetensors"
    write_safetensors(file, {"f8": values.astype(ml_dtypes.float8_e4m3fn), "bf": values.astype(ml_dtypes.bfloat16)})
    reader = open_checkpoint(file)
    assert reader.read("f8").astype(np.float32).tolist() == [1.5, -2.0, 448.0]
    assert reader.read("bf").astype(np.float32).tolist() == [1.5, -2.0, 448.0]
