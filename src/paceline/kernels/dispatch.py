"""One function, two forms: the reference in plain PyTorch, and a Triton kernel that computes the same on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Dispatch(Generic[P, R]):
    """Calls the function of the same name in a module of kernels where `runs` says that these run, and else the
    reference, which is also reached as `plain`."""

    def __init__(self, plain: Callable[P, R], module: str, runs: Callable[..., bool]):
        functools.update_wrapper(self, plain)
        self.plain = plain
        self._module = module
        self._runs = runs

    @functools.cached_property
    def _kernel(self) -> Callable[P, R]:
        """Imported at the first call that needs it: machines without a GPU need no Triton."""
        return getattr(import_module(f"paceline.kernels.{self._module}"), self.plain.__name__)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return (self._kernel if self._runs(*args) else self.plain)(*args, **kwargs)


def dispatch(module: str, runs: Callable[..., bool]) -> Callable[[Callable[P, R]], Dispatch[P, R]]:
    """Decorates the reference. `module` is relative to paceline.kernels; `runs` gets the positional arguments and says
    whether the kernel takes them."""
    return lambda plain: Dispatch(plain, module, runs)
