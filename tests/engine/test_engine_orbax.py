"""An engine from an Orbax folder answers as the one from the Hugging Face folder does."""

import shutil

import pytest

from eaglejax import EagleJaxEngine, Sampling
from eaglejax.checkpoint.convert import convert
from eaglejax.errors import CheckpointError


@pytest.mark.parametrize("name", ["qwen3_moe_sparse_step", "gpt_oss"])
def test_same_tokens(data, tmp_path, name):
    # the folder holds expected values beside the model, which are no part of it
    source = shutil.copytree(data / "targets" / name, tmp_path / name, ignore=shutil.ignore_patterns("expected*"))
    convert(source, tmp_path / "orbax", to="orbax", max_bytes=60_000)
    convert(tmp_path / "orbax", tmp_path / "back", to="safetensors", max_bytes=60_000)
    assert len(list((tmp_path / "orbax").glob("group-*"))) > 1
    answers = []
    for folder in (source, tmp_path / "orbax", tmp_path / "back"):
        engine = EagleJaxEngine.from_pretrained(str(folder), max_len=64, slots=1)
        assert str(folder) in str(engine.load_report)
        answers.append(engine.generate([[1, 2, 3]], Sampling(max_new_tokens=12, ignore_eos=True))[0].token_ids)
    assert len(answers[0]) == 12
    assert answers[0] == answers[1] == answers[2]


def test_a_truncated_folder_is_refused_by_name(data, tmp_path):
    convert(data / "targets" / "qwen3_moe_sparse_step", tmp_path / "orbax", to="orbax", max_bytes=60_000)
    shutil.rmtree(tmp_path / "orbax" / "group-00001")
    with pytest.raises(CheckpointError, match="the groups are not those of.*missing: group-00001"):
        EagleJaxEngine.from_pretrained(str(tmp_path / "orbax"))
