"""`EagleJaxEngine`: a target, a draft, and everything a user asks of the pair."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eaglejax.capture_probe import settle_capture
from eaglejax.config import Sampling, Speculation, whole_number
from eaglejax.drafting import check_tree, view
from eaglejax.errors import ConfigError, PromptError
from eaglejax.generation import Chunk, DraftScore, Generation, Score, Tree
from eaglejax.load_report import LoadReport
from eaglejax.loading import Pair, load_pair
from eaglejax.models.draft import Draft
from eaglejax.sharding.fit import Capacity
from eaglejax.sharding.mesh import build_mesh
from eaglejax.sharding.processes import agree, from_first, in_step, telling
from eaglejax.sharding.rules import DraftPlacement, ExpertSplit, Placement
from eaglejax.speculation.programs import Programs
from eaglejax.teacher import Teacher
from eaglejax.text.chat import parse_messages
from eaglejax.text.prompts import parse_prompts
from eaglejax.text.tokenizer import Tokenizer
from eaglejax.wave import Job, Wave

if TYPE_CHECKING:
    from eaglejax.measure.profile_result import Profile

PLAIN = Speculation(num_steps=0)
# until a tree is chosen from measured costs, "auto" is this chain
AUTO = Speculation(num_steps=3, topk=1, num_draft_tokens=4)
Setting = Speculation | Literal["auto"] | None


class _Own(Enum):
    """Stands for "as the engine was set", where None means plain decoding."""

    SETTING = "the engine's own setting"


_ENGINE = _Own.SETTING
Override = Setting | _Own


def _tree(asked: Setting, drafted: bool) -> Speculation:
    """The tree a setting stands for, whether or not a draft can grow it."""
    if asked is None or (asked == "auto" and not drafted):
        return PLAIN
    spec = AUTO if asked == "auto" else asked
    if not isinstance(spec, Speculation):
        raise ConfigError(
            "not a tree", where="speculation", found=repr(asked), expected='a Speculation, "auto" or None'
        )
    return spec if spec.num_steps else PLAIN


class EagleJaxEngine:
    """Decodes with a target model and, where one is given, an EAGLE-3 draft. Made by `from_pretrained`."""

    def __init__(self, pair: Pair, *, speculation: Setting = "auto", max_len: int = 2048, slots: int = 4):
        self._pair, self.max_len, self.slots = pair, max_len, slots
        self.speculation = self._checked(speculation)
        self._programs: dict[Speculation, Programs] = {}
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
    ) -> EagleJaxEngine:
        """Load a target and a draft, and check that they fit.

        Arguments:
            model: a built-in name ("smollm2"), a folder in Hugging Face format, a .gguf file, or a hub id.
            draft: likewise for the draft; None is plain decoding.
            speculation: the tree of every cycle; "auto" (a short chain for now; plain decoding without a draft); None for plain decoding.
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

        Raises:
            CheckpointError, ConfigError: before any compile; the message says what, where, found, expected and what to do. Weights and
                caches that cannot fit the free memory are refused before a weight is read.
        """
        if dtype not in ("float32", "bfloat16"):
            raise ConfigError("not a compute dtype", where="dtype", found=dtype, expected='"float32" or "bfloat16"')
        max_len, slots = whole_number("max_len", max_len, 1), whole_number("slots", slots, 1)
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
                capacity=Capacity(_tree(speculation, draft is not None), max_len, slots),
            )
        agree("loading", "done")
        if max_len > pair.target.config.max_position > 0:
            pair.report.warn(
                f"max_len {max_len} is cut to the target's context of {pair.target.config.max_position} tokens"
            )
            max_len = pair.target.config.max_position
        engine = cls(pair, speculation=speculation, max_len=max_len, slots=slots)
        pair.report.note("speculation", engine._describe(speculation))
        if pair.capture is not None and pair.capture.alternatives:
            settle_capture(pair, engine._teacher, engine.generate, max_len)
        return engine

    # what was loaded

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
        if self._pair.tokenizer is None:
            raise ConfigError(
                "this checkpoint has no tokenizer",
                where=self._pair.name,
                expected="tokenizer.json or tiktoken.model",
                fix="use token ids",
            )
        return self._pair.tokenizer

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
        speculation: Override = _ENGINE,
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
        jobs, programs = _seeded(jobs), self._programs_for(spec)
        answers: list[Generation] = []
        for first in range(0, len(jobs), self.slots):
            answers += Wave(programs, jobs[first : first + self.slots], self._pair.tokenizer, self.slots).run()
        return answers

    def stream(
        self,
        prompt: Any,
        sampling: Sampling | None = None,
        *,
        speculation: Override = _ENGINE,
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
        wave = Wave(self._programs_for(spec), _seeded(jobs), self._pair.tokenizer, self.slots)
        return in_step("a piece of a stream", (chunk for _, chunk in wave.chunks(cycles)))

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling: Sampling | None = None,
        *,
        speculation: Override = _ENGINE,
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
        for programs in self._programs.values():
            programs.use_draft(draft)
        self._teacher = Teacher(self._pair.target, draft, self._pair.mesh)

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

    def propose(self, token_ids: Sequence[int], speculation: Override = _ENGINE) -> Tree:
        """The tree the draft grows below the last token, at temperature 0. Raises as `draft_score` does."""
        with telling("propose"):
            draft, boundaries = self._need_draft()
            spec = self._setting(speculation)
            if not spec.num_steps:  # an engine set to plain decoding still shows trees
                spec = AUTO
            check_tree(spec, draft.config.draft_vocab_size)
            ids = self._ids(token_ids, 2)
        agree("propose", (ids, spec))
        return view(self._teacher.propose(boundaries, ids, spec))

    # measuring

    def profile(
        self,
        prompts: Any,
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        speculation: Override = _ENGINE,
        repeats: int = 3,
        trace_dir: str | Path | None = None,
        twice: bool = False,
        done: Callable[[], object] = lambda: None,
    ) -> Profile:
        """Where a cycle's time goes, phase by phase (`measure/profile.py`).

        Arguments: prompts, sampling and speculation as for `generate`, at most as many prompts as slots and no stop strings (default: 64
            new tokens each); the others as for `take_profile`.

        Raises as `generate` does, and ConfigError for several processes and a folder that cannot be written.
        """
        from eaglejax.measure.profile import take_profile

        jobs = _seeded(self._jobs(prompts, Sampling(max_new_tokens=64) if sampling is None else sampling))
        return take_profile(
            self._pair,
            jobs,
            self._setting(speculation),
            self.max_len,
            self.slots,
            repeats=repeats,
            trace_dir=trace_dir,
            twice=twice,
            done=done,
        )

    # inner parts

    def _checked(self, speculation: Setting) -> Speculation:
        """The tree a setting stands for, refused where this pair cannot grow it."""
        draft = self._pair.draft
        spec = _tree(speculation, draft is not None)
        if spec.num_steps == 0:
            return spec
        if draft is None:
            raise ConfigError(
                "a tree needs a draft", where="speculation", found=spec.describe(), fix="load the engine with draft="
            )
        check_tree(spec, draft.config.draft_vocab_size)
        return spec

    def _setting(self, speculation: Override) -> Speculation:
        return self.speculation if isinstance(speculation, _Own) else self._checked(speculation)

    def _describe(self, asked: Setting) -> str:
        if asked == "auto" and self.speculation is not PLAIN:
            return f'"auto": {self.speculation.describe()}; a fixed choice, not tuned to this machine'
        return self.speculation.describe()

    def _need_draft(self):
        if self._pair.draft is None:
            raise ConfigError("no draft was loaded", where="draft", fix="load the engine with draft=")
        assert self._pair.capture is not None
        return self._pair.draft, self._pair.capture.boundaries

    def _programs_for(self, spec: Speculation) -> Programs:
        if spec not in self._programs:
            boundaries = self._pair.capture.boundaries if self._pair.capture is not None else ()
            self._programs[spec] = Programs(
                self._pair.target, self._pair.draft, boundaries, spec, self.max_len, self._pair.dtype, self._pair.mesh
            )
        return self._programs[spec]

    def _jobs(self, prompts: Any, sampling: Sampling | Sequence[Sampling] | None) -> list[Job]:
        ids = self.encode(prompts)
        given = Sampling() if sampling is None else sampling
        samplings = [given] * len(ids) if isinstance(given, Sampling) else given
        if not isinstance(samplings, list | tuple) or not all(isinstance(s, Sampling) for s in samplings):
            raise ConfigError(
                "not a Sampling", where="sampling", found=repr(sampling)[:80], expected="one, or a list of them"
            )
        if len(samplings) != len(ids):
            raise ConfigError(
                "needs as many as there are prompts, or a single one for all",
                where="sampling",
                found=f"{len(samplings)} for {len(ids)} prompts",
            )
        jobs = []
        for prompt, asked in zip(ids, samplings, strict=True):
            stops = tuple(asked.stop_token_ids) if asked.ignore_eos else (*self._pair.eos_ids, *asked.stop_token_ids)
            if asked.stop:
                _ = self.tokenizer  # stop strings need text
            jobs.append(Job(prompt, asked, asked.seed, tuple(dict.fromkeys(stops))))
        return jobs

    def _ids(self, token_ids: Sequence[int], least: int) -> list[int]:
        if isinstance(token_ids, str) or not hasattr(token_ids, "__len__"):
            raise PromptError(
                "not token ids", where="token_ids", found=repr(token_ids)[:80], expected="a list of whole numbers"
            )
        limit = self._pair.target.config.max_position or 2**31 - 1
        (ids,) = parse_prompts([list(token_ids)], None, vocab_size=self._pair.target.config.vocab_size, max_len=limit)
        if len(ids) < least:
            raise PromptError("too few tokens", where="token_ids", found=len(ids), expected=f"{least} or more")
        return ids


def _seeded(jobs: list[Job]) -> list[Job]:
    """The jobs, a fresh seed for each that has none: process 0's where there are several."""
    return [job if job.seed is not None else replace(job, seed=from_first(secrets.randbits(63))) for job in jobs]
