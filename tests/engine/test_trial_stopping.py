"""Trials 22, 23, 26: EOS inside a block, EOS of the draft alone, stop strings."""

import kit_m
import pairs
import pytest

from eaglejax import Sampling

FOLLOWING = pairs.around()
# every place of a block: the first token comes from the prefill, blocks hold levels + 1 tokens
SETTINGS = {0: None, 5: pairs.FIVE, 7: pairs.SEVEN}
levels = pytest.mark.parametrize("levels", SETTINGS)


def full_cycles(tokens: int, levels: int) -> list[int]:
    """Accepted counts where all is accepted: one token of the prefill, then blocks of levels + 1."""
    return [levels] * -(-(tokens - 1) // (levels + 1))


@levels
@pytest.mark.parametrize("eos", [63, 40])
def test_trial_22_eos_inside_a_block(ring, levels, eos):
    """EOS on each place of a block, the bonus token included; both ids of generation_config stop."""
    starts = [eos - distance for distance in range(1, 17)]
    answers = ring.generate([[s] for s in starts], Sampling(max_new_tokens=40), speculation=SETTINGS[levels])
    for start, answer in zip(starts, answers, strict=True):
        assert answer.token_ids == list(range(start + 1, eos + 1))
        assert (answer.finish_reason, answer.stop_reason) == ("stop", eos)
        assert answer.stats.accepted_per_cycle == full_cycles(eos - start, levels)
        assert answer.text == "".join(kit_m.ALPHABET[t] for t in answer.token_ids[:-1])


def test_trial_22_ignore_eos_runs_on_and_stop_ids_do_not(ring):
    """ignore_eos passes both EOS ids; a stop id of the request still ends the answer."""
    asked = [
        Sampling(max_new_tokens=40, ignore_eos=True),
        Sampling(max_new_tokens=40, ignore_eos=True, stop_token_ids=[44]),
    ]
    free, held = ring.generate([[35], [35]], asked)
    assert free.token_ids == pairs.walk(FOLLOWING, 35, 40) and {40, 63} < set(free.token_ids)
    assert free.finish_reason == "length" and free.stats.accepted_per_cycle == full_cycles(40, 5)
    assert held.token_ids == list(range(36, 45)) and held.stop_reason == 44


@pytest.fixture(scope="module")
def lured(tmp_path_factory, ring):
    """The draft says EOS after tokens 10 and 50 where the target goes on."""
    q = FOLLOWING.copy()
    q[[10, 50]] = 63
    p, q = kit_m.sharp(FOLLOWING), kit_m.sharp(q)
    folder = tmp_path_factory.mktemp("lured")
    engine = pairs.load(*pairs.write_ring(folder, p, q), speculation=pairs.FIVE)
    return pairs.share_programs(engine, ring, pairs.FIVE), p, q


def test_trial_23_eos_of_the_draft_alone_ends_nothing(lured):
    """Only the row whose target says EOS finishes; the lure costs its cycle what it designed to cost."""
    engine, p, q = lured
    starts, budget = [6, 48, 60, 9], 14
    answers = engine.generate([[s] for s in starts], Sampling(max_new_tokens=budget))
    assert [a.finish_reason for a in answers] == ["length", "length", "stop", "length"]
    for start, answer in zip(starts, answers, strict=True):
        if start != 60:
            tokens, accepted = kit_m.greedy_chain(p, q, start, budget, 5)
            assert (answer.token_ids, answer.stats.accepted_per_cycle) == (tokens, accepted)
            assert min(accepted) < 5 and 63 not in tokens
    assert answers[2].token_ids == [61, 62, 63]


STOPS = [
    (["f"], 5, "e", "f"),  # in the first block
    (["fg"], 6, "e", "fg"),
    (["jkl"], 11, "efghi", "jkl"),  # over the edge of the first two blocks
    (["zz"], None, None, None),  # never
    (["no", "kl", "m"], 11, "efghij", "kl"),  # a later one of the list comes first
    (["hij", "i"], 8, "efgh", "i"),  # the first complete match wins
    (["lm", "klm"], 12, "efghij", "klm"),  # of two that end together, the one that starts earlier
    (["e"], 4, "", "e"),  # the prefill's own token
]


@levels
def test_trial_26_stop_strings(ring, levels):
    """Text, ids and counts end at the same token for every length of block, in one batch of different stops."""
    asked = [Sampling(max_new_tokens=30, stop=stop) for stop, *_ in STOPS]
    answers = ring.generate([[3]] * len(STOPS), asked, speculation=SETTINGS[levels])
    for (stop, last, text, reason), answer in zip(STOPS, answers, strict=True):
        end = 34 if last is None else last + 1
        assert answer.token_ids == list(range(4, end)), stop
        assert answer.text == ("".join(kit_m.ALPHABET[4:34]) if text is None else text), stop
        assert (answer.finish_reason, answer.stop_reason) == (("length", None) if last is None else ("stop", reason))
        assert answer.stats.new_tokens == len(answer.token_ids)
        assert answer.stats.accepted_per_cycle == full_cycles(end - 4, levels), stop


def test_trial_26_stop_strings_while_streaming(ring):
    """Pieces join to the text before the match, and no piece runs past it."""
    pieces = list(ring.stream([3], Sampling(max_new_tokens=30, stop=["no", "kl"]), cycles=1))
    assert "".join(piece.text for piece in pieces) == "efghij" == pieces[-1].generation.text
    assert [t for piece in pieces for t in piece.token_ids] == list(range(4, 12)) == pieces[-1].generation.token_ids
    assert pieces[-1].generation.stats.accepted_per_cycle == [5, 5]
