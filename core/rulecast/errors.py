"""Errors that end a command."""


class UsageError(Exception):
    """Bad input at start-up: a flag, a file, a certificate, an address.

    `str()` is one clear line that names what is wrong and where; the command prints it and exits with 2.
    """
