"""Run configs: what a file means, and how a wrong one is refused."""

from pathlib import Path

import pytest

from eaglejax import Sampling, Speculation
from eaglejax.errors import ConfigError
from eaglejax.run_config import KEYS, RunConfig

CONFIGS = Path(__file__).parent.parent / "configs"


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_empty_file_is_the_defaults(tmp_path):
    config = RunConfig.load(written(tmp_path, ""))
    assert (config.model, config.draft, config.capture) == ("smollm2", "smollm2-eagle3", "auto")
    assert config.speculation == "auto"
    assert config.sampling == Sampling()


def test_every_key_reaches_its_place(tmp_path):
    config = RunConfig.load(
        written(
            tmp_path,
            """
            [model]
            model = "target"
            draft = "head"
            capture = [3, 31, 59]
            draft_config = { rope_theta = 10000.0 }
            [speculation]
            num_steps = 5
            topk = 4
            num_draft_tokens = 16
            score_temperature = 1.5
            coupled = false
            coupling = 2.0
            [sampling]
            max_new_tokens = 7
            temperature = 0.5
            top_k = 20
            top_p = 0.9
            min_p = 0.05
            seed = 11
            stop = ["\\n"]
            stop_token_ids = [2]
            ignore_eos = true
            [engine]
            dtype = "bfloat16"
            max_len = 64
            slots = 2
            mesh = "data=2,model=4"
            draft_placement = "sharded"
            expert_split = "width"
            check_wiring = false
            tuning = "measure"
            """,
        )
    )
    tree = Speculation(num_steps=5, topk=4, num_draft_tokens=16, score_temperature=1.5, coupled=False, coupling=2.0)
    assert config.engine_arguments() == {
        "model": "target",
        "draft": "head",
        "capture": (3, 31, 59),
        "draft_config": {"rope_theta": 10000.0},
        "speculation": tree,
        "dtype": "bfloat16",
        "max_len": 64,
        "slots": 2,
        "mesh": "data=2,model=4",
        "draft_placement": "sharded",
        "expert_split": "width",
        "check_wiring": False,
        "tuning": "measure",
    }
    assert config.sampling == Sampling(7, 0.5, 20, 0.9, 0.05, 11, ["\n"], [2], True)


@pytest.mark.parametrize(
    ("text", "draft", "speculation"),
    [
        ('[speculation]\nmode = "none"', None, None),
        ("[speculation]\nnum_steps = 0", None, Speculation(num_steps=0)),
        ('[model]\ndraft = "none"', None, "auto"),
        ('[model]\nmodel = "other"', None, "auto"),
        ("[speculation]\nnum_steps = 2", "smollm2-eagle3", Speculation(num_steps=2)),
    ],
)
def test_which_draft_is_meant(tmp_path, text, draft, speculation):
    config = RunConfig.load(written(tmp_path, text))
    assert (config.draft, config.speculation) == (draft, speculation)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[sampling]\ntemprature = 1", ["[sampling]", "temprature", "did you mean temperature?"]),
        ("[sampling]\nslots = 1", ["[sampling]", "slots", "it belongs in [engine]"]),
        ("[sampler]\n", ["unknown section", "sampler", "did you mean sampling?"]),
        ("max_len = 3\n", ["outside of any section", "max_len", "it belongs in [engine]"]),
        ("sampling = 3\n", ["sampling", "found 3", "[sampling]"]),
        ("[sampling]\ntop_p = 3", ["[sampling] top_p", "found 3", "above 0, up to 1"]),
        ("[sampling]\ntop_p = [1]", ["[sampling] top_p", "not a number"]),
        ('[sampling]\nignore_eos = "no"', ["[sampling] ignore_eos", "'no'", "true or false"]),
        ("[sampling]\nstop_token_ids = 3", ["[sampling] stop_token_ids", "not a list", "found 3"]),
        ("[speculation]\nnum_steps = 3\nnum_draft_tokens = 9", ["[speculation] num_draft_tokens", "found 9", "4"]),
        ('[speculation]\nscore_temperature = "x"', ["[speculation] score_temperature"]),
        ('[speculation]\nmode = "fast"', ["[speculation] mode", "'fast'", '"auto" or "none"']),
        ('[speculation]\nmode = "auto"\ntopk = 2', ["[speculation] mode", "topk"]),
        ('[model]\nmodel = ""', ["[model] model", "non-empty text"]),
        ("[model]\ndraft = 3", ["[model] draft", "found 3"]),
        ("[model]\ndraft_config = 3", ["[model] draft_config", "found 3"]),
        ("[engine]\nslots = {a = 1}", ["[engine] slots", "not a table"]),
        ("[model]\ncapture = 3", ["[model] capture", "found 3", "3,31,59"]),
        ('[model]\nmodel = "x"\n[speculation]\ntopk = 2', ["[speculation] topk", "needs a draft"]),
        ('[engine]\ndtype = "int8"', ["[engine] dtype", "int8", "float32 or bfloat16"]),
        ("[engine]\nslots = 0", ["[engine] slots", "found 0", "at least 1"]),
        ("[engine]\nmax_len = true", ["[engine] max_len", "True"]),
        ("[engine", ["not valid TOML", "Expected ']'"]),
    ],
)
def test_refusals_name_file_key_and_values(tmp_path, text, words):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        RunConfig.load(path)
    for word in (str(path), *words):
        assert word in str(refused.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        RunConfig.load(tmp_path / "none.toml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_shipped_configs_load(path):
    assert RunConfig.load(path).model


def test_sections_hold_the_engine_s_own_arguments():
    import inspect

    from eaglejax import EagleJaxEngine

    taken = set(inspect.signature(EagleJaxEngine.from_pretrained).parameters) - {"speculation"}
    assert taken == {*KEYS["model"], *KEYS["engine"]}
