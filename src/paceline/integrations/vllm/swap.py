"""Exchanging a running engine's drafter: all of its workers take the new one, or all keep the one before."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import RunError, Sentence, UserError
from paceline.integrations.vllm.drafter_folder import DrafterFolder
from paceline.integrations.vllm.online import NewVersion
from paceline.integrations.vllm.same_shape import difference

LOAD = "paceline_load_drafter"
LOADED_FROM = "paceline_loaded_from"


def refuse_other_shape(folder: Path, started_with: Path) -> None:
    """Refuse a drafter that an engine could not take, by the one that it was started with."""
    found = difference(folder, started_with)
    if found is not None:
        raise UserError(found)


class Swap:
    def __init__(
        self,
        llm: Any,
        place: DrafterFolder,
        drafter: Path,
        version: int,
        report: Callable[[str], None],
        deadline_s: float,
    ):
        self.version = version
        """Of the drafter that the engine has."""
        self._llm = llm
        self._place = place
        self._folder = drafter  # of the one that the engine has
        self._report = report
        self._deadline_s = deadline_s

    def again(self) -> None:
        """Load once more what the engine should have; a RunError says what went wrong."""
        failed = next((problem for problem in self._load(self._folder) if problem is not None), None)
        if failed is not None:
            raise RunError(f"version {self.version} of the drafter could not be loaded again: {failed}")

    def to(self, new: NewVersion) -> bool:
        """Whether the engine has it now; if not, why is reported, and generation goes on with the one before."""
        started = time.perf_counter()
        problems = self._load(Path(new.folder))
        failed = next((problem for problem in problems if problem is not None), None)
        if failed is not None:
            if any(problem is None for problem in problems):  # workers must not draft with different ones
                self._load(self._folder)
            self._report(
                f"version {new.version} of the drafter was not taken by vLLM: {failed}; generation goes on with "
                f"version {self.version}"
            )
            return False
        self.version = new.version
        self._folder = Path(new.folder)
        took = time.perf_counter() - started
        try:
            self._place.record({"version": new.version, "in_engine": True, "swap_seconds": round(took, 4)})
        except Sentence as err:
            self._report(f"{err}; the engine has version {new.version} of its drafter")
        return True

    def _load(self, folder: Path) -> list[str | None]:
        """What each worker says."""
        try:
            return self._llm.collective_rpc(LOAD, timeout=self._deadline_s, args=(str(folder),))
        except TimeoutError:
            return [f"a worker did not answer within {self._deadline_s:.0f} s"]
        except Exception as err:  # noqa: BLE001 (vLLM raises anything from a worker; the engine tells by itself if it is dead)
            return [f"{type(err).__name__}: {err}"]
