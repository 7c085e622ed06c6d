"""The Orbax folder: blocks read through their chunks, Orbax itself can restore it, and whatever is missing is named."""

import json
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from checkpoint_files import write_safetensors

from eaglejax.checkpoint.convert import convert
from eaglejax.checkpoint.orbax_folder import OrbaxReader, open_orbax
from eaglejax.checkpoint.orbax_group import CHUNK_BYTES, chunk_shape, save_group
from eaglejax.checkpoint.reader import open_checkpoint
from eaglejax.checkpoint.tensors import DTYPES
from eaglejax.errors import CheckpointError

MANIFEST = "eaglejax_orbax.json"
RNG = np.random.default_rng(3)
BIG = RNG.integers(0, 2**16, (161, 1024), np.uint16).view(ml_dtypes.bfloat16)
CUBE = RNG.standard_normal((4, 100, 64), np.float32)
SMALL = np.arange(6, dtype=np.int64).reshape(2, 3)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orbax")
    write_safetensors(folder / "model.safetensors", {"big": BIG, "cube": CUBE, "small": SMALL, "one": np.array(5.0)})
    convert(folder / "model.safetensors", folder / "made", to="orbax", max_bytes=400_000)
    return folder / "made"


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "copy")


def refused(folder, message):
    with pytest.raises(CheckpointError, match=message) as e:
        open_checkpoint(folder)
    assert "\n" not in str(e.value)


def change_manifest(folder, change):
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "array", "index"),
    [
        ("big", BIG, (slice(40, 97), slice(None))),
        ("big", BIG, (slice(None), slice(128, 256))),
        ("big", BIG, (slice(160, 161), slice(1023, 1024))),
        ("cube", CUBE, (slice(1, 3), slice(10, 20), slice(0, 64))),
        ("cube", CUBE, (slice(2, 2), slice(None), slice(None))),
        ("small", SMALL, (slice(0, 1), slice(1, 3))),
        ("one", np.array(5.0), ()),
    ],
)
def test_blocks(made, name, array, index):
    reader = open_checkpoint(made)
    block = reader.read_block(name, index)
    assert block.dtype == array.dtype and block.shape == array[index].shape
    assert block.tobytes() == array[index].tobytes()
    block[...] = 0  # the caller's own array


@pytest.mark.parametrize(
    ("name", "array", "shape", "dtype", "index"),
    [
        ("big", BIG, (23, 7, 1024), None, (slice(3, 9), slice(2, 7), slice(5, 600))),
        ("big", BIG, (161, 2048), "U8", (slice(150, 161), slice(0, 1000))),
        ("big", BIG, (161 * 1024,), "I16", (slice(5000, 5003),)),
        ("cube", CUBE, (8, 50, 16, 4), None, (slice(3, 5), slice(0, 50), slice(1, 16), slice(0, 4))),
        ("cube", CUBE, None, "I32", (slice(1, 2), slice(99, 100), slice(0, 64))),
        ("small", SMALL, (6,), "U64", (slice(2, 2),)),
        ("one", np.array(5.0), (2,), "U32", (slice(1, 2),)),
        ("one", np.array(5.0), (), "I64", ()),
    ],
)
def test_blocks_of_another_shape_or_dtype(made, name, array, shape, dtype, index):
    seen = array.reshape(-1).view(DTYPES[dtype] if dtype else array.dtype)
    expected = seen.reshape(array.shape if shape is None else shape)[index]
    readers = open_checkpoint(made), open_checkpoint(made.parent / "model.safetensors")
    for reader in readers:
        block = reader.read_block(name, index, shape=shape, dtype=dtype)
        assert (block.dtype, block.shape) == (expected.dtype, expected.shape)
        assert block.tobytes() == expected.tobytes()


def test_rows_and_bounds(made):
    reader = open_checkpoint(made)
    assert reader.read_rows("big", 7, 30).tobytes() == BIG[7:30].tobytes()
    for start, stop in ((0, 162), (-1, 3), (4, 3)):
        with pytest.raises(IndexError):
            reader.read_rows("big", start, stop)
    for index in (
        (slice(0, 1),),
        (slice(0, 162), slice(None)),
        (slice(0, 4, 2), slice(None)),
        (slice(-1, 3), slice(0, 1)),
    ):
        with pytest.raises(IndexError, match="is no block of 'big'"):
            reader.read_block("big", index)
    with pytest.raises(CheckpointError, match="tensor 'absent' is missing"):
        reader.read_block("absent", ())


def test_a_block_needs_only_the_chunks_it_touches(made, folder):
    """A byte is turned in one chunk: blocks beside it are still read, the block that holds it is refused."""
    row = BIG[5].tobytes()
    (file, at) = next(
        (path, path.read_bytes().index(row)) for path in sorted(folder.rglob("d/*")) if row in path.read_bytes()
    )
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    reader = open_checkpoint(folder)
    rows = chunk_shape(BIG.shape, 2)[0]
    assert rows == 11
    assert reader.read_rows("big", rows, 161).tobytes() == BIG[rows:].tobytes()
    assert reader.read("cube").tobytes() == CUBE.tobytes()
    with pytest.raises(
        CheckpointError, match=r"group-0000\d: tensor 'big' cannot be read \(.*Digest mismatch.*; convert"
    ):
        reader.read_block("big", (slice(4, 6), slice(0, 8)))
    with pytest.raises(CheckpointError, match="tensor 'big' cannot be read"):
        convert(folder, folder.parent / "back", to="safetensors")
    assert not (folder.parent / "back").exists()


def test_bytes_that_are_not_those_that_were_put_in(folder):
    def swap(group):
        if "cube" in group["tensors"]:
            group["tensors"]["cube"]["sha256"] = "0" * 64

    change_manifest(folder, lambda manifest: [swap(group) for group in manifest["groups"].values()])
    for table in folder.glob("group-*/eaglejax_group.json"):
        group = json.loads(table.read_text())
        swap(group)
        table.write_text(json.dumps(group))
    for to in ("safetensors", "orbax"):
        with pytest.raises(CheckpointError, match="tensor 'cube' is damaged: its sha256 is not the one in"):
            convert(folder, folder.parent / "back", to=to)
        shutil.rmtree(folder.parent / "back.partial")


def test_orbax_itself_restores_a_group(tmp_path):
    bits = RNG.integers(0, 255, (64,), np.uint8)
    # every dtype that a safetensors file can have
    tree = {
        f"model.layers.{name}": bits[: 8 * dtype.itemsize].view(dtype)
        for name, dtype in DTYPES.items()
        if name != "BOOL"
    }
    tree |= {"flag": np.array([True, False]), "scalar": np.array(2**62 + 1), "big": BIG}
    save_group(tmp_path / "group", tree)
    # uncompressed, and a name is one key whatever dots it has
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arguments = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in tree}
        found = checkpointer.restore(tmp_path / "group", args=ocp.args.PyTreeRestore(restore_args=arguments))
    assert found.keys() == tree.keys()
    for name, array in tree.items():
        assert found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes(), name


def test_chunks_on_disk(tmp_path):
    save_group(tmp_path / "group", {"big": BIG})
    store = {"driver": "ocdbt", "base": f"file://{tmp_path}/group/", "path": "big/"}
    array = tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True).result()
    assert array.chunk_layout.read_chunk.shape == (11, 1024)


@pytest.mark.parametrize(
    ("shape", "itemsize", "chunk"),
    [
        ((), 8, ()),
        ((128, 64), 4, (128, 64)),
        ((4096, 7168), 2, (256, 7168)),
        ((163840, 7168), 2, (160, 7168)),
        ((32, 5760, 2880), 2, (1, 360, 2880)),
        ((384, 4096, 3584), 1, (1, 256, 3584)),
        ((5, 100_000), 4, (1, 100_000)),
        ((100_000_000,), 4, (781_250,)),
        ((1, 1, 64 << 20), 2, (1, 1, 2 << 20)),
    ],
)
def test_chunk_shape(shape, itemsize, chunk):
    assert chunk_shape(shape, itemsize) == chunk
    assert np.prod(chunk) * itemsize <= CHUNK_BYTES


def test_missing_manifest(folder):
    (folder / MANIFEST).unlink()
    refused(folder, f"copy: is an Orbax checkpoint without {MANIFEST}.*expected a folder that 'eaglejax convert")


def test_foreign_orbax_checkpoint(tmp_path):
    save_group(tmp_path / "foreign", {"a": SMALL})
    refused(tmp_path / "foreign", f"foreign: is an Orbax checkpoint without {MANIFEST}")


def test_cut_manifest(folder):
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text[: len(text) // 2])
    refused(folder, f"{MANIFEST}: is (cut off|not valid JSON)")


def test_missing_group(folder):
    shutil.rmtree(folder / "group-00001")
    refused(folder, r"copy: the groups are not those.*missing: group-00001\); found 1 groups.*expected 2 groups")


def test_group_too_many(folder):
    shutil.copytree(folder / "group-00001", folder / "group-00007")
    refused(folder, r"extra: group-00007\); found 3 groups")


def test_wrong_count(folder):
    change_manifest(folder, lambda m: m.update(group_count=3))
    refused(folder, "found 2 groups, 2 in the table; expected 3 groups")


def test_missing_and_cut_files_of_a_group(folder):
    file = max((folder / "group-00000").rglob("d/*"), key=lambda path: path.stat().st_size)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-10])
    refused(folder, f"{file.name}: is cut or was changed; found {size - 10} bytes; expected {size} bytes")
    file.unlink()
    refused(folder, f"{file.name}: is missing; expected {size} bytes")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=2), r"is of another format or version; found \('eaglejax-orbax', 2\)"),
        (lambda m: m.pop("groups"), "contradicts itself .KeyError"),
        (lambda m: m.update(groups=["x"]), "contradicts itself .ValueError"),
        (lambda m: m["groups"].update({"../x": {"files": {}, "tensors": {}}}), "'../x' is no group's name"),
        (lambda m: m["groups"]["group-00000"]["tensors"]["big"].update(dtype="F4"), "entry of tensor 'big'"),
        (lambda m: m["groups"]["group-00000"]["tensors"]["big"].update(shape=[-1, 2]), "entry of tensor 'big'"),
        (
            lambda m: m["groups"]["group-00001"]["tensors"].update(m["groups"]["group-00000"]["tensors"]),
            "entry of tensor",
        ),
        (lambda m: m["groups"]["group-00000"]["tensors"]["big"].pop("sha256"), "contradicts itself"),
    ],
)
def test_manifests_that_cannot_be(folder, change, message):
    change_manifest(folder, change)
    refused(folder, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("big"), f"1 tensor in the group, and not in {MANIFEST}: 'big'"),
        (lambda tensors: tensors.update(more=tensors["big"]), f"1 tensor in {MANIFEST}, and not in the group: 'more'"),
        (lambda tensors: tensors["big"].update(sha256="0" * 64), f"1 tensor told in another way by {MANIFEST}: 'big'"),
    ],
)
def test_a_manifest_that_tells_other_tensors_than_the_group(folder, change, message):
    change_manifest(folder, lambda manifest: change(manifest["groups"]["group-00000"]["tensors"]))
    refused(folder, f"group-00000/eaglejax_group.json: {message}")


def test_a_manifest_that_does_not_fit_the_arrays(folder):
    change_manifest(
        folder, lambda manifest: manifest["groups"]["group-00000"]["tensors"]["big"].update(shape=[100, 1024])
    )
    table = folder / "group-00000" / "eaglejax_group.json"
    group = json.loads(table.read_text())
    group["tensors"]["big"]["shape"] = [100, 1024]
    table.write_text(json.dumps(group))
    with pytest.raises(CheckpointError, match=r"tensor 'big' is not the one.*found bfloat16 \[161, 1024\]; expected"):
        open_checkpoint(folder).read("big")


def test_reading_needs_neither_jax_nor_orbax(made):
    assert isinstance(open_orbax(made), OrbaxReader)
    code = (
        "import sys; sys.modules['jax'] = sys.modules['orbax'] = None\n"
        "from eaglejax.checkpoint.reader import open_checkpoint\n"
        "assert 'tensorstore' not in sys.modules\n"
        f"print(open_checkpoint({str(made)!r}).read_rows('small', 1, 2))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[[3 4 5]]", done.stderr
