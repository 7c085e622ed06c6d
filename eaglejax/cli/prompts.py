"""The prompts of a command line: texts, token ids, or a JSONL file of texts, ids and chat messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from absl.flags import FlagValues

from eaglejax.cli.flags import UsageError, given
from eaglejax.cli.settings import token_ids
from eaglejax.errors import PromptError

KINDS = ("prompt", "token_ids", "prompt_file")


def read_flags(flags: FlagValues) -> list[Any]:
    """All prompts as the engine takes them, checked as far as that goes without a model.

    Raises:
        UsageError: none or several kinds are given. PromptError: a prompt is empty, or a line of the file is broken.
    """
    # an empty --prompt is an empty prompt, not an unset flag
    values = {name: given(flags, name) for name in KINDS}
    chosen = [name for name in KINDS if values[name] is not None]
    if len(chosen) != 1:
        found = " and ".join(f"--{name}" for name in chosen) or "none"
        raise UsageError(f"give prompts in one way: --prompt, --token_ids or --prompt_file; found {found}")
    value = values[chosen[0]]
    if chosen == ["token_ids"]:
        prompts: list[Any] = [token_ids("token_ids", text) for text in value]
    elif chosen == ["prompt"]:
        prompts = list(value)
        if "" in prompts:
            raise PromptError("the prompt is empty", where="--prompt", found="''", expected="at least one token")
    else:
        from eaglejax.text.prompts import read_prompts

        prompts = read_prompts(Path(value))
    return [_in_conversation(prompt, bool(flags["chat"].value), given(flags, "system")) for prompt in prompts]


def _in_conversation(prompt: Any, chat: bool, system: str | None) -> Any:
    """Text as the user's message where the template is asked for; the system message before any conversation without
    one."""
    if isinstance(prompt, str) and chat:
        prompt = [{"role": "user", "content": prompt}]
    if system is None:
        return prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        raise UsageError("--system needs a conversation: chat messages in the prompt file, or text with --chat")
    return prompt if prompt[0]["role"] == "system" else [*system_message(system), *prompt]


def require_tokenizer(model: str, where: str) -> None:
    """Refuse text for a model without a tokenizer before its weights are read.

    Arguments: `model` as in `EagleJaxEngine.from_pretrained`; `where`, the flag that needs text.
    Raises PromptError, or CheckpointError and ConfigError where the model is not there or is no target at all.
    """
    from eaglejax.checkpoint.builtin import builtin_names
    from eaglejax.checkpoint.difference_base import difference_folder
    from eaglejax.checkpoint.reader import open_checkpoint
    from eaglejax.checkpoint.source import resolve
    from eaglejax.text.tokenizer import has_tokenizer

    if model in builtin_names():
        return
    source = resolve(model)
    # these have the tokenizer elsewhere than beside the weights
    elsewhere = source.kind == "gguf" or difference_folder(source.path) is not None
    reader = open_checkpoint(source.path) if elsewhere else None
    if has_tokenizer(source.folder, reader):
        return
    from eaglejax.checkpoint.target_loader import open_target

    open_target(source.path)  # a folder that holds no target at all is the better message
    raise PromptError(
        "this checkpoint has no tokenizer",
        where=model,
        found=f"text ({where})",
        expected="tokenizer.json or tiktoken.model in its folder",
        fix="put the model's tokenizer.json there; without one, 'eaglejax generate --token_ids=1,2,3' works, without --stop",
    )


def text_flag(prompts: list[Any], stop: Any) -> str | None:
    """The flag for which these prompts and stop strings need a tokenizer, or None where token ids are all there is."""
    if any(isinstance(prompt, str) or not isinstance(prompt[0], int) for prompt in prompts):
        return "the prompt"
    return "--stop" if stop else None


def system_message(text: str | None) -> list[dict[str, Any]]:
    """The beginning of a conversation: the system message, or nothing."""
    return [] if text is None else [{"role": "system", "content": text}]
