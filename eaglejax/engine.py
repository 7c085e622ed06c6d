"""`EagleJaxEngine`: a target, a draft, and everything a user asks of the pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglejax.adaptive import UNTUNED, Adaptive
from eaglejax.config import Auto, Real, Sampling, Speculation, whole_number, yes_or_no
from eaglejax.drafting import check_tree, view
from eaglejax.errors import ConfigError, PromptError
from eaglejax.generation import Chunk, DraftScore, Generation, Score, Tree
from eaglejax.load_report import LoadReport
from eaglejax.loading import Pair, load_pair
from eaglejax.measure.tuning import Tuning, stored_path
from eaglejax.models.draft import Draft
from eaglejax.requests import make_jobs, seeded, text_ids
from eaglejax.setting import OWN, Override, Own, Setting, trees_of
from eaglejax.sharding.fit import Capacity
from eaglejax.sharding.mesh import build_mesh
from eaglejax.sharding.processes import agree, in_step, telling
from eaglejax.sharding.rules import DraftPlacement, ExpertSplit, Placement
from eaglejax.speculation.programs import Programs
from eaglejax.speculation.simulated import SimulatedAcceptance
from eaglejax.teacher import Teacher
from eaglejax.text.chat import parse_messages
from eaglejax.text.prompts import parse_prompts
from eaglejax.text.tokenizer import Tokenizer
from eaglejax.wave import Job, Wave

if TYPE_CHECKING:
    from eaglejax.measure.check import CheckReport
    from eaglejax.measure.profile_result import Profile


class EagleJaxEngine:
    """Decodes with a target model and, where one is given, an EAGLE-3 draft. Made by `from_pretrained`."""

    def __init__(
        self,
        pair: Pair,
        *,
        speculation: Setting = "auto",
        max_len: int = 2048,
        slots: int = 4,
        simulated: SimulatedAcceptance | None = None,
        tuning: str = "auto",
    ):
        self._pair, self.max_len, self.slots, self.simulated = pair, max_len, slots, simulated
        self._tuning = tuning
        self._adaptive = Adaptive(pair, slots, tuning) if pair.draft is not None else None
        self.speculation = self.check_speculation(speculation)
        self._programs: dict[Speculation | Auto, Programs] = {}
        self._teacher = Teacher(pair.target, pair.draft, pair.mesh)

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        draft: str | None = None,
        speculation: Setting = "auto",
        capture: str | Sequence[int] = "auto",
        draft_config: Mapping[str, Any] | None = None,
        mesh: Any = None,
        dtype: str = "float32",
        max_len: int = 2048,
        slots: int = 4,
        draft_placement: DraftPlacement = "replicated",
        expert_split: ExpertSplit = "auto",
        tuning: str = "auto",
        check_wiring: bool = True,
    ) -> EagleJaxEngine:
        """Load a target and a draft, and check that they fit.

        Arguments:
            model: a built-in name ("smollm2"), a folder in Hugging Face format, a .gguf file, or a hub id.
            draft: likewise for the draft; None is plain decoding.
            speculation: the tree of every cycle; "auto" (chosen as it goes among a few trees and plain decoding, docs/tune.md; plain
                decoding without a draft), or an `Auto` with trees of your own; None for plain decoding.
            capture: how the draft's config numbers the captured layers: "auto", "input" (id i is the input of layer i), "output", or the
                boundaries themselves, such as (3, 31, 59). Boundary b is the residual stream after b blocks.
            draft_config: keys of the draft's config.json to replace, such as {"rope_theta": 10000.0} or {"norm_output": False}.
            mesh: None for one device, text such as "model=8" or "data=2,model=4", or a jax Mesh with those axes. Weights are split over
                "model", slots over "data".
            dtype: "float32" or "bfloat16", of weights and caches.
            max_len: tokens of prompt and answer at most.
            slots: requests decoded together at most; more run in waves.
            draft_placement: on a mesh, "replicated" (a copy of the draft on every device, no collective while drafting) or "sharded".
            expert_split: on a mesh, "experts" (each device holds whole experts), "width" (a part of each), "auto" (the first that
                divides).
            tuning: what "auto" decides by: "auto" (a stored tuning of this pair and machine, else costs measured when a number of slots
                first decodes), "measure" (no stored one), "none" (nothing measured), or the path of a tuning.
            check_wiring: measure on a short text, where there is a tokenizer, whether another wiring of the draft (captures, norms, map
                of its vocabulary) is better than the loaded one, and warn; `check` looks closer. False leaves that out.

        Raises:
            CheckpointError, ConfigError: before any compile; the message says what, where, found, expected and what to do. Weights and
                caches that cannot fit the free memory are refused before a weight is read.
        """
        if dtype not in ("float32", "bfloat16"):
            raise ConfigError("not a compute dtype", where="dtype", found=dtype, expected='"float32" or "bfloat16"')
        max_len, slots = whole_number("max_len", max_len, 1), whole_number("slots", slots, 1)
        check_wiring = yes_or_no("check_wiring", check_wiring)
        if draft is None and isinstance(speculation, Speculation) and speculation.num_steps:
            raise ConfigError(
                "a tree needs a draft",
                where="speculation",
                found=speculation.describe(),
                fix="pass draft=, or speculation=None",
            )
        placement = Placement(expert_split, draft_placement)
        made_of = (
            str(model),
            draft and str(draft),
            speculation,
            capture,
            draft_config,
            dtype,
            max_len,
            slots,
            placement,
            tuning,
            check_wiring,
        )
        agree("from_pretrained", made_of)
        with telling("from_pretrained"):
            pair = load_pair(
                model,
                draft,
                capture=capture,
                dtype=dtype,
                draft_config=draft_config,
                mesh=build_mesh(mesh),
                placement=placement,
                capacity=Capacity(trees_of(speculation, UNTUNED if draft is not None else None), max_len, slots),
            )
        agree("loading", "done")
        if max_len > pair.target.config.max_position > 0:
            pair.report.warn(
                f"max_len {max_len} is cut to the target's context of {pair.target.config.max_position} tokens"
            )
            max_len = pair.target.config.max_position
        engine = cls(pair, speculation=speculation, max_len=max_len, slots=slots, tuning=str(tuning))
        pair.report.note("speculation", engine.speculation.describe())
        if isinstance(engine.speculation, Auto) and engine._adaptive is not None:
            pair.report.note("speculation", engine._adaptive.describe())
        if pair.draft is not None:
            from eaglejax.measure.load_check import check_at_load

            check_at_load(pair, engine.generate, max_len, asked=check_wiring)
        return engine

    def variant(self, *, slots: int | None = None, simulated: SimulatedAcceptance | None = None) -> EagleJaxEngine:
        """The same pair, tree and max_len served with other slots, or with acceptance simulated: weights are shared, programs and caches
        are its own. For measurements: what an engine with `simulated` answers is no text of the target's."""
        slots = self.slots if slots is None else whole_number("slots", slots, 1)
        return EagleJaxEngine(
            self._pair,
            speculation=self.speculation,
            max_len=self.max_len,
            slots=slots,
            simulated=simulated,
            tuning=self._tuning,
        )

    # what was loaded

    @property
    def pair(self) -> Pair:
        """The models behind this engine, their dtype and mesh: for instruments."""
        return self._pair

    def programs(self, speculation: Setting) -> Programs:
        """The compiled programs of a tree: for instruments. Raises as `check_speculation` does."""
        return self._programs_for(self.check_speculation(speculation))

    @property
    def load_report(self) -> LoadReport:
        """What was loaded, captured, borrowed, converted and assumed, in plain words."""
        return self._pair.report

    @property
    def has_tokenizer(self) -> bool:
        """Whether the checkpoint has a tokenizer; without one, prompts and answers are token ids."""
        return self._pair.tokenizer is not None

    @property
    def vocab_size(self) -> int:
        """Ids that prompts may hold lie below: rows of the target's embedding."""
        return self._pair.target.config.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back (`text/interface.py`). Raises ConfigError where the checkpoint has none."""
        return self._pair.text_tokenizer

    # generation

    def encode(self, prompts: Any) -> list[list[int]]:
        """Token ids of prompts as `generate` takes them, refused as `generate` would refuse them.

        Raises PromptError naming the prompt: empty, too long, an id out of range, or text where there is no tokenizer.
        """
        return parse_prompts(
            prompts, self._pair.tokenizer, vocab_size=self._pair.target.config.vocab_size, max_len=self.max_len
        )

    def generate(
        self,
        prompts: Any,
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        speculation: Override = OWN,
    ) -> list[Generation]:
        """Answer every prompt.

        Arguments:
            prompts: text, token ids, chat messages, or a list of them.
            sampling: one for all prompts, or one per prompt.
            speculation: overrides the engine's setting for this call; None is plain decoding.

        Returns: one Generation per prompt, in order. More prompts than slots run in waves.

        Raises PromptError naming the prompt (empty, too long, an id out of range, text without a tokenizer), and ConfigError for a
        tree that this pair cannot grow or samplings that do not fit the prompts; both before anything runs.
        """
        with telling("generate"):
            jobs = self._jobs(prompts, sampling)
            spec = self._setting(speculation)
        agree("generate", (jobs, spec))
        jobs, programs = seeded(jobs), self._programs_for(spec)
        answers: list[Generation] = []
        for first in range(0, len(jobs), self.slots):
            answers += self._wave(programs, jobs[first : first + self.slots]).run()
        return answers

    def stream(
        self,
        prompt: Any,
        sampling: Sampling | None = None,
        *,
        speculation: Override = OWN,
        cycles: int = 2,
    ) -> Iterator[Chunk]:
        """Answer one prompt piece by piece; the last piece carries the whole Generation.

        Arguments:
            cycles: cycles of the compiled loop between two pieces.

        Raises as `generate` does, before the first piece.
        """
        with telling("stream"):
            jobs = self._jobs(prompt, sampling)
            if len(jobs) != 1:
                raise PromptError(
                    "stream takes one prompt", where="prompt", found=f"{len(jobs)} prompts", expected="one"
                )
            whole_number("cycles", cycles, 1)
            spec = self._setting(speculation)
        agree("stream", (jobs, spec, cycles))
        wave = self._wave(self._programs_for(spec), seeded(jobs))
        return in_step("a piece of a stream", (chunk for _, chunk in wave.chunks(cycles)))

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling: Sampling | None = None,
        *,
        speculation: Override = OWN,
    ) -> Generation:
        """The answer to one conversation: messages of {"role": .., "content": ..}, through the checkpoint's own chat template.

        Raises as `generate` does, and CheckpointError where the checkpoint has no chat template.
        """
        return self.generate([parse_messages(messages)], sampling, speculation=speculation)[0]

    def use_draft(self, draft: Draft) -> None:
        """Serve other weights of the draft's own shape from now on, as training makes them; nothing is compiled anew.

        Raises ConfigError where the engine has no draft, or one of another shape.
        """
        own, _ = self._need_draft()
        if own.config != draft.config or own.dtype != draft.dtype:
            raise ConfigError("not of the shape of the engine's draft", where="draft", found=draft.config)
        self._pair.draft = draft
        if self._adaptive is not None:
            self._adaptive.forget()
        for programs in self._programs.values():
            programs.use_draft(draft)
        self._teacher = Teacher(self._pair.target, draft, self._pair.mesh)

    # instruments

    def tune(
        self,
        prompts: Any = None,
        *,
        max_new_tokens: int = 64,
        temperature: Real = 0.8,
        confirm: int = 3,
        store: bool = True,
        progress: Any = None,
    ) -> Tuning:
        """Measure what a cycle costs here and what the draft gets right, and choose the trees of "auto" by that (docs/tune.md).

        Arguments:
            prompts: as `generate` takes them, decoded in waves of the engine's slots; None: built-in ones.
            max_new_tokens: of each prompt's answer in the calibration.
            temperature: of the second class of requests; 0 leaves that out.
            confirm: settings of each class to run beside plain decoding: the best three, further ones spread over the rest.
            store: keep it in the user's cache folder, where engines of the same pair on the same machine find it.
            progress: makes a context with a function to advance, from a title and a total, as the runner's bars are.

        Returns: the tuning; this engine's "auto" uses it from now on.

        Raises ConfigError without a draft, with several processes, and where answers are too short to learn from.
        """
        from eaglejax.measure.tune import default_prompts, tune

        given = default_prompts(self) if prompts is None else self.encode(prompts)
        was = self._adaptive.auto if self._adaptive is not None and isinstance(self.speculation, Auto) else None
        tuning = tune(
            self, given, max_new_tokens=max_new_tokens, temperature=temperature, confirm=confirm, progress=progress
        )
        if store:
            tuning.save(stored_path(tuning.holds_for))
        assert self._adaptive is not None
        self._adaptive.use(tuning)
        if self.speculation == was:
            self.speculation = tuning.auto
        return tuning

    def profile(
        self,
        prompts: Any,
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        speculation: Override = OWN,
        repeats: int = 3,
        trace_dir: str | Path | None = None,
        twice: bool = False,
        done: Callable[[], object] = lambda: None,
    ) -> Profile:
        """Where a cycle's time goes, phase by phase (`measure/profile.py`).

        Arguments: prompts, sampling and speculation as for `generate`, at most as many prompts as slots and no stop strings (default: 64
            new tokens each); the others as for `take_profile`. Of "auto", which changes its tree as it goes, the first tree is profiled.

        Raises as `generate` does, and ConfigError for several processes and a folder that cannot be written.
        """
        from eaglejax.measure.profile import take_profile

        jobs = seeded(self._jobs(prompts, Sampling(max_new_tokens=64) if sampling is None else sampling))
        spec = self._setting(speculation)
        return take_profile(
            self._pair,
            jobs,
            spec.trees[0] if isinstance(spec, Auto) else spec,
            self.max_len,
            self.slots,
            repeats=repeats,
            trace_dir=trace_dir,
            twice=twice,
            done=done,
        )

    def check(self, *, tokens: int = 512, wiring: bool = True, lossless: bool = True) -> CheckReport:
        """A doctor for the pair: which wiring was the draft trained for, is decoding lossless, do tables and sizes fit? (docs/check.md)

        Arguments:
            tokens: that the target writes, in all, by plain decoding; the draft is judged on them. More of them tell smaller faults.
            wiring: measure the draft under every plausible wiring. lossless: compare speculative with plain decoding.

        Returns: a report to print; `.ok` is False where something is wrong, `.wrong` says what and how it is mended.

        Raises ConfigError without a draft, for impossible tokens, and where several processes run the mesh.
        """
        from eaglejax.measure.check import check

        return check(self, tokens=tokens, wiring=wiring, lossless=lossless)

    # looking inside

    def score(self, token_ids: Sequence[int]) -> Score:
        """Teacher-forced pass of the target: logits [t, v] and the residual stream [t, d] at every boundary 0..L.

        Raises PromptError for ids that are none of the target's, and for more of them than its context.
        """
        with telling("score"):
            ids = self._ids(token_ids, 1)
        agree("score", ids)
        return self._teacher.score(ids)

    def draft_score(self, token_ids: Sequence[int]) -> DraftScore:
        """Teacher-forced pass of the draft: logits [t-1, w] and hidden [t-1, d].

        Row i has token i + 1 beside the target's features of position i. Raises as `score` does, and ConfigError without a draft.
        """
        with telling("draft_score"):
            _, boundaries = self._need_draft()
            ids = self._ids(token_ids, 2)
        agree("draft_score", ids)
        return self._teacher.draft_score(boundaries, ids)

    def propose(self, token_ids: Sequence[int], speculation: Override = OWN) -> Tree:
        """The tree the draft grows below the last token, at temperature 0; with "auto" the first of its trees.

        Raises as `draft_score` does."""
        with telling("propose"):
            draft, boundaries = self._need_draft()
            spec = self._setting(speculation)
            if isinstance(spec, Auto):
                spec = spec.trees[0]
            elif not spec.num_steps:  # an engine set to plain decoding still shows trees
                spec = UNTUNED.trees[0]
            check_tree(spec, draft.config.draft_vocab_size)
            ids = self._ids(token_ids, 2)
        agree("propose", (ids, spec))
        return view(self._teacher.propose(boundaries, ids, spec))

    def check_speculation(self, speculation: Setting) -> Speculation | Auto:
        """The tree, or the trees, that a setting stands for. Raises ConfigError where this pair cannot grow them."""
        draft = self._pair.draft
        # a stored tuning is looked for only where it is asked for
        auto = self._adaptive.auto if self._adaptive is not None and speculation == "auto" else None
        spec = trees_of(speculation, auto)
        if spec.num_steps == 0:
            return spec
        if draft is None:
            raise ConfigError(
                "a tree needs a draft", where="speculation", found=spec.describe(), fix="load the engine with draft="
            )
        for tree in spec.trees if isinstance(spec, Auto) else (spec,):
            check_tree(tree, draft.config.draft_vocab_size)
        return spec

    # inner parts

    def _setting(self, speculation: Override) -> Speculation | Auto:
        return self.speculation if isinstance(speculation, Own) else self.check_speculation(speculation)

    def _wave(self, programs: Programs, jobs: list[Job]) -> Wave:
        policy = experience = None
        if isinstance(programs.spec, Auto):
            assert self._adaptive is not None
            sampled = any(job.sampling.temperature > 0 for job in jobs)
            policy = self._adaptive.policy(programs, programs.slots_for(len(jobs), self.slots), sampled)
            experience = self._adaptive.experience(programs.spec, sampled)
        return Wave(programs, jobs, self._pair.tokenizer, self.slots, policy, experience)

    def _need_draft(self):
        if self._pair.draft is None:
            raise ConfigError("no draft was loaded", where="draft", fix="load the engine with draft=")
        assert self._pair.capture is not None
        return self._pair.draft, self._pair.capture.boundaries

    def _programs_for(self, spec: Speculation | Auto) -> Programs:
        if spec not in self._programs:
            boundaries = self._pair.capture.boundaries if self._pair.capture is not None else ()
            self._programs[spec] = Programs(
                self._pair.target,
                self._pair.draft,
                boundaries,
                spec,
                self.max_len,
                self._pair.dtype,
                self._pair.mesh,
                self.simulated,
            )
        return self._programs[spec]

    def _jobs(self, prompts: Any, sampling: Sampling | Sequence[Sampling] | None) -> list[Job]:
        return make_jobs(self._pair, self.encode(prompts), sampling)

    def _ids(self, token_ids: Sequence[int], least: int) -> list[int]:
        return text_ids(self._pair.target.config, token_ids, least)
