"""The unrolled losses and gradients against another trainer (stored figures) and the engine, and planted faults."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from eaglejax import Speculation, load_draft
from eaglejax.errors import ConfigError
from eaglejax.training import ttt as unroll
from eaglejax.training import ttt_loss_and_grads
from eaglejax.training.gradients import check_trainable
from eaglejax.training.ttt import Text, teach, ttt


@pytest.fixture(scope="module")
def case(data):
    folder = data / "train_eagle3"
    arrays = load_file(folder / "expected.safetensors")
    embedding = load_file(folder / "embed.safetensors")["model.embed_tokens.weight"]
    head = load_file(folder / "target_head.safetensors")["lm_head.weight"]
    return load_draft(str(folder), target_embedding=embedding, dtype="float32"), arrays, head


def run(case, **changes):
    draft, x, head = case
    given = {name: x[name] for name in ("input_ids", "loss_mask", "aux_hidden", "target_last_hidden")}
    return ttt_loss_and_grads(draft, **{**given, "target_head": head, "steps": len(x["plosses"]), **changes})


@pytest.fixture(scope="module")
def result(case):
    return run(case)


def test_losses_and_accuracies(case, result):
    x = case[1]
    np.testing.assert_allclose(result.step_losses, x["plosses"], atol=1e-4)
    np.testing.assert_allclose(result.step_accuracies, x["acces"], atol=1e-4)
    np.testing.assert_allclose(result.loss, x["loss"].item(), atol=1e-4)


def test_gradients_by_checkpoint_name(case, result):
    x = case[1]
    expected = {name[5:]: value for name, value in x.items() if name.startswith("grad.")}
    assert result.grads.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(result.grads[name], value, atol=1e-3 * np.abs(value).max(), err_msg=name)
    total = np.sqrt(sum((value.astype(np.float64) ** 2).sum() for value in result.grads.values()))
    np.testing.assert_allclose(total, x["grad_norm_total"].item(), rtol=1e-4)


@pytest.mark.parametrize("queries", [1, 5, 12])
def test_blocks_of_queries_change_nothing(case, result, monkeypatch, queries):
    """Losses and gradients are the same however the places are cut, also where the last block is not full."""
    monkeypatch.setattr(unroll, "QUERIES", queries)
    found = run(case)
    np.testing.assert_allclose(found.step_losses, result.step_losses, rtol=1e-5)
    for name, value in result.grads.items():
        np.testing.assert_allclose(found.grads[name], value, atol=1e-4 * np.abs(value).max(), err_msg=name)


def still_positions(forward):
    def fault(draft, tokens, hidden, positions, memories, sight):
        return forward(draft, tokens, hidden, positions - len(memories[0]), memories, sight)

    return fault


def only_first_keys(forward):
    def fault(draft, tokens, hidden, positions, memories, sight):
        return forward(draft, tokens, hidden, positions, [memory[:1] for memory in memories], sight)

    return fault


def later_keys_see_all(forward):
    def fault(draft, tokens, hidden, positions, memories, sight):
        return forward(draft, tokens, hidden, positions, memories, sight._replace(order=jnp.zeros_like(sight.order)))

    return fault


@pytest.mark.parametrize("fault", [still_positions, only_first_keys, later_keys_see_all])
def test_planted_fault_shows(case, monkeypatch, fault):
    monkeypatch.setattr(unroll, "_forward", fault(unroll._forward))
    losses = run(case).step_losses
    assert np.abs(losses - case[1]["plosses"]).max() > 1e-3


def test_shapes_are_checked_first(case):
    with pytest.raises(ConfigError, match="aux_hidden"):
        run(case, aux_hidden=case[1]["aux_hidden"][..., :-1])
    with pytest.raises(ConfigError, match="steps"):
        run(case, steps=0)


def test_attention_it_does_not_know_is_refused(case):
    config = case[0].draft.config
    layer = config.layers[0]
    sinks = replace(config, layers=(replace(layer, attention=replace(layer.attention, sinks=True)),))
    with pytest.raises(ConfigError, match="sinks"):
        check_trainable(sinks)


def test_the_unroll_drafts_what_drafting_drafts(case):
    """A chain proposed by the engine's code, fed back as text, is what the unroll says at the row it grew from."""
    draft, x, head = case
    ids, features = x["input_ids"][0].tolist(), x["aux_hidden"][0]
    prompt = 10
    tree = draft.propose(features[: prompt - 1], ids[:prompt], Speculation(num_steps=4, topk=1, num_draft_tokens=5))
    tokens = jnp.asarray([[*ids[:prompt], *tree.tokens[1:]]], jnp.int32)
    size = tokens.shape[1]
    zeros = jnp.zeros((1, size), jnp.int32)
    text = Text(tokens, jnp.arange(size, dtype=jnp.int32)[None], zeros, zeros == 0)
    module = draft.draft
    teacher = teach(jnp.asarray(x["target_last_hidden"][:1, :size]), jnp.asarray(head), module.target_ids[...])
    out = ttt(module, text, jnp.asarray(features[None, :size]), teacher, 4)
    assert np.asarray(out.drafted)[:, 0, prompt - 2].tolist() == tree.tokens[1:].tolist()


def test_reached_weighs_a_place_by_the_chance_of_getting_there(case):
    """Loss on two places: of step 1 only the row that counted at step 0 is left, by its sum of min(p, q) there."""
    draft, x, head = case
    module, tokens = draft.draft, jnp.asarray(x["input_ids"], jnp.int32)
    zeros = jnp.zeros_like(tokens)
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    teacher = teach(jnp.asarray(x["target_last_hidden"]), jnp.asarray(head), module.target_ids[...])
    teacher, place = replace(teacher, known=jnp.ones_like(teacher.known)), 6

    def losses(on: list[int], objective):
        text = Text(tokens, places, zeros, zeros.at[0, jnp.asarray(on)].set(1) == 1)
        return np.asarray(ttt(module, text, jnp.asarray(x["aux_hidden"]), teacher, 2, objective).losses)

    one, both = losses([place], "acceptance"), losses([place, place + 1], "acceptance")
    accepted = np.exp(-tokens.size * one[0])
    assert 0 < accepted < 1
    found = losses([place, place + 1], "reached")
    np.testing.assert_allclose(found[0], both[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], accepted * (both[1] - one[1]), rtol=1e-4)
