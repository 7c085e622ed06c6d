"""The story behind the project, retold from a plan: Kimi-K2.5 on 8 PCIe cards, 90 tokens/s plain, 71 with an EAGLE-3 head.

Two constants are calibrated, each on one figure of the story itself: the cost of a collective (the preset's, on 90 tokens/s plain) and
the fixed cost that its engine paid per verification beyond a plain step's (on 25.6 ms for 3 rows). Everything else follows from bytes.
The story does not say which chain gave 71 tokens/s, nor the context: a chain of 3 nodes and 1,024 tokens are assumed, and "acceptance"
is read as the share of all drafted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from eaglejax.config import Speculation
from eaglejax.measure.hardware import Hardware, read_hardware
from eaglejax.measure.roofline import chain_tau, cycle_seconds
from eaglejax.measure.work import Placed, cycle_phases, is_draft, plain_phases

CONTEXT = 1024
PLAIN, SPECULATIVE = 90.0, 71.0  # tokens/s
VERIFY_3, VERIFY_6 = 25.6e-3, 28.7e-3  # seconds
RIGHT, WRONG = 0.47, 0.19  # acceptance with the right capture and the wrong one
PROFILED = 31.0  # tokens/s seen by a profiler that synchronised after each phase


@dataclass(frozen=True)
class Chain:
    """One cycle of a chain of `nodes` nodes, in seconds. `verify`: target and head; `fixed`: what the engine paid on top."""

    nodes: int
    draft: float
    verify: float
    fixed: float

    @property
    def cycle(self) -> float:
        return self.draft + self.verify + self.fixed

    def tokens(self, share: float) -> float:
        """Tokens/s where `share` of the drafted tokens are accepted."""
        return chain_tau(self.nodes - 1, share) / self.cycle


@dataclass(frozen=True)
class Story:
    """`plain`: seconds of a plain step, of which `plain_reading` are memory. `three`, `six`: chains as the engine ran them."""

    plain: float
    plain_reading: float
    collectives: int
    three: Chain
    six: Chain

    @property
    def fixed_three(self) -> Chain:
        """The chain of three without the engine's fixed cost."""
        return Chain(3, self.three.draft, self.three.verify, 0.0)

    @property
    def needed_share(self) -> float:
        """Share of drafted tokens that must be accepted for the chain of three to reach plain decoding, as the engine ran it."""
        return (self.three.cycle / self.plain - 1) / 2


def tell(target: Placed, draft: Placed, hardware: Hardware | None = None) -> Story:
    """The story's figures from the two models on the 8 cards."""
    hardware = hardware or read_hardware("rtx-pro-6000-pcie")
    devices = target.devices
    plain = plain_phases(target, 1, CONTEXT)
    bare = {nodes: _chain(target, draft, nodes, hardware, 0.0) for nodes in (3, 6)}
    fixed = VERIFY_3 - bare[3].verify
    reading = sum(phase.bytes for phase in plain) / hardware.bandwidth
    return Story(
        cycle_seconds(plain, hardware, devices),
        reading,
        sum(phase.collective_count for phase in plain),
        _chain(target, draft, 3, hardware, fixed),
        _chain(target, draft, 6, hardware, fixed),
    )


def _chain(target: Placed, draft: Placed, nodes: int, hardware: Hardware, fixed: float) -> Chain:
    phases = cycle_phases(target, draft, Speculation(num_steps=nodes - 1, topk=1), 1, CONTEXT)
    parts = [
        cycle_seconds([p for p in phases if is_draft(p) == wanted], hardware, target.devices)
        for wanted in (True, False)
    ]
    return Chain(nodes, parts[0], parts[1], fixed)


def tale(story: Story) -> str:
    """The story in words and figures: as told, as computed."""
    three, six, better = story.three, story.six, story.fixed_three
    ms = lambda seconds: f"{1e3 * seconds:.1f} ms"
    rows = [
        (
            "plain decoding",
            "90 tok/s (calibrates a collective)",
            f"{1 / story.plain:.1f} tok/s, {ms(story.plain)} a step",
        ),
        ("verify 3 rows", "25.6 ms (calibrates the fixed cost)", ms(three.verify + three.fixed)),
        ("verify 6 rows", "28.7 ms", ms(six.verify + six.fixed)),
        ("verify 6 / verify 3", "1.12", f"{(six.verify + six.fixed) / (three.verify + three.fixed):.2f}"),
        ("draft, of the cycle", "3 %", f"{100 * three.draft / three.cycle:.1f} %"),
        ("verify, of the cycle", "over 95 %", f"{100 * (three.verify + three.fixed) / three.cycle:.1f} %"),
        ("acceptance 47 %, right capture", "71 tok/s", f"{three.tokens(RIGHT):.1f} tok/s"),
        ("acceptance 19 %, wrong capture", "-", f"{three.tokens(WRONG):.1f} tok/s"),
    ]
    table = [f"  {what:<32} {told:<37} {computed}" for what, told, computed in [("", "the story", "this plan"), *rows]]
    return "\n".join(
        [
            "Kimi-K2.5 on 8 PCIe cards (rtx-pro-6000-pcie), chain of 3 nodes, draft split over the 8, 1024 tokens of context:",
            *table,
            "",
            f"Where a plain step goes: {ms(story.plain_reading)} reading weights, {ms(story.plain - story.plain_reading)} in "
            f"{story.collectives} collectives and the launches around them.",
            f"Verifying 3 rows reads {ms(three.verify - story.plain)} more than 1 row, 6 rows {ms(six.verify - story.plain)} more: "
            f"more experts on the busiest card. The engine paid {ms(three.fixed)} beyond that, whatever the rows: "
            "fixed overhead, not per-token work.",
            "What would have fixed it:",
            f"  the capture alone: {three.tokens(WRONG):.0f} -> {three.tokens(RIGHT):.0f} tok/s, still below plain; it would have needed "
            f"{100 * story.needed_share:.0f} % of the drafted tokens accepted.",
            f"  another placement of the draft: {ms(three.draft)} of {ms(three.cycle)} at most.",
            f"  a verification without that fixed cost (one compiled program): {ms(better.cycle)} a cycle, "
            f"{better.tokens(RIGHT):.0f} tok/s at 47 %, {better.tokens(WRONG):.0f} at 19 %.",
            f"  both: {better.tokens(RIGHT) * story.plain:.2f} times plain decoding. The profile that synchronised after each phase "
            f"showed {PROFILED:.0f} tok/s of {SPECULATIVE:.0f}: {SPECULATIVE / PROFILED:.1f} times too slow, and hid all of this.",
        ]
    )
