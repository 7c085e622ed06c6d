"""What a model's name means, and that a mistyped path is never taken for something else in silence."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest

from eaglejax.checkpoint import builtin, source
from eaglejax.checkpoint.source import Source, resolve
from eaglejax.errors import CheckpointError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Relative names mean this folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_hub(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "huggingface_hub" else real(name))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for huggingface_hub whose one model holds the files named by the test."""
    module = types.ModuleType("huggingface_hub")
    calls, files = [], []

    def snapshot_download(repo_id, allow_patterns, ignore_patterns):
        calls.append((repo_id, allow_patterns, ignore_patterns))
        if repo_id != "org/model":
            raise RuntimeError("404 Client Error.\n\nRepository Not Found")
        folder = tmp_path / "snapshot"
        folder.mkdir(exist_ok=True)
        for name in files:
            if any(Path(name).match(pattern) for pattern in allow_patterns):
                (folder / name).touch()
        return str(folder)

    vars(module)["snapshot_download"] = snapshot_download
    module.__spec__ = importlib.util.spec_from_loader("huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return types.SimpleNamespace(calls=calls, files=files)


def test_paths(elsewhere):
    (elsewhere / "folder").mkdir()
    (elsewhere / "m.gguf").touch()
    (elsewhere / "w.safetensors").touch()
    assert resolve("folder") == Source(Path("folder"), "folder")
    assert resolve(elsewhere / "m.gguf") == Source(elsewhere / "m.gguf", "gguf")
    assert resolve("./w.safetensors") == Source(Path("w.safetensors"), "safetensors")
    assert resolve("w.safetensors").folder == Path(".") and resolve("folder").folder == Path("folder")


def test_home(elsewhere, monkeypatch):
    monkeypatch.setenv("HOME", str(elsewhere))
    monkeypatch.setenv("USERPROFILE", str(elsewhere))
    (elsewhere / "folder").mkdir()
    assert resolve("~/folder").path == elsewhere / "folder"


def test_existing_path_goes_before_the_hub(elsewhere, hub):
    (elsewhere / "org" / "model").mkdir(parents=True)
    assert resolve("org/model") == Source(Path("org/model"), "folder")
    assert hub.calls == []


@pytest.mark.parametrize(
    "name", ["absent", "absent.gguf", "org/m.gguf", "a/b/c", "/absent/m", "../absent", "org/", " ", ""]
)
def test_nothing_of_that_name(name, hub):
    with pytest.raises(CheckpointError, match="no such file or folder|empty model name") as e:
        resolve(name)
    assert "smollm2" in str(e.value) and hub.calls == []


def test_a_path_object_is_never_a_hub_id(hub):
    with pytest.raises(CheckpointError, match="org/model: no such file or folder"):
        resolve(Path("org/model"))
    assert hub.calls == []


@pytest.mark.parametrize("name", ["model.bin", "config.json"])
def test_a_file_that_is_no_checkpoint(elsewhere, name):
    (elsewhere / name).touch()
    with pytest.raises(CheckpointError, match=f"{name}: is no checkpoint by its name.*give the folder that holds it"):
        resolve(str(elsewhere / name))


def test_hub_id_without_the_package(no_hub):
    with pytest.raises(CheckpointError) as e:
        resolve("org/model")
    assert "no such folder here; read as a hub id it needs the package huggingface_hub" in str(e.value)
    assert "pip install huggingface_hub && hf download org/model --local-dir ./model" in str(e.value)


def test_hub_id(hub, caplog):
    hub.files += ["model.safetensors", "config.json", "tokenizer.json", "pytorch_model.bin", "model.onnx"]
    with caplog.at_level("INFO", "eaglejax"):
        found = resolve("org/model")
    assert sorted(p.name for p in found.path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert found.kind == "folder" and len(hub.calls) == 1
    assert "org/model: no such folder here, so it is read as a hub id" in caplog.text


def test_hub_id_with_torch_weights_only(hub):
    hub.files += ["config.json", "pytorch_model.bin"]
    assert (resolve("org/model").path / "pytorch_model.bin").exists()


def test_hub_id_that_cannot_be_downloaded(hub):
    with pytest.raises(CheckpointError) as e:
        resolve("org/modle")
    for part in ("org/modle: no such folder here, and as a hub id", "404 Client Error", "hf download org/modle"):
        assert part in str(e.value)
    assert "\n" not in str(e.value)


def test_mistyped_path_is_not_sent_to_the_hub(elsewhere, hub):
    (elsewhere / "checkpoints").mkdir()
    with pytest.raises(CheckpointError) as e:
        resolve("checkpoints/modle")
    assert "checkpoints/modle: no such folder (in " in str(e.value) and "hf download checkpoints/modle" in str(e.value)
    assert hub.calls == []


def test_built_in_names(elsewhere, monkeypatch):
    shipped = elsewhere / "shipped"
    (shipped / "small-eagle3").mkdir(parents=True)
    (shipped / "small-eagle3" / "config.json").touch()
    (shipped / "not-a-model").mkdir()
    monkeypatch.setattr(builtin, "SHIPPED", shipped)
    assert builtin.builtin_names() == ["smollm2", "small-eagle3"]
    assert resolve("small-eagle3") == Source(shipped / "small-eagle3", "folder")
    # the name wins over a folder here, which ./NAME still means
    (elsewhere / "small-eagle3").mkdir()
    assert resolve("small-eagle3").path == shipped / "small-eagle3"
    assert resolve("./small-eagle3").path == Path("small-eagle3")
    with pytest.raises(CheckpointError, match="one of smollm2, small-eagle3"):
        resolve("not-a-model")


def test_smollm2(monkeypatch, tmp_path):
    monkeypatch.setattr(source, "builtin_path", lambda name: tmp_path / f"{name}.gguf")
    (tmp_path / "smollm2.gguf").touch()
    assert resolve("smollm2") == Source(tmp_path / "smollm2.gguf", "gguf")
