"""The numpy references against the values that the peers produced, and the fixtures against the references."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from draft_numpy import load_case, next_logprobs_after, run_case
from safetensors.numpy import load_file
from tree_numpy import best, build_tree, leaf_paths

TESTS = Path(__file__).parent.parent
FORMATS = sorted((TESTS / "data" / "draft_formats").glob("*/case.json"))


def golden(name: str) -> Path:
    """Folder of a golden draft case: in the tests' data, or under EAGLEJAX_GOLDEN."""
    for parent in (TESTS / "data" / "drafts", Path(os.environ.get("EAGLEJAX_GOLDEN", ""))):
        if (parent / name / "expected.safetensors").exists():
            return parent / name
    pytest.skip(f"golden case {name} is not here; set EAGLEJAX_GOLDEN")


@pytest.mark.parametrize("name", ["draft_eagle3", "draft_eagle3_own_embed"])
def test_oracle_reproduces_the_peer(name: str) -> None:
    folder = golden(name)
    expected = load_file(folder / "expected.safetensors")
    found = run_case(load_case(folder), expected["aux_hidden"][0], expected["input_ids"][0])
    for key in ("fc_out", "draft_hidden", "draft_logits"):
        np.testing.assert_allclose(found[key], expected[key], atol=2e-5, rtol=0, err_msg=key)


@pytest.mark.parametrize("name", ["draft_eagle3", "draft_eagle3_own_embed"])
@pytest.mark.parametrize("step", [1, 2])
def test_brute_force_tree_reproduces_the_peer(name: str, step: int) -> None:
    folder = golden(name)
    expected = load_file(folder / "expected.safetensors")
    trees = json.loads((folder / "case.json").read_text())["trees"]
    draft, captures, ids = load_case(folder), expected["aux_hidden"][0], expected["input_ids"][0]
    if step == 2:
        captures, ids = np.concatenate([captures, expected["aux_hidden_2"][0]]), expected["input_ids_2"][0]
    next_logprobs = next_logprobs_after(draft, captures, ids)
    for tree_name, sizes in trees.items():
        tree = build_tree(next_logprobs, int(ids[-1]), sizes["depth"] + 1, sizes["top_k"], sizes["total_tokens"])
        prefix = f"{tree_name}.step{step}."
        np.testing.assert_array_equal(tree.tokens, expected[prefix + "draft_tokens"][0])
        np.testing.assert_array_equal(tree.depths, expected[prefix + "tree_position_ids"])
        np.testing.assert_array_equal(tree.mask, expected[prefix + "tree_mask"][0, 0] > 0)
        rows = [[x for x in row if x >= 0] for row in expected[prefix + "retrieve_indices"].tolist()]
        assert leaf_paths(tree) == rows


def test_ties_go_to_the_lower_index() -> None:
    assert best([1.0, 2.0, 2.0, 0.0], 3) == [1, 2, 0]
    tree = build_tree(lambda path: np.zeros(4), root=9, levels=3, top_k=2, total=6)
    np.testing.assert_array_equal(tree.pool_indices, [-1, 0, 1, 2, 3, 4])
    np.testing.assert_array_equal(tree.tokens, [9, 0, 1, 0, 1, 0])
    np.testing.assert_array_equal(tree.parents, [-1, 0, 0, 1, 1, 2])


def test_tree_refuses_what_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="the pool has 6"):
        build_tree(lambda path: np.zeros(4), root=9, levels=2, top_k=2, total=8)
    with pytest.raises(ValueError, match="fewer than top_k=2"):
        build_tree(lambda path: np.array([0.0, -np.inf]), root=9, levels=2, top_k=2, total=3)


@pytest.mark.parametrize("case", FORMATS, ids=lambda p: p.parent.name)
def test_format_fixture_is_what_the_oracle_says(case: Path) -> None:
    """Guards the stored files: every config layout of a case gives the stored values."""
    described = json.loads(case.read_text())
    expected = load_file(case.parent / "expected.safetensors")
    for config_name in described["configs"]:
        draft = load_case(case.parent, config_name)
        found = run_case(draft, expected["aux_hidden"][0], expected["input_ids"][0])
        for key, value in found.items():
            np.testing.assert_allclose(value, expected[key], atol=2e-6, rtol=2e-6, err_msg=key)
    assert described["faults"], "a fixture without a fault that it can tell is of no use"
    assert all(f["max_abs_difference"] > 1e-2 for f in described["faults"].values())


def test_every_format_has_a_fixture() -> None:
    assert len(FORMATS) >= 12
    size = sum(f.stat().st_size for c in FORMATS for f in c.parent.iterdir())
    assert size < 0.9 * 2**20
