"""Faults that change no text, only acceptance, and faults of masks and caches: each planted, each seen by its check."""

import json
from dataclasses import replace

import jax.numpy as jnp
import kit_m
import numpy as np
import pairs
import pytest
from safetensors.numpy import load_file

from eaglejax import Sampling, Speculation
from eaglejax.checkpoint.draft_loader import read_draft
from eaglejax.drafting import StandaloneDraft
from eaglejax.load_report import LoadReport
from eaglejax.models.draft import Draft
from eaglejax.speculation import draft as drafting
from eaglejax.speculation import loop, tree
from eaglejax.speculation.programs import Programs

# the stored trees of the EAGLE reference


def trees_are_the_references(folder, alter=lambda draft: None) -> bool:
    """Whether a stored draft proposes the reference's trees, from nothing and after some tokens were accepted."""
    embedding = folder / "embed.safetensors"
    table = load_file(embedding)["model.embed_tokens.weight"] if embedding.exists() else None
    draft = read_draft(folder, dtype="float32", target=None, target_embedding=table, report=LoadReport()).draft
    alter(draft)
    alone = StandaloneDraft(draft, LoadReport())
    want = load_file(folder / "expected.safetensors")
    first, both = want["aux_hidden"][0], np.concatenate([want["aux_hidden"][0], want["aux_hidden_2"][0]])
    shape = json.loads((folder / "case.json").read_text())["trees"]["t16"]
    spec = Speculation(shape["depth"] + 1, shape["top_k"], shape["total_tokens"])
    good = True
    for step, features, ids in (("step1", first, "input_ids"), ("step2", both, "input_ids_2")):
        found = alone.propose(features, [int(i) for i in want[ids][0]], spec)
        good &= np.array_equal(found.tokens, want[f"t16.{step}.draft_tokens"][0])
        good &= np.array_equal(found.mask, want[f"t16.{step}.tree_mask"][0, 0] > 0)
        good &= np.array_equal(found.depths, want[f"t16.{step}.tree_position_ids"])
    return good


GOLDEN = ["draft_eagle3", "draft_eagle3_own_embed"]


def feed_the_normed_state(monkeypatch):
    plain = Draft.__call__

    def faulty(self, *args, **kw):
        out = plain(self, *args, **kw)
        return replace(out, feedback=self.norm(out.hidden))

    monkeypatch.setattr(Draft, "__call__", faulty)


def change_levels(monkeypatch, change):
    plain = drafting._level_step
    monkeypatch.setattr(drafting, "_level_step", lambda *args: change(plain(*args)))


def see_siblings(monkeypatch):
    change_levels(monkeypatch, lambda step: replace(step, mask=jnp.ones_like(step.mask)))


def skip_a_position(monkeypatch):
    change_levels(
        monkeypatch,
        lambda step: replace(step, positions=step.positions + 1, row_positions=step.row_positions + 1),
    )


def forget_the_levels_above(monkeypatch):
    def only_itself(step):
        above = jnp.arange(step.mask.shape[-1]) < step.mask.shape[-1] - step.mask.shape[-2]
        return replace(step, mask=step.mask & ~above)

    change_levels(monkeypatch, only_itself)


FAULTS = [(fault, name) for fault in (feed_the_normed_state, see_siblings, skip_a_position) for name in GOLDEN]
# the other stored draft looks back so little that its tree stays the same
FAULTS.append((forget_the_levels_above, "draft_eagle3"))


@pytest.mark.parametrize("fault, name", FAULTS, ids=[f"{fault.__name__}-{name}" for fault, name in FAULTS])
def test_faults_of_growth_change_the_references_trees(data, monkeypatch, fault, name):
    """A normed state fed back, siblings seen as ancestors, a position skipped, ancestors not seen."""
    fault(monkeypatch)
    assert not trees_are_the_references(data / "drafts" / name)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_references_trees_without_a_fault(data, name):
    """The check passes on the sound code."""
    assert trees_are_the_references(data / "drafts" / name)


def test_d2t_taken_for_the_id_itself(data):
    """Target id = d2t[i] in place of i + d2t[i]; and draft ids taken for target ids."""
    for name in GOLDEN:
        offsets = load_file(data / "drafts" / name / "model.safetensors")["d2t"].astype(np.int32)
        for wrong in (offsets, np.arange(len(offsets), dtype=np.int32)):
            alter = lambda draft, wrong=wrong: draft.target_ids.set_value(jnp.asarray(wrong))
            assert not trees_are_the_references(data / "drafts" / name, alter)


@pytest.mark.parametrize("name, theta", [("draft_eagle3", 1e6), ("draft_eagle3_own_embed", 1e4)])
def test_wrong_rope_base(data, tmp_path, name, theta):
    """The base of another family, as a reader takes that looks for it in the wrong place."""
    for file in (data / "drafts" / name).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": theta}))
    assert not trees_are_the_references(tmp_path)


# designed accepted counts


def test_captures_off_by_one(ring, ring_folders):
    """All captures one block early: the text stays right, and the accepted counts are not those of the design."""
    early = pairs.load(*ring_folders, capture=(0, 1, 2), speculation=pairs.FIVE)
    asked, sampling = [[5], [20], [40], [50]], Sampling(max_new_tokens=31, ignore_eos=True)
    right, wrong = (engine.generate(asked, sampling) for engine in (ring, early))
    assert pairs.counts(right) == [[5] * 5] * 4
    assert pairs.ids(right) == pairs.ids(wrong) and pairs.counts(wrong) != pairs.counts(right)
    assert np.mean([answer.stats.tau for answer in wrong]) < 2


# rows of caches


@pytest.fixture(scope="module")
def partial(tmp_path_factory):
    """A pair whose draft is wrong after every third token, so that rows are rejected."""
    following = pairs.around()
    wrong = np.where(np.arange(64) % 3 == 0, 2, following)
    folder = tmp_path_factory.mktemp("partial")
    return pairs.load(*pairs.write_ring(folder, kit_m.sharp(following), kit_m.sharp(wrong)))


def programs_of(engine, spec) -> Programs:
    """Programs of their own, traced with whatever fault is planted."""
    pair = engine._pair
    return Programs(pair.target, pair.draft, pair.capture.boundaries, spec, engine.max_len, pair.dtype)


def caches_stay_fresh(engine, faulty: Programs, cycles: int = 4) -> bool:
    """Whether every round of `faulty` leaves the rows that a prefill by the sound programs would write."""
    clean = engine._programs_for(faulty.spec)
    asked = pairs.prompts([5, 9, 14, 16], seed=15)
    # Kit M's draft multiplies the rounding of the captured tags by vectors of size 50
    return all(pairs.caches_are_fresh(clean, state, atol=5e-3) for state in pairs.rounds(faulty, asked, cycles))


def in_the_loop(monkeypatch, change):
    """Replace `extend` in cycles alone: they bring num_steps + 1 rows, a prefill brings 16 or more."""
    plain = loop.extend

    def extend(draft, cache, tokens, features, start, count):
        act = change if tokens.shape[1] < 16 else lambda run, *args: run(*args)
        return act(plain, draft, cache, tokens, features, start, count)

    monkeypatch.setattr(loop, "extend", extend)


def skip_extend(run, draft, cache, *args):
    _, tip = run(draft, cache, *args)
    return cache, tip


def start_late(run, draft, cache, tokens, features, start, count):
    return run(draft, cache, tokens, features, start + 1, count)


def keep_drafted_states(run, draft, cache, tokens, features, start, count):
    # the rows of accepted tokens hold the draft's own states: all but the first feature are not the target's
    first = jnp.arange(features.shape[1])[None, :, None] == 0
    return run(draft, cache, tokens, jnp.where(first, features, features[:, :1]), start, count)


@pytest.mark.parametrize(
    "fault", [None, skip_extend, pytest.param(start_late, marks=pytest.mark.slow), keep_drafted_states]
)
def test_stale_rows_of_the_draft(partial, monkeypatch, fault):
    """Draft rows not rewritten after acceptance, rewritten one place late, or made of states not the target's."""
    if fault is not None:
        in_the_loop(monkeypatch, fault)
    assert caches_stay_fresh(partial, programs_of(partial, pairs.CHAIN)) == (fault is None)


def test_siblings_seen_in_verification(latent, monkeypatch):
    """The target sees all nodes of the tree: text and caches are no longer those of plain decoding."""
    monkeypatch.setattr(tree, "ancestors", lambda parents, depth: jnp.ones((*parents.shape, parents.shape[-1]), bool))
    assert not caches_stay_fresh(latent, programs_of(latent, pairs.TREE))


def test_rejected_rows_left_in_the_target(partial, monkeypatch):
    """Rows committed in the order of the tree, not along the accepted path."""
    plain = loop.take_rows

    def take_rows(rows, path):
        if rows.ndim == 4:  # keys and values: rows of heads
            path = jnp.broadcast_to(jnp.arange(path.shape[1], dtype=jnp.int32), path.shape)
        return plain(rows, path)

    monkeypatch.setattr(loop, "take_rows", take_rows)
    assert not caches_stay_fresh(partial, programs_of(partial, Speculation(3, 2, 8)))
