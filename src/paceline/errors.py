"""The two ways a command can fail on purpose.

Both carry one sentence that names what is wrong, where, and what to do. `cli.main` prints it and exits with the code
given here; anything else that escapes is a bug and keeps its traceback.
"""


class UserError(Exception):
    """Bad input, found before any work is done."""

    exit_code = 2


class RunError(Exception):
    """A run that had to stop. What it had done is saved, and the message says how to go on."""

    exit_code = 1


class Stopped(RunError):
    """Somebody asked for it: the user with Ctrl-C, or a scheduler with a signal. Shells count such exits from 128."""

    def __init__(self, message: str, signal_number: int = 2):
        super().__init__(message)
        self.exit_code = 128 + signal_number
