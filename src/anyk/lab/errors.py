"""What a user can mend."""


class LabError(Exception):
    """One sentence that names the file or the argument and says what to do.

    The command line prints it without a traceback and ends with exit code 2.
    """
