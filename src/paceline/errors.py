"""The two ways a command can fail on purpose.

Both carry one sentence that names what is wrong, where, and what to do. `cli.main` prints it and exits with the code
given here; anything else that escapes is a bug and keeps its traceback.
"""


class Sentence(Exception):
    """An error whose text is one line, whatever the names and values that it quotes hold."""

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())


class UserError(Sentence):
    """Bad input, found before any work is done."""

    exit_code = 2


class RunError(Sentence):
    """A run that had to stop. What it had done is saved, and the message says how to go on."""

    exit_code = 1


class RenamedSetting(FutureWarning):
    """A setting was given by the name that it had before; the message says its present one."""


class WorkerFailed(Exception):
    """A worker raised an error. It is not lost, and would raise it again: the run is saved and stops."""

    def __init__(self, worker: int, sentence: str, trace: str):
        super().__init__(sentence)
        self.worker = worker
        self.trace = trace


class Stopped(RunError):
    """Somebody asked for it: the user with Ctrl-C, or a scheduler with a signal. Shells count such exits from 128."""

    def __init__(self, message: str, signal_number: int = 2):
        super().__init__(message)
        self.exit_code = 128 + signal_number
