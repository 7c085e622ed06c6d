"""An interrupted call leaves an engine that still works."""

import kit_m
import numpy as np
import pytest

from eaglejax import EagleJaxEngine, Sampling
from eaglejax.errors import ConfigError


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interrupted")
    chain = np.roll(np.arange(64), 1)
    target = folder / "target"
    kit_m.write_target(target, kit_m.sharp(chain))
    return EagleJaxEngine.from_pretrained(str(target), max_len=64, slots=1)


def test_interrupt_inside_decode(engine, monkeypatch):
    asked = Sampling(max_new_tokens=12, ignore_eos=True)
    want = engine.generate([[5]], asked)[0].token_ids
    (programs,) = engine._programs.values()
    decode = programs._decode

    def interrupted(*arguments):
        decode(*arguments)  # the state is donated and gone
        raise KeyboardInterrupt

    monkeypatch.setattr(programs, "_decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5]], asked)
    monkeypatch.undo()
    assert engine.generate([[5]], asked)[0].token_ids == want


@pytest.mark.parametrize("cycles", [0, -1])
def test_stream_without_progress_is_refused(engine, cycles):
    with pytest.raises(ConfigError, match="cycles"):
        engine.stream([5], cycles=cycles)


def test_wrong_samplings_are_refused(engine):
    with pytest.raises(
        ConfigError, match="sampling: needs as many as there are prompts, or a single one for all; found 1 for 2"
    ):
        engine.generate([[5], [6]], [Sampling()])
