"""Saving a run at the end, on the way and when something stops it, and the sentence that says how to resume it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.errors import RunError, Stopped, UserError, WorkerFailed
from paceline.observe.hooks import CallbackFailed
from paceline.process.stopping import Interrupted
from paceline.run.checkpoints import Progress, checkpoint_name
from paceline.run.directory import Run
from paceline.run.state import write_end

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster
    from paceline.model.tokenizer import Tokenizer
    from paceline.observe.live import LiveView
    from paceline.process.stopping import Stopping
    from paceline.run.records import StepRecorder


class RunSaver:
    def __init__(
        self,
        run: Run,
        cluster: Cluster,
        tokenizer: Tokenizer,
        progress: Progress,
        recorder: StepRecorder,
        view: LiveView,
    ):
        self.run = run
        self.cluster = cluster
        self.tokenizer = tokenizer
        self.progress = progress
        self.recorder = recorder
        self.view = view

    @contextmanager
    def save_on_stop(self, stopping: Stopping) -> Iterator[None]:
        """While steps are made: whatever ends them early, what there is gets saved, and the error says how to
        resume."""
        try:
            yield
        except Interrupted as stop:
            self.cluster.clear()
            self.save_once()
            raise stopped(self.run, stopping, f"stopped after step {self.progress.step}") from stop
        except OSError as err:
            raise self.run.disk_error(err) from err
        except RunError:
            raise
        except Exception as err:
            raise self.failure(err) from err

    def save(self) -> None:
        self.view.part("save_checkpoint")
        started = time.time()
        before = time.perf_counter()
        self.run.save(self.cluster.save, self.tokenizer, self.progress)
        self.recorder.on_save(started, time.perf_counter() - before, self.progress.step)

    def stop_if_one_failed(self) -> None:
        """An error in a worker stops the run, also one in saving that the others could make up for."""
        failure = self.cluster.save_failure
        self.cluster.save_failure = None
        if failure is not None:
            raise failure

    def save_once(self) -> None:
        """Unless this step is saved already."""
        if self.run.newest_checkpoint() != self.run.checkpoints / checkpoint_name(self.progress.step):
            self.save()

    def save_if_whole(self) -> str:
        """Save, unless the policy is half updated -> what there is to resume from."""
        if not self.cluster.updating:
            try:
                self.cluster.clear()
                self.save()
            except Exception as err:  # noqa: BLE001 (reported here and in the log; what stopped the run comes first)
                self.run.write_error("while saving", traceback.format_exc())
                self.view.note(f"the run could not be saved: {err}")
            else:
                return f"the run is saved after step {self.progress.step}"
        return self.run.last_saved()

    def failure(self, err: Exception) -> RunError:
        """Something failed in the middle of a run: save what there is -> the sentence to stop with. A traceback goes to
        a file, unless the error is a sentence that says all."""
        if isinstance(err, UserError):
            return self.fix_and_resume(str(err))
        sentence, trace = describe_error(err)
        file = self.run.write_error(sentence, trace)
        saved = self.save_if_whole()
        write_end(self.run.folder, "failed", sentence)
        return RunError(
            f"{sentence}; {saved}; the traceback is in {file}; fix it and resume with: {self.run.resume_command}"
        )

    def fix_and_resume(self, sentence: str, otherwise: str = "") -> RunError:
        """Save what there is -> the sentence with what to do."""
        saved = self.save_if_whole()
        write_end(self.run.folder, "failed", sentence)
        return RunError(f"{sentence}; {saved}; fix it and resume with: {self.run.resume_command}{otherwise}")

    def check_update(self, metrics: dict[str, float], limit: int) -> None:
        """Note an update that was skipped because it was not finite; after `limit` of them in a row the run is saved
        and stops."""
        if not metrics["actor/skipped"]:
            self.progress.bad_updates = 0
            return
        self.progress.bad_updates += 1
        step = self.progress.step
        self.view.note(f"step {step + 1}: the loss or its gradient was not finite, so the update was skipped")
        if self.progress.bad_updates >= limit:
            self.save()
            write_end(self.run.folder, "failed", f"{limit} updates in a row were not finite")
            raise RunError(
                f"{limit} updates in a row were not finite (learn.max_bad_updates); the policy before them is saved "
                f"after step {step}; try a lower learn.lr and resume with: {self.run.resume_command}"
            )


@contextmanager
def starting(run: Run, is_new: bool) -> Iterator[None]:
    """While a run is started: if that fails, a new one leaves no directory behind, and what nobody expected leaves its
    traceback in a file."""
    try:
        yield
    except UserError:
        if is_new:
            run.discard()  # nothing has happened in it yet
        raise
    except RunError:
        raise
    except Exception as err:
        sentence, trace = describe_error(err)
        file = run.discard_for(sentence, trace) if is_new else run.write_error(sentence, trace)
        raise RunError(f"the run could not be started: {sentence}; the traceback is in {file}") from err


def stopped(run: Run, stopping: Stopping, when: str) -> Stopped:
    """What is said last of a run that was asked to stop."""
    assert stopping.number is not None, "somebody asked"
    write_end(run.folder, "stopped", when)
    return Stopped(f"{when}; resume with: {run.resume_command}", stopping.number)


def describe_error(err: Exception) -> tuple[str, str]:
    """The sentence and the traceback of an error, in this process or in a worker."""
    if isinstance(err, WorkerFailed):
        return str(err), err.trace
    if isinstance(err, CallbackFailed):
        return str(err), traceback.format_exc()
    return f"{type(err).__name__}: {err}", traceback.format_exc()
