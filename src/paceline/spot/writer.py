"""The newest version of the drafter, in a folder of the run, written by a thread while decoding goes on.

It is there before the first checkpoint is, and can be exported or served at any time. A resumed run starts from its
checkpoint, which has the drafter that belongs to its policy. What goes wrong with it is raised when the next one is to
be written, or is reported when the process ends; a disk that does not answer is waited for only so long.
"""

from __future__ import annotations

import atexit
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.draft.eagle.files import DrafterFiles, files_of, write_files

if TYPE_CHECKING:
    from paceline.draft.eagle.model import EagleModel

WRITE_DEADLINE_S = 600.0  # seconds that a drafter of some gigabytes may take to be written


class DrafterWriter:
    def __init__(self, folder: Path, deadline_s: float = WRITE_DEADLINE_S):
        self.folder = folder
        self.deadline_s = deadline_s
        self._writing: Future[None] | None = None

    def write(self, drafter: EagleModel) -> bool:
        """Copy it to the host and have it written -> whether it will be: not while an older one still is. What went
        wrong with that is raised here."""
        if self._writing is not None and not self._writing.done():
            return False
        self.wait()
        self._writing = Future()
        # A daemon, so that the process can end when the disk does not answer; `close` waits for it in time.
        work = threading.Thread(
            target=self._run, args=(self._writing, files_of(drafter)), name="write-drafter", daemon=True
        )
        atexit.unregister(self.close)
        atexit.register(self.close)
        work.start()
        return True

    def wait(self) -> None:
        """Until what was begun is written."""
        if self._writing is None:
            return
        try:
            self._writing.result(self.deadline_s)
        except TimeoutError as err:
            if self._writing.done():  # it is the disk's own
                self._writing = None
                raise
            # It stays begun: nothing else may be written into the same folder.
            raise TimeoutError(
                f"{self.folder} was not written within {self.deadline_s:.0f} s; see to its disk"
            ) from err
        except BaseException:
            self._writing = None
            raise
        self._writing = None

    def close(self) -> None:
        """The process ends: wait for what is being written, and tell what went wrong with it, for nobody else will."""
        try:
            self.wait()
        except Exception as err:  # noqa: BLE001 (it is reported, and there is nothing left that it could stop)
            print(f"the newest drafter could not be written to {self.folder}: {err}", file=sys.stderr)

    def _run(self, writing: Future[None], files: DrafterFiles) -> None:
        try:
            self._write(files)
        except BaseException as err:  # noqa: BLE001 (`wait` raises it)
            writing.set_exception(err)
        else:
            writing.set_result(None)

    def _write(self, files: DrafterFiles) -> None:
        """Aside first: whoever reads the folder meanwhile finds the older version whole."""
        aside = self.folder / ".partial"
        write_files(files, aside)
        for file in sorted(aside.iterdir(), reverse=True):  # the weights first; versions differ in nothing else
            file.replace(self.folder / file.name)
        aside.rmdir()
