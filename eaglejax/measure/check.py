"""A doctor for a target and its draft: is the draft wired as it was trained, is decoding lossless, do the tables fit? (`engine.check`)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import jax

from eaglejax.config import PLAIN, Sampling, Speculation, whole_number
from eaglejax.errors import ConfigError
from eaglejax.generation import Generation
from eaglejax.loading import Pair
from eaglejax.measure.check_items import Item, look_at_pair
from eaglejax.measure.check_texts import own_texts, prompt_ids
from eaglejax.measure.judge import Judge
from eaglejax.measure.lossless import Job, Row, answer, compare, failures, make_jobs, rate_of, shape_name, table
from eaglejax.measure.wiring_check import Figure, WiringCheck, check_wiring
from eaglejax.speculation.programs import Programs
from eaglejax.wave import Job as Request
from eaglejax.wave import Wave

if TYPE_CHECKING:
    from eaglejax.engine import EagleJaxEngine

TOKENS = 512
LEAST_TOKENS = 64  # eight answers of these have the fewest places that anything can be told from
GREEDY, SAMPLED = "T=0", "T=0.8 top_p=0.95 top_k=20"
CHAIN = Speculation(3, 1, 4)  # what is audited where the engine is set to plain decoding
LEAST_COVERED = 0.5
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], Any]]]


@dataclass(frozen=True)
class CheckReport:
    """What a check found.

    title: the pair and the machine. items: one line per question, what is wrong first. wiring, rows: the figures behind two of them.
    """

    title: str
    items: tuple[Item, ...]
    wiring: WiringCheck | None
    rows: tuple[Row, ...]

    @property
    def wrong(self) -> list[Item]:
        """The findings that have to be mended."""
        return [item for item in self.items if item.status == "wrong"]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; warnings may be there."""
        return not self.wrong

    def __str__(self) -> str:
        width = max(len(item.name) for item in self.items)
        lines = [self.title, ""]
        lines += [f"{item.status:7}  {item.name:{width}}  {item.line}" for item in self.items]
        if self.wiring is not None:
            lines += ["", *_wiring_table(self.wiring)]
        if self.rows:
            lines += ["", table(self.rows)]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "title": self.title,
            "ok": self.ok,
            "items": [asdict(item) for item in self.items],
            "wiring": None if self.wiring is None else _wiring_json(self.wiring),
            "lossless": [asdict(row) | {"tau": row.tau if row.cycles else None} for row in self.rows],
        }


def check(
    engine: EagleJaxEngine,
    *,
    tokens: int = TOKENS,
    wiring: bool = True,
    lossless: bool = True,
    progress: Progress = lambda what, total: nullcontext(lambda n: None),
) -> CheckReport:
    """See `EagleJaxEngine.check`. progress: (what, total) -> a context that yields `advance(n)`."""
    pair = engine._pair
    tokens = whole_number("tokens", tokens, LEAST_TOKENS, 10**6)
    if pair.draft is None or pair.origin is None:
        raise ConfigError("no draft to check", where="draft", fix="load the engine with draft=")
    if jax.process_count() > 1:
        raise ConfigError(
            "check runs in one process",
            where="check",
            found=f"{jax.process_count()} processes",
            fix="check on one machine",
        )
    items = look_at_pair(pair, engine.max_len)
    names = [GREEDY, SAMPLED] if lossless else [GREEDY]
    found, rows = None, []
    if wiring or lossless:
        prompts, words = prompt_ids(pair, engine.max_len)
        each = min(-(-tokens // len(prompts)), engine.max_len - max(map(len, prompts)))
        jobs = make_jobs(prompts, each, names)
        with progress("plain decoding", len(jobs)) as advance:
            plain = answer(_plain(engine), jobs, engine.slots, advance)
        if wiring:
            texts = own_texts(plain[:: len(names)], pair.eos_ids if pair.tokenizer is not None else ())
            with progress("wirings", 0) as advance:
                found = check_wiring(pair, texts, f"the target's own greedy answers {words}", advance)
            items += _wiring_items(found)
        if lossless:
            rows, item = _audit(engine, jobs, names, plain, progress)
            items.append(item)
    order = {"wrong": 0, "warning": 1, "ok": 2}
    items.sort(key=lambda item: order[item.status])
    return CheckReport(_title(engine), tuple(items), found, tuple(rows))


def _plain(engine: EagleJaxEngine) -> Callable[..., list[Generation]]:
    return lambda prompts, samplings: engine.generate(prompts, samplings, speculation=None)


def _audit(
    engine: EagleJaxEngine, jobs: Sequence[Job], names: Sequence[str], plain: Sequence[Generation], progress: Progress
) -> tuple[list[Row], Item]:
    """Speculation beside plain decoding; in bfloat16 plain decoding with as many rows beside it too."""
    pair, slots = engine._pair, engine.slots
    spec = engine.speculation if engine.speculation.num_steps else CHAIN
    judge, dtype = Judge(pair), pair.dtype.name
    with progress(f"speculative decoding, {spec.describe()}", len(jobs)) as advance:
        tree = lambda prompts, samplings: engine.generate(prompts, samplings, speculation=spec)
        own = answer(tree, jobs, slots, advance)
    rows = compare(shape_name(spec), slots, names, jobs, plain, own, judge)
    if dtype != "float32":
        with progress(f"plain decoding with {spec.nodes} rows", len(jobs)) as advance:
            control = answer(_padded(engine, spec.nodes), jobs, slots, advance)
        rows += compare("control", slots, names, jobs, plain, control, judge)
    wrong = failures(rows, dtype)
    tokens = sum(row.tokens for row in rows if row.shape != "control")
    cases = sum(len(row.divergences) for row in rows if row.shape != "control")
    rate = rate_of(rows)
    if wrong:
        return rows, Item("lossless", "wrong", "; ".join(wrong))
    if rate is not None:
        return rows, Item("lossless", "warning" if rate.undecided else "ok", rate.told())
    line = f"{tokens} tokens compared with plain decoding, {cases} differ" + (", by rounding" if cases else "")
    return rows, Item("lossless", "ok", line)


def _padded(engine: EagleJaxEngine, rows: int) -> Callable[..., list[Generation]]:
    """Plain decoding that runs as many rows a step as a tree has nodes, all but the first for nothing."""
    pair = engine._pair
    programs = Programs(pair.target, None, (), PLAIN, engine.max_len, pair.dtype, pair.mesh, plain_rows=rows)

    def generate(prompts: Sequence[list[int]], samplings: Sequence[Sampling]) -> list[Generation]:
        asked = zip(prompts, samplings, strict=True)
        jobs = [Request(list(prompt), sampling, sampling.seed, ()) for prompt, sampling in asked]
        return Wave(programs, jobs, None, engine.slots).run()

    return generate


def _wiring_items(found: WiringCheck) -> list[Item]:
    status = "wrong" if found.wrong else "warning" if found.blind or found.too_few or not found.places else "ok"
    items = [Item("wiring", status, found.verdict())]
    if found.places:
        line = (
            f"the draft's vocabulary holds {found.covered:.1%} of the target's choices: it can be right no more often"
        )
        items.append(Item("coverage", "warning" if found.covered < LEAST_COVERED else "ok", line))
    return items


def _title(engine: EagleJaxEngine) -> str:
    pair: Pair = engine._pair
    assert pair.origin is not None
    device = jax.devices()[0].device_kind if pair.mesh is None else pair.mesh.devices.flat[0].device_kind
    mesh = "" if pair.mesh is None else f", mesh {dict(pair.mesh.shape)}"
    return f"{pair.name} with {pair.origin.source.path.name}: {pair.dtype.name}, {device}{mesh}, jax {jax.__version__}"


def _wiring_table(found: WiringCheck) -> list[str]:
    """The figures of all wirings, the best first."""
    steps = len(found.loaded.accuracies)
    head = " ".join(f"pos {step}" for step in range(steps))
    lines = [f"{'tokens/cycle':>12}  {head}  wiring ({found.places} places)"]
    for figure in sorted(found.figures, key=lambda figure: -figure.tokens_per_cycle):
        mark = "  <- loaded" if figure is found.loaded else ""
        mark += "  <- trained for" if figure is found.best and found.wrong else ""
        mark += "  (cannot be told apart)" if figure in found.equals else ""
        shares = " ".join(f"{share:5.1%}" for share in figure.accuracies)
        lines.append(f"{figure.tokens_per_cycle:12.2f}  {shares}  {figure.wiring.name}{mark}")
    return lines


def _wiring_json(found: WiringCheck) -> dict[str, Any]:
    return {
        "wrong": found.wrong,
        "verdict": found.verdict(),
        "places": found.places,
        "source": found.source,
        "covered": found.covered,
        "fix": {"keyword": found.best.wiring.keyword, "flags": found.best.wiring.flags} if found.wrong else None,
        "figures": [_figure_json(figure, found) for figure in found.figures],
    }


def _figure_json(figure: Figure, found: WiringCheck) -> dict[str, Any]:
    return {
        "wiring": figure.wiring.name,
        "boundaries": list(figure.wiring.boundaries),
        "tokens_per_cycle": figure.tokens_per_cycle,
        "accuracies": figure.accuracies,
        "loaded": figure is found.loaded,
        "best": figure is found.best,
        "cannot_be_told_from_best": figure in found.equals,
    }
