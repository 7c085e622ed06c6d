"""Errors that say what is wrong, where, what was found, what was expected and what to do."""


class EagleJaxError(ValueError):
    """Base of every refusal of EagleJax.

    Arguments:
        what: the fault in one sentence.
        where: file, config key or argument at fault.
        found: the value that was met.
        expected: the value that would be right.
        fix: what the user can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        found: object = None,
        expected: object = None,
        fix: str | None = None,
    ):
        self.what, self.where, self.found, self.expected, self.fix = (
            what,
            where,
            found,
            expected,
            fix,
        )
        parts = [what if where is None else f"{where}: {what}"]
        if found is not None:
            parts.append(f"found {found}")
        if expected is not None:
            parts.append(f"expected {expected}")
        if fix is not None:
            parts.append(fix)
        super().__init__("; ".join(parts))


class CheckpointError(EagleJaxError):
    """A file of a checkpoint is missing, corrupt, or does not fit its config."""


class ConfigError(EagleJaxError):
    """A configuration value or an argument is impossible or not supported."""


class PromptError(EagleJaxError):
    """A prompt cannot be served: empty, too long, or with ids out of range."""
