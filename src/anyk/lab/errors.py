"""What a user can mend."""


class LabError(Exception):
    """One sentence that names the file or the argument and says what to do.

    The command line prints it without a traceback and ends with exit code 2.
    """


class Stopped(Exception):
    """A run was asked to stop; its checkpoint is written."""
