"""Texts to judge a draft by: what the target itself answers, or a passage that every tokenizer can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eaglejax.config import Sampling
from eaglejax.generation import Generation
from eaglejax.loading import Pair
from eaglejax.measure.prompt_sets import read_prompts
from eaglejax.measure.teacher_forced import Text
from eaglejax.text.prompts import parse_prompts

PROMPTS = 8
RANDOM_TOKENS = 16
LONGEST_PROMPT = 128
SETS = ("mt_bench", "gsm8k", "humaneval", "qa")
Generate = Callable[..., list[Generation]]

QUESTION = "Why is the sky blue, and why are sunsets red?"
ANSWER = """The sky is blue because of the way that sunlight is scattered by the air. Sunlight looks white, but it is made of all the \
colors of the rainbow, and each color has its own wavelength. When the light enters the atmosphere, it meets molecules of nitrogen and \
oxygen, which are much smaller than the wavelength of light. They scatter short wavelengths, such as blue and violet, much more than \
long ones, such as red. This is called Rayleigh scattering. The blue light is scattered in all directions, so that it reaches our eyes \
from every part of the sky. At sunset the sun is low, and its light has to travel through much more air before it reaches us. Most of \
the blue light has been scattered out of the way by then, and what is left is orange and red. Dust and water in the air can make the \
colors even stronger. In short:
1. The air scatters blue light more than red light.
2. During the day, we see the scattered blue light.
3. In the evening, we see the red light that is left."""


def prompt_ids(pair: Pair, max_len: int, count: int = PROMPTS) -> tuple[list[list[int]], str]:
    """Token ids of `count` prompts and what they are, in words: built-in ones where there is a tokenizer, else random ids.

    A prompt longer than half of `max_len` is cut to that.
    """
    vocab = pair.target.config.vocab_size
    room = max(min(LONGEST_PROMPT, max_len // 2), 1)
    if pair.tokenizer is None:
        rows = np.random.default_rng(0).integers(0, vocab, (count, min(RANDOM_TOKENS, room)))
        return rows.tolist(), "after random ids (no tokenizer)"
    chat = pair.tokenizer.chat is not None
    each = -(-count // len(SETS))
    contents = [prompt.content for name in SETS for prompt in _short(name, each, chat)][:count]
    ids = parse_prompts(contents, pair.tokenizer, vocab_size=vocab, max_len=2**31 - 1)
    return [row[:room] for row in ids], "to built-in prompts"


def _short(name: str, count: int, chat: bool) -> list[Any]:
    """The shortest prompts of a set, in the order of the set."""
    prompts = read_prompts(name, chat=chat)
    shortest = sorted(prompts, key=lambda prompt: len(str(prompt.content)))[:count]
    return sorted(shortest, key=lambda prompt: prompt.number)


def own_texts(answers: Sequence[Generation], eos_ids: Sequence[int]) -> list[Text]:
    """The target's answers as texts, each up to its first end of text."""
    texts = []
    for answer in answers:
        ids = answer.token_ids
        ends = [index for index, token in enumerate(ids) if token in eos_ids]
        kept = ids[: ends[0] + 1] if ends else ids
        texts.append(Text(answer.prompt_token_ids + kept, len(answer.prompt_token_ids)))
    return texts


def sampled(pair: Pair, generate: Generate, max_len: int) -> tuple[list[Text], str]:
    """Texts of the target's own making after random ids, by seeded sampling: for a target without a tokenizer."""
    starts = np.random.default_rng(0).integers(0, pair.target.config.vocab_size, 4)
    asked = Sampling(max_new_tokens=min(80, max_len - 1), temperature=1.0, seed=0, ignore_eos=True)
    answers = generate([[int(i)] for i in starts], asked, speculation=None)
    texts = [Text(answer.prompt_token_ids + answer.token_ids, 1) for answer in answers]
    return texts, "text that the target drew after random ids (no tokenizer)"


def passage(pair: Pair, max_len: int) -> tuple[list[Text], str] | None:
    """A passage that comes with the package, as an answer in the model's chat template where it has one; None without a tokenizer."""
    if pair.tokenizer is None:
        return None
    start = (
        pair.tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])
        if pair.tokenizer.chat is not None
        else pair.tokenizer.encode(QUESTION)
    )
    ids = (start + pair.tokenizer.encode(ANSWER))[:max_len]
    vocab = pair.target.config.vocab_size
    if not ids or max(ids) >= vocab:
        return None
    return [Text(ids, min(len(start), len(ids)))], "a built-in passage"
