"""Where "auto" has its tables from: a stored tuning that fits, else a measurement at a width's first wave, else documented priors."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from eaglejax.config import Auto, Speculation
from eaglejax.errors import ConfigError
from eaglejax.loading import Pair
from eaglejax.measure.cycle_costs import Costs, measure_costs
from eaglejax.measure.tuning import FIX, Tuning, holds_for, read_tuning, stored_path
from eaglejax.sharding.processes import from_all, telling
from eaglejax.speculation.adapt import PRIOR_CHAIN, Policy, make_policy, prior_policy, prior_reach
from eaglejax.speculation.experience import Experience
from eaglejax.speculation.programs import Programs

log = logging.getLogger("eaglejax")

# what "auto" chooses among, beside plain decoding, where nothing was tuned
UNTUNED = Auto((Speculation(3, 1, 4), Speculation(7, 1, 8)))
SECTION = "speculation"


class Adaptive:
    """The trees and tables of one pair. `tuning`: "auto", "measure" (no stored one), "none" (priors alone), or a file's path."""

    def __init__(self, pair: Pair, slots: int, tuning: str):
        self._pair, self._slots, self._asked = pair, slots, tuning
        self._tuning: Tuning | None = None
        self._looked = tuning in ("none", "measure")
        self._costs: dict[tuple[Auto, int], Costs] = {}
        self._policies: dict[tuple[Auto, int, bool], Policy] = {}
        self._experiences: dict[tuple[Auto, bool], Experience] = {}

    @property
    def tuning(self) -> Tuning | None:
        """The tuning in use. Looked for when "auto" is first asked for; raises ConfigError where a file was named that does not fit."""
        if not self._looked:
            self._tuning = _find(self._pair, self._slots, self._asked)
            self._looked = True
        return self._tuning

    @property
    def auto(self) -> Auto:
        """The choices of "auto"."""
        return self.tuning.auto if self.tuning is not None else UNTUNED

    def use(self, tuning: Tuning) -> None:
        """Decode with a new tuning from now on."""
        self._tuning, self._looked = tuning, True
        self._policies.clear()
        self.forget()

    def policy(self, programs: Programs, width: int, sampled: bool) -> Policy:
        """The placed tables of a wave of `width` slots; `sampled` where any of its requests draws. Measures where it has to."""
        assert isinstance(programs.spec, Auto)
        key = (programs.spec, width, sampled)
        if key not in self._policies:
            self._policies[key] = programs.place_policy(self._tables(programs, width, sampled))
        return self._policies[key]

    def experience(self, auto: Auto, sampled: bool) -> Experience:
        """What waves with these trees have shown so far, greedy and sampled ones apart."""
        return self._experiences.setdefault((auto, sampled), Experience())

    def forget(self) -> None:
        """Begin the next wave as if it were the first: the draft is another."""
        self._experiences.clear()

    def describe(self) -> str:
        """Where the tables come from, in words."""
        if self.tuning is not None:
            device, slots = self.tuning.holds_for.device, self.tuning.holds_for.slots
            counted = "1 slot" if slots == 1 else f"{slots} slots"
            if slots == self._slots:
                return f'"auto": costs and acceptance of the tuning for {device}, {counted}'
            return f'"auto": acceptance of the tuning for {device}; tuned with {counted}: costs for {self._slots} measured at first use'
        if self._asked == "none":
            return '"auto": nothing is measured: costs and acceptance are taken for granted (tuning="none")'
        return (
            '"auto": no tuning fits: the costs of a cycle are measured when a number of slots first decodes, in some seconds '
            'after compiling (tuning="none" leaves that out); acceptance is taken for granted until answers show it'
        )

    def _tables(self, programs: Programs, width: int, sampled: bool) -> Policy:
        auto, tuning = programs.spec, self.tuning
        assert isinstance(auto, Auto)
        acceptance = None
        if tuning is not None and tuning.auto == auto:
            if programs.slots_for(tuning.holds_for.slots, tuning.holds_for.slots) == width:
                return tuning.policy(sampled)
            acceptance = tuning.acceptance_of(sampled)
        if self._asked == "none":
            return prior_policy(auto)
        costs = self._measured(programs, width)
        if acceptance is not None:
            return make_policy(acceptance.reach, costs.trees, costs.catch_up, costs.look, acceptance.first_guess)
        reach = [prior_reach(tree) for tree in auto.trees]
        return make_policy(reach, costs.trees, costs.catch_up, costs.look, PRIOR_CHAIN[0])

    def _measured(self, programs: Programs, width: int) -> Costs:
        auto = programs.spec
        assert isinstance(auto, Auto)
        if (auto, width) not in self._costs:
            costs = self._costs[auto, width] = measure_costs(programs, width)
            shown = ", ".join(
                f"({tree.num_steps}, {tree.topk}, {tree.nodes}) {cost:.2f}"
                for tree, cost in zip(auto.trees, costs.trees, strict=True)
            )
            draft = f"the draft's run over a window {costs.catch_up:.2f}, over what was accepted {costs.look:.2f}"
            line = f"{width} slots: a plain step {costs.plain_ms:.2f} ms; in such steps a cycle of {shown}; {draft}"
            self._pair.report.note(SECTION, f"measured in {costs.seconds:.1f} s, compilation included, for {line}")
            log.info("measured cycles for %s", line)
        return self._costs[auto, width]


def _find(pair: Pair, slots: int, asked: str) -> Tuning | None:
    """The tuning asked for; process 0's where there are several. Raises ConfigError for a file that does not fit."""
    here = holds_for(pair, slots)
    path = stored_path(here) if asked == "auto" else Path(asked)
    with telling("tuning"):
        found = _read(path, here, pair, optional=asked == "auto")
    first = from_all("tuning", json.dumps(found.to_json()) if found is not None else "")[0]
    return Tuning.from_json(json.loads(first), "process 0's tuning") if first else None


def _read(path: Path, here, pair: Pair, optional: bool) -> Tuning | None:
    if optional and not path.is_file():
        return None
    try:
        tuning = read_tuning(path)
        if different := tuning.holds_for.differences(here):
            raise ConfigError("a tuning for something else", where=path, found="; ".join(different), fix=FIX)
    except ConfigError as error:
        if not optional:
            raise
        pair.report.warn(f"the stored tuning is left out: {error}")
        return None
    return tuning
