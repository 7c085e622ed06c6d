"""Every mesh says what one device says: peers' cases, random pairs with speculation, skewed routing."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from random_targets import SHARED, assert_same, write
from safetensors.numpy import load_file

from eaglejax import EagleJaxEngine, Sampling, Speculation
from eaglejax.kernels import experts as experts_kernel

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
import pairs  # noqa: E402

MESHES = ("model=8", "data=2,model=4", "data=4,model=2", "data=8")
STORED = Path(__file__).parents[1] / "data"
GOLDEN = os.environ.get("EAGLEJAX_GOLDEN")
CASES = [STORED / "targets" / name for name in ("gpt_oss", "glm4_moe", "kimi_k25")]
if GOLDEN:
    CASES += [Path(GOLDEN) / f"target_{name}" for name in ("qwen3_moe", "deepseek_v3", "kimi_k2", "mixtral")]

LAYOUTS = [("model=8", "replicated"), ("data=2,model=4", "sharded"), ("data=4,model=2", "replicated")]


@pytest.mark.parametrize("folder", CASES, ids=lambda path: path.name)
def test_peers_cases(folder):
    """The peer's own logits and greedy tokens, on every mesh."""
    want = load_file(folder / "expected.safetensors")
    prompts = [[int(i) for i in row] for row in want["input_ids"]]
    greedy = [[int(i) for i in row] for row in want["greedy_tokens"]]
    one = EagleJaxEngine.from_pretrained(str(folder)).score(prompts[0])
    for mesh in MESHES if GOLDEN else MESHES[:2]:
        engine = EagleJaxEngine.from_pretrained(str(folder), mesh=mesh, max_len=64)
        score = engine.score(prompts[0])
        np.testing.assert_allclose(score.logits, one.logits, rtol=0, atol=5e-5, err_msg=mesh)
        np.testing.assert_allclose(score.logits, want["logits"][0], rtol=0, atol=1e-4, err_msg=mesh)
        assert score.experts.keys() == one.experts.keys() != set()
        assert all(np.array_equal(score.experts[layer], one.experts[layer]) for layer in one.experts), mesh
        out = engine.generate(prompts, Sampling(max_new_tokens=len(greedy[0]), ignore_eos=True))
        assert pairs.ids(out) == greedy, mesh


@pytest.mark.parametrize("layouts", [LAYOUTS[1:2], pytest.param(LAYOUTS[::2], marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_speculation_on_a_mesh(tmp_path, family, layouts):
    """Tokens and accepted counts of greedy and sampled trees, draft replicated and sharded."""
    target, draft = pairs.write_random(tmp_path, family)
    asked = pairs.prompts([3, 17, 9])
    samplings = [
        Sampling(max_new_tokens=20),
        Sampling(max_new_tokens=20, temperature=0.8, seed=5),
        Sampling(max_new_tokens=16, temperature=1.0, top_p=0.9, top_k=20, seed=6),
    ]
    one = pairs.load(target, draft, speculation=pairs.TREE)
    plain = pairs.ids(one.generate(asked, samplings, speculation=None))
    answers = one.generate(asked, samplings)
    assert pairs.ids(answers) == plain
    assert sum(map(sum, pairs.counts(answers))) > 20
    for mesh, placement in layouts:
        engine = pairs.load(target, draft, speculation=pairs.TREE, mesh=mesh, draft_placement=placement)
        out = engine.generate(asked, samplings)
        assert pairs.ids(out) == plain, (mesh, placement)
        assert pairs.counts(out) == pairs.counts(answers), (mesh, placement)
        tree, same = engine.propose(asked[1]), one.propose(asked[1])
        assert (tree.tokens == same.tokens).all() and (tree.parents == same.parents).all()
        np.testing.assert_allclose(engine.draft_score(asked[1]).logits, one.draft_score(asked[1]).logits, atol=5e-5)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("favoured", [(0,), pytest.param((7,), marks=pytest.mark.slow), (2, 3)])
def test_skewed_routing(tmp_path, monkeypatch, favoured, gathered):
    """All tokens to one expert, or all to one device; shared experts so large that counting them twice would show."""
    monkeypatch.setattr(experts_kernel, "gather_pays", lambda pairs, count: gathered)

    def skew(name, tensor):
        if name.endswith("e_score_correction_bias"):
            tensor[:] = 0
            tensor[list(favoured)] = 50
        return tensor * 8 if "shared_experts.down" in name else tensor

    folder = write(
        tmp_path / "target", SHARED | dict(num_experts_per_tok=len(favoured), n_group=1, topk_group=1), change=skew
    )
    assert_same(folder, ("model=8", "data=2,model=4"), atol=2e-4)


def test_tied_logits_go_to_the_lower_id_across_devices(tmp_path):
    """Every row of the head has a twin in another device's part; the lower id must win, on every mesh and for every prompt."""

    def twins(name, tensor):
        if name == "lm_head.weight":
            tensor[80:] = tensor[:80]
        return tensor

    folder = write(tmp_path / "target", SHARED, change=twins)
    for engine in assert_same(folder, ("model=8", "model=2")):
        out = engine.generate([[3, 4, 5], [9]], Sampling(max_new_tokens=20, ignore_eos=True))
        assert max(max(answer.token_ids) for answer in out) < 80


def test_smollm2_on_one_and_eight_devices(smollm2_path):
    ask = Sampling(max_new_tokens=24)
    prompt = "The capital of France is"
    texts = []
    for mesh in (None, "model=8"):
        engine = EagleJaxEngine.from_pretrained(
            "smollm2", draft="smollm2-eagle3", mesh=mesh, max_len=64, slots=1, speculation=Speculation(3, 2, 6)
        )
        out = engine.generate(prompt, ask)[0]
        texts.append((out.token_ids, out.stats.accepted_per_cycle))
    assert texts[0] == texts[1]
    assert sum(texts[0][1]) > 0
