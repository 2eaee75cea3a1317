"""The one error that the command line shows without a traceback."""


class InputError(ValueError):
    """A configuration, corpus or folder that cannot be used; the message says why and what to do."""
