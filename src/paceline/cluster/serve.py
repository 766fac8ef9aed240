"""The life of a worker: take calls, do what there is to do in between, say how it goes."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from safetensors import SafetensorError

from paceline.cluster.coordinator import Report
from paceline.cluster.messages import Call, Failed, Post, Returned
from paceline.cluster.peers import PeerLost
from paceline.cluster.worker import Worker
from paceline.config import Config
from paceline.errors import UserError

Inbox = Callable[[bool], Call | None]
"""Gives the next call; waits for one if asked to. Raises EOFError when there will be none any more."""


def serve(config: Config, post: Post, inbox: Inbox, tell: Callable[[Report], None]) -> None:
    me = (post.number, post.life)
    try:
        worker = Worker(config, post, tell)
    except UserError as err:
        tell(Failed(*me, None, "user", str(err)))
        return
    except Exception:  # noqa: BLE001 (it is told to the driver, which ends the run)
        tell(Failed(*me, None, "error", traceback.format_exc()))
        return
    tell(worker.ready())
    number = None
    try:
        while True:
            call = inbox(not worker.busy)
            number = call.number if call else None
            if call is None:
                worker.turn()
                continue
            try:
                value = getattr(worker, call.name)(*call.args)
            except PeerLost as err:  # the others form a new circle, with this worker in it
                tell(Failed(*me, number, "peer", str(err)))
                continue
            except (OSError, SafetensorError) as err:
                if call.name not in ("save", "settle"):  # which write what a run keeps
                    raise
                tell(Failed(*me, number, "disk", str(err)))
                continue
            if number is not None:
                tell(Returned(*me, number, value))
    except EOFError:  # the driver is gone
        return
    except UserError as err:
        tell(Failed(*me, number, "user", str(err)))
    except Exception:  # noqa: BLE001 (as above)
        tell(Failed(*me, number, "error", traceback.format_exc()))
