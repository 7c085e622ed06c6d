"""The profile of real runs: an operation planted in the draft is found there and nowhere else, times add up, compiles are in no figure."""

import json
from types import SimpleNamespace

import jax
import kit_m
import pytest
from planted import plant, seconds_alone
from type_checks import jaxtyping_off

from eaglejax import EagleJaxEngine, Sampling, Speculation
from eaglejax.errors import ConfigError
from eaglejax.measure.profile import check_request

CAPTURE = (1, 2, 3)
PROMPT = [list(range(3, 15))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder, ring = tmp_path_factory.mktemp("profile"), kit_m.sharp(kit_m.ring())
    target = kit_m.write_target(folder / "target", ring, layers=3)
    draft = kit_m.write_draft(folder / "draft", ring, CAPTURE, eagle_aux_hidden_state_layer_ids=list(CAPTURE))
    return str(target), str(draft)


def load(folders, steps=3, planted=False, **more):
    engine = EagleJaxEngine.from_pretrained(
        folders[0], draft=folders[1], max_len=64, slots=1, **{"speculation": Speculation(steps, 1)} | more
    )
    if planted:
        plant(engine)
    return engine


def run(engine, tokens=25, **more):
    with jaxtyping_off():  # a lowered program describes its arguments by shapes
        return engine.profile(PROMPT, Sampling(max_new_tokens=tokens), **{"repeats": 1} | more)


@pytest.fixture(scope="module")
def profiles(folders, tmp_path_factory):
    trace = tmp_path_factory.mktemp("traces") / "kept"
    return SimpleNamespace(
        bare=run(load(folders)),
        planted=run(load(folders, planted=True), trace_dir=trace),
        trace=trace,
    )


@pytest.mark.slow  # times against the clock
def test_the_planted_time_is_in_the_draft_and_nowhere_else(profiles):
    bare, planted, alone = profiles.bare, profiles.planted, seconds_alone()
    # one pass in the extension and in each step but the first, which has a head alone
    passes = [planted.seconds(f"draft {name}") for name in ("extend", "step 2", "step 3")]
    assert max(passes) < 4 * min(passes)
    assert planted.seconds("draft step 1") < 0.2 * min(passes)
    grown = planted.seconds("draft") - bare.seconds("draft")
    assert 0.3 < grown / (3 * alone) < 3
    assert planted.seconds("verify") - bare.seconds("verify") < 0.3 * grown
    assert planted.share("draft") > bare.share("draft") + 0.1 and planted.share("draft") > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("which", ["bare", "planted"])
def test_phases_add_up_and_every_one_is_there(profiles, which):
    profile = getattr(profiles, which)
    assert 0.95 < profile.named < 1.05
    assert sum(phase.seconds for phase in profile.phases) == pytest.approx(profile.cycle_seconds, rel=1e-3)
    names = {phase.name for phase in profile.phases if phase.ops}
    assert {"draft extend", "draft step 1", "draft step 3", "rerank", "accept", "commit"} <= names
    assert {f"verify: {part}" for part in ("attention", "MLP", "norms", "head")} <= names
    assert {phase.name for phase in profile.prefill} >= {"target prefill", "draft prefill", "first token"}
    assert "draft step 4" not in names and "unnamed" not in names
    assert profile.cycles == 6 and profile.tau == 4 and profile.same_tokens
    assert profile.setting.compile_seconds > 0


@pytest.mark.slow
def test_table_and_json_tell_the_same(profiles):
    profile = profiles.planted
    text, values = profile.to_text(), json.loads(json.dumps(profile.to_json()))
    assert f"distortion {profile.distortion:.2f}" in text and "; tokens the same in every run" in text
    assert ("within the noise" in text) != values["distortion_beyond_noise"]
    assert values["distortion"] == pytest.approx(
        values["untraced_tokens_per_second"]["median"] / values["traced_tokens_per_second"]["median"]
    )
    assert sum(phase["share"] for phase in values["phases"]) == pytest.approx(1, rel=1e-3)
    assert sum(group["share"] for group in values["groups"].values()) == pytest.approx(1, rel=1e-3)
    for phase in values["phases"]:
        assert phase["name"] in text
        if phase["floor_seconds"] is not None and phase["name"] != "draft step 1":
            assert phase["bytes"] > 0 and phase["floor_seconds"] > 0
    assert ("doubt this: tracing slowed" in text) == (profile.distortion > 1.3)


@pytest.mark.slow
def test_the_trace_is_kept_with_the_operations_in_it(profiles):
    (file,) = profiles.trace.glob("plugins/profile/*/*.xplane.pb")
    assert b"eaglejax.decode" in file.read_bytes() and b"jit_decode" in file.read_bytes()
    assert list(profiles.trace.glob("plugins/profile/*/*.json.gz"))
    assert profiles.bare.trace is None


def refused(engine, prompts=PROMPT, said="", **more):
    with pytest.raises(ConfigError, match=said):
        engine.profile(prompts, **more)


def test_what_a_profile_does_not_measure_is_refused_before_any_compile(folders, tmp_path, monkeypatch):
    engine = load(folders)
    refused(engine, PROMPT * 2, "more prompts than slots: a profile is of one wave; found 2; expected at most 1")
    refused(engine, said="stop strings make the host stop", sampling=Sampling(stop_token_ids=[5], stop=["ab"]))
    refused(engine, said="no cycle to profile", sampling=Sampling(max_new_tokens=1))
    refused(engine, said="repeats: out of range; found 0", repeats=0)
    (tmp_path / "file").write_text("")
    refused(engine, said=r"trace_dir .*file: cannot be written", trace_dir=tmp_path / "file")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="a profile is taken by one process.*found 2 processes"):
        check_request([], 1)


@pytest.mark.slow
def test_draft_time_grows_with_the_steps_and_verification_hardly(folders):
    drafts, verifies = {}, {}
    for steps in (1, 3, 5):
        profile = run(load(folders, steps, planted=True), tokens=31, repeats=3)
        drafts[steps], verifies[steps] = profile.seconds("draft"), profile.seconds("verify")
    # one, three and five passes with the planted products
    assert 2 < drafts[3] / drafts[1] < 4.5 and 3.3 < drafts[5] / drafts[1] < 7.5
    assert verifies[5] - verifies[1] < 0.25 * (drafts[5] - drafts[1])


@pytest.mark.slow
def test_on_a_mesh_collectives_are_told(folders):
    profile = run(load(folders, mesh="model=2"))
    assert profile.setting.hardware.allreduce > 0
    shown = next(phase for phase in profile.phases if phase.name == "verify: collectives")
    assert shown.ops > 0 and shown.work.collective_count == 2 * 3 + 2 and shown.floor.collectives > 0
    assert 0.95 < profile.named < 1.05


@pytest.mark.slow
def test_the_built_in_pair_is_distorted_less_than_a_third():
    spec = Speculation(3, 1)
    engine = EagleJaxEngine.from_pretrained("smollm2", draft="smollm2-eagle3", speculation=spec, max_len=512, slots=1)
    with jaxtyping_off():
        profile = engine.profile("The history of Paris begins", Sampling(max_new_tokens=48, ignore_eos=True), repeats=5)
    assert profile.distortion < 1.3
    assert profile.named > 0.95 and profile.busy > 0.9
    assert profile.share("verify") > profile.share("draft") > 0.01
