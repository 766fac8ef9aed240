"""Runs first in every Python process that has this folder on its path: plants the fault that PACELINE_FAULT names, as
`worker:what:call:kind`, in the worker with that number or in `any`, which raises in that call of the method; once: the
file that PACELINE_FAULT_MARK names then exists. Workers also get a call that says back what they are told."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys

WHAT = {
    "assign": ("paceline.cluster.worker", "Worker", "assign"),
    "round": ("paceline.rollout.engine", "RolloutEngine", "step"),
    "ahead": ("paceline.cluster.worker_ahead", "WorkerAhead", "step"),
    "training": ("paceline.spot.learning", "DrafterLearning", "step"),
    "spend": ("paceline.spot.learning", "DrafterLearning", "train_for"),
    "gradients": ("paceline.learn.learner", "Learner", "gradients"),
    "apply": ("paceline.learn.learner", "Learner", "apply"),
    "save": ("paceline.cluster.worker", "Worker", "save"),
    "merge": ("paceline.cluster.worker", "Worker", "merge_drafters"),
}


def plant(module: object, owner: str, method: str, call: int, kind: str) -> None:
    cls = getattr(module, owner)
    work = getattr(cls, method)
    calls = 0

    def failing(*args: object, **more: object) -> object:
        nonlocal calls
        if me() and not os.path.exists(os.environ["PACELINE_FAULT_MARK"]):
            calls += 1
            if calls == call and marked():
                if kind == "user":
                    from paceline.errors import UserError

                    raise UserError("planted: set something else")
                raise ValueError("planted fault")
        return work(*args, **more)

    setattr(cls, method, failing)


def me() -> bool:
    """Whether this process is the worker that is to fail."""
    number = os.environ["PACELINE_FAULT"].split(":")[0]
    worker = sys.modules.get("paceline.cluster.worker")
    return worker is not None and number in ("any", str(getattr(worker, "NUMBER", None)))


def marked() -> bool:
    """Whether it was this process that has left the mark."""
    try:
        os.close(os.open(os.environ["PACELINE_FAULT_MARK"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        _, what, call, kind = os.environ["PACELINE_FAULT"].split(":")
        module, owner, method = WHAT[what]
        if name not in (module, "paceline.cluster.worker"):
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def then_plant(made):
            execute(made)
            if name == "paceline.cluster.worker":
                init = made.Worker.__init__

                def remember(self, config, spec, tell):
                    made.NUMBER = spec.number
                    init(self, config, spec, tell)

                made.Worker.__init__ = remember
                made.Worker.echo = lambda self, data: data
            if name == module:
                plant(made, owner, method, int(call), kind)

        spec.loader.exec_module = then_plant
        return spec


if "PACELINE_FAULT" in os.environ:
    sys.meta_path.insert(0, Finder())
