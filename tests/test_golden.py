"""Whole runs of other people's software on a CPU, reproduced: SafeAILab/EAGLE decoding a mixture of experts, transformers on SmolLM2.

With EAGLEJAX_GOLDEN naming a folder of more such cases (e2e_*), all of them are run.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from eaglejax import EagleJaxEngine, Sampling, Speculation

HERE = Path(__file__).parent / "data"
MORE = sorted(Path(os.environ["EAGLEJAX_GOLDEN"]).glob("e2e_*")) if "EAGLEJAX_GOLDEN" in os.environ else []


def spec_of(case: dict) -> Speculation:
    tree = case["tree"]
    return Speculation(num_steps=tree["depth"] + 1, topk=tree["top_k"], num_draft_tokens=tree["total_tokens"])


@pytest.mark.parametrize("folder", [HERE / "e2e_mixtral", *MORE], ids=lambda folder: folder.name)
def test_eagle3_decoding_is_the_references_cycle_by_cycle(folder):
    case, expected = json.loads((folder / "case.json").read_text()), load_file(folder / "expected.safetensors")
    engine = EagleJaxEngine.from_pretrained(
        str(folder / "target"), draft=str(folder / "draft"), speculation=spec_of(case), max_len=128, slots=4
    )
    prompts, answers, counts = [], [], []
    while (name := f"prompt{len(prompts)}") + ".input_ids" in expected:
        prompts.append(expected[f"{name}.input_ids"].ravel().tolist())
        answers.append(expected[f"{name}.generated"].ravel().tolist())
        accepted = expected[f"{name}.accept_lengths"].ravel().tolist()
        # the reference goes on until the budget is passed: a last cycle of nothing but the bonus token is not run here
        counts.append(accepted if accepted[-1] else accepted[:-1])
    assert len(prompts) == 3
    asked = [Sampling(max_new_tokens=len(answer), ignore_eos=True) for answer in answers]
    for answer, tokens, accepted in zip(engine.generate(prompts, asked), answers, counts, strict=True):
        assert answer.token_ids == tokens
        assert answer.stats.accepted_per_cycle == accepted
    # alone, in a program of another width, and without the draft
    alone = engine.generate(prompts[0], asked[0])[0]
    assert alone.token_ids == answers[0] and alone.stats.accepted_per_cycle == counts[0]
    assert engine.generate(prompts[2], asked[2], speculation=None)[0].token_ids == answers[2]


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return EagleJaxEngine.from_pretrained("smollm2", max_len=256, slots=1)


def test_smollm2_scores_as_transformers_does(smollm2):
    expected = load_file(HERE / "smollm2" / "expected.safetensors")
    score = smollm2.score(expected["token_ids"].tolist())
    rows = expected["rows"]
    logits = score.logits[rows]
    got = np.take_along_axis(logits, expected["top64_ids"], axis=1)
    np.testing.assert_allclose(got, expected["top64_logits"], atol=2e-3)
    assert np.array_equal(logits.argmax(-1), expected["top64_ids"][:, 0])
    sums = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(sums, expected["logsumexp"], atol=2e-3)
    for boundary in (2, 15, 27):
        want = expected[f"boundary_{boundary}"]
        np.testing.assert_allclose(score.boundaries[boundary][rows], want, atol=2e-3 * max(1.0, np.abs(want).max()))


def test_smollm2_answers_as_transformers_does(smollm2):
    expected = json.loads((HERE / "smollm2" / "expected.json").read_text())
    for case in expected["greedy"]:
        answer = smollm2.generate(case["prompt_ids"], Sampling(max_new_tokens=expected["max_new_tokens"]))[0]
        assert answer.token_ids == case["greedy_ids"]
        assert answer.finish_reason == ("stop" if case["greedy_ids"][-1] == expected["eos"] else "length")
