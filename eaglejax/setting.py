"""What `speculation=` may be given as, and the trees that it stands for."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from eaglejax.config import PLAIN, Auto, Speculation
from eaglejax.errors import ConfigError

Setting = Speculation | Auto | Literal["auto"] | None


class Own(Enum):
    """Stands for "as the engine was set", where None means plain decoding."""

    SETTING = "the engine's own setting"


OWN = Own.SETTING
Override = Setting | Own


def trees_of(asked: Setting, auto: Auto | None) -> Speculation | Auto:
    """The tree or trees a setting stands for, whether or not a draft can grow them. `auto`: those of "auto", None without a draft.

    Raises ConfigError for anything else.
    """
    if asked is None or (asked == "auto" and auto is None):
        return PLAIN
    spec = auto if asked == "auto" else asked
    if not isinstance(spec, Speculation | Auto):
        raise ConfigError(
            "not a tree", where="speculation", found=repr(asked), expected='a Speculation, an Auto, "auto" or None'
        )
    return spec if spec.num_steps else PLAIN
