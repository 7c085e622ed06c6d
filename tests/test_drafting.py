"""`load_draft` and what it gives: what is refused, and by which name."""

import draft_files
import numpy as np
import pytest

from eaglejax import Speculation, load_draft
from eaglejax.errors import ConfigError, PromptError


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    folder = draft_files.draft(tmp_path_factory.mktemp("draft"))
    return load_draft(str(folder), target_embedding=draft_files.TABLE)


STATES = np.zeros((3, 3 * 128), np.float32)


@pytest.mark.parametrize(
    "ids, words",
    [
        ([1, 2, 3, 64], r"outside the target's vocabulary; found 64; expected 0 to 63"),
        ([1, 2, -1, 4], "outside the target's vocabulary; found -1"),
        ([1, 2, 3], "aux_hidden: needs one captured state per token but the last"),
    ],
)
def test_ids_that_have_no_embedding_are_refused(draft, ids, words):
    """A gather beyond the table would give a row of something else and no error."""
    for call in (draft.score, lambda states, ids: draft.propose(states, ids, Speculation(2))):
        with pytest.raises(PromptError, match=words):
            call(STATES, ids)


def test_what_is_no_tree_is_refused(draft):
    with pytest.raises((ConfigError, TypeError), match="speculation"):
        draft.propose(STATES, [1, 2, 3, 4], "auto")
    with pytest.raises(ConfigError, match="at least one level"):
        draft.propose(STATES, [1, 2, 3, 4], Speculation(0))


def test_settings_of_a_draft_alone(tmp_path):
    folder = str(draft_files.draft(tmp_path))
    for dtype in ("int8", "float16", "nonsense"):
        with pytest.raises(ConfigError, match=f"dtype: not a compute dtype; found '{dtype}'"):
            load_draft(folder, target_embedding=draft_files.TABLE, dtype=dtype)
    changed = load_draft(folder, target_embedding=draft_files.TABLE, draft_config={"rope_theta": 5e6})
    assert "overridden: rope_theta = 5000000.0" in str(changed.load_report)
    assert changed.draft.config.layers[0].attention.rope.theta == 5e6
