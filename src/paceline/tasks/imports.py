"""The user's own objects by `module:name` or `file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.files.reading import shorten

MAX_REASON = 200  # characters of why a module cannot be imported


def import_named(name: str, what: str) -> Any:
    """`what` it is, for messages: "the reward". `name` has a colon."""
    module_name, _, attribute = name.rpartition(":")
    try:
        is_file = module_name.endswith(".py")
        module = _import_file(Path(module_name), what) if is_file else importlib.import_module(module_name)
    except UserError:
        raise
    except (Exception, SystemExit) as err:  # a module can fail in any way while it is imported
        reason = shorten(f"{type(err).__name__}: {err}", MAX_REASON)
        raise UserError(f"{what} '{name}' cannot be imported: {reason}") from err
    found = getattr(module, attribute, None)
    if not callable(found):
        raise UserError(f"{module_name} has no function '{attribute}', which {what} '{name}' names")
    return found


def _import_file(path: Path, what: str) -> Any:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"no file at {path}, where {what} should be")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # so that it can import its neighbours
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
