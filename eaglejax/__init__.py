"""EAGLE-3 speculative decoding for mixture-of-experts models, native in JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eaglejax.config import Auto, Sampling, Speculation
    from eaglejax.drafting import load_draft
    from eaglejax.engine import EagleJaxEngine
    from eaglejax.generation import Generation, Tree

__version__ = "0.1.0"

__all__ = ["Auto", "EagleJaxEngine", "Generation", "Sampling", "Speculation", "Tree", "load_draft"]

_HOMES = {
    "EagleJaxEngine": "eaglejax.engine",
    "Generation": "eaglejax.generation",
    "Auto": "eaglejax.config",
    "Sampling": "eaglejax.config",
    "Speculation": "eaglejax.config",
    "Tree": "eaglejax.generation",
    "load_draft": "eaglejax.drafting",
}


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def __getattr__(name: str) -> Any:
    # jax and flax are imported on first use, so that `import eaglejax` and usage errors are quick
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'eaglejax' has no attribute {name!r}")
