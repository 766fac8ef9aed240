"""The folder of an export, which is there as a whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from paceline.errors import RunError, UserError


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder that gets its name when it is complete."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already; name another place to export to")
    aside = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        yield aside
        if out.exists():
            out.rmdir()
        aside.rename(out)
    except (OSError, SafetensorError) as err:
        raise RunError(f"the export could not be written to {out}: {err}") from err
    finally:
        shutil.rmtree(aside, ignore_errors=True)
