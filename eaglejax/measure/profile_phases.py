"""From the named scopes of the source to the phases of a profile."""

from __future__ import annotations

import re

# scope -> phase, by the outermost scope that is one of these
_OUTER = {
    "target_prefill": "target prefill",
    "draft_prefill": "draft prefill",
    "first_token": "first token",
    "draft_extend": "draft extend",
    "rerank": "rerank",
    "verify": "verify",
    "accept": "accept",
    "commit": "commit",
}
_STEP = re.compile(r"draft_step_(\d+)")
# parts of a verification, by the first of these scopes that is there: shared experts are an MLP inside of "moe"
_PARTS = {
    "gqa": "attention",
    "mla": "attention",
    "moe": "experts",
    "mlp": "MLP",
    "block": "norms",
    "embedding": "embedding",
    "head": "head",
    "draw": "draw",
}
VERIFY_PARTS = ("embedding", "attention", "experts", "MLP", "norms", "head", "draw", "rest", "collectives")
COLLECTIVES = "collectives"
LOOP = "loop"
FIRST_TOKEN = "first token"


def phase_of(scopes: tuple[str, ...], collective: bool) -> str | None:
    """The phase of an instruction, such as "draft step 2" or "verify: attention"; None where no scope says.

    Arguments:
        scopes: named scopes around it, outermost first.
        collective: whether it crosses between devices.
    """
    outer = next((name for scope in scopes if (name := _outer(scope)) is not None), None)
    if outer is None:
        return None
    if collective:
        return f"{outer}: {COLLECTIVES}"
    if outer != "verify":
        return outer
    return f"verify: {next((part for scope, part in _PARTS.items() if scope in scopes), 'rest')}"


def _outer(scope: str) -> str | None:
    if match := _STEP.fullmatch(scope):
        return f"draft step {match[1]}"
    return _OUTER.get(scope)


def group_of(phase: str) -> str:
    """What a phase is summed up under: "draft", "verify", or itself."""
    name = phase.partition(":")[0]
    return "draft" if name.startswith(("draft", "rerank")) and name != "draft prefill" else name


def in_order(phases: set[str]) -> list[str]:
    """Phases in the order of a cycle."""
    return sorted(phases, key=_place)


def _place(phase: str) -> tuple[int, int, str]:
    name, _, part = phase.partition(": ")
    inner = VERIFY_PARTS.index(part) if part in VERIFY_PARTS else -1
    if match := re.fullmatch(r"draft step (\d+)", name):
        return 4, 10 * int(match[1]) + (part != ""), part
    order = {LOOP: 0, "target prefill": 1, "draft prefill": 2, "draft extend": 3, "rerank": 5, "verify": 6}
    order |= {"accept": 7, "commit": 8, FIRST_TOKEN: 9}
    return order.get(name, 10), inner, part
