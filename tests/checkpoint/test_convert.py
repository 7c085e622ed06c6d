"""Conversions: bit for bit in both directions, continued after a kill, refused in words."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from checkpoint_files import write_gguf, write_safetensors, write_shards

from eaglejax.checkpoint import convert as convert_module
from eaglejax.checkpoint.convert import convert
from eaglejax.checkpoint.durable import locked
from eaglejax.checkpoint.reader import open_checkpoint
from eaglejax.checkpoint.source import resolve
from eaglejax.errors import CheckpointError, ConfigError

RECORD = "eaglejax_convert.json"


def sample() -> list[dict[str, np.ndarray]]:
    """Three shards with every kind of dtype, shapes of rank 0 to 3 and an empty tensor."""
    rng = np.random.default_rng(0)
    bits = lambda shape: rng.integers(0, 256, shape, np.uint8)
    return [
        {
            "model.embed.weight": bits((300, 512)).view(ml_dtypes.bfloat16),
            "a.scale": bits((7,)).view(ml_dtypes.float8_e4m3fn),
            "a.bf0": np.array(-1.5, ml_dtypes.bfloat16),
            "a.e5m2": bits((5, 3)).view(ml_dtypes.float8_e5m2),
        },
        {
            "b.packed": rng.integers(-(2**31), 2**31 - 1, (40, 33), np.int32),
            "b.count": np.array(2**62 + 1, np.int64),
            "b.many": rng.integers(-(2**62), 2**62, (3, 5), np.int64),
            "b.none": np.zeros((0, 4), np.float32),
            "b.nan": np.array([np.nan, np.inf, -0.0, 1e-45], np.float32),
        },
        {
            "c.experts": rng.standard_normal((18, 64, 48), np.float32),
            "c.flag": np.array([True, False, True]),
            "c.f16": rng.standard_normal((9, 2)).astype(np.float16),
            "c.f64": rng.standard_normal(()),
            "c.i8": rng.integers(-128, 128, (4, 4, 4), np.int8),
        },
    ]


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    write_shards(folder, sample())
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_bytes(b"\xef\xbb\xbf{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / ".gitattributes").write_text("x")
    (folder / "original").mkdir()
    return folder


def assert_same(folder: Path, parts: list[dict[str, np.ndarray]]) -> None:
    """By our reader: every name, dtype, shape and byte."""
    reader = open_checkpoint(folder)
    expected = {name: array for part in parts for name, array in part.items()}
    assert reader.tensors.keys() == expected.keys()
    for name, array in expected.items():
        found = reader.read(name)
        assert (found.dtype, found.shape) == (array.dtype, array.shape), name
        assert found.tobytes() == array.tobytes(), name


def refused(message: str, *arguments, **settings):
    with pytest.raises(CheckpointError, match=message) as e:
        convert(*arguments, **settings)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("max_bytes", [100_000, None])
def test_round_trip(source, tmp_path, max_bytes):
    made = convert(source, tmp_path / "orbax", to="orbax", max_bytes=max_bytes)
    assert (made.tensors, made.parts, made.kept, made.already_done) == (14, 4 if max_bytes else 1, 0, False)
    assert made.nbytes == made.written == sum(a.nbytes for part in sample() for a in part.values())
    assert made.left_out == ("original",)
    assert_same(tmp_path / "orbax", sample())

    back = convert(tmp_path / "orbax", tmp_path / "back", to="safetensors", max_bytes=max_bytes)
    assert (back.tensors, back.nbytes, back.left_out) == (made.tensors, made.nbytes, ())
    assert_same(tmp_path / "back", sample())
    for folder in ("orbax", "back"):
        for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
            assert (tmp_path / folder / name).read_bytes() == (source / name).read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_the_library_of_the_format_reads_what_is_written(source, tmp_path):
    convert(source, tmp_path / "new", to="safetensors", max_bytes=100_000)
    expected = {name: array for part in sample() for name, array in part.items()}
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in expected.values())
    for file in sorted((tmp_path / "new").glob("*.safetensors")):
        for name, entry in safetensors.deserialize(file.read_bytes()):
            array = expected.pop(name)
            assert (bytes(entry["data"]), list(entry["shape"])) == (array.tobytes(), list(array.shape))
        # transformers refuses a file without this
        with safetensors.safe_open(file, "numpy") as opened:
            assert opened.metadata()["format"] == "pt"
    assert not expected


def test_single_file_takes_its_config_along_and_nothing_else(tmp_path):
    (tmp_path / "in").mkdir()
    file = write_safetensors(tmp_path / "in" / "some.safetensors", sample()[0], {"format": "np", "note": "x"})
    write_safetensors(tmp_path / "in" / "other.safetensors", sample()[1])
    (tmp_path / "in" / "config.json").write_text("{}")
    (tmp_path / "in" / "holiday.jpg").write_text("")
    convert(file, tmp_path / "out", to="orbax")
    assert_same(tmp_path / "out", sample()[:1])
    assert open_checkpoint(tmp_path / "out").metadata == {"format": "np", "note": "x"}
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json", RECORD, "eaglejax_orbax.json", "group-00000",
    ]  # fmt: skip
    convert(tmp_path / "out", tmp_path / "back", to="safetensors")
    assert open_checkpoint(tmp_path / "back" / "model.safetensors").metadata == {"format": "np", "note": "x"}


def test_a_finished_conversion_is_not_done_again(source, tmp_path):
    convert(source, tmp_path / "new", to="orbax")
    before = (tmp_path / "new" / "eaglejax_orbax.json").stat()
    made = convert(source, tmp_path / "new", to="orbax")
    assert (made.already_done, made.written) == (True, 0)
    assert (tmp_path / "new" / "eaglejax_orbax.json").stat() == before
    refused("exists already.*found --to=orbax, not --to=safetensors", source, tmp_path / "new", to="safetensors")
    refused(
        "exists already.*--max_shard_gb=2 .2000000000 bytes., not --max_shard_gb=5e-08",
        source,
        tmp_path / "new",
        to="orbax",
        max_bytes=50,
    )
    os.utime(source / "config.json", ns=(1, 1))
    refused("exists already.*changed source: config.json", source, tmp_path / "new", to="orbax")


def test_a_finished_conversion_that_was_damaged_is_not_called_done(source, tmp_path):
    convert(source, tmp_path / "new", to="orbax")
    shutil.rmtree(tmp_path / "new" / "group-00000")
    refused("the groups are not those of", source, tmp_path / "new", to="orbax")


def test_existing_targets(source, tmp_path):
    (tmp_path / "there").mkdir()
    refused(
        "there: exists already, and is not this conversion; found not made by", source, tmp_path / "there", to="orbax"
    )
    (tmp_path / "file").write_text("")
    refused("file: exists already", source, tmp_path / "file", to="orbax")
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "mine.txt").write_text("")
    refused("new.partial: is in the way.*mine.txt", source, tmp_path / "new", to="orbax")
    (tmp_path / "other.partial").write_text("")
    refused("other.partial: cannot be made", source, tmp_path / "other", to="orbax")


def test_targets_in_the_wrong_place(source, tmp_path):
    refused("the target lies inside the source", source, source / "orbax", to="orbax")
    refused("the target is the source", source, tmp_path / "x" / ".." / "source", to="orbax")
    (tmp_path / "link").symlink_to(source)
    refused("the target lies inside the source", source, tmp_path / "link" / "a", to="orbax")
    refused("no such folder to write into", source, tmp_path / "no" / "where", to="orbax")


def test_sources_that_cannot_be_converted(tmp_path):
    refused("no such file or folder", tmp_path / "absent", tmp_path / "new", to="orbax")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    refused("empty: holds no weights", tmp_path / "empty", tmp_path / "new", to="orbax")
    file = write_gguf(tmp_path / "model.gguf", {})
    refused("model.gguf: a GGUF file is not converted", file, tmp_path / "new", to="orbax")
    (tmp_path / "slash").mkdir()
    write_safetensors(tmp_path / "slash" / "model.safetensors", {"a/b": np.zeros(1)})
    refused("cannot be the name of an Orbax array; found 'a/b'", tmp_path / "slash", tmp_path / "new", to="orbax")
    assert not (tmp_path / "new").exists()


def test_settings(source, tmp_path):
    with pytest.raises(ConfigError, match="to: no form of a checkpoint; found 'gguf'; expected orbax or safetensors"):
        convert(source, tmp_path / "new", to="gguf")
    with pytest.raises(ConfigError, match="max_bytes: out of range"):
        convert(source, tmp_path / "new", to="orbax", max_bytes=0)


def test_no_space(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda path: usage._replace(free=17_000_000))
    refused("too little space.*found 0.017 GB free; expected 0.017 GB; make room", source, tmp_path / "new", to="orbax")
    monkeypatch.undo()
    assert convert(source, tmp_path / "new", to="orbax").kept == 0


def test_a_disk_without_room_for_the_record(source, tmp_path, monkeypatch):
    def full(*arguments, **settings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(convert_module, "save_record", full)
    refused("new.partial: cannot be written .No space left", source, tmp_path / "new", to="orbax")
    monkeypatch.undo()
    assert convert(source, tmp_path / "new", to="orbax").kept == 0


def test_a_foreign_record_in_the_source(source, tmp_path):
    (source / RECORD).write_text('{"made": "elsewhere"}')
    refused(f"{RECORD}: is no record of a conversion.*remove that file alone", source, tmp_path / "new", to="orbax")


def test_another_process_is_writing(source, tmp_path):
    (tmp_path / "new.partial").mkdir()
    with locked(tmp_path / "new.partial"):
        refused("new.partial: another convert is writing here", source, tmp_path / "new", to="orbax")
    convert(source, tmp_path / "new", to="orbax")


def parts_in(folder: Path) -> int:
    """Complete groups or shards."""
    return len([path for path in folder.glob("[gm]*-0*") if ".writing" not in path.name])


def stop_after(source: Path, target: Path, parts: int, **settings) -> None:
    """A conversion that is interrupted while it writes the part that comes after so many."""

    @contextmanager
    def progress(total):
        def advance(n):
            if parts_in(target.with_name(target.name + ".partial")) >= parts:
                raise KeyboardInterrupt

        yield advance

    with pytest.raises(KeyboardInterrupt):
        convert(source, target, progress=progress, **settings)


def test_what_was_begun_is_continued_only_from_the_same_source(source, tmp_path):
    settings = {"to": "safetensors", "max_bytes": 100_000}
    stop_after(source, tmp_path / "new", 2, **settings)
    assert not (tmp_path / "new").exists()
    with pytest.raises(CheckpointError, match="new.partial: is a conversion that was not finished; run the same"):
        open_checkpoint(tmp_path / "new.partial")
    with pytest.raises(CheckpointError, match="new.partial: is a conversion that was not finished; run the same"):
        resolve(tmp_path / "new.partial")
    other = "--to=safetensors, not --to=orbax, and --max_shard_gb=0.0001 .100000 bytes., not --max_shard_gb=2 "
    refused(f"begun here that is not this one; found {other}", source, tmp_path / "new", to="orbax")
    shard = source / "model-00003-of-00003.safetensors"
    changed = shard.read_bytes()[:-1] + b"\x07"
    shard.write_bytes(changed)
    refused(f"is not this one; found another or changed source: {shard.name}", source, tmp_path / "new", **settings)
    shutil.rmtree(tmp_path / "new.partial")
    made = convert(source, tmp_path / "new", **settings)
    assert made.kept == 0


def test_complete_parts_are_kept(source, tmp_path):
    settings = {"to": "safetensors", "max_bytes": 100_000}
    stop_after(source, tmp_path / "new", 2, **settings)
    first = tmp_path / "new.partial" / "model-00001-of-00004.safetensors"
    inode = first.stat().st_ino
    made = convert(source, tmp_path / "new", **settings)
    assert (made.kept, made.parts) == (2, 4)
    assert made.written < made.nbytes
    assert (tmp_path / "new" / first.name).stat().st_ino == inode
    assert_same(tmp_path / "new", sample())


def test_a_source_that_changes_meanwhile(source, tmp_path):
    @contextmanager
    def progress(total):
        os.utime(source / "model-00001-of-00003.safetensors", ns=(1, 1))
        yield lambda n: None

    refused("the source changed while it was converted", source, tmp_path / "new", to="orbax", progress=progress)
    assert not (tmp_path / "new").exists()


def digest_of(folder: Path) -> str:
    reader = open_checkpoint(folder)
    total = hashlib.sha256()
    for name in sorted(reader.tensors):
        total.update(name.encode() + reader.read(name).tobytes())
    return total.hexdigest()


RUN = """
import sys
from eaglejax.checkpoint.convert import convert
if sys.argv[3] == "orbax":
    import eaglejax.checkpoint.orbax_group  # what a kill must hit is the conversion, not the imports
print("go", flush=True)
convert(sys.argv[1], sys.argv[2], to=sys.argv[3], max_bytes=int(sys.argv[4]))
"""


def kill_until_done(source, target, to, max_bytes, span, rng, kills=10):
    """Runs the conversion, killing it `kills` times within `span` seconds of its start; then lets it finish. Returns
    the number of parts that were there after each kill."""
    progress = []
    partial = target.with_name(target.name + ".partial")
    command = [sys.executable, "-c", RUN, str(source), str(target), to, str(max_bytes)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    for _ in range(kills):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout and process.stdout.readline() == b"go\n"
            time.sleep(rng.uniform(0, span))
            alive = process.poll() is None
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert alive, "it was done before the kill: the checkpoint is too small for this test"
        assert not target.exists()
        progress.append(parts_in(partial))
        if len(progress) > 2 and progress[-3] == progress[-1]:
            span *= 1.5  # a slow machine
        if (partial / RECORD).exists():
            with pytest.raises(CheckpointError, match="not finished"):
                open_checkpoint(partial)
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return progress


def random_checkpoint(folder: Path, shards: int, tensors: int, nbytes: int) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(1)
    rows = nbytes // 2048
    write_shards(
        folder,
        [
            {
                f"layer.{s}.{t}": np.frombuffer(rng.bytes(rows * 2048), np.int32).reshape(rows, 512)
                for t in range(tensors)
            }
            for s in range(shards)
        ],
    )
    return folder


def ten_kills(tmp_path, source, max_bytes, spans):
    expected = digest_of(source)
    for to, origin, span in zip(("orbax", "safetensors"), (source, tmp_path / "orbax"), spans, strict=True):
        progress = kill_until_done(origin, tmp_path / to, to, max_bytes, span, random.Random(7))
        assert progress == sorted(progress), "a complete part was lost"
        assert progress[-1] > 0, progress
        assert digest_of(tmp_path / to) == expected
        made = convert(origin, tmp_path / to, to=to, max_bytes=max_bytes)
        assert made.already_done


def test_ten_kills_lose_nothing(tmp_path):
    ten_kills(tmp_path, random_checkpoint(tmp_path / "source", 4, 30, 500_000), 1_000_000, spans=(0.5, 0.15))


@pytest.mark.slow
def test_ten_kills_of_two_gigabytes(tmp_path):
    ten_kills(tmp_path, random_checkpoint(tmp_path / "source", 4, 16, 32_000_000), 100_000_000, spans=(2.0, 1.0))
