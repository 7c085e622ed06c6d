"""What a profile does not measure. Nothing heavy is imported here, so that a command line is refused at once."""

from __future__ import annotations

from collections.abc import Sequence

from eaglejax.config import Sampling
from eaglejax.errors import ConfigError


def check_wave(samplings: Sequence[Sampling], slots: int) -> None:
    """Refuse requests, one sampling each, that are no wave to profile. Raises ConfigError."""
    if len(samplings) > slots:
        raise ConfigError(
            "more prompts than slots: a profile is of one wave",
            where="prompts",
            found=len(samplings),
            expected=f"at most {slots}",
        )
    if any(sampling.stop for sampling in samplings):
        raise ConfigError(
            "stop strings make the host stop the loop now and then: that is not profiled",
            where="stop",
            fix="leave them out; stop_token_ids are looked for inside the loop",
        )
    if any(sampling.max_new_tokens < 2 for sampling in samplings):
        raise ConfigError(
            "no cycle to profile: the first token comes from the prefill", where="max_new_tokens", expected="2 or more"
        )
