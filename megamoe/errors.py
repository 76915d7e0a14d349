"""The one exception that stands for a user's mistake."""


class UserError(ValueError):
    """Bad input: a key, a file or a combination that the user can put right.

    The message is one line that names the key or file, the value found, what was expected and
    the way out. Entry points print it without a traceback and exit with code 2; everything else
    that is raised is a defect of the program and keeps its traceback.
    """
