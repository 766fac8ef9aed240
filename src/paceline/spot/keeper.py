"""The newest version of the drafter, in a folder of the run, written by a thread while decoding goes on.

It is there before the first checkpoint is, and can be exported or served at any time. A resumed run goes on from its
checkpoint, which has the drafter that belongs to its policy.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from paceline.draft.neural import DrafterFiles, NeuralDrafter, files_of, write_files


class Keeper:
    def __init__(self, folder: Path):
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, "keep-drafter")
        self._writing: Future[None] | None = None

    def keep(self, drafter: NeuralDrafter) -> bool:
        """Copy it to the host and have it written -> whether it will be: not while an older one still is. What went
        wrong with that is raised here."""
        if self._writing is not None and not self._writing.done():
            return False
        self.wait()
        self._writing = self._thread.submit(self._write, files_of(drafter))
        return True

    def wait(self) -> None:
        """Until what was begun is written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, files: DrafterFiles) -> None:
        """Aside first: whoever reads the folder meanwhile finds the older version whole."""
        aside = self.folder / ".partial"
        write_files(files, aside)
        for file in sorted(aside.iterdir(), reverse=True):  # the weights first; versions differ in nothing else
            file.replace(self.folder / file.name)
        aside.rmdir()
