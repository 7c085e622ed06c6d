"""Trials 01 to 13: drafts as they are found, judged by what the whole engine accepts with them."""

import json
import logging
import sys
from pathlib import Path

import kit_m
import numpy as np
import pairs
import pytest
from safetensors.numpy import load_file

from eaglejax import Sampling, loading
from eaglejax.errors import ConfigError, EagleJaxError

sys.path.insert(0, str(Path(__file__).parents[1] / "oracles"))
import draft_numpy  # noqa: E402
import tree_numpy  # noqa: E402

FOLLOWING = pairs.around()
P = kit_m.sharp(FOLLOWING)
TENSORS = kit_m.draft_tensors(P, pairs.CAPTURE)
CAPTURED = {"eagle_aux_hidden_state_layer_ids": list(pairs.CAPTURE)}
FREE = Sampling(max_new_tokens=32, ignore_eos=True)
STARTS = [[5], [20, 3], [40], [58]]
TABLE = np.zeros((64, 128), np.float32)
TABLE[:, :64] = np.eye(64)


def write(folder: Path, tensors: dict, **config) -> str:
    """A draft's folder; config values of None are left out."""
    settings = kit_m.draft_config(**CAPTURED | config)
    return str(kit_m.write_folder(folder, {k: v for k, v in settings.items() if v is not None}, tensors))


def with_draft(ring, folder: str, **more):
    """An engine of the ring's target and another draft, with the ring's programs where their structure is the same."""
    engine = pairs.load(ring._pair.name, folder, **{"speculation": pairs.FIVE} | more)
    return pairs.share_programs(engine, ring, pairs.FIVE)


def designed(engine, q=P):
    """The engine's ids and accepted counts are those of the two matrices."""
    for start, answer in zip(STARTS, engine.generate(STARTS, FREE), strict=True):
        tokens, accepted = kit_m.greedy_chain(P, q, start[-1], 32, 5)
        assert (answer.token_ids, answer.stats.accepted_per_cycle) == (tokens, accepted)
    return True


def refused(match: str, target: str, draft: str, monkeypatch, kind=EagleJaxError, **more) -> None:
    """Refused before a weight of the target is read."""
    monkeypatch.setattr(loading, "build_target", lambda *_: pytest.fail("the target's weights were read"))
    with pytest.raises(kind, match=f"(?s){match}") as caught:
        pairs.load(target, draft, **more)
    assert "\n" not in str(caught.value)


def reference(engine, folder: str, spec, tokens) -> tree_numpy.Tree:
    """The tree of a numpy draft over the states that the engine's target has."""
    embedding = load_file(Path(engine._pair.name) / "model.safetensors")["model.embed_tokens.weight"]
    config = json.loads((Path(folder) / "config.json").read_text())
    draft = draft_numpy.read_draft(config, load_file(Path(folder) / "model.safetensors"), embedding)
    boundaries = engine.score(tokens).boundaries
    captures = np.concatenate([boundaries[b] for b in engine._pair.capture.boundaries], axis=-1)[:-1]
    after = draft_numpy.next_logprobs_after(draft, captures, np.asarray(tokens))
    return tree_numpy.build_tree(after, tokens[-1], spec.num_steps, spec.topk, spec.nodes)


def proposes_as_numpy(engine, folder: str, spec=pairs.FIVE) -> None:
    tokens = pairs.prompts([13], seed=21)[0]
    want, found = reference(engine, folder, spec, tokens), engine.propose(tokens, spec)
    np.testing.assert_array_equal(found.tokens, want.tokens)
    np.testing.assert_allclose(found.scores, want.scores, atol=2e-4, rtol=0)


def test_trial_01_no_embedding_a_copy_and_one_of_its_own(ring, tmp_path):
    """A borrowed table and a copy accept alike; a table of its own is used, where borrowing would accept nothing."""
    assert designed(ring) and "embedding: borrowed" in str(ring.load_report)
    copied = with_draft(ring, write(tmp_path / "copy", TENSORS | {"embed_tokens.weight": TABLE}))
    assert designed(copied) and "embedding: own" in str(copied.load_report)
    order = np.random.default_rng(11).permutation(64)
    table, head = np.zeros_like(TABLE), np.zeros_like(TENSORS["lm_head.weight"])
    table[np.arange(64), order] = 1
    head[:, order] = TENSORS["lm_head.weight"][:, :64]
    own = TENSORS | {"embed_tokens.weight": table, "lm_head.weight": head}
    engine = with_draft(ring, write(tmp_path / "own", own))
    assert designed(engine) and "embedding: own" in str(engine.load_report)
    lent = with_draft(ring, write(tmp_path / "lent", TENSORS | {"lm_head.weight": head}))
    assert max(max(c) for c in pairs.counts(lent.generate(STARTS, FREE))) < 5


KNOWN = [3, 7, 11, 15, *range(20, 26), *range(42, 48)]


def test_trial_03_d2t_holds_offsets(ring, tmp_path):
    """16 ids of 64: accepted exactly where the right token is one of them, in both ways of storing the map."""
    tensors = kit_m.draft_tensors(P, pairs.CAPTURE, ids=KNOWN)
    known = np.where(np.isin(np.arange(64), KNOWN), P, 0)
    offsets = with_draft(ring, write(tmp_path / "offsets", tensors, draft_vocab=16))
    assert designed(offsets, known)
    assert {0, 1, 5} <= {a for counts in pairs.counts(offsets.generate(STARTS, FREE)) for a in counts}
    assert "16 of the target's 64 ids" in str(offsets.load_report)
    absolute = with_draft(ring, write(tmp_path / "ids", tensors | {"d2t": np.asarray(KNOWN)}, draft_vocab=16))
    assert designed(pairs.share_programs(absolute, offsets, pairs.FIVE), known)
    assert "! d2t of the draft holds target ids, not offsets" in str(absolute.load_report)


def test_trial_03_zero_offsets_are_no_map(ring, tmp_path):
    """A full vocabulary with d2t all zero is the draft without maps."""
    zero = {"d2t": np.zeros(64, np.int64), "t2d": np.ones(64, bool)}
    assert designed(with_draft(ring, write(tmp_path / "zero", TENSORS | zero)))


OFFSETS = np.asarray(KNOWN) - np.arange(16)
MAPS = {
    "a no maps": ({}, ("d2t", "t2d"), {}, "no d2t"),
    "b beyond": ({"d2t": OFFSETS + np.eye(16, dtype=int)[15] * 17}, (), {}, "becomes target id 64"),
    "c negative": ({"d2t": OFFSETS - np.eye(16, dtype=int)[0] * 4}, (), {}, "becomes target id -1"),
    "d 17 true": ({"t2d": np.isin(np.arange(64), [*KNOWN, 0])}, (), {}, "17 true.*16"),
    "e size 0": ({}, (), {"draft_vocab_size": 0}, "draft_vocab_size.*found 0"),
    "e size -1": ({}, (), {"draft_vocab_size": -1}, "draft_vocab_size.*found -1"),
    "f 20 rows": ({"lm_head.weight": np.zeros((20, 128), np.float32)}, (), {}, "found 16; expected 20"),
}


@pytest.mark.parametrize("fault", MAPS)
def test_trial_04_maps_that_contradict(ring, tmp_path, monkeypatch, fault):
    """A cut vocabulary whose map is missing, out of range or contradicted is refused from headers and small tables."""
    changes, dropped, config, match = MAPS[fault]
    tensors = kit_m.draft_tensors(P, pairs.CAPTURE, ids=KNOWN) | changes
    tensors = {name: value for name, value in tensors.items() if name not in dropped}
    refused(match, ring._pair.name, write(tmp_path / "d", tensors, **{"draft_vocab": 16} | config), monkeypatch)


NAMES = {
    "b layers.0": lambda k: k.replace("midlayer.", "layers.0."),
    "c model.layers.0": lambda k: "model." + k.replace("midlayer.", "layers.0."),
    "d model.midlayer": lambda k: "model." + k,
}


def test_trial_06_names_prefixes_and_leftovers(ring, tmp_path):
    """(a-d) The same draft under any of its names accepts the same; leftovers are listed."""
    tokens = pairs.prompts([12])[0]
    want = ring.draft_score(tokens).logits
    extra = {"model.midlayer.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32), "odd": np.ones(3, np.float32)}
    for name, rename in NAMES.items():
        tensors = {rename(k): v for k, v in TENSORS.items()} | (extra if name[0] == "d" else {})
        engine = with_draft(ring, write(tmp_path / name, tensors))
        np.testing.assert_array_equal(engine.draft_score(tokens).logits, want)
        assert designed(engine)
    assert "not used: odd" in str(engine.load_report) and "inv_freq" in str(engine.load_report)


def test_trial_06_a_bias_of_fc_is_applied(ring, tmp_path):
    """(e, f) A bias of zeros changes nothing; another one is what the reference says."""
    tokens = pairs.prompts([12])[0]
    zeros = with_draft(ring, write(tmp_path / "zeros", TENSORS | {"fc.bias": np.zeros(128, np.float32)}))
    np.testing.assert_allclose(zeros.draft_score(tokens).logits, ring.draft_score(tokens).logits, atol=1e-5)
    bias = np.random.default_rng(1).normal(0, 0.3, 128).astype(np.float32)
    folder = write(tmp_path / "bias", TENSORS | {"fc.bias": bias})
    engine = with_draft(ring, folder)
    proposes_as_numpy(engine, folder)
    assert np.abs(engine.draft_score(tokens).logits - ring.draft_score(tokens).logits).max() > 0.1


def narrow_draft(hidden: int = 96, width: int = 128) -> dict[str, np.ndarray]:
    """A random draft of width 96 with 4 heads of 32, fed states of width 128, with a table of its own."""
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.normal(0, 0.2, shape).astype(np.float32)
    ones = np.ones(hidden, np.float32)
    layer = {f"self_attn.{n}_proj.weight": draw(r, 2 * hidden) for n, r in (("q", 128), ("k", 64), ("v", 64))}
    layer |= {"self_attn.o_proj.weight": draw(hidden, 128), "mlp.down_proj.weight": draw(hidden, 32)}
    layer |= {f"mlp.{n}_proj.weight": draw(32, hidden) for n in ("gate", "up")}
    layer |= {f"{n}.weight": ones for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    top = {"fc.weight": draw(hidden, 3 * width), "norm.weight": ones, "lm_head.weight": draw(64, hidden)}
    return top | {"embed_tokens.weight": draw(64, hidden)} | {f"midlayer.{k}": v for k, v in layer.items()}


def test_trial_07_widths_that_do_not_follow_from_the_target(ring, tmp_path, monkeypatch):
    """Draft width 96 with head_dim 32 under a target of 128: runs as the reference; a wrong target width is refused."""
    sizes = dict(hidden_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    folder = write(tmp_path / "right", narrow_draft(), **sizes, target_hidden_size=128)
    engine = with_draft(ring, folder, speculation=pairs.TREE)
    proposes_as_numpy(engine, folder, pairs.TREE)
    asked = [[i] for i in range(3, 63, 15)]
    found = engine.generate(asked, Sampling(max_new_tokens=100, ignore_eos=True))
    assert pairs.ids(found) == [pairs.walk(FOLLOWING, i, 100) for (i,) in asked]
    assert sum(sum(counts) for counts in pairs.counts(found)) > 0
    silent = pairs.load(ring._pair.name, write(tmp_path / "silent", narrow_draft(), **sizes))
    assert silent._pair.draft.config.target_hidden_size == 128
    wrong = write(tmp_path / "wrong", narrow_draft(), **sizes, target_hidden_size=64)
    refused("target_hidden_size.*64.*128|128.*64", ring._pair.name, wrong, monkeypatch)


def test_trial_10_flags_that_change_the_network(ring, tmp_path):
    """(c-e) Norms of the captures, a normed state fed back, a normed residual: each as the numpy draft has it."""
    tensors = pairs.random_draft(pairs.ranked(FOLLOWING))
    norms = {f"fc_norm.{i}.weight": np.full(128, 2, np.float32) for i in range(3)}
    flags = {
        "fc_norm": (norms, {"fc_norm": True}),
        "norm_output": ({}, {"norm_output": True}),
        "norm_before_residual": ({}, {"norm_before_residual": True}),
    }
    plain = with_draft(ring, write(tmp_path / "plain", tensors, num_key_value_heads=8))
    tokens = pairs.prompts([13], seed=21)[0]
    for name, (more, config) in flags.items():
        folder = write(tmp_path / name, tensors | more, num_key_value_heads=8, **config)
        engine = with_draft(ring, folder)
        proposes_as_numpy(engine, folder)
        difference = engine.propose(tokens, pairs.FIVE).scores - plain.propose(tokens, pairs.FIVE).scores
        assert np.abs(difference).max() > 1e-3, name


def test_trial_10_four_captures_and_an_unknown_norm(ring, tmp_path, monkeypatch):
    """(a, b, f) Four captures, boundary L too, are accepted in full; an unknown flag with weights is refused."""
    four = (0, 1, 2, 3)
    settings = {"eagle_aux_hidden_state_layer_ids": list(four)}
    assert designed(with_draft(ring, write(tmp_path / "four", kit_m.draft_tensors(P, four), **settings)))
    fancy = {"fancy_norm.weight": np.ones(128, np.float32)}
    folder = write(tmp_path / "fancy", TENSORS | fancy, fancy_norm=True)
    refused("fancy_norm", ring._pair.name, folder, monkeypatch)


def test_trial_11_wrong_sorts_of_draft(ring, tmp_path, monkeypatch):
    """The target itself, an EAGLE-1 fc, another vocabulary, an unrelated network: refused before the target is read."""
    target = ring._pair.name
    plain = pairs.load(target, None, speculation="auto")
    assert plain.speculation.num_steps == 0  # (a) without a draft decoding is plain
    refused("the draft is the target itself", target, target, monkeypatch, ConfigError)
    narrow = write(tmp_path / "eagle1", TENSORS | {"fc.weight": np.zeros((128, 128), np.float32)})
    refused("fc", target, narrow, monkeypatch)
    other = TENSORS | {"lm_head.weight": np.zeros((96, 128), np.float32)}
    refused("96.*64", target, write(tmp_path / "vocab", other, draft_vocab=96, vocab_size=96), monkeypatch)
    unrelated = write(
        tmp_path / "bert", {"bert.pooler.weight": np.ones((4, 4), np.float32)}, architectures=["BertModel"]
    )
    refused("BertModel|bert", target, unrelated, monkeypatch)
    second = str(kit_m.write_target(tmp_path / "second", P, layers=2))
    refused("draft", target, second, monkeypatch)


def test_trial_11_nothing_accepted_is_said_once(ring, tmp_path, caplog):
    """After 64 cycles without one accepted token there is one warning, however many requests follow."""
    astray = kit_m.sharp((FOLLOWING + 9) % 64)
    engine = with_draft(ring, write(tmp_path / "astray", kit_m.draft_tensors(astray, pairs.CAPTURE)))
    with caplog.at_level(logging.WARNING, "eaglejax"):
        for _ in range(2):
            answers = engine.generate(STARTS, Sampling(max_new_tokens=80, ignore_eos=True))
            assert pairs.counts(answers) == [[0] * 79] * 4
    assert len([r for r in caplog.records if "no drafted token was accepted in 64 cycles" in r.message]) == 1


def test_trial_12_rope_settings_wherever_they_stand(random_pairs, grouped, tmp_path):
    """Base 5e6, plain and under yarn, top-level, in rope_parameters or rope_scaling: one network, the reference's."""
    target, base = random_pairs["qwen3_moe"]
    tensors = load_file(Path(base) / "model.safetensors")
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32}
    layouts = {
        "plain": [
            {"rope_theta": 5e6},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
            {"rope_scaling": {"rope_type": "default", "rope_theta": 5e6}},
        ],
        "yarn": [
            {"rope_theta": 5e6, "rope_scaling": {"type": "yarn", **yarn}},
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e6, **yarn}},
        ],
    }
    tokens = pairs.prompts([120], seed=2)[0]
    seen = [grouped.draft_score(tokens).logits]
    for kind, configs in layouts.items():
        answers = []
        for index, config in enumerate(configs):
            folder = write(tmp_path / f"{kind}{index}", tensors, num_key_value_heads=8, **config)
            engine = pairs.load(target, folder)
            assert "5e+06" in str(engine.load_report) or "5000000" in str(engine.load_report)
            answers.append(engine.draft_score(tokens).logits)
            if index == 0:
                proposes_as_numpy(engine, folder)
        for answer in answers[1:]:
            np.testing.assert_allclose(answer, answers[0], atol=1e-5, rtol=0)
        assert all(np.abs(answers[0] - other)[100:].max() > 1e-3 for other in seen), "the setting must matter"
        seen.append(answers[0])


def test_trial_12_unknown_rope_type(ring, tmp_path, monkeypatch):
    """A rope_type that is not known is refused by name."""
    folder = write(tmp_path / "d", TENSORS, rope_scaling={"rope_type": "spiral", "factor": 2.0})
    refused("spiral", ring._pair.name, folder, monkeypatch)


def test_trial_13_padded_vocabulary(tmp_path, monkeypatch):
    """Rows 64..71 are noise that can be drawn: the same ids with and without a draft, never drafted, never a crash."""
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.full(64, 0.3), 64)
    target = kit_m.write_target(tmp_path / "target", p, layers=3, rows=72)
    tensors = load_file(target / "model.safetensors")
    tensors["lm_head.weight"][64:, :64] = rng.normal(-1, 0.2, (8, 64))
    kit_m.write_folder(target, kit_m.target_config(3, 72, eos_token_id=None), tensors)
    folder = write(tmp_path / "draft", kit_m.draft_tensors(p, pairs.CAPTURE))
    engine = pairs.load(str(target), folder)
    sampling = [Sampling(max_new_tokens=110, temperature=1.0, seed=s) for s in range(16)]
    starts = [[int(i)] for i in rng.integers(0, 64, 16)]
    plain = engine.generate(starts, sampling, speculation=None)
    found = engine.generate(starts, sampling)
    assert pairs.ids(found) == pairs.ids(plain)
    assert np.mean([answer.stats.tau for answer in found]) > 1.5
    drawn = {t for answer in found for t in answer.token_ids}
    assert any(t >= 64 for t in drawn) and max(drawn) < 72
    assert "8 rows of the vocabulary are no token" in str(engine.load_report)
    assert all(answer.text == "".join(kit_m.ALPHABET[t] for t in answer.token_ids if t < 64) for answer in found)
    assert engine._pair.draft.target_ids[...].max() < 64
    wide = TENSORS | {"lm_head.weight": np.zeros((80, 128), np.float32)}
    refused("80.*72", str(target), write(tmp_path / "wide", wide, draft_vocab=80, vocab_size=80), monkeypatch)
