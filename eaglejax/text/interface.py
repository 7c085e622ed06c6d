"""What a tokenizer does, whatever file it came in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np

from eaglejax.errors import PromptError
from eaglejax.text.backend import Backend
from eaglejax.text.chat import ChatTemplate, Message, no_template, parse_messages
from eaglejax.text.detokenizer import Detokenizer


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back.

    Arguments:
        backend: the vocabulary.
        special_ids: ids that `decode` leaves out by default (BOS, EOS, role marks, ...).
        named_ids: "bos_token", "eos_token", ... -> id, those that the checkpoint names and the vocabulary holds.
        chat: the chat template, or None.
        where: the file or folder it came from.
        notes: what was read and what was passed over, for the load report.
    """

    backend: Backend
    special_ids: frozenset[int]
    named_ids: Mapping[str, int]
    chat: ChatTemplate | None
    where: object
    notes: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        """One more than the highest id. A model's embedding may have more rows (padding), never fewer that matter."""
        return self.backend.size

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own EOS. What ends a generation is `eos.read_eos_ids`: other files have a say before it."""
        return self.named_ids.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of `bos_token`, None where the checkpoint names none."""
        return self.named_ids.get("bos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id of `pad_token`, None where the checkpoint names none."""
        return self.named_ids.get("pad_token")

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. No special token is added; special tokens written in the text are recognised (chat templates
        rely on it).

        Raises PromptError for text that is not Unicode (a lone surrogate).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                "text is not valid Unicode", found=f"a lone surrogate {text[error.start]!r} at character {error.start}"
            ) from None
        return self.backend.encode(text)

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids` [n]. Special tokens are left out unless `skip_special_tokens` is False.

        Ids that are no token (rows of a padded vocabulary) add nothing. Bytes that are no UTF-8 become U+FFFD.
        """
        ids = np.asarray(ids).tolist() if hasattr(ids, "__array__") else ids
        stream = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return stream.push(ids) + stream.flush()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder: ids in, text out."""
        return Detokenizer(self.backend, self.special_ids if skip_special_tokens else frozenset())

    def token(self, token_id: int) -> str | None:
        """The token as its file writes it (byte-level tokens in their letters), or None for an id that is no token."""
        return self.backend.token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of a token as its file writes it, or None."""
        return self.backend.token_id(token)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text of chat messages by the checkpoint's template.

        Raises PromptError for malformed messages, CheckpointError where there is no template.
        """
        checked = parse_messages(messages)
        if self.chat is None:
            raise no_template(self.where)
        return self.chat.render(checked, add_generation_prompt=add_generation_prompt, **variables)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of chat messages. The template writes its own special tokens; none is added, so BOS is never doubled."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables))
