"""`eaglejax plan`: table and JSON, refusals (1), wrong usage (2)."""

import json
import time

import pytest

from eaglejax.cli.main import run
from eaglejax.sharding.plan_models import PLACES

KIMI = ("plan", "--nocompile", "--model=kimi-k2.5", "--mesh=model=8", "--tree=3,1,4", "--slots=1", "--max_len=8192")


def test_table(capsys):
    assert run([*KIMI, "--hardware=h200-nvlink"]) == 0
    out = capsys.readouterr().out
    for part in (
        "kimi-k2.5 on mesh data=1,model=8: 8 devices, weights INT4 in groups of 32",
        "71,345,111,040",  # experts
        "575,668,224",  # cache
        "experts touched on the busiest device, a layer: 2.6 at 1 row, 6.7 at 4 rows",
        "prefill, estimate",
        "123 all-reduces",
        "measured: copy rate on one H200",
        "speculation beats plain decoding above",
    ):
        assert part in out, part


def test_json_says_what_the_table_says(capsys):
    assert run([*KIMI, "--json", "--tau=2.5"]) == 0
    plan = json.loads(capsys.readouterr().out)
    memory = plan["memory"]
    parts = [memory[name] for name in ("target_weights", "draft_weights", "state", "temporaries")]
    assert memory["needed_bytes"] == sum(sum(part.values()) for part in parts)
    assert memory["free_bytes"] == memory["device_bytes"] - memory["needed_bytes"] > 0 and memory["fits"]
    assert memory["draft_borrowed_copies"] == 163840 * 7168 * 2
    assert plan["draft_placement"] == "replicated" and plan["tree"] == [3, 1, 4]
    assert plan["plain"]["collectives"]["all-reduce"]["count"] == 123
    rate = plan["tokens_per_second"]
    assert set(rate) == {"plain", "tau 2.5"}
    assert rate["tau 2.5"] == pytest.approx(2.5 / plan["cycle"]["seconds"])
    assert plan["breakeven_tau"] == pytest.approx(plan["cycle"]["seconds"] / plan["plain"]["seconds"])
    seconds = sum(phase["device_s"] + phase["collectives_s"] for phase in plan["cycle"]["phases"])
    assert plan["cycle"]["seconds"] == pytest.approx(seconds)


def test_figures_given_in_place_of_a_preset(capsys):
    given = ("--bandwidth_gbs=1000", "--allreduce_us=50", "--tflops=100", "--device_memory_gb=90")
    assert run([*KIMI, "--json", *given]) == 0
    plan = json.loads(capsys.readouterr().out)
    target = plan["plain"]["phases"][0]
    assert target["device_s"] == pytest.approx(target["bytes_read"] / 1e12)
    assert target["collectives_s"] > 123 * 50e-6
    assert plan["memory"]["device_bytes"] == 90_000_000_000
    assert plan["hardware"]["sources"]["bandwidth"] == "given"


def test_data_axis_and_plain_decoding(capsys):
    assert (
        run(
            [
                "plan",
                "--nocompile",
                "--model=qwen3-30b-a3b",
                "--mesh=data=2,model=4",
                "--slots=4",
                "--draft=none",
                "--json",
            ]
        )
        == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert plan["cycle"] is None and plan["draft"] is None and plan["breakeven_tau"] is None
    # 4 KV heads on 4 devices, two slots on each half of the mesh
    assert plan["memory"]["state"]["target cache"] == 48 * 2 * 1 * 128 * 8192 * 2 * 2


def test_slots_are_rounded_up_to_the_data_axis(capsys):
    words = ["plan", "--nocompile", "--model=qwen3-30b-a3b", "--mesh=data=2,model=4", "--draft=none"]
    assert run(words) == 0
    out = capsys.readouterr().out
    assert "! slots: 1 asked for, 2 held, a multiple of the data axis" in out and "2 slots of 8192 tokens" in out
    assert run([*words, "--slots=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["slots"] == 4


@pytest.mark.slow
def test_advice_tries_every_size_of_the_model_axis(capsys):
    error = refused(capsys, "plan", "--nocompile", "--model=kimi-k2.5", "--mesh=model=7")
    assert "would fit: a mesh of data=1,model=6 or data=1,model=8" in error


def test_more_devices_than_can_be_compiled_for(capsys):
    assert run(["plan", "--model=qwen3-30b-a3b", "--mesh=data=1025", "--draft=none"]) == 0
    out, err = capsys.readouterr()
    assert err == "not compiled: 1025 devices, and XLA on a CPU bears 1024\n" and "compiled for" not in out


def test_a_config_of_ones_own(tmp_path, capsys):
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 96,
    }
    config |= {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "vocab_size": 101,
    }
    config |= {"num_local_experts": 12, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(["plan", "--nocompile", f"--model={tmp_path}", "--mesh=model=8", "--max_len=512", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    notes = " ".join(plan["notes"])
    assert "9" in notes and "101" in notes and "12 experts" in notes
    weights = plan["memory"]["target_weights"]
    assert weights["attention"] == 2 * ((9 + 2 * 3) * 8 * 64 + 64 * 72) * 2  # whole
    assert weights["experts"] == 2 * 12 * 3 * 64 * (96 // 8) * 2  # a part of the width of each
    assert weights["head"] == 101 * 64 * 2


@pytest.mark.slow
def test_largest_slots_and_length(capsys):
    assert run([*KIMI, "--json", "--device_memory_gb=80", "--draft_placement=sharded"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    slots, most = memory["largest"][0]["slots"], memory["largest"][0]["max_len"]
    fitting = (
        "plan",
        "--nocompile",
        "--model=kimi-k2.5",
        "--mesh=model=8",
        f"--slots={slots}",
        "--device_memory_gb=80",
        "--draft_placement=sharded",
    )
    assert run([*fitting, f"--max_len={most}"]) == 0
    assert run([*fitting, f"--max_len={most + 1}"]) == 1


def refused(capsys, *words: str) -> str:
    assert run(list(words)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    return error


def test_does_not_fit(capsys):
    error = refused(
        capsys, "plan", "--nocompile", "--model=deepseek-v3", "--mesh=model=4", "--hardware=h100-nvlink", "--json"
    )
    assert "does not fit" in error and "80,000,000,000 there" in error and "too many" in error
    assert "would fit: a mesh of data=1,model=16" in error
    error = refused(
        capsys,
        "plan",
        "--nocompile",
        "--model=kimi-k2.5",
        "--mesh=model=8",
        "--device_memory_gb=78",
        "--max_len=65536",
        "--draft_placement=sharded",
    )
    assert "max_len of at most" in error
    error = refused(capsys, "plan", "--nocompile", "--model=kimi-k2.5", "--mesh=model=8", "--device_memory_gb=80")
    assert "draft_placement=sharded" in error


def test_the_refused_plan_is_still_shown(capsys):
    assert run(["plan", "--nocompile", "--model=deepseek-v3", "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert not plan["memory"]["fits"] and plan["memory"]["free_bytes"] < 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model=kimi-k3"], "no such config; found 'kimi-k3'"),
        (["--model=kimi-k2.5", "--draft=nowhere"], "draft: no such config"),
        (["--model=mixtral-8x7b", "--draft=mixtral-8x7b"], "draft: there is no built-in draft of mixtral-8x7b"),
        (
            ["--model=mixtral-8x7b", "--draft=kimi-k2.5"],
            "draft: the draft of kimi-k2.5 is none of mixtral-8x7b; found 'kimi-k2.5', made for 61 layers, 7168 wide",
        ),
        (["--model=kimi-k2.5", "--max_len=64", "--context=100"], "context: more than max_len; found 100"),
    ],
)
def test_refusals(capsys, words, said):
    assert said in refused(capsys, "plan", "--nocompile", *words)


def test_a_group_that_divides_no_row(tmp_path, capsys):
    config = json.loads((PLACES[-1] / "mixtral-8x7b" / "config.json").read_text())
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 96}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refused(capsys, "plan", "--nocompile", f"--model={tmp_path}")
    assert "groups of 96 do not divide the rows of model.layers.0" in error and "found 4096 weights a row" in error


def test_an_absurd_number_of_layers(tmp_path, capsys):
    config = json.loads((PLACES[-1] / "mixtral-8x7b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    error = refused(capsys, "plan", "--nocompile", f"--model={tmp_path}")
    assert "num_hidden_layers: is not supported; found 1000000000; expected at most 10000" in error


def test_a_quantisation_that_is_not_known(tmp_path, capsys):
    config = json.loads((PLACES[-1] / "mixtral-8x7b" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refused(capsys, "plan", "--nocompile", f"--model={tmp_path}")
    assert "quantization_config.quant_method" in error and "'awq'" in error and "fp8" in error
    (tmp_path / "config.json").write_text("{")
    assert "is not valid JSON" in refused(capsys, "plan", "--nocompile", f"--model={tmp_path / 'config.json'}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--model is needed"),
        (["--model=x", "--mesh=rows=8"], "not a mesh; found 'rows=8'"),
        (["--model=x", "--mesh=model=0"], "not a mesh; found 'model=0'"),
        (["--model=x", "--mesh=model=2,model=4"], "not a mesh; found 'model=2,model=4'"),
        (["--model=x", "--hardware=abacus"], "no such preset; found 'abacus'; expected one of h200-nvlink"),
        (["--model=x", "--tree=3"], "--tree: no tree; found '3'"),
        (["--model=x", "--tree=3,1,9"], "a chain (topk 1) verifies num_steps + 1 nodes"),
        (["--model=x", "--tree=3,1,5"], "--tree: num_draft_tokens: a chain (topk 1) verifies num_steps + 1 nodes"),
        (["--model=x", "--slots=0"], "--slots: out of range"),
        (["--model=x", "--slots=65537"], "--slots: out of range; found 65537; expected 1 to 65536"),
        (["--model=x", "--max_len=100000001"], "--max_len: out of range"),
        (["--model=x", "--mesh=model=4097"], "--mesh: out of range; found model=4097; expected at most 4096"),
        (["--model=x", f"--mesh=data={'9' * 5000}"], "--mesh: not a mesh"),
        (["--model=x", "--bandwidth_gbs=0.5"], "--bandwidth_gbs: out of range; found 0.5; expected 1 to 1e+06"),
        (["--model=x", "--device_memory_gb=1e9"], "--device_memory_gb: out of range"),
        (["--model=x", "--draft_placement=anywhere"], "--draft_placement: unknown; found 'anywhere'"),
        (["--model=x", "--expert_split=depth"], "--expert_split: unknown; found 'depth'"),
        (["--model=x", "--dtype=int8"], "--dtype: not a compute dtype"),
        (["--model=x", "--tau=0.5"], "--tau: out of range"),
        (["--model=x", "--bandwidth_gbs=fast"], "--bandwidth_gbs: not a number"),
    ],
)
def test_wrong_usage(capsys, words, said):
    assert run(["plan", "--nocompile", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and "eaglejax plan --help" in error


def test_story(capsys):
    assert run(["plan", "--nocompile", "--story"]) == 0
    out = capsys.readouterr().out
    for part in (
        "90 tok/s (calibrates a collective)",
        "28.7 ms",
        "1.12",
        "71 tok/s",
        "What would have fixed it",
        "fixed overhead",
    ):
        assert part in out, part


def test_full_plans_are_quick(capsys):
    begin = time.perf_counter()
    for model in ("kimi-k2.5", "deepseek-v3"):
        assert run(["plan", "--nocompile", f"--model={model}", "--mesh=model=8", "--hardware=h200-nvlink"]) == 0
    assert time.perf_counter() - begin < 60
