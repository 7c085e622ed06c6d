"""Settings every test runs under: strict dtypes, so that nothing is promoted by accident."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of stored test data."""
    return Path(__file__).parent / "data"
