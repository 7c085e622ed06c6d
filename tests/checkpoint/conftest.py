"""What the tests of checkpoints share."""

import pytest

from eaglejax.checkpoint.reader import CheckpointReader


@pytest.fixture
def nothing_read(monkeypatch):
    """Whoever reads a tensor's values fails: refusals come from config and headers alone."""

    def read(self, name, *_, **__):
        raise AssertionError(f"{name} was read before the refusal")

    monkeypatch.setattr(CheckpointReader, "read", read)
    monkeypatch.setattr(CheckpointReader, "read_block", read)
