"""Trials 20, 27, 28, 33 on small random models: the text of plain decoding, clean caches, rows that do not touch."""

import json
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest
from safetensors.numpy import load_file

from eaglejax import Sampling, Speculation
from eaglejax.generation import Tree

sys.path.insert(0, str(Path(__file__).parents[1] / "oracles"))
import draft_numpy  # noqa: E402
import tree_numpy  # noqa: E402

ASKED = pairs.prompts([1, 7, 20, 33, 16, 17, 2, 50])


# 20: the recurrence of the draft


def reference_tree(folders: tuple[str, str], engine, tokens: list[int], spec: Speculation) -> tree_numpy.Tree:
    """The tree by brute force: a numpy draft that runs every path by itself, on the target's own states."""
    target, folder = map(Path, folders)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    config = json.loads((folder / "config.json").read_text())
    draft = draft_numpy.read_draft(config, load_file(folder / "model.safetensors"), embedding)
    boundaries = engine.score(tokens).boundaries
    captures = np.concatenate([boundaries[b] for b in pairs.CAPTURE], axis=-1)[:-1]
    after = draft_numpy.next_logprobs_after(draft, captures, np.asarray(tokens))
    return tree_numpy.build_tree(after, tokens[-1], spec.num_steps, spec.topk, spec.nodes)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_trial_20_drafted_rows_are_those_of_a_whole_sequence(request, random_pairs, family):
    """Five drafted levels have the scores of a reference that runs each path by itself on the target's states."""
    engine = request.getfixturevalue("latent" if family == "deepseek_v3" else "grouped")
    tokens = pairs.prompts([14], seed=4)[0]
    for spec in (pairs.FIVE, pairs.TREE):
        want = reference_tree(random_pairs[family], engine, tokens, spec)
        found = engine.propose(tokens, spec)
        np.testing.assert_array_equal(found.tokens, want.tokens)
        np.testing.assert_array_equal(found.parents, want.parents)
        np.testing.assert_array_equal(found.mask, want.mask)
        np.testing.assert_allclose(found.scores, want.scores, atol=1e-4, rtol=0)


def test_trial_20_every_one_of_seven_levels_is_accepted(ring):
    """P = Q: acceptance at each level is 1.0, the first as well as the seventh."""
    sampling = Sampling(max_new_tokens=57, ignore_eos=True)
    for answer in ring.generate([[5], [9, 4], [30], [62]], sampling, speculation=pairs.SEVEN):
        assert answer.stats.accepted_at_level(7) == [1.0] * 7 and answer.stats.cycles == 7


# 27: the text of plain decoding


def test_trial_27_greedy_text_is_that_of_plain_decoding(random_engine):
    """float32, chain and tree, token for token; the drafts are accepted, and the text is no loop."""
    sampling = Sampling(max_new_tokens=70)
    plain = random_engine.generate(ASKED, sampling, speculation=None)
    assert all(answer.stats.tau == 1 for answer in plain)
    assert len({token for answer in plain for token in answer.token_ids}) > 30
    for spec, least in ((pairs.CHAIN, 1.6), (pairs.TREE, 2.2)):
        found = random_engine.generate(ASKED, sampling, speculation=spec)
        assert pairs.ids(found) == pairs.ids(plain)
        assert np.mean([answer.stats.tau for answer in found]) > least
        assert {a for counts in pairs.counts(found) for a in counts} == {0, 1, 2, 3}


def test_trial_27_the_text_depends_on_the_whole_context(random_engine):
    """What makes this model a judge: another first token, far back, changes what is said after the same last tokens."""
    tail = pairs.prompts([16], seed=8)[0]
    logits = [random_engine.score([first, *tail]).logits[-1] for first in (3, 44)]
    assert np.abs(logits[0] - logits[1]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_trial_27_at_full_size(random_pairs, family):
    """50 prompts of 200 tokens, levels 1, 3, 7 by topk 1 and 4."""
    engine = pairs.load(*random_pairs[family], max_len=256, slots=16)
    asked = pairs.prompts([1 + i for i in range(50)], seed=2)
    plain = engine.generate(asked, Sampling(max_new_tokens=200), speculation=None)
    for steps in (1, 3, 7):
        for spec in (Speculation(steps, 1), Speculation(steps, 4, min(5 * steps, 24))):
            found = engine.generate(asked, Sampling(max_new_tokens=200), speculation=spec)
            assert pairs.ids(found) == pairs.ids(plain), spec.describe()
            assert np.mean([answer.stats.tau for answer in found]) > 1.3


# 28: rows of a batch


def test_trial_28_each_row_is_its_solo_run(grouped):
    """(a) Ragged prompts and budgets in one batch give the ids and the accepted counts of each alone."""
    asked = pairs.prompts([1, 7, 40, 80])
    samplings = [Sampling(max_new_tokens=n) for n in (3, 40, 20, 45)]
    together = grouped.generate(asked, samplings, speculation=pairs.TREE)
    for prompt, sampling, answer in zip(asked, samplings, together, strict=True):
        (alone,) = grouped.generate([prompt], sampling, speculation=pairs.TREE)
        assert (alone.token_ids, alone.stats.accepted_per_cycle) == (answer.token_ids, answer.stats.accepted_per_cycle)
        assert len(alone.token_ids) == sampling.max_new_tokens
    assert together[3].stats.tau > 1.5


def row(state, slot: int):
    """Everything the program holds of one slot within its length."""
    length = int(state.length[slot])
    caches = [leaf[slot, : length - 1] for leaf in state.target_cache]
    drafts = [leaf[slot, : length - 1 - state.pending_count[slot]] for leaf in state.draft_cache]
    pending = state.pending_features[slot, : state.pending_count[slot]]
    return [state.tokens[slot, :length], state.accepted[slot], pending, *caches, *drafts]


def same(first, second) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_trial_28_contents_of_other_rows_change_no_bit(random_engine):
    """(b) With the same shapes, row 0 is bit for bit the same beside other mates, in both caches and all features."""
    programs = random_engine._programs_for(pairs.TREE)
    mates = [pairs.prompts([9, 30, 5, 22], seed=s)[1:] for s in (10, 11)]
    mine = pairs.prompts([9], seed=12)
    (*_, first), (*_, second) = (pairs.rounds(programs, mine + others, 6) for others in mates)
    assert first.accepted[0].sum() > 4
    assert same(row(first, 0), row(second, 0)) and not same(row(first, 1), row(second, 1))


def test_trial_28_unused_slots_and_poisoned_caches_change_nothing(random_engine):
    """(c, d) Caches full of NaN where nothing was written, and slots without a request: same answer, no NaN in it."""
    programs = random_engine._programs_for(pairs.TREE)
    asked = pairs.prompts([1, 7, 40, 18], seed=6)
    *_, clean = pairs.rounds(programs, asked, 6)
    *_, poisoned = pairs.rounds(programs, asked, 6, spoil=True)
    for slot in range(4):
        assert same(row(clean, slot), row(poisoned, slot))
        assert all(np.isfinite(part).all() for part in row(poisoned, slot))
    assert np.isnan(poisoned.target_cache[0][0, int(poisoned.length[0]) + 1 :]).all()
    # three requests run in four slots: the fourth is a dummy
    three = random_engine.generate(asked[:3], Sampling(max_new_tokens=30), speculation=pairs.TREE)
    four = random_engine.generate(asked, Sampling(max_new_tokens=30), speculation=pairs.TREE)
    assert pairs.ids(three) == pairs.ids(four[:3]) and pairs.counts(three) == pairs.counts(four[:3])
    # what an earlier wave left behind, were it all NaN, is never read
    idle = programs._idle[4]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(idle.target_cache))
    nan = lambda leaf: jnp.full_like(leaf, jnp.nan) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
    programs._idle[4] = jax.tree.map(nan, idle)
    again = random_engine.generate(asked, Sampling(max_new_tokens=30), speculation=pairs.TREE)
    assert pairs.ids(again) == pairs.ids(four) and pairs.counts(again) == pairs.counts(four)


# 33: accepted paths that are no prefix


def accepted_ranks(tree: Tree, following: list[int]) -> list[int]:
    """Ranks among their siblings of the nodes that a text follows down a tree."""
    ranks, node = [], 0
    for token in following:
        children = np.flatnonzero(tree.parents == node)
        by_score = children[np.argsort(-tree.scores[children], kind="stable")]
        fits = [rank for rank, child in enumerate(by_score) if tree.tokens[child] == token]
        if not fits:
            break
        ranks.append(fits[0])
        node = by_score[fits[0]]
    return ranks


def test_trial_33_caches_after_every_round_are_those_of_a_prefill(random_engine):
    """Accepted nodes that are the 2nd or 3rd child at depths 1, 2 and 3 leave both caches as a fresh prefill would."""
    programs = random_engine._programs_for(pairs.TREE)
    asked = pairs.prompts([17, 18, 19, 20], seed=3)
    seen: Counter[tuple[int, int]] = Counter()
    before = None
    for state in pairs.rounds(programs, asked, 9):
        assert pairs.caches_are_fresh(programs, state)
        for slot in range(4) if before is not None else ():
            old, new = pairs.committed(before, slot), pairs.committed(state, slot)
            ranks = accepted_ranks(random_engine.propose(old, pairs.TREE), new[len(old) :])
            # the tree inside the loop is the one that `propose` grows, and it was followed as far as it goes
            assert len(ranks) == len(new) - len(old) - 1 == state.accepted[slot, before.cycles[slot]]
            seen.update((depth, rank) for depth, rank in enumerate(ranks, 1))
        before = state
    assert all(sum(seen[depth, rank] for rank in (1, 2, 3)) for depth in (1, 2, 3)), seen
    assert sum(n for (_, rank), n in seen.items() if rank > 1) > 0, seen
