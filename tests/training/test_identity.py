"""What belongs to another run is told by the names of settings, with both values."""

import pytest

from eaglejax.errors import ConfigError
from eaglejax.training.identity import check_same_run


def refused(found, expected, **more):
    with pytest.raises(ConfigError) as error:
        check_same_run(found, expected, "here", **more)
    return str(error.value)


def test_every_key_that_differs_is_told():
    check_same_run({"rate": 1.0}, {"rate": 1.0}, "here")
    assert "found rate begun with 1.0, now 2.0; seed begun with None, now 3; give" in refused(
        {"rate": 1.0}, {"rate": 2.0, "seed": 3}
    )
    check_same_run({"rate": 1.0, "text": "a"}, {"rate": 1.0, "text": "b"}, "here", only=("rate",))


def test_keys_are_called_like_settings():
    assert "answer_tokens begun with 16, now 8" in refused({"new_tokens": 16}, {"new_tokens": 8})
    # a target in another dtype has another digest, which would say nothing
    message = refused({"dtype": "float32", "target": "a"}, {"dtype": "bfloat16", "target": "b"})
    assert "dtype begun with 'float32'" in message and "target" not in message


def test_a_longer_run_is_another_one():
    assert "a run cannot be lengthened" in refused({"steps": 8}, {"steps": 9})
    assert "lengthened" not in refused({"rate": 8}, {"rate": 9})


def test_of_two_shapes_only_what_differs_is_shown():
    shape = (
        "DraftConfig(vocab_size=64, boundaries=(1, 2, 3), layers=(LayerConfig(mlp=DenseConfig(width={}, bias=False)),))"
    )
    message = refused({"draft": shape.format(64)}, {"draft": shape.format(32)})
    assert "found draft begun with width 64, now width 32; give" in message
    other = shape.format(64).replace("(1, 2, 3)", "(1, 2, 4)")
    assert "draft begun with boundaries (1, 2, 3), now boundaries (1, 2, 4);" in refused(
        {"draft": shape.format(64)}, {"draft": other}
    )
    # where a setting says it, the shape need not
    assert "draft begun" not in refused({"draft": "a", "mlp": 64}, {"draft": "b", "mlp": 32})


def test_paths_do_not_bind_and_older_checkpoints_are_gone_on_with():
    check_same_run({"data": ["a"], "start": "x", "rate": 1}, {"rate": 1, "vocabulary": "v", "start_draft": "s"}, "here")
    assert "start begun with None" in refused({"start": None}, {"start_draft": "s"})
    assert "vocabulary begun with 'v', now 'w'" in refused({"vocabulary": "v"}, {"vocabulary": "w"})
    assert "start begun with 's', now 't'" in refused({"start_draft": "s"}, {"start_draft": "t"})
