"""The main loop of a worker: take calls, do what there is to do in between, say how it goes.

An error is not a death: it is reported with its traceback and with what the worker was doing, and the worker stays, so
that the driver can still have it save its part of the run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from paceline.cluster.messages import LOADING, Call, Failed, Returned, WorkerSpec
from paceline.cluster.peers import PeerLost
from paceline.cluster.worker import Worker
from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.cluster.coordinator import Report
    from paceline.config import Config

Inbox = Callable[[bool], Call | None]
"""Gives the next call; waits for one if asked to. Does not return when the driver is gone."""
WRITES = ("save", "accept_drafter")  # calls that write what a run keeps


def serve(config: Config, spec: WorkerSpec, inbox: Inbox, tell: Callable[[Report], None]) -> None:
    try:
        worker = Worker(config, spec, tell)
    except Exception as err:  # noqa: BLE001 (reported to the driver, which ends the run)
        tell(failure(spec, None, LOADING, err))
        return
    tell(worker.ready())
    while True:
        call = inbox(not worker.busy)
        doing = call.name if call else worker.doing
        number = call.number if call else None
        value = None
        try:
            if call:
                value = getattr(worker, call.name)(*call.args)
            else:
                worker.run_once()
        except PeerLost as err:  # the others form a new process group, with this worker in it
            tell(failure(spec, number, doing, err))
            continue
        except Exception as err:  # noqa: BLE001 (as above)
            worker.abandon()
            tell(failure(spec, number, doing, err))
            continue
        if number is not None:
            tell(Returned(spec.number, spec.generation, number, value))


def failure(spec: WorkerSpec, call: int | None, doing: str, err: Exception) -> Failed:
    """The report of an exception to the driver; called where it is handled."""
    unreachable: tuple[int, ...] = getattr(err, "unreachable", ())
    sentence = str(err).strip().partition("\n")[0]
    if isinstance(err, PeerLost):
        kind = "peer"
    elif isinstance(err, UserError):
        kind = "user"
    elif isinstance(err, OSError | SafetensorError) and doing in WRITES:
        kind = "disk"
    else:
        kind = "error"
        sentence = f"{type(err).__name__}: {sentence}" if sentence else type(err).__name__
    trace = traceback.format_exc()
    return Failed(spec.number, spec.generation, call, doing, kind, sentence, trace, unreachable)  # type: ignore[arg-type]
