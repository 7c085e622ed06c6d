"""JSON files of a checkpoint and the ways in which they arrive broken."""

import pytest
from checkpoint_files import LFS_POINTER

from eaglejax.checkpoint.json_file import read_config, read_generation_config, read_json
from eaglejax.errors import CheckpointError

CONFIG = '{"model_type": "llama", "hidden_size": 64, "rope_scaling": {"factor": 8.0}}'


def test_sound_file(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + CONFIG.encode())
    assert read_config(tmp_path)["rope_scaling"] == {"factor": 8.0}


def test_generation_config_may_be_absent(tmp_path):
    assert read_generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert read_generation_config(tmp_path) == {"eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="generation_config.json: is cut off"):
        read_generation_config(tmp_path)


@pytest.mark.parametrize("length", range(1, len(CONFIG) - 1))
def test_file_cut_anywhere(tmp_path, length):
    (tmp_path / "config.json").write_text(CONFIG[:length])
    with pytest.raises(CheckpointError, match=rf"config.json: is cut off after {length} bytes .*; download"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is empty"),
        (b"[1]", "holds no JSON object; found list"),
        (b'"text"', "holds no JSON object; found str"),
        (b'{"a": ?, "b": 1}', "is not valid JSON .*column 7"),
        (b'{"a": 1} {"b": 2}', "is not valid JSON .*Extra data"),
        (b'{"a": "\xff"}', "is not UTF-8 text .byte 7."),
        ("{}".encode("utf-16"), "is not UTF-8 text"),
        (b"[" * 100_000, "is not valid JSON|is cut off"),
        (LFS_POINTER.encode(), "is a Git-LFS pointer"),
        (b"<html>Sign in</html>", "is a web page"),
    ],
)
def test_other_content(tmp_path, raw, message):
    (tmp_path / "x.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=message) as e:
        read_json(tmp_path / "x.json")
    assert str(tmp_path / "x.json") in str(e.value) and "\n" not in str(e.value)


def test_missing(tmp_path):
    with pytest.raises(CheckpointError, match="config.json: no such file"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        read_config(tmp_path / "absent")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="config.json: cannot be read"):
        read_config(tmp_path)
