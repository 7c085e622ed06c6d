"""The quick look at the wiring when a pair is loaded: one pass of the target over a few hundred tokens, a handful of wirings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from eaglejax.generation import Generation
from eaglejax.loading import Pair
from eaglejax.measure.check_texts import passage, sampled
from eaglejax.measure.seen_wirings import remember, seen_path, was_right
from eaglejax.measure.teacher_forced import Text
from eaglejax.measure.wiring_check import Figure, Measured, WiringCheck
from eaglejax.measure.wirings import Change, Wiring, Wirings

STEPS = 2  # a state that is fed back wrongly shows at the second step, and every fault of the first at the first
CHEAP, DEARER = ("capture", "vocabulary"), ("norms",)  # the dearer ones have programs of their own to compile
# a draft that is right as often as this at position 0, and at position 1 as a share of that, has its norms as it was trained
HEALTHY, FED_BACK = 0.3, 0.5
SECTION = "wiring"
Generate = Callable[..., list[Generation]]


def check_at_load(pair: Pair, generate: Generate, max_len: int, *, asked: bool) -> None:
    """Settle an ambiguous config, and say in the load report, with a warning where it is wrong, how the draft is wired.

    Arguments:
        generate: the engine's own, for a target without a tokenizer whose draft's config is ambiguous.
        asked: False leaves out everything but the ambiguous config, which has to be settled.
    """
    assert pair.capture is not None
    ambiguous = bool(pair.capture.alternatives)
    if not asked and not ambiguous:
        pair.report.note(SECTION, "not measured at load (check_wiring=False); `eaglejax check` does")
        return
    texts = passage(pair, max_len)
    if texts is None and not ambiguous:
        pair.report.note(SECTION, "not measured at load: no tokenizer to read a text with; `eaglejax check` makes one")
        return
    mark = seen_path(pair)
    if not ambiguous and was_right(mark):
        pair.report.note(
            SECTION, "right, as measured when this pair was first loaded here; `eaglejax check` measures again"
        )
        return
    begin = time.perf_counter()
    texts, source = texts if texts is not None else sampled(pair, generate, max_len)
    wirings = Wirings(pair)
    if ambiguous:
        readings = _readings(pair, wirings)
        run = Measured(pair, texts, source, readings, steps=STEPS)
        _settle(pair, run.judged([run.figure(reading) for reading in readings]))
        wirings = Wirings(pair)
    if asked:
        check = _look(pair, texts, source, wirings)
        _tell(pair, check, time.perf_counter() - begin)
        if check.places and not (check.wrong or check.blind or check.too_few or ambiguous):
            remember(mark)


def _look(pair: Pair, texts: list[Text], source: str, wirings: Wirings) -> WiringCheck:
    """The captures and the map of the vocabulary, which share one program; the norms too where the draft looks unhealthy."""
    cheap = [wirings.loaded, *wirings.singles(CHEAP)]
    run = Measured(pair, texts, source, cheap, steps=STEPS)
    figures = [run.figure(wiring) for wiring in cheap]
    first, second = figures[0].accuracies[:STEPS]
    check = run.judged(figures)
    if check.wrong or not check.places or (first >= HEALTHY and second >= FED_BACK * first):
        return check
    return run.judged([*figures, *map(run.figure, wirings.singles(DEARER))])


def _tell(pair: Pair, check: WiringCheck, seconds: float) -> None:
    if check.places == 0:
        pair.report.note(SECTION, "not measured at load: the text is too short for this max_len")
    elif check.wrong:
        pair.report.warn(f"WIRING: {check.verdict()}")
    else:
        pair.report.note(SECTION, f"{check.verdict()}; {seconds:.1f} s at load, check_wiring=False leaves it out")


def _readings(pair: Pair, wirings: Wirings) -> list[Wiring]:
    """The readings of an ambiguous config, the one that was taken for now first."""
    assert pair.capture is not None
    changes = [Change("capture", name, ids) for name, ids in pair.capture.alternatives]
    made = [wirings.apply(change) for change in changes]
    return [wiring for wiring in made if wiring is not None]


def _settle(pair: Pair, check: WiringCheck) -> None:
    """Take the better of the readings, and say the figures of both."""
    assert pair.capture is not None
    best, clear = check.best, check.wrong
    if not clear and len(check.figures) > 1:
        # the first may be the better one beyond chance too
        others = [figure for figure in check.figures if figure is not check.loaded]
        clear = not any(figure in check.equals for figure in others)
        best = best if clear else max(check.figures, key=lambda figure: figure.tokens_per_cycle)
    said = "; ".join(_figure(figure) for figure in check.figures)
    boundaries, name = best.wiring.boundaries, best.wiring.changes[0].name
    verdict = "Took" if clear else "NOT DECIDED by this measurement; took"
    pair.report.warn(
        f"{pair.capture.source}: position-0 accuracy of the draft over {check.places} places of {check.source}: {said}. "
        f"{verdict} {name}: boundaries {boundaries}. capture={name!r} or capture={boundaries} settles it"
    )
    pair.capture = replace(pair.capture, boundaries=boundaries, alternatives=())


def _figure(figure: Figure) -> str:
    return f"{figure.wiring.changes[0].name} {figure.wiring.boundaries}: {figure.accuracies[0]:.1%}"
