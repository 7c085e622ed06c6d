"""The configs that come with the package. Nothing heavy is imported here."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent.parent


def config_places(kind: str) -> tuple[Path, Path]:
    """The folders of one kind of configs: beside the package in a wheel, at the top of the repository in a checkout."""
    return PACKAGE / "configs" / kind, PACKAGE.parent / "configs" / kind


PLACES = config_places("models")


def known_models() -> list[str]:
    """Names of the built-in configs."""
    return sorted({folder.parent.name for place in PLACES for folder in place.glob("*/config.json")})
