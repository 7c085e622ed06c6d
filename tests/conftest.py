"""Settings every test runs under: strict dtypes, so that nothing is promoted by accident."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of stored test data."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The built-in model's GGUF file, fetched once into the user's own cache folder and taken from there ever after."""
    from eaglejax.checkpoint.builtin import builtin_path

    return builtin_path("smollm2")
