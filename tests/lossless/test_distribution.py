"""At temperature 1 the speculative text has the target's distribution: chi-square against enumeration on a Markov pair.

Kit M's target gives row P[t] after token t. Eight tokens carry all of P, so every (token before, token) pair is
counted often. Tokens are counted apart by where in a cycle they were drawn: in the prefill, first after the root,
deeper along accepted drafts, and the bonus token after a cycle whose drafts were all accepted. Whether a cycle gets
that far hangs on earlier noise alone, so each of these is distributed as P.
"""

from collections import Counter

import kit_m
import numpy as np
import pytest
from scipy.stats import chi2

from eaglejax import EagleJaxEngine, Sampling, Speculation

STATES = np.array([3, 7, 11, 20, 21, 40, 50, 58])
SLOTS, NEW_TOKENS, LEVELS = 64, 160, 2
SHAPES = {"chain": Speculation(LEVELS, 1), "tree": Speculation(LEVELS, 3, 8)}
FILTERS = {"all": {}, "filtered": {"top_k": 6, "top_p": 0.85, "min_p": 0.05}}
BOUNDARIES = (1, 2, 3)


def matrices() -> tuple[np.ndarray, np.ndarray]:
    """P over the eight states, and a Q that is like it but not it."""
    rng = np.random.default_rng(4)
    p, other = (np.zeros((64, 64)) for _ in range(2))
    p[:, STATES], other[:, STATES] = rng.dirichlet(np.ones(8), 64), rng.dirichlet(np.ones(8), 64)
    return p, 0.6 * p + 0.4 * other


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("markov")
    p, q = matrices()
    target = kit_m.write_target(folder / "target", p, layers=3, tokenizer=False)
    draft = kit_m.write_draft(folder / "draft", q, BOUNDARIES, eagle_aux_hidden_state_layer_ids=list(BOUNDARIES))
    return EagleJaxEngine.from_pretrained(str(target), draft=str(draft), max_len=NEW_TOKENS + 16, slots=SLOTS)


def filtered(row: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """A row of P after top-k, top-p and min-p, by a sort."""
    order = np.argsort(-row)
    keep = order[:top_k] if top_k else order
    mass = row[keep] / row[keep].sum()
    keep = keep[: int(np.searchsorted(np.cumsum(mass), top_p - 1e-12)) + 1] if top_p < 1 else keep
    keep = keep[row[keep] >= min_p * row[order[0]]]
    out = np.zeros_like(row)
    out[keep] = row[keep] / row[keep].sum()
    return out


def count(engine, shape: str, filters: dict, draws: int) -> tuple[dict[str, Counter], float]:
    """Counts of (token before, token) by place in the cycle, over at least `draws` tokens; and tau."""
    places = {name: Counter() for name in ("prefill", "first", "deeper", "bonus")}
    cycles = accepted = seed = 0
    while sum(sum(counts.values()) for counts in places.values()) < draws:
        prompts = [[int(STATES[(seed + i) % 8])] for i in range(SLOTS)]
        asked = [Sampling(NEW_TOKENS, temperature=1.0, seed=seed + i, ignore_eos=True, **filters) for i in range(SLOTS)]
        for prompt, answer in zip(prompts, engine.generate(prompts, asked, speculation=SHAPES[shape]), strict=True):
            tokens = prompt + answer.token_ids
            names = ["prefill"]
            for accepts in answer.stats.accepted_per_cycle:
                names += ["first", *["deeper"] * (LEVELS - 1), "bonus"][: accepts + 1]
            for before, token, name in zip(tokens, tokens[1:], names, strict=False):
                places[name][before, token] += 1
            cycles, accepted = cycles + answer.stats.cycles, accepted + sum(answer.stats.accepted_per_cycle)
        seed += SLOTS
    return places, 1 + accepted / cycles


def p_value(counts: Counter, expected: np.ndarray) -> float:
    """Chi-square of the counts given the token before; rare cells (expected < 5) are joined in their row."""
    statistic, freedom = 0.0, 0
    for before in STATES:
        seen = np.array([counts[int(before), token] for token in range(64)], float)
        want = seen.sum() * expected[before]
        rare = want < 5
        cells = [*zip(seen[~rare], want[~rare], strict=True), (seen[rare].sum(), want[rare].sum())]
        if cells[-1][1] == 0 and cells.pop()[0]:
            return 0.0  # a token was drawn that cannot be
        if cells and cells[-1][1] < 5 and len(cells) > 1:
            (a, b), (c, d) = cells.pop(), cells.pop()
            cells.append((a + c, b + d))
        statistic += sum((s - w) ** 2 / w for s, w in cells if w)
        freedom += max(len(cells) - 1, 0)
    assert freedom > 20
    return float(chi2.sf(statistic, freedom))


def check(engine, shape: str, filters: str, draws: int) -> None:
    p, q = matrices()
    asked = FILTERS[filters]
    expected = np.array([filtered(row, **asked) for row in p])
    places, tau = count(engine, shape, asked, draws)
    assert tau > 1.3 and sum(places["bonus"].values()) > draws / 20  # the draft took part
    found = {name: p_value(places[name], expected) for name in ("first", "deeper", "bonus")}
    found["all"] = p_value(sum(places.values(), Counter()), expected)
    assert min(found.values()) > 0.001, found
    # the same test sees the draft's own distribution, and a tenth of it mixed in
    drafted = np.array([filtered(row, **asked) for row in q])
    assert p_value(places["bonus"], drafted) < 1e-6
    assert p_value(sum(places.values(), Counter()), 0.9 * expected + 0.1 * drafted) < 0.05


@pytest.mark.parametrize("shape, filters", list(zip(SHAPES, FILTERS, strict=True)))
def test_20_000_draws(engine, shape, filters):
    check(engine, shape, filters, 20_000)


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_200_000_draws(engine, shape, filters):
    check(engine, shape, filters, 200_000)
