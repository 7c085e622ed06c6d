"""`tune`: from a calibration run and the cost of a cycle's parts to the fastest trees of a pair on this machine, confirmed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from eaglejax.config import PLAIN, Auto, Real, Sampling, Speculation, real_number, whole_number
from eaglejax.errors import ConfigError
from eaglejax.measure.cost_curve import ROWS, CostCurve, measure_curves
from eaglejax.measure.cycle_costs import measure_costs
from eaglejax.measure.look_ahead import LookAhead, whole_pool
from eaglejax.measure.prompt_sets import read_prompts
from eaglejax.measure.replay import Replayed, Text, first_guesses, replay, settings
from eaglejax.measure.timing import Spread, alternate
from eaglejax.measure.tuning import GREEDY, SAMPLED, Acceptance, Row, Tuning, holds_for
from eaglejax.sharding.mesh import MODEL, axis_size
from eaglejax.wave import Job, Wave

if TYPE_CHECKING:
    from eaglejax.engine import EagleJaxEngine

CHAIN_STEPS, TREE_STEPS, TOPK = 7, 5, 4  # of the widest trees of the calibration
BEST, CONFIRM_ROUNDS = 3, 3  # settings of each class that are run in any case; how often
CONTEXTS = 3  # waves of the calibration behind whose tokens costs are measured
MOST_TREES = 3  # of "auto": each is compiled
HARDNESS = (0.5, 1.0, 2.0)  # texts for which "auto" gets the best tree: easier than the calibration's, like it, harder
SETS = ("mt_bench", "gsm8k", "humaneval")
Progress = Callable[[str, int], Any]


@dataclass(frozen=True)
class Found:
    """What the calibration says about one class of requests. `texts`: with chains, with broad trees."""

    sampling: Sampling
    chains: list[Text]
    broad: list[Text]

    def contexts(self, asked: Sequence[Sequence[int]], slots: int) -> list[list[int]]:
        """Tokens that stand in every slot in the middle of an answer: of waves that go from the shortest to the longest."""
        standing = [len(prompt) + len(text.tokens) // 2 for prompt, text in zip(asked, self.chains, strict=True)]
        waves = sorted((standing[first : first + slots] for first in range(0, len(standing), slots)), key=max)
        few = min(CONTEXTS, len(waves))
        return [waves[(2 * index + 1) * len(waves) // (2 * few)] for index in range(few)]

    def replayed(self, wanted: Sequence[Speculation]) -> dict[Speculation, Replayed]:
        """Every setting on the calibration's texts."""
        shapes: dict[tuple[int, int], list[int]] = {}
        for tree in wanted:
            shapes.setdefault((tree.num_steps, tree.topk), []).append(tree.nodes)
        found = {}
        for (steps, topk), sizes in shapes.items():
            told = replay(self.chains if topk == 1 else self.broad, steps, topk, sizes)
            found |= {Speculation(steps, topk, nodes): told[nodes] for nodes in sizes}
        return found


def tune(
    engine: EagleJaxEngine,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 64,
    temperature: Real = 0.8,
    confirm: int = BEST,
    rows: Sequence[int] = ROWS,
    progress: Callable[[str, int], Any] | None = None,
) -> Tuning:
    """Measure and choose. See `EagleJaxEngine.tune`."""
    pair, slots = engine._pair, engine.slots
    if pair.draft is None:
        raise ConfigError("there is nothing to tune without a draft", where="draft", fix="load the engine with draft=")
    if jax.process_count() > 1:
        raise ConfigError(
            "tune runs in one process", where="processes", found=jax.process_count(), fix="tune on one host"
        )
    least = 2 * CHAIN_STEPS
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens, least + 2, engine.max_len - 1)
    asked = engine.encode(list(prompts))
    asked = [asked[index % len(asked)] for index in range(-(-len(asked) // slots) * slots)]  # whole waves
    temperature = real_number("temperature", temperature, 0, 1e4)
    confirm = whole_number("confirm", confirm, 1)
    told = progress or (lambda what, total: _silent())
    classes = {GREEDY: Sampling(max_new_tokens=max_new_tokens, ignore_eos=True)}
    if temperature > 0:
        classes[SAMPLED] = replace(classes[GREEDY], temperature=temperature, seed=0)

    looking = _looking(engine)
    found = {name: _calibrate(looking, asked, sampling, slots, told) for name, sampling in classes.items()}
    curves = _curves(engine, asked, found, rows, told)
    most = min(pair.draft.config.draft_vocab_size, TOPK)
    wanted = settings(CHAIN_STEPS, TREE_STEPS, most, max(rows))
    predicted = {name: _predict(each.replayed(wanted), curves[name]) for name, each in found.items()}
    confirmed = {
        name: _confirm(engine, asked, found[name].sampling, predicted[name], confirm, told) for name in classes
    }
    trees = choose_trees([(found[name].replayed(wanted), curves[name]) for name in classes])
    auto = Auto(trees)
    with told("costs of the chosen trees", 1) as advance:
        middle = statistics.mean(
            tokens for each in found.values() for wave in each.contexts(asked, slots) for tokens in wave
        )
        costs = measure_costs(engine._programs_for(auto), slots, round(middle))
        advance(1)
    acceptance = {}
    for name, each in found.items():
        replayed = each.replayed(trees)
        acceptance[name] = Acceptance(tuple(replayed[tree].reach for tree in trees), first_guesses(each.chains))
    return Tuning(holds_for(pair, slots), trees, auto.window, costs, acceptance, confirmed)


def default_prompts(engine: EagleJaxEngine) -> list[list[int]]:
    """Built-in prompts, at least one per slot and set, of all sets in turn; as chat messages where the tokenizer has a template, random ids
    without one."""
    return mixed_prompts(engine, SETS if engine.has_tokenizer else ("random",))


def mixed_prompts(engine: EagleJaxEngine, names: Sequence[str]) -> list[list[int]]:
    """Prompts of all sets in turn, at least one of each: one answer alone may be far easier or harder than the rest."""
    chat = engine.has_tokenizer and engine.tokenizer.chat is not None
    count = -(-len(names) // engine.slots) * engine.slots
    each = -(-count // len(names))
    read = [read_prompts(name, each, chat=chat, vocab_size=engine.vocab_size) for name in names]
    sets = [[prompt.content for prompt in prompts] for prompts in read]
    mixed = [prompts[turn] for turn in range(each) for prompts in sets if turn < len(prompts)]
    return engine.encode(mixed[:count])


@contextmanager
def _silent() -> Iterator[Callable[[int], object]]:
    yield lambda n: None


def _looking(engine: EagleJaxEngine) -> LookAhead:
    assert engine._pair.draft is not None
    most = min(engine._pair.draft.config.draft_vocab_size, TOPK)
    specs = [whole_pool(CHAIN_STEPS, 1), whole_pool(TREE_STEPS, most)]
    return LookAhead(engine._programs_for(specs[0]), specs)


def _waves(asked: list[list[int]], sampling: Sampling, slots: int) -> list[list[Job]]:
    """Requests that are decoded together; request i draws with seed i."""
    jobs = [Job(prompt, sampling, index, ()) for index, prompt in enumerate(asked)]
    return [jobs[first : first + slots] for first in range(0, len(jobs), slots)]


def _calibrate(looking: LookAhead, asked: list[list[int]], sampling: Sampling, slots: int, told: Progress) -> Found:
    kind, waves = SAMPLED if sampling.temperature else GREEDY, _waves(asked, sampling, slots)
    chains, broad = [], []
    with told(f"calibration, {kind}", sampling.max_new_tokens * len(waves)) as advance:
        for jobs in waves:
            for texts, found in zip((chains, broad), looking.run(jobs, advance), strict=True):
                texts += found
    if sum(len(text.trees) for text in chains) <= CHAIN_STEPS * len(chains):
        raise ConfigError(
            "the answers are too short to learn from",
            where="max_len",
            found=looking.programs.max_len,
            fix="shorter prompts",
        )
    return Found(sampling, chains, broad)


def _curves(
    engine: EagleJaxEngine, asked: list[list[int]], classes: Mapping[str, Found], rows: Sequence[int], told: Progress
) -> dict[str, CostCurve]:
    pair = engine._pair
    assert pair.draft is not None
    topks = [k for k in (1, 2, TOPK) if k <= pair.draft.config.draft_vocab_size]
    plain = engine._programs_for(PLAIN)
    with told("cost of the parts of a cycle", len(classes) * (len(rows) + 2 * len(topks))) as advance:
        curves = measure_curves(
            engine._programs_for(whole_pool(CHAIN_STEPS, 1)),
            plain,
            {name: (each.sampling, each.contexts(asked, engine.slots)) for name, each in classes.items()},
            pair.target.config,
            axis_size(pair.mesh, MODEL),
            topks,
            advance,
            rows,
        )
    plain.release()
    return curves


@dataclass(frozen=True)
class _Run:
    """Waves that were decoded. `tau`: tokens a cycle made, over all slots; `cycle_ms`: of all slots together."""

    tau: float
    cycle_ms: float


def _decode(engine: EagleJaxEngine, asked: list[list[int]], sampling: Sampling, spec: Speculation) -> _Run:
    """All waves. What the last cycle of an answer makes beyond its limit counts too: how an answer ends says nothing about a tree, and the
    shorter the answers, the more of their cycles are last ones. Nor does a slot count that waits for the longest one."""
    programs, made, cycles, seconds, longest = engine._programs_for(spec), 0, 0, 0.0, 0
    for jobs in _waves(asked, sampling, engine.slots):
        stats = [answer.stats for answer in Wave(programs, jobs, None, engine.slots).run()]
        made += sum(sum(one.accepted_per_cycle) + one.cycles for one in stats)
        cycles += sum(one.cycles for one in stats)
        seconds += stats[0].decode_seconds
        longest += max(one.cycles for one in stats)
    programs.release()  # many trees are run: each would keep caches of its own
    return _Run(made / max(cycles, 1), 1e3 * seconds / max(longest, 1))


def _predict(replayed: dict[Speculation, Replayed], curve: CostCurve) -> list[Row]:
    """Every setting, plain decoding included, fastest first."""
    plain = curve.cycle_ms(PLAIN)
    rows = [Row(0, 1, 1, 1.0, plain, 1e3 * curve.slots / plain)]
    for tree, told in replayed.items():
        cycle = curve.cycle_ms(tree)
        rate = 1e3 * curve.slots * told.tau / cycle
        rows.append(Row(tree.num_steps, tree.topk, tree.nodes, told.tau, cycle, rate))
    return sorted(rows, key=lambda row: -row.predicted)


def _confirm(
    engine: EagleJaxEngine, asked: list[list[int]], sampling: Sampling, rows: list[Row], confirm: int, told: Progress
) -> tuple[Row, ...]:
    """The rows with the best few, further ones spread over the rest, and plain decoding, measured in turns."""
    chosen, rest = rows[: min(confirm, BEST)], rows[BEST:]
    more = min(confirm - len(chosen), len(rest))
    chosen += [rest[(2 * index + 1) * len(rest) // (2 * more)] for index in range(more)]
    chosen += [row for row in rows if row.num_steps == 0 and row not in chosen]

    with told("the best few, run", len(chosen) * (CONFIRM_ROUNDS + 1)) as advance:
        tasks = {row: (lambda row=row: _decode(engine, asked, sampling, row.tree)) for row in chosen}
        runs = alternate(tasks, repeats=CONFIRM_ROUNDS, done=lambda: advance(1))
    told_rows = []
    for row, found in runs.items():
        cycle = Spread.of([run.cycle_ms for run in found]).median
        tau = found[0].tau  # the same answers every time
        told_rows.append(replace(row, measured=1e3 * engine.slots * tau / cycle, measured_ms=cycle))
    told_rows.sort(key=lambda row: -(row.measured or 0))
    return (*told_rows, *(row for row in rows if row not in chosen))


def choose_trees(classes: Sequence[tuple[dict[Speculation, Replayed], CostCurve]]) -> tuple[Speculation, ...]:
    """The trees of "auto": for each class and hardness of text the one that its costs favour, the likelier first; at most `MOST_TREES`."""
    chosen: list[Speculation] = []
    for hardness in sorted(HARDNESS, key=lambda hard: abs(hard - 1)):
        for replayed, curve in classes:

            def rate(tree: Speculation, found=replayed, curve=curve, hard=hardness) -> float:
                return (1 + sum(share**hard for share in found[tree].reach)) / curve.cycle_ms(tree)

            best = max(replayed, key=rate)
            if best not in chosen:
                chosen.append(best)
    return tuple(sorted(chosen[:MOST_TREES], key=lambda tree: (tree.nodes, tree.num_steps)))
