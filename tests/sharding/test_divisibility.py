"""Trial 44: heads, KV heads, experts and vocabularies that do not divide over the devices give right answers, and the report says how."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from random_targets import QWEN, SHARED, assert_same, engine, write

from eaglejax.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
import kit_m  # noqa: E402
import pairs  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

SHAPES = [  # query heads, KV heads, experts, what the report of eight devices says
    (8, 1, 8, "8 devices share each KV head"),
    (8, 4, 16, "2 devices share each KV head"),
    (8, 8, 12, "12 experts on 8 devices: each holds a part of the width of all"),
    (12, 2, 8, "attention of 12 heads over 2 KV heads does not divide over 8 devices: whole on each"),
    (16, 16, 12, "12 experts on 8 devices"),
]


@pytest.mark.parametrize("meshes", [("model=8",), pytest.param(("data=2,model=4", "data=8"), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("heads", "kv_heads", "experts", "said"), SHAPES)
def test_any_number_of_heads_and_experts(tmp_path, heads, kv_heads, experts, said, meshes):
    config = QWEN | dict(num_attention_heads=heads, num_key_value_heads=kv_heads, num_experts=experts)
    folder = write(tmp_path / "target", config)
    first, *_ = assert_same(folder, meshes, atol=1e-5)
    if meshes == ("model=8",):
        assert said in str(first.load_report)


@pytest.mark.parametrize("mesh", ["model=3", "data=3", pytest.param("model=5", marks=pytest.mark.slow)])
def test_meshes_that_divide_nothing(tmp_path, mesh):
    (made,) = assert_same(write(tmp_path / "target", QWEN), (mesh,), atol=1e-5)
    if mesh != "data=3":
        assert "the vocabulary of 160 does not divide over 3" in str(made.load_report) or mesh == "model=5"


def test_an_odd_vocabulary_and_odd_parts(tmp_path):
    odd = write(tmp_path / "odd", QWEN | dict(vocab_size=157))
    (made,) = assert_same(odd, ("model=8",), atol=1e-5)
    assert "the vocabulary of 157 does not divide over 8 devices: whole on each" in str(made.load_report)
    # 168 / 8 = 21: parts of odd size, whose noise is drawn id by id
    assert_same(write(tmp_path / "parts", QWEN | dict(vocab_size=168)), ("model=8",), atol=1e-5)


def test_experts_split_by_width_when_asked(tmp_path):
    folder = write(tmp_path / "target", SHARED)
    (made,) = assert_same(folder, ("model=4",), expert_split="width")
    assert "each holds a part of the width of all" in str(made.load_report)


def test_a_split_that_does_not_divide_is_refused_by_name(tmp_path):
    folder = write(tmp_path / "target", QWEN | dict(num_experts=12))
    with pytest.raises(ConfigError, match=r"expert_split: the experts cannot be split by experts; found 12 experts"):
        engine(folder, "model=8", expert_split="experts")
    with pytest.raises(ConfigError, match="expert_split: unknown choice"):
        engine(folder, "model=8", expert_split="heads")
    with pytest.raises(ConfigError, match="draft_placement: unknown choice"):
        engine(folder, "model=8", draft_placement="everywhere")


def test_a_draft_with_fewer_kv_heads_than_its_target(tmp_path):
    """2 KV heads in the draft, 4 in the target, on 8 and on 4 devices: each model is split by its own count."""
    target, draft = pairs.write_random(tmp_path, "qwen3_moe")
    config = json.loads((Path(draft) / "config.json").read_text()) | {"num_key_value_heads": 2}
    tensors = load_file(Path(draft) / "model.safetensors")
    for name in ("k", "v"):
        weight = tensors[f"midlayer.self_attn.{name}_proj.weight"]
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = weight[: 2 * kit_m.HEAD_DIM]
    draft = str(kit_m.write_folder(tmp_path / "two", config, tensors))
    asked = pairs.prompts([5, 11])
    ask = pairs.Sampling(max_new_tokens=12)
    one = pairs.load(target, draft, speculation=pairs.TREE)
    answers = one.generate(asked, ask)
    assert sum(map(sum, pairs.counts(answers))) > 0
    score = one.draft_score(asked[1])
    for mesh, said in (
        ("model=8", "draft: 4 devices share each KV head"),
        ("data=2,model=4", "draft: 2 devices share each KV"),
    ):
        made = pairs.load(target, draft, speculation=pairs.TREE, mesh=mesh, draft_placement="sharded")
        assert said in str(made.load_report)
        out = made.generate(asked, ask)
        assert (pairs.ids(out), pairs.counts(out)) == (pairs.ids(answers), pairs.counts(answers)), mesh
        # logits reach 13: one part in a million of that is a dozen float32 steps
        np.testing.assert_allclose(made.draft_score(asked[1]).logits, score.logits, atol=1e-5, rtol=2e-6)
