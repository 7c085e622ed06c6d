"""Whole targets against transformers: logits, every boundary, every router choice, greedy text, cache against no
cache."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from target_cases import STORED, advance, expected, folders, ints, run_case, spoiled_caches, teacher_forced

from eaglejax.checkpoint.target_loader import load_target
from eaglejax.models.layers import leaves
from eaglejax.models.rows import KVRows, causal_step

FOLDERS = folders()
EVERY = pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])


@EVERY
def test_logits_and_boundaries(folder):
    case = run_case(folder)
    length = case.want["input_ids"].shape[1]
    names = ["hidden_in_0"] + [f"hidden_out_{layer}" for layer in range(case.target.config.num_layers)]
    assert case.logits.dtype == np.float32
    for name, got in zip(names, case.captured, strict=True):
        np.testing.assert_allclose(got[:, :length], case.want[name], atol=1e-4, rtol=0, err_msg=name)
    np.testing.assert_allclose(case.logits[:, :length], case.want["logits"], atol=1e-4, rtol=0)


@EVERY
def test_router_choices(folder):
    case = run_case(folder)
    length = case.want["input_ids"].shape[1]
    for index, (ids, weights) in case.routes.items():
        np.testing.assert_array_equal(ids[:, :length], case.want[f"router_indices_{index}"])
        np.testing.assert_allclose(weights[:, :length], case.want[f"router_weights_{index}"], atol=2e-5, rtol=0)
    assert len(case.routes) == sum(name.startswith("router_indices_") for name in case.want)


@EVERY
def test_greedy_text_over_a_cache(folder):
    """The prompt in chunks, then token by token, over caches that hold NaN wherever nothing was written."""
    case = run_case(folder)
    prompt, text = case.want["input_ids"], case.want["greedy_tokens"]
    batch, length = prompt.shape
    chunk = 4 if length % 4 < 2 else 5
    caches, logits = spoiled_caches(case.target, batch, length + text.shape[1] + 3), []
    for start in range(0, length, chunk):
        part = prompt[:, start : start + chunk]
        step_logits, caches = advance(case.target, part, [start] * batch, caches)
        logits.append(step_logits)
    new = [logits[-1][:, -1].argmax(-1)]
    for index in range(text.shape[1] - 1):
        step_logits, caches = advance(case.target, new[-1][:, None], [length + index] * batch, caches)
        logits.append(step_logits)
        new.append(step_logits[:, -1].argmax(-1))
    np.testing.assert_array_equal(np.stack(new, axis=1), text)
    np.testing.assert_allclose(np.concatenate(logits, axis=1), case.logits, atol=1e-4, rtol=0)


@EVERY
def test_prompt_of_one_token(folder):
    """Twice in a batch, so that it runs in the program that the continuation was computed with."""
    case = run_case(folder)
    prompt, length = case.want["len1.input_ids"], case.want["input_ids"].shape[1]
    caches = spoiled_caches(case.target, 2, length + case.want["greedy_tokens"].shape[1] + 3)
    logits, _ = advance(case.target, np.repeat(prompt, 2, axis=0), [0, 0], caches)
    for row in logits:
        np.testing.assert_allclose(row, case.want["len1.logits"][0], atol=1e-4, rtol=0)


def test_slots_of_different_lengths():
    case = run_case(STORED / "gpt_oss")
    prompt, lengths = case.want["input_ids"], (7, 3)
    caches = spoiled_caches(case.target, 2, 16)
    for slot, length in enumerate(lengths):
        first = np.repeat(prompt[slot : slot + 1, :length], 2, axis=0)
        _, written = advance(case.target, first, [0, 0], caches)
        caches = [
            KVRows(old.keys.at[slot].set(new.keys[slot]), old.values.at[slot].set(new.values[slot]))
            for old, new in zip(caches, written, strict=True)
        ]
    last = np.stack([prompt[slot, length : length + 2] for slot, length in enumerate(lengths)])
    logits, _ = advance(case.target, last, lengths, caches)
    for slot, length in enumerate(lengths):
        np.testing.assert_allclose(logits[slot], case.logits[slot, length : length + 2], atol=1e-4, rtol=0)


def test_boundaries_in_any_order():
    case = run_case(STORED / "llama_biased")
    tokens = ints(case.want["input_ids"])
    step = causal_step(jnp.zeros(tokens.shape[0], jnp.int32), tokens.shape[1])
    out = case.target(tokens, step, case.target.empty_caches(tokens.shape[0], 0), (2, 0, 1))
    for got, boundary in zip(out.captured, (2, 0, 1), strict=True):
        np.testing.assert_allclose(got, case.captured[boundary][:, : tokens.shape[1]], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(out.hidden, out.captured[0])


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_no_q_lora", "llama_tied_linear"])
def test_bfloat16(name):
    model, want = load_target(STORED / name, dtype="bfloat16"), expected(STORED / name)
    for leaf, variable in leaves(model).items():
        assert variable[...].dtype == (jnp.float32 if ".router." in leaf else jnp.bfloat16), leaf
    logits, captured, _ = teacher_forced(model, ints(want["input_ids"]))
    assert logits.dtype == np.float32 and captured[1].dtype == jnp.bfloat16
    error = np.abs(logits - want["logits"])
    # a router choice may flip in bfloat16, so the bound is on the bulk
    assert np.median(error) < 0.03 * want["logits"].std(), (np.median(error), want["logits"].std())
    # rounded to bfloat16, the logits would be these
    assert (logits != logits.astype(jnp.bfloat16).astype(np.float32)).mean() > 0.9


def test_latent_cache_is_small():
    model = load_target(STORED / "kimi_k25")
    attention = model.config.layers[0].attention
    for cache in model.empty_caches(2, 5):
        assert cache.values is None and cache.keys.shape == (2, 5, 1, attention.kv_lora_rank + attention.rope_dim)


def test_tied_head_is_the_embedding():
    model = load_target(STORED / "llama_tied_linear")
    assert model.head is None
    hidden = jnp.ones((1, 1, model.config.hidden_size))
    before = model.logits(hidden)
    halved = nnx.clone(model)
    halved.embedding.weight.set_value(halved.embedding.weight[...] * 0.5)
    np.testing.assert_allclose(halved.logits(hidden), before * 0.5, rtol=1e-6)
