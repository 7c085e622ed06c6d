"""Trial 34: every cell of num_steps x topk x num_draft_tokens runs as plain decoding, or is refused with the rule."""

import itertools

import pairs
import pytest

from eaglejax import Sampling, Speculation
from eaglejax.errors import ConfigError

STEPS, TOPK, NODES = (0, 1, 2, 7, 16), (1, 2, 8), (None, 1, 2, 8, 64)
CELLS = list(itertools.product(STEPS, TOPK, NODES))
FOLLOWING = pairs.around()


def rule(steps: int, topk: int, nodes: int | None) -> tuple[int | None, str]:
    """(nodes, "") of a cell that can run, or (None, part of the message)."""
    pool = topk + (steps - 1) * topk * topk
    if steps == 0:
        return (1, "") if nodes in (None, 1) else (None, r"plain decoding.*expected 1")
    if topk == 1:
        return (steps + 1, "") if nodes in (None, steps + 1) else (None, rf"num_steps \+ 1 nodes.*expected {steps + 1}")
    if nodes is None:
        return min(64, pool + 1), ""
    if nodes == 1:
        return None, "its root and one candidate"
    return (nodes, "") if nodes <= pool + 1 else (None, rf"cannot be filled.*at most {pool + 1}")


@pytest.mark.parametrize("steps, topk, nodes", CELLS)
def test_trial_34_every_cell_is_filled_in_or_refused(steps, topk, nodes):
    """None becomes a number that is printed; what cannot be filled is refused; numbers may come as text."""
    right, message = rule(steps, topk, nodes)
    as_text = lambda n: None if n is None else str(n)
    for values in ((steps, topk, nodes), tuple(map(as_text, (steps, topk, nodes)))):
        if right is None:
            with pytest.raises(ConfigError, match=f"num_draft_tokens.*{message}"):
                Speculation(*values)
        else:
            spec = Speculation(*values)
            assert (spec.num_steps, spec.topk, spec.num_draft_tokens) == (steps, topk, right)
            assert (
                spec.describe() == "plain decoding" if steps == 0 else f"({steps}, {topk}, {right})" in spec.describe()
            )


@pytest.mark.parametrize(
    "values", [("x", 1), (2.5, 1), (True, 1), (-1, 1), (33, 1), (3, 0), (3, 65), (None, 1), ("", 1)]
)
def test_trial_34_values_that_are_no_numbers(values):
    """Words, fractions, truth values and numbers out of range are refused by name."""
    with pytest.raises(ConfigError, match="num_steps|topk"):
        Speculation(*values)


def runs(engine, spec: Speculation) -> None:
    """Plain text from four starts, also where the budget is smaller than the levels; all that fits is accepted."""
    asked = [Sampling(max_new_tokens=n, ignore_eos=True) for n in (1, 3, 18, 25)]
    for start, sampling, answer in zip(
        (5, 20, 33, 58), asked, engine.generate([[5], [20], [33], [58]], asked, speculation=spec), strict=True
    ):
        assert answer.token_ids == pairs.walk(FOLLOWING, start, sampling.max_new_tokens)
        # the best path stands in every tree of this pair: its first choice has probability 0.999
        deep = min(spec.num_steps, spec.nodes - 1)
        assert answer.stats.accepted_per_cycle == [deep] * -(-(sampling.max_new_tokens - 1) // (deep + 1))


@pytest.mark.parametrize("cell", [(1, 2, None), (2, 8, 64), (7, 2, 2)], ids=str)
def test_trial_34_cells_run_as_plain_decoding(ring, cell):
    """The smallest tree, a full one, and a deep one that keeps a single candidate."""
    runs(ring, Speculation(*cell))


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in CELLS if rule(*cell)[0]], ids=str)
def test_trial_34_all_cells_run(ring, cell):
    """Every cell that is not refused."""
    runs(ring, Speculation(*cell))


def test_trial_34_more_children_than_the_draft_has_tokens(tmp_path, ring):
    """topk above the draft's vocabulary is refused when the engine is made and at every call."""
    import kit_m

    draft = pairs.write_draft(tmp_path / "draft", kit_m.sharp(FOLLOWING), ids=[3, 5, 7, 9])
    with pytest.raises(ConfigError, match="topk.*found 8.*at most 4"):
        pairs.load(ring._pair.name, draft, speculation=Speculation(2, 8))
    engine = pairs.load(ring._pair.name, draft)
    with pytest.raises(ConfigError, match="topk.*found 8.*at most 4"):
        engine.generate([[5]], speculation=Speculation(2, 8))
    assert not engine._programs
