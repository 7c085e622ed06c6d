"""Trials 16, 17, 19, 24: the context's end, short prompts, exact budgets."""

import json
from pathlib import Path

import numpy as np
import pairs
import pytest

from eaglejax import Sampling
from eaglejax.errors import ConfigError, PromptError

FOLLOWING = pairs.around()


def on(budget: int) -> Sampling:
    return Sampling(max_new_tokens=budget, ignore_eos=True)


def on_the_ring(length: int) -> list[int]:
    """A prompt of any length that ends at a token of the ring."""
    return [3 + (7 * i) % 61 for i in range(length)]


def test_trial_16_draft_context_shorter_than_the_text(random_pairs, grouped, tmp_path):
    """A draft whose config ends at 32 positions drafts beyond them exactly as one that says 2048."""
    target, draft = random_pairs["qwen3_moe"]
    short = tmp_path / "short"
    short.mkdir()
    config = json.loads((Path(draft) / "config.json").read_text())
    assert config["max_position_embeddings"] == 2048
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    (short / "model.safetensors").write_bytes((Path(draft) / "model.safetensors").read_bytes())
    engine = pairs.load(target, str(short))
    assert "max_position_embeddings 32 sets no limit" in str(engine.load_report)
    asked = pairs.prompts([20, 40, 31, 33])
    found, right = (e.generate(asked, on(60)) for e in (engine, grouped))
    assert pairs.ids(found) == pairs.ids(right) and pairs.counts(found) == pairs.counts(right)
    # every text ends beyond position 80, and drafts are accepted to its end
    assert np.mean([count for answer in found for count in answer.stats.accepted_per_cycle[-10:]]) > 0.5


def test_trial_17_at_the_end_of_the_context(ring):
    """Prompts of 121 to 128 of 128 tokens are answered up to the limit, whole blocks at hand or not."""
    for lengths in ([121, 122, 123, 124], [125, 126, 127, 128]):
        asked = [on_the_ring(length) for length in lengths]
        for prompt, answer in zip(asked, ring.generate(asked, on(64)), strict=True):
            room = 128 - len(prompt)
            assert answer.token_ids == pairs.walk(FOLLOWING, prompt[-1], room)
            assert answer.finish_reason == "length" and answer.stats.new_tokens == room
            assert answer.stats.accepted_per_cycle == [5] * -(-max(room - 1, 0) // 6)
    with pytest.raises(PromptError, match="129"):
        ring.generate([on_the_ring(129)], on(64))


def test_trial_17_the_limit_of_one_row_leaves_the_others_alone(grouped):
    """A row that runs into the limit writes nothing into its neighbours' caches."""
    asked = pairs.prompts([9, 120, 30, 5])
    found = grouped.generate(asked, on(50))
    assert len(found[1].token_ids) == 8 and found[1].finish_reason == "length"
    others = grouped.generate([asked[0], asked[0], asked[2], asked[3]], on(50))
    for row in (0, 2, 3):
        assert found[row].token_ids == others[row].token_ids and len(found[row].token_ids) == 50
        assert found[row].stats.accepted_per_cycle == others[row].stats.accepted_per_cycle
        assert found[row].stats.tau > 1.3


def test_trial_19_prompts_of_one_token_two_and_many(ring):
    """Prompts shorter than the chain of seven levels, mixed with a long one."""
    asked = [[5], [5, 9], on_the_ring(100), [60]]
    for prompt, answer in zip(asked, ring.generate(asked, on(20), speculation=pairs.SEVEN), strict=True):
        assert answer.token_ids == pairs.walk(FOLLOWING, prompt[-1], 20)
        assert answer.stats.accepted_per_cycle == [7, 7, 7]


def test_trial_19_empty_prompts_are_refused_before_a_program_is_made(ring):
    """No BOS is slipped in, and nothing compiles."""
    made = dict(ring._programs)
    for empty in ([[]], [[5], []], "", [""]):
        with pytest.raises(PromptError, match="empty"):
            ring.generate(empty, on(5), speculation=pairs.Speculation(6, 1))
    assert ring._programs == made


def test_trial_24_budgets_are_exact(ring):
    """0 to 13 tokens are asked and delivered, each row of a batch with a budget of its own."""
    budgets = [0, 13, 1, 7, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    answers = ring.generate([[20]] * len(budgets), [on(budget) for budget in budgets])
    for budget, answer in zip(budgets, answers, strict=True):
        assert answer.token_ids == list(range(21, 21 + budget)) and answer.finish_reason == "length"
        assert answer.stats.new_tokens == budget == len(answer.text)
        # the first token is the prefill's, each cycle gives six, and a cycle without budget is not run
        assert answer.stats.accepted_per_cycle == [5] * -(-max(budget - 1, 0) // 6)


def test_trial_24_nothing_asked_runs_nothing(ring, monkeypatch):
    """A budget of 0 starts no program; a negative one is refused."""
    programs = ring._programs_for(pairs.FIVE)
    monkeypatch.setattr(type(programs), "start", lambda *_: pytest.fail("a program was started"))
    (answer,) = ring.generate([[20]], on(0))
    assert (answer.token_ids, answer.text, answer.stats.cycles) == ([], "", 0)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        on(-1)
