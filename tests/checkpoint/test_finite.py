"""Weights with NaN or infinity are refused at load, with tensor, file and count."""

from pathlib import Path

import draft_files
import kit_m
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import write_safetensors
from safetensors.numpy import load_file

from eaglejax.checkpoint.draft_loader import read_draft
from eaglejax.checkpoint.finite import finite, refuse_nonfinite
from eaglejax.checkpoint.target_loader import load_target
from eaglejax.checkpoint.tensors import TensorInfo
from eaglejax.errors import CheckpointError
from eaglejax.load_report import LoadReport

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_bit_pattern(dtype):
    """Against numpy's own test: all 16-bit patterns, and the edges of the wider formats."""
    if dtype.itemsize == 2:
        patterns = np.arange(2**16, dtype=np.uint16).view(dtype)
    else:
        largest = np.finfo(dtype).max
        tiny = np.finfo(dtype).smallest_subnormal
        patterns = np.array([0.0, -0.0, 1, -1, largest, -largest, tiny, -tiny, np.inf, -np.inf, np.nan, -np.nan], dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        right = np.isfinite(patterns.astype(np.float64))
    assert [finite(patterns[i : i + 1]) for i in range(len(patterns))] == list(right)
    assert finite(patterns[right]) and not finite(patterns)
    assert finite(patterns[right].reshape(2, -1)[:, ::2].T)
    assert finite(patterns[:0])
    with pytest.raises(CheckpointError, match=f"f: t: .*NaN and .*infinite of {len(patterns)} values"):
        refuse_nonfinite(patterns, TensorInfo("t", patterns.shape, "", Path("f"), 0, ""))


def test_other_dtypes_pass():
    info = TensorInfo("t", (4,), "I8", Path("f"), 0, "I8")
    refuse_nonfinite(np.full(4, -1, np.int8), info)
    refuse_nonfinite(np.full(4, 255, np.uint8), info)


def target_with(tmp_path, name: str, *values: float, dtype=np.float32) -> Path:
    """A small target one of whose tensors begins with `values`."""
    folder = kit_m.write_target(tmp_path / "target", kit_m.sharp(np.arange(64)), layers=2, rows=72)
    tensors = {key: value.astype(dtype) for key, value in load_file(folder / "model.safetensors").items()}
    tensors[name].reshape(-1)[: len(values)] = values
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
def test_a_target_is_refused(tmp_path, dtype):
    name = "model.layers.1.self_attn.v_proj.weight"
    folder = target_with(tmp_path, name, np.nan, np.inf, 1.0, -np.nan, -np.inf, np.nan, dtype=dtype)
    message = rf"model.safetensors: {name}: weights that are not finite.*found 3 NaN and 2 infinite of 8192 values"
    with pytest.raises(CheckpointError, match=message + ".*download the file again"):
        load_target(folder)


def test_padding_may_hold_anything(tmp_path):
    """Rows beyond vocab_size are dropped before anything looks at them; those within are not."""
    folder = target_with(tmp_path, "model.embed_tokens.weight")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"vocab_size": 72', '"vocab_size": 64'))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][64:] = np.nan
    write_safetensors(folder / "model.safetensors", tensors)
    load_target(folder)
    tensors["model.embed_tokens.weight"][63, 5] = np.nan
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="1 NaN of 8192"):
        load_target(folder)


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.self_attn.k_proj.weight", "norm.weight"])
def test_a_draft_is_refused(tmp_path, name):
    spoilt = {name: draft_files.KIT[name].copy()}
    spoilt[name].reshape(-1)[7] = -np.inf
    folder = draft_files.draft(tmp_path, spoilt)
    with pytest.raises(CheckpointError, match=rf"model.safetensors: {name}: .*found 1 infinite of"):
        read_draft(folder, dtype="float32", target_embedding=draft_files.TABLE, report=LoadReport())
