"""`engine.check` as a whole, on a pair that is right and on pairs with one thing wrong."""

from dataclasses import replace

import kit_m
import pairs
import pytest
import wired_pairs

from eaglejax.errors import ConfigError
from eaglejax.measure.check_items import look_at_pair
from eaglejax.measure.load_check import SECTION
from eaglejax.measure.seen_wirings import seen_path


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return wired_pairs.write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return wired_pairs.write_draft(tmp_path_factory.mktemp("draft") / "draft")


@pytest.fixture(scope="module")
def right(target, draft):
    return pairs.load(target, draft, slots=4)


@pytest.mark.slow
def test_the_right_pair_passes(right):
    """Wiring, losslessness and tables in one report, as text and as JSON."""
    report = right.check(tokens=128)
    assert report.ok and not report.wrong and report.wiring is not None
    found = {item.name: item for item in report.items}
    assert {"wiring", "coverage", "lossless", "vocabulary map", "tokenizer", "context", "end of text"} <= found.keys()
    assert all(item.status == "ok" for item in report.items), report
    assert "by rounding" not in found["lossless"].line and {row.tau for row in report.rows} == {4.0}
    text, values = str(report), report.to_json()
    assert "<- loaded" in text and "trained for" not in text
    assert values["ok"] and values["wiring"]["fix"] is None and len(values["lossless"]) == 2
    assert values["wiring"]["figures"][0]["accuracies"] == [1.0] * 4


def test_a_fault_makes_the_report_wrong(target, draft):
    engine = pairs.load(target, draft, capture=(3, 5, 6), slots=4)
    report = engine.check(tokens=128, lossless=False)
    assert not report.ok and [item.name for item in report.wrong] == ["wiring"]
    assert "capture=(2, 4, 5)" in report.wrong[0].line and "--capture=2,4,5" in str(report)
    assert report.items[0].status == "wrong" and "<- trained for" in str(report)
    assert report.to_json()["wiring"]["fix"]["flags"] == "--capture=2,4,5"


def test_what_cannot_be_checked_is_refused(target, right):
    with pytest.raises(ConfigError, match="no draft to check"):
        pairs.load(target, None, speculation=None).check()
    with pytest.raises(ConfigError, match="tokens: out of range; found 0"):
        right.check(tokens=0)


def test_tables_that_do_not_fit(right):
    """Planted in the loaded pair, where no loader would let them through."""
    pair, status = right._pair, lambda pair: {item.name: item.status for item in look_at_pair(pair, 128)}
    assert set(status(pair).values()) == {"ok"}
    assert status(replace(pair, eos_ids=(64,)))["end of text"] == "wrong"
    short = replace(pair.origin.plan, target_ids=pair.origin.plan.target_ids[::-1])
    assert status(replace(pair, origin=replace(pair.origin, plan=short)))["vocabulary map"] == "wrong"
    assert {item.status for item in look_at_pair(pair, 5000) if item.name == "context"} == {"wrong"}
    assert {item.status for item in look_at_pair(pair, 3000) if item.name == "context"} == {"warning"}


def test_a_tokenizer_of_another_model(tmp_path, draft):
    """64 tokens for 60 rows: ids that the embedding does not hold."""
    target = kit_m.write_target(tmp_path / "t", wired_pairs.P, layers=8)
    engine = pairs.load(str(target), draft)
    pair = engine._pair
    small = replace(pair.target.config, vocab_size=60)
    pair.target.config = small
    found = {item.name: item for item in look_at_pair(pair, 128)}
    assert found["tokenizer"].status == "wrong" and "ids up to 63" in found["tokenizer"].line


def test_the_quick_look_at_load(target, draft, caplog, monkeypatch, tmp_path):
    """On by default: it warns of a fault with the override that mends it, says what it cost where all is well, and remembers that."""
    monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path))
    wrong = pairs.load(target, draft, capture=(1, 3, 4), check_wiring=True)
    (line,) = [line for line in wrong.load_report.warnings if line.startswith("WIRING")]
    assert "capture=(2, 4, 5)" in line and any("WIRING" in record.message for record in caplog.records)
    fine = pairs.load(target, draft, check_wiring=True)
    (said,) = fine.load_report.notes[SECTION]
    assert "as the draft was trained" in said and "s at load" in said and not fine.load_report.warnings
    again = pairs.load(target, draft, check_wiring=True)
    assert again.load_report.notes[SECTION][0].startswith("right, as measured when this pair was first loaded")
    for engine in (wrong, fine):  # what is wrong is measured every time
        assert (len(list((tmp_path / "wirings").iterdir())) == 1) and seen_path(engine._pair).exists() == (
            engine is fine
        )
    norms = pairs.load(target, draft, draft_config={"norm_output": True}, check_wiring=True)
    assert any("draft_config={'norm_output': False}" in line for line in norms.load_report.warnings)


def test_the_quick_look_is_left_out_in_words(tmp_path, target, draft):
    off = pairs.load(target, draft)
    assert "check_wiring=False" in off.load_report.notes[SECTION][0]
    mute = kit_m.write_target(tmp_path / "mute", wired_pairs.P, layers=8, tokenizer=False)
    silent = pairs.load(str(mute), draft, check_wiring=True)
    assert "no tokenizer" in silent.load_report.notes[SECTION][0]
