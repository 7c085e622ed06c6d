"""Trials 12 and 16 at the positions they name: 3000 and beyond, and past the draft's own max_position_embeddings."""

import json
import logging
import sys
from pathlib import Path

import kit_m
import numpy as np
import pairs
import pytest
from safetensors.numpy import load_file

from eaglejax import Sampling, load_draft

sys.path.insert(0, str(Path(__file__).parents[1] / "oracles"))
import draft_numpy  # noqa: E402

POSITIONS = [0, 100, 3000]
HIDDEN, HEADS, WIDTH = 32, 2, 16
FOLLOWING = pairs.around()
LEVELS = pairs.CHAIN.num_steps


# trial 12: a random draft by itself


def small_draft() -> dict[str, np.ndarray]:
    """A random draft of two heads whose attention is sharp enough that positions matter, with a table of its own."""
    rng = np.random.default_rng(4)
    draw = lambda *shape: rng.normal(0, 0.3, shape).astype(np.float32)
    ones = np.ones(HIDDEN, np.float32)
    layer = {f"self_attn.{n}_proj.weight": draw(HEADS * WIDTH, 2 * HIDDEN) for n in "qkv"}
    layer |= {"self_attn.o_proj.weight": draw(HIDDEN, HEADS * WIDTH), "mlp.down_proj.weight": draw(HIDDEN, 32)}
    layer |= {f"mlp.{n}_proj.weight": draw(32, HIDDEN) for n in ("gate", "up")}
    layer |= {f"{n}.weight": ones for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    top = {"fc.weight": draw(HIDDEN, 3 * HIDDEN), "norm.weight": ones, "lm_head.weight": draw(64, HIDDEN)}
    return top | {"embed_tokens.weight": draw(64, HIDDEN)} | {f"midlayer.{k}": v for k, v in layer.items()}


YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
LAYOUTS = {
    "plain": [
        {"rope_theta": 5e6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5e6}},
    ],
    "yarn": [
        {"rope_theta": 5e6, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e6, **YARN}},
    ],
}


def in_numpy(config: dict, tensors: dict, captures: np.ndarray, tokens: np.ndarray, last: int | None = None):
    """Logits of the numpy draft at POSITIONS; with `last`, no position is larger, as if a table ended there."""
    draft = draft_numpy.read_draft(config, tensors)
    places = np.minimum(np.arange(len(captures)), len(captures) if last is None else last)
    hidden, _ = draft.step(tokens[1:], draft.features(captures.astype(np.float64)), places)
    return draft.logits(hidden[POSITIONS])


@pytest.mark.parametrize("kind", LAYOUTS)
def test_trial_12_at_position_3000(tmp_path, kind):
    """Every layout of one RoPE gives the same logits at positions 0, 100 and 3000, those of the numpy draft."""
    rng, rows = np.random.default_rng(6), POSITIONS[-1] + 1
    captures = rng.normal(0, 1, (rows, 3 * HIDDEN)).astype(np.float32)
    tokens = rng.integers(0, 64, rows + 1)
    tensors = small_draft()
    sizes = dict(hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=WIDTH)
    found, want = [], np.zeros(())
    for index, layout in enumerate(LAYOUTS[kind]):
        config = kit_m.draft_config(64, eagle_aux_hidden_state_layer_ids=[1, 2, 3], **sizes, **layout)
        folder = kit_m.write_folder(tmp_path / str(index), config, tensors)
        draft = load_draft(str(folder))
        assert "5e+06" in str(draft.load_report) or "5000000" in str(draft.load_report)
        found.append(draft.score(captures, [int(t) for t in tokens]).logits[POSITIONS])
        if index == 0:
            want = in_numpy(config, tensors, captures, tokens)
            table = in_numpy(config, tensors, captures, tokens, last=2047)
            assert np.abs(table - want)[:2].max() < 1e-9 and np.abs(table - want)[2].max() > 0.02
            other = in_numpy(config | {"rope_theta": 1e4, "rope_parameters": None}, tensors, captures, tokens)
            assert np.abs(other - want)[2].max() > 0.02
    for logits in found[1:]:
        np.testing.assert_allclose(logits, found[0], atol=1e-5, rtol=0)
    # float32 holds an angle of 3000 radians to 1e-4
    np.testing.assert_allclose(found[0], want, atol=1e-3, rtol=0)


# trials 12 and 16 with caches: the whole engine, whose target's states are known by hand


def states(tokens: list[int]) -> np.ndarray:
    """What Kit M's target captures at pairs.CAPTURE: the token's one-hot, and a tag for each block that was passed."""
    tags = [np.concatenate([np.ones(b), np.zeros(64 - b)]) for b in pairs.CAPTURE]
    return np.concatenate([np.concatenate([np.eye(64)[t], tag]) for t in tokens for tag in tags]).reshape(
        len(tokens), -1
    )


def accepted_in_numpy(folder: str, prompt: list[int], text: list[int], last: int | None = None) -> list[int]:
    """Drafted tokens that the text accepts in every cycle: each cycle's chain grown anew after the committed tokens.

    With `last`, positions beyond it are clamped.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    table = np.eye(64, 128)
    draft = draft_numpy.read_draft(config, load_file(Path(folder) / "model.safetensors"), table)
    place = lambda first, count: np.minimum(first + np.arange(count), 10**9 if last is None else last)
    whole = np.asarray([*prompt, *text])
    captures = states([int(t) for t in whole])
    counts, rows, known, cache, hidden = [], 0, len(prompt) + 1, None, np.zeros((1, 128))
    while known < len(whole):
        while rows < known - 1:  # rows of target features, a few hundred at a time
            stop = min(known - 1, rows + 256)
            fused = draft.features(captures[rows:stop])
            hidden, cache = draft.step(whole[rows + 1 : stop + 1], fused, place(rows, stop - rows), cache)
            rows = stop
        tip, keys, right = hidden[-1:], cache, 0
        for level in range(LEVELS):
            token = int(draft.target_ids[draft.logits(tip)[0].argmax()])
            if known + level >= len(whole) or token != whole[known + level]:
                break
            right += 1
            tip, keys = draft.step(np.array([token]), draft.feedback(tip), place(rows + level, 1), keys)
        counts.append(right)
        known += right + 1
    return counts


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    """Kit M's ring without EOS in its way, and a draft with random heads over all rows whose config ends at 2048."""
    folder = tmp_path_factory.mktemp("far")
    target = kit_m.write_target(folder / "target", kit_m.sharp(FOLLOWING), layers=3)
    captured = dict(num_key_value_heads=8, eagle_aux_hidden_state_layer_ids=list(pairs.CAPTURE))
    draft = kit_m.write_folder(
        folder / "draft", kit_m.draft_config(64, **captured), pairs.random_draft(pairs.ranked(FOLLOWING))
    )
    return str(target), str(draft)


def test_trials_12_and_16_drafts_beyond_position_3000(far):
    """A prompt of 3050 tokens, prefilled and drafted from through the caches, accepts what the numpy draft accepts."""
    engine = pairs.load(*far, max_len=3200, slots=1)
    assert "max_position_embeddings 2048 sets no limit" in str(engine.load_report)
    rng = np.random.default_rng(8)
    prompt = [int(t) for t in rng.integers(0, 64, 3050)]
    (answer,) = engine.generate([prompt], Sampling(max_new_tokens=48, ignore_eos=True))
    assert answer.token_ids == pairs.walk(FOLLOWING, prompt[-1], 48)
    found = answer.stats.accepted_per_cycle
    want = accepted_in_numpy(far[1], prompt, pairs.walk(FOLLOWING, prompt[-1], 48 + LEVELS + 1))
    assert found == want[: len(found)] and sum(found) > 10
    clamped = accepted_in_numpy(far[1], prompt, pairs.walk(FOLLOWING, prompt[-1], 48 + LEVELS + 1), last=2047)
    assert clamped[: len(found)] != found, "a table that ends at 2048 must be seen"


# trial 16 as it is written


def test_trial_16_as_written(random_pairs, tmp_path, caplog):
    """Target of 4096 positions, draft whose config ends at 256: prompts of 200 and 300 tokens, 200 new ones each.

    The stated policy is that positions beyond are computed properly, so nothing stops drafting and nothing is warned
    about while it runs; the load report says it.
    """
    target, draft = (Path(folder) for folder in random_pairs["qwen3_moe"])

    def copy(folder: Path, name: str, positions: int) -> str:
        config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": positions}
        return str(kit_m.write_folder(tmp_path / name, config, load_file(folder / "model.safetensors")))

    long = copy(target, "target", 4096)
    engines = {name: pairs.load(long, copy(draft, f"draft{name}", name), max_len=512, slots=2) for name in (256, 4096)}
    for name, engine in engines.items():
        assert f"max_position_embeddings {name} sets no limit" in str(engine.load_report)
    asked, free = pairs.prompts([200, 300], seed=4), Sampling(max_new_tokens=200, ignore_eos=True)
    with caplog.at_level(logging.WARNING, "eaglejax"):
        short, whole = (engine.generate(asked, free) for engine in engines.values())
    plain = engines[256].generate(asked, free, speculation=None)
    assert pairs.ids(short) == pairs.ids(plain) and all(len(ids) == 200 for ids in pairs.ids(short))
    assert pairs.ids(whole) == pairs.ids(short) and pairs.counts(whole) == pairs.counts(short)
    # rows of both texts lie beyond 256 to their ends, and drafts are accepted there as before
    for answer in short:
        assert np.mean(answer.stats.accepted_per_cycle[-30:]) > 0.5
    assert not caplog.records
