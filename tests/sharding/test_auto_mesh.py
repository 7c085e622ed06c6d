""" "auto" on a mesh: the same text; the same choices where the data axis is not split, each shard's own where it is."""

import sys
from pathlib import Path

import pytest

from eaglejax import Auto, Sampling, Speculation

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
import pairs  # noqa: E402

AUTO = Auto((Speculation(2, 1), Speculation(2, 2, 5)), window=8)


@pytest.mark.slow
def test_auto_on_a_mesh(tmp_path):
    folders = pairs.write_random(tmp_path, "qwen3_moe")
    asked, sampling = pairs.prompts([3, 9]), Sampling(max_new_tokens=40, temperature=0.7, seed=2)
    settings = dict(speculation=AUTO, tuning="none", slots=2)
    one = pairs.load(*folders, **settings)
    plain = pairs.ids(one.generate(asked, sampling, speculation=None))
    alone = one.generate(asked, sampling)
    assert pairs.ids(alone) == plain
    for mesh in ("model=2", "data=2,model=2"):
        answers = pairs.load(*folders, **settings, mesh=mesh).generate(asked, sampling)
        assert pairs.ids(answers) == plain, mesh
        assert all(sum(a.stats.cycles_by_choice) == a.stats.cycles for a in answers)
        if mesh == "model=2":
            choices = lambda made: [answer.stats.cycles_by_choice for answer in made]
            assert choices(answers) == choices(alone) and pairs.counts(answers) == pairs.counts(alone)
            assert sum(choices(answers)[0][1:]) > 0
