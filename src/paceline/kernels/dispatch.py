"""A function in plain PyTorch and its twin, a kernel that computes the same on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Dispatch(Generic[P, R]):
    """Calls the function of the same name in a module of kernels where those run, and else `plain`."""

    def __init__(self, plain: Callable[P, R], module: str, runs: Callable[..., bool]):
        functools.update_wrapper(self, plain)
        self.plain, self._module, self._runs = plain, module, runs

    @functools.cached_property
    def _kernel(self) -> Callable[P, R]:
        """Imported when it is first used: machines without a GPU need no Triton."""
        return getattr(import_module(f"paceline.kernels.{self._module}"), self.plain.__name__)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return (self._kernel if self._runs(*args) else self.plain)(*args, **kwargs)


def dispatch(module: str, runs: Callable[..., bool]) -> Callable[[Callable[P, R]], Dispatch[P, R]]:
    """For the plain form. `runs` says of the positional arguments whether the kernel can take them."""
    return lambda plain: Dispatch(plain, module, runs)
