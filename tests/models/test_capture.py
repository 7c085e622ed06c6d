"""Every way in which released drafts number their capture layers, brought to boundaries."""

import pytest

from eaglejax.errors import ConfigError
from eaglejax.models.capture import IDS_KEY, read_capture


def nested(ids):
    return {"eagle_config": {IDS_KEY: ids, "use_aux_hidden_state": True}}


def top(ids):
    return {IDS_KEY: ids}


# name, config, blocks of the target, boundaries, whether both readings fit
TABLE = [
    ("EAGLE reference, nothing stored, Llama-3.1-8B", {}, 32, (2, 16, 29), False),
    ("SpecForge DeepSeek-V3", nested([1, 29, 57]), 61, (2, 30, 58), False),
    ("SpecForge Qwen3-30B-A3B", nested([1, 23, 44]), 48, (2, 24, 45), False),
    ("SpecForge Qwen3-235B-A22B", nested([1, 46, 90]), 94, (2, 47, 91), False),
    ("SpecForge gpt-oss-120b", nested([1, 17, 33]), 36, (2, 18, 34), False),
    ("SpecForge gpt-oss-20b", nested([1, 11, 21]), 24, (2, 12, 22), False),
    ("SpecForge without ids, Qwen3-480B", {"eagle_config": {"use_aux_hidden_state": True}}, 62, (2, 31, 59), False),
    ("AQ-MedAI Kimi-K2", nested([2, 30, 58]), 61, (3, 31, 59), True),
    ("lightseek Kimi MLA", {**nested([2, 30, 58]), "model_type": "kimi_k2"}, 61, (2, 30, 58), True),
    ("step-3.5", nested([4, 20, 40]), 45, (5, 21, 41), True),
    ("NVIDIA gpt-oss v3, after the last block", nested([24, 30, 36]), 36, (24, 30, 36), False),
    ("speculators", top([2, 24, 45]), 48, (2, 24, 45), False),
    ("speculators, null", top(None), 48, (2, 24, 45), False),
    ("speculators, last boundary", top([2, 24, 48]), 48, (2, 24, 48), False),
    ("lifted from a nested list", top([1, 46, 90]), 94, (1, 46, 90), False),
    ("both places, one meaning", {**top([2, 24, 45]), **nested([1, 23, 44])}, 48, (2, 24, 45), False),
    ("both places, the same list", {**top([2, 24, 45]), **nested([2, 24, 45])}, 48, (2, 24, 45), False),
    ("our manifest", {"eaglejax": {"boundaries": [3, 5, 7]}}, 8, (3, 5, 7), False),
    ("our manifest and SGLang's", {"eaglejax": {"boundaries": [3, 5, 7]}, **nested([2, 4, 6])}, 8, (3, 5, 7), False),
]  # fmt: skip


@pytest.mark.parametrize("name, config, blocks, boundaries, ambiguous", TABLE, ids=[row[0] for row in TABLE])
def test_table(name, config, blocks, boundaries, ambiguous):
    reading = read_capture(config, blocks, 3)
    assert reading.boundaries == boundaries
    assert reading.ambiguous == ambiguous
    assert reading.source
    if ambiguous:
        ids = config["eagle_config"][IDS_KEY]
        assert dict(reading.alternatives) == {"output": tuple(i + 1 for i in ids), "input": tuple(ids)}
        assert reading.alternatives[0][1] == boundaries
        assert "AMBIGUOUS" in reading.source


@pytest.mark.parametrize("ids", [[2, 30, 58], [1, 29, 57]])
def test_one_word_decides(ids):
    for config in (nested(ids), top(ids)):
        assert read_capture(config, 61, 3, "input").boundaries == tuple(ids)
        assert read_capture(config, 61, 3, "output").boundaries == tuple(i + 1 for i in ids)
        assert read_capture(config, 61, 3, (3, 31, 59)).boundaries == (3, 31, 59)
        assert not read_capture(config, 61, 3, "input").ambiguous
        assert read_capture(config, 61, 3, [0, 31, 61]).boundaries == (0, 31, 61)


def test_lifted_default_is_warned_about():
    assert "capture='output'" in read_capture(top([1, 46, 90]), 94, 3).warning
    assert not read_capture(top([2, 46, 90]), 94, 3).warning


def test_other_counts_than_three():
    assert read_capture(top([2, 4, 5, 7]), 8, 4).boundaries == (2, 4, 5, 7)
    assert read_capture(top([8]), 8, 1).boundaries == (8,)
    with pytest.raises(ConfigError, match="default has three.*4 captures.*capture="):
        read_capture({}, 48, 4)
    with pytest.raises(ConfigError, match=r"number of capture layers.*found 3.*expected 4"):
        read_capture(top([2, 4, 5]), 8, 4)
    with pytest.raises(ConfigError, match=r"capture: the number of capture layers.*found 2"):
        read_capture({}, 8, 3, (2, 4))


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 6])
def test_small_targets_have_no_default(blocks):
    with pytest.raises(ConfigError, match=rf"L = {blocks} blocks.*capture=\(low, mid, high\)"):
        read_capture({}, blocks, 3)
    if blocks > 1:
        assert read_capture({}, blocks, 3, (0, 1, 2)).boundaries == (0, 1, 2)


def test_seven_blocks_have_one():
    assert read_capture({}, 7, 3).boundaries == (2, 3, 4)


REFUSED = [
    (top([2, 4, 99]), r"boundaries \[2, 4, 99\].*0 \(embedding\) to 8"),
    (nested([1, 4, 99]), r"boundaries \[2, 5, 100\]"),
    (nested([2, 4, 99]), "lie outside"),
    (top([-1, 4, 5]), "lie outside"),
    (top([5, 4, 2]), "ascending"),
    (top([2, 4, 4]), "ascending"),
    (top([]), "list of whole numbers"),
    (top("2,4,5"), "list of whole numbers"),
    (top([2, 4, 5.0]), "list of whole numbers"),
    (top([True, 4, 5]), "list of whole numbers"),
    ({**top([2, 4, 6]), **nested([1, 3, 4])}, r"\[2, 4, 6\] at the top level.*\[1, 3, 4\] under eagle_config"),
    ({"eaglejax": {"boundaries": [2, 4, 6]}, **top([2, 4, 5])}, r"eaglejax.boundaries \[2, 4, 6\].*\[2, 4, 5\]"),
]  # fmt: skip


@pytest.mark.parametrize("config, message", REFUSED)
def test_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        read_capture(config, 8, 3)


def test_contradiction_yields_to_an_override():
    both = {**top([2, 4, 6]), **nested([1, 3, 4])}
    assert read_capture(both, 8, 3, "input").boundaries == (2, 4, 6)
    assert read_capture(both, 8, 3, "output").boundaries == (2, 4, 5)
    assert read_capture(both, 8, 3, (2, 4, 7)).boundaries == (2, 4, 7)


REPEATED = [
    (top([2, 30, 58]), 61, (3, 3, 59)),
    (nested([2, 30, 58]), 61, (3, 59, 3)),
    (top([2, 2, 58]), 61, (3, 59, 59)),  # repeats, but not in these places
    ({}, 61, (3, 3, 59)),
    ({}, 4, (1, 1, 2)),  # the reference's default there is (2, 2, 1)
    ({"eaglejax": {"boundaries": [2, 30, 58]}}, 61, (2, 2, 58)),
]


@pytest.mark.parametrize("config, blocks, capture", REPEATED)
def test_a_repeated_boundary_is_refused(config, blocks, capture):
    with pytest.raises(ConfigError, match=r"capture: capture= names a boundary more than once.*found \[.*once"):
        read_capture(config, blocks, 3, capture)


@pytest.mark.parametrize(
    "config, blocks, capture",
    [
        (top([2, 2, 58]), 61, (3, 3, 59)),
        (nested([1, 1, 3]), 4, (2, 2, 4)),
        ({"eaglejax": {"boundaries": [1, 1, 3]}}, 4, (1, 1, 3)),
        ({}, 4, (2, 2, 1)),
        ({}, 5, (2, 2, 2)),
    ],
)
def test_a_repetition_of_the_drafts_own_is_taken(config, blocks, capture):
    assert read_capture(config, blocks, 3, capture).boundaries == capture


def test_negative_ids_have_no_agreed_meaning():
    for ids in ([-1, 4, 7], [1, 4, -1]):
        with pytest.raises(ConfigError, match=r"negative.*no agreed meaning.*found \[.*capture='output'"):
            read_capture(nested(ids), 8, 3)
    assert read_capture(nested([-1, 4, 6]), 8, 3, "output").boundaries == (0, 5, 7)
    with pytest.raises(ConfigError, match="lie outside"):
        read_capture(nested([-1, 4, 6]), 8, 3, "input")
    assert read_capture(nested([-1, 4, 6]), 8, 3, (4, 6, 8)).boundaries == (4, 6, 8)


@pytest.mark.parametrize("capture", ["middle", (1, 2, 9), (-1, 2, 3), ()])
def test_bad_overrides(capture):
    with pytest.raises(ConfigError):
        read_capture({}, 8, 3, capture)


def test_without_a_target():
    assert read_capture({}, None, 3).boundaries == ()
    assert read_capture(top([2, 4, 5]), None, 3).boundaries == (2, 4, 5)
    assert read_capture(nested([2, 4, 5]), None, 3).ambiguous
