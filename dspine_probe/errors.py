"""The two faults a user can meet, and the exit status each leads to.

Both carry one sentence that names what was given, what is allowed and what to do instead. The command line prints
that sentence alone; in Python they behave as the built-in errors they derive from.
"""


class UsageError(ValueError):
    """The request itself cannot be met: unknown name, wrong option, malformed input. Exit status 2."""


class ProbeError(RuntimeError):
    """The request was sound but could not be carried out: broken file, full disk, missing package. Exit status 1."""
