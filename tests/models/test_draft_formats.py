"""Every released draft format against an independent float64 forward, and one planted fault per flag that must show.

The stored values come from `tests/oracles/draft_numpy.py`, written from descriptions of the formats alone.
"""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from draft_runs import compiled, from_scratch
from flax import nnx
from safetensors.numpy import load_file

from eaglejax.checkpoint.draft_loader import DraftPlan, inspect_draft, load_plan
from eaglejax.errors import ConfigError
from eaglejax.load_report import LoadReport
from eaglejax.models.config import TargetConfig
from eaglejax.models.draft_config import TargetFacts
from eaglejax.models.rows import KVRows, causal_step
from eaglejax.models.target import Target

CASES = [
    ("speculators_llama", "config.json"),
    ("speculators_llama", "config_silent.json"),
    ("speculators_qwen3", "config.json"),
    ("specforge_eagle31", "config.json"),
    ("specforge_yarn", "config.json"),
    ("specforge_yarn", "config_new_layout.json"),
    ("specforge_llama3", "config.json"),
    ("specforge_llama3", "config_old_layout.json"),
    ("modelopt_shared_head", "config.json"),
    ("modelopt_no_aux", "config.json"),
    ("modelopt_no_aux_fc", "config.json"),
    ("modelopt_norms_off", "config.json"),
    ("mla", "config.json"),
    ("mla_own_vocab", "config.json"),
    ("four_captures", "config.json"),
    ("own_embed_wide", "config.json"),
]


def plan_of(folder, name: str, report: LoadReport | None = None) -> DraftPlan:
    """The draft checked against a target of the case's size."""
    case = json.loads((folder / "case.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    aux = load_file(folder / "expected.safetensors")["aux_hidden"].shape[-1]
    count = len(case.get("aux", {}).get("stored") or (1, 2, 3))
    width = aux if case.get("aux", {}).get("stored") == [] else aux // count
    assert "fc.weight" not in tensors or tensors["fc.weight"].shape[1] == aux
    vocab = config.get("vocab_size") or config["transformer_layer_config"]["vocab_size"]
    facts = TargetFacts(vocab, width, case.get("aux", {}).get("target_layers", 8))
    source = folder
    if name != "config.json":
        source = folder.parent / f"{folder.name}_{name.removesuffix('.json')}"
    return inspect_draft(source, target=facts, report=report or LoadReport())


def lender(folder) -> Target | None:
    """A target that has nothing but the embedding and the head to lend."""
    if not (folder / "target_head.safetensors").exists():
        return None
    embedding = load_file(folder / "embed.safetensors")["model.embed_tokens.weight"]
    config = TargetConfig("llama", *embedding.shape, (), 1e-5, False, 64)
    target = nnx.eval_shape(lambda: Target(config, dtype=jnp.float32))
    target.embedding.weight.set_value(jnp.asarray(embedding))
    assert target.head is not None
    target.head.weight.set_value(jnp.asarray(load_file(folder / "target_head.safetensors")["lm_head.weight"]))
    return target


def run(folder, plan: DraftPlan, *, late: int = 0, order: tuple[int, ...] | None = None) -> dict[str, np.ndarray]:
    """Prefill and three greedy chain steps, as the oracle runs them. `late` moves the chain's positions, `order` the
    captures.
    """
    expected, embed = load_file(folder / "expected.safetensors"), folder / "embed.safetensors"
    table = load_file(embed)["model.embed_tokens.weight"] if embed.exists() else None
    target = lender(folder)
    draft = load_plan(
        plan, dtype="float32", target=target, target_embedding=None if target else table, report=LoadReport()
    ).draft
    features = expected["aux_hidden"]
    if order is not None:
        parts = np.split(features, plan.config.captures, axis=-1)
        features = np.concatenate([parts[i] for i in order], axis=-1)
    fused, out, logits = from_scratch(draft, features, expected["input_ids"][:, 1:])
    found = {"fc_out": fused, "draft_hidden": out.hidden, "feedback": out.feedback, "draft_logits": logits}
    step, n = compiled(draft), fused.shape[1]
    caches = [
        KVRows(*(None if a is None else jnp.pad(a, ((0, 0), (0, 8), (0, 0), (0, 0))) for a in (r.keys, r.values)))
        for r in out.rows
    ]
    feedback, last, chain = out.feedback[:, -1:], logits[:, -1], []
    for depth in range(3):
        token = draft.target_ids[...][jnp.argmax(last, axis=-1)]
        at = causal_step(jnp.asarray([n + depth], jnp.int32), 1)
        at = dataclasses.replace(at, positions=at.positions + late, row_positions=at.row_positions + late)
        out, deep = step(token[:, None], feedback, at, caches)
        caches = [join(cache, own, n + depth) for cache, own in zip(caches, out.rows, strict=True)]
        feedback, last = out.feedback, deep[:, 0]
        chain.append((token[0], out.hidden[0, 0], last[0]))
    for key, values in zip(("chain_tokens", "chain_hidden", "chain_logits"), zip(*chain, strict=True), strict=True):
        found[key] = jnp.stack(values)
    return {key: np.asarray(value) for key, value in found.items()}


def join(cache: KVRows, own: KVRows, at: int) -> KVRows:
    put = lambda whole, part: None if whole is None else whole.at[:, at : at + 1].set(part)
    return KVRows(put(cache.keys, own.keys), put(cache.values, own.values))


@pytest.fixture(scope="module")
def cases(data, tmp_path_factory):
    """The stored cases, and a copy of a case for each further config of it."""
    root = tmp_path_factory.mktemp("formats")
    for folder, name in CASES:
        source = data / "draft_formats" / folder
        copy = root / (folder if name == "config.json" else f"{folder}_{name.removesuffix('.json')}")
        copy.mkdir(exist_ok=True)
        for file in source.iterdir():
            if file.suffix == ".safetensors" or file.name == "case.json":
                (copy / file.name).symlink_to(file)
        (copy / "config.json").symlink_to(source / name)
    return root


@pytest.mark.parametrize("folder, name", CASES, ids=["-".join(case) for case in CASES])
def test_format(cases, folder, name):
    path = cases / folder
    plan = plan_of(path, name, report := LoadReport())
    case, expected = json.loads((path / "case.json").read_text()), load_file(path / "expected.safetensors")
    found = run(path, plan)
    for key in found:
        np.testing.assert_allclose(found[key], expected[key], atol=1e-4, rtol=0, err_msg=key)
    boundaries = case.get("aux", {}).get("boundaries", [2, 4, 5])
    if isinstance(boundaries, list):
        assert plan.capture.boundaries == tuple(boundaries), str(report)
    else:
        assert plan.capture.boundaries == (case["aux"]["target_layers"],)


def test_every_stored_case_is_run(data):
    stored = {(path.parent.name, path.name) for path in (data / "draft_formats").glob("*/config*.json")}
    assert stored == set(CASES)


def layer_fault(change):
    """A fault in the attention of every layer."""

    def fault(config):
        layers = tuple(dataclasses.replace(x, attention=change(x.attention)) for x in config.layers)
        return dataclasses.replace(config, layers=layers)

    return fault


def flag(**values):
    return lambda config: dataclasses.replace(config, **values)


def rope(**values):
    return layer_fault(lambda a: dataclasses.replace(a, rope=dataclasses.replace(a.rope, **values)))


def attention(**values):
    return layer_fault(lambda a: dataclasses.replace(a, **values))


FAULTS = [
    ("speculators_llama", "norm_before_residual", flag(norm_before_residual=False)),
    ("speculators_llama", "window ignored", attention(window=None)),
    ("speculators_llama", "window too wide", attention(window=5)),
    ("speculators_llama", "window too narrow", attention(window=3)),
    ("speculators_llama", "rope base", rope(theta=10000.0)),
    ("speculators_qwen3", "norm_before_residual", flag(norm_before_residual=True)),
    ("speculators_qwen3", "norm_before_fc", flag(norm_before_fc=False)),
    ("speculators_qwen3", "q/k norm", attention(qk_norm=False)),
    ("speculators_qwen3", "second layer skipped", lambda config: dataclasses.replace(config, layers=config.layers[:1])),
    ("specforge_eagle31", "fc_norm", flag(fc_norm=False)),
    ("specforge_eagle31", "norm_output", flag(norm_output=False)),
    ("specforge_yarn", "scaling ignored", rope(kind="default")),
    ("specforge_yarn", "cos and sin not scaled", rope(attention_factor=1.0)),
    ("specforge_yarn", "factor", rope(factor=2.0)),
    ("specforge_llama3", "scaling ignored", rope(kind="default")),
    ("specforge_llama3", "rope base", rope(theta=10000.0)),
    ("modelopt_shared_head", "norm_output", flag(norm_output=True)),
    ("modelopt_shared_head", "use_last_layernorm", flag(final_norm=False)),
    ("modelopt_shared_head", "use_input_layernorm_in_first_layer, hidden half", flag(hidden_norm=False)),
    ("modelopt_shared_head", "use_input_layernorm_in_first_layer, embedding half", flag(input_norm=False)),
    ("modelopt_no_aux", "use_last_layernorm", flag(final_norm=False)),
    ("modelopt_no_aux_fc", "fc skipped since the widths agree", flag(fc=False)),
    ("mla", "interleaved", rope(interleaved=False)),
    ("mla", "mscale in the softmax scale", attention(scale=16**-0.5)),
    ("mla", "softmax scale of nope alone", attention(scale=8**-0.5)),
    ("mla", "yarn ignored", rope(kind="default")),
    ("mla_own_vocab", "rope base", rope(theta=10000.0)),
    ("four_captures", "fc.bias", flag(fc_bias=False)),
    ("own_embed_wide", "rope base", rope(theta=10000.0)),
]


def difference(folder, found: dict[str, np.ndarray]) -> float:
    expected = load_file(folder / "expected.safetensors")
    return max(
        float(np.abs(found[key] - expected[key]).max())
        for key in ("draft_hidden", "draft_logits", "chain_hidden", "chain_logits")
    )


@pytest.mark.parametrize("folder, name, change", FAULTS, ids=[f"{case[0]}-{case[1]}" for case in FAULTS])
def test_planted_fault_shows(cases, folder, name, change):
    plan = plan_of(cases / folder, "config.json")
    config = change(plan.config)
    assert config != plan.config
    assert difference(cases / folder, run(cases / folder, dataclasses.replace(plan, config=config))) > 1e-2


@pytest.mark.parametrize("folder", ["speculators_qwen3", "specforge_eagle31", "mla", "four_captures", "own_embed_wide"])
def test_order_positions_and_map_show(cases, folder):
    plan, path = plan_of(cases / folder, "config.json"), cases / folder
    assert difference(path, run(path, plan, late=1)) > 1e-2
    assert difference(path, run(path, plan, order=tuple(reversed(range(plan.config.captures))))) > 1e-2
    if plan.config.draft_vocab_size < plan.config.vocab_size:
        offsets = plan.target_ids - np.arange(plan.target_ids.size, dtype=np.int32)
        assert difference(path, run(path, dataclasses.replace(plan, target_ids=offsets))) > 1e-2


def test_last_state_passes_the_targets_norm(cases):
    """Without auxiliary states the draft reads boundary L through the target's final norm, which it borrows."""
    path = cases / "modelopt_no_aux_fc"
    facts = TargetFacts(96, 32, 8, 1e-3)
    plan = inspect_draft(path, target=facts, report=LoadReport())
    assert plan.config.target_norm_eps == 1e-3 and plan.capture.boundaries == (8,)
    with pytest.raises(ConfigError, match=r"capture.*last state only.*\(2,\).*\(8,\)"):
        inspect_draft(path, target=facts, capture=(2,), report=LoadReport())
    embedding = load_file(path / "embed.safetensors")["model.embed_tokens.weight"]
    config = TargetConfig("llama", *embedding.shape, (), 1e-3, False, 64)
    target = nnx.eval_shape(lambda: Target(config, dtype=jnp.float32))
    scale = np.linspace(0.5, 2, 32).astype(np.float32)
    target.embedding.weight.set_value(jnp.asarray(embedding))
    target.norm.scale.set_value(jnp.asarray(scale))
    draft = load_plan(plan, dtype="float32", target=target, report=LoadReport()).draft
    state = np.random.default_rng(0).normal(0, 3, (1, 4, 32)).astype(np.float32)
    normed = state / np.sqrt(np.mean(state * state, -1, keepdims=True) + 1e-3) * scale
    fc = load_file(path / "model.safetensors")["fc.weight"]
    np.testing.assert_allclose(draft.fuse(jnp.asarray(state)), normed @ fc.T, atol=1e-4)
