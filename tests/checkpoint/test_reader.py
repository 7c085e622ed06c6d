"""Which files of a folder make up the checkpoint, and what is refused."""

import json
import subprocess
import sys

import numpy as np
import pytest
from checkpoint_files import LFS_POINTER, write_safetensors, write_shards

from eaglejax.checkpoint.reader import open_checkpoint
from eaglejax.errors import CheckpointError

A, B, C = ({name: np.full(3, n, np.float32)} for n, name in enumerate("abc"))
INDEX = "model.safetensors.index.json"


def refused(path, message):
    with pytest.raises(CheckpointError, match=message) as e:
        open_checkpoint(path)
    assert "\n" not in str(e.value)


def values(path):
    reader = open_checkpoint(path)
    return {name: reader.read(name)[0] for name in reader.tensors}


def change_index(folder, change):
    file = folder / INDEX
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


@pytest.mark.parametrize("index", [True, False])
def test_shards(tmp_path, index):
    folder = write_shards(tmp_path, [A, B, C], index)
    assert values(folder) == {"a": 0, "b": 1, "c": 2}
    assert open_checkpoint(folder).tensors["b"].file.name == "model-00002-of-00003.safetensors"


def test_single_file_of_any_name_and_by_its_path(tmp_path):
    file = write_safetensors(tmp_path / "weights.safetensors", A | B)
    assert values(tmp_path) == values(file) == values(str(file)) == {"a": 0, "b": 1}


def test_model_safetensors_goes_before_other_files(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", A)
    write_safetensors(tmp_path / "embed.safetensors", B)
    assert values(tmp_path) == {"a": 0}


def test_index_leaves_out_files_that_it_does_not_name(tmp_path):
    write_safetensors(write_shards(tmp_path, [A, B]) / "consolidated.safetensors", C)
    assert values(tmp_path) == {"a": 0, "b": 1}


def test_missing_shards(tmp_path):
    folder = write_shards(tmp_path, [A, B, C])
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, f"{INDEX}: 1 of the 3 files that it names are missing: model-00002-of-00003.safetensors; download")
    (folder / INDEX).unlink()
    refused(folder, "1 of 3 shards are missing: model-00002-of-00003.safetensors; download")


def test_broken_shard_is_named(tmp_path):
    folder = write_shards(tmp_path, [A, B])
    (folder / "model-00002-of-00002.safetensors").write_text(LFS_POINTER)
    refused(folder, "model-00002-of-00002.safetensors: is a Git-LFS pointer")


def test_index_against_shards(tmp_path):
    folder = write_shards(tmp_path, [A | B, C])
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    change_index(folder, lambda m: m.update(a=two))
    refused(folder, f"says that tensor 'a' is in {two}; found it in {one}; download")
    change_index(folder, lambda m: m.update(a=one, d=one))
    refused(folder, "says that tensor 'd' is in .*found it in no file")


def test_tensors_that_the_index_lacks(tmp_path):
    folder = write_shards(tmp_path, [A | B, C])
    change_index(folder, lambda m: m.pop("b"))
    refused(folder, f"{INDEX}: lacks 1 tensors that its files hold: b")


def test_tensor_in_two_shards(tmp_path):
    folder = write_shards(tmp_path, [A | C, A | B])
    twice = "tensor 'a' is in two files; found model-00001-of-00002.safetensors and model-00002-of-00002.safetensors"
    refused(folder, twice)
    (folder / INDEX).unlink()
    refused(folder, twice)


@pytest.mark.parametrize("shard", ["../x.safetensors", "", 3, "sub/x.safetensors", ".."])
def test_index_that_leads_out_of_the_folder(tmp_path, shard):
    folder = write_shards(tmp_path, [A])
    change_index(folder, lambda m: m.update(a=shard))
    refused(folder, f"{INDEX}: weight_map names no file beside it for 'a'")


def test_index_without_a_map(tmp_path):
    (tmp_path / INDEX).write_text('{"metadata": {}}')
    refused(tmp_path, f"{INDEX}: has no weight_map")
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-0')
    refused(tmp_path, f"{INDEX}: is cut off after 29 bytes")


def test_two_checkpoints_in_one_folder(tmp_path):
    write_safetensors(write_shards(tmp_path, [A, B]) / "model.safetensors", A)
    refused(tmp_path, "holds two checkpoints; found model.safetensors and model.safetensors.index.json")
    change_index(tmp_path, lambda m: (m.clear(), m.update(a="model.safetensors")))
    assert values(tmp_path) == {"a": 0}


def test_files_without_a_rule(tmp_path):
    write_safetensors(tmp_path / "one.safetensors", A)
    write_safetensors(tmp_path / "two.safetensors", B)
    refused(tmp_path, "several .safetensors files, no index.*found one.safetensors, two.safetensors")


def test_shards_of_two_sets(tmp_path):
    write_safetensors(tmp_path / "model-00001-of-00001.safetensors", A)
    write_safetensors(tmp_path / "other-00001-of-00001.safetensors", B)
    refused(tmp_path, "shards of several checkpoints")


def test_adapter_alone(tmp_path):
    write_safetensors(tmp_path / "adapter_model.safetensors", A)
    refused(tmp_path, "only an adapter")


def test_nothing_to_open(tmp_path):
    refused(tmp_path / "absent", "absent: no such file or folder")
    refused(tmp_path, "holds no weights; found an empty folder")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "holds no weights; found config.json; expected model.safetensors")
    refused(tmp_path / "config.json", "no checkpoint by its name")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    refused(tmp_path, "give the file itself: .*m.gguf")


def test_no_torch_and_no_jax_are_imported(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", A)
    code = (
        "import sys; sys.modules['torch'] = sys.modules['jax'] = None\n"
        f"from eaglejax.checkpoint.reader import open_checkpoint; print(open_checkpoint({str(tmp_path)!r}).read('a'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[0. 0. 0.]", done.stderr
