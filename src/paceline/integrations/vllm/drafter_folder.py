"""The versions of a drafter on disk: a folder each, in the form that vLLM starts with, and a record of all of them.

FOLDER/version-00003/    config.json and weights; the newest few are kept
FOLDER/versions.jsonl    what was made, of which policy, whether it was better, and since when the engine has it
"""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from paceline.draft.eagle.files import DrafterFiles, files_of, write_files
from paceline.draft.eagle.model import EagleModel
from paceline.errors import RunError, UserError
from paceline.files.reading import decode, parse_json, read_lines
from paceline.files.writing import append_text
from paceline.integrations.export_formats import ExportedDrafter, make_files

RECORD = "versions.jsonl"
NAME = re.compile(r"version-(\d{5})")
KEPT_VERSIONS = 3


class DrafterFolder:
    def __init__(self, folder: Path, keep: Path | None = None):
        """`keep` is one that stays, however old it is."""
        self.folder = folder
        self.keep = keep

    def newest(self) -> tuple[int, Path] | None:
        """The version that was published last, and its folder."""
        found = [(number, folder) for number, folder in self._versions() if (folder / "config.json").is_file()]
        return max(found, default=None)

    def _versions(self) -> list[tuple[int, Path]]:
        folders = [(NAME.fullmatch(folder.name), folder) for folder in sorted(self.folder.glob("version-*"))]
        return [(int(match[1]), folder) for match, folder in folders if match]

    def write(self, version: int, drafter: EagleModel) -> Path:
        """Whole or not at all, and the oldest leave."""
        out = self.folder / f"version-{version:05d}"
        aside = self.folder / f".version-{version:05d}.partial"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            write_files(vllm_files(drafter), aside)
            if out.exists():  # the same version with the head of a newer policy
                shutil.rmtree(out)
            aside.rename(out)
        except (OSError, SafetensorError) as err:
            shutil.rmtree(aside, ignore_errors=True)
            raise RunError(f"version {version} of the drafter could not be written to {out}: {err}") from err
        for _, old in sorted(self._versions())[:-KEPT_VERSIONS]:
            if self.keep is None or old.resolve() != self.keep.resolve():
                shutil.rmtree(old, ignore_errors=True)
        return out

    def record(self, row: dict[str, Any]) -> None:
        """Add a line to `versions.jsonl`; the engine's process and a side-car both do."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            append_text(self.folder / RECORD, json.dumps({"time": round(time.time(), 3)} | row) + "\n")
        except OSError as err:
            raise RunError(f"{self.folder / RECORD} could not be written: {err}") from err

    def rows(self) -> list[dict[str, Any]]:
        """Of the record. A kill can leave half a line at the end, which is skipped."""
        file = self.folder / RECORD
        if not file.is_file():
            return []
        whole = [(number, line) for number, line in read_lines(file) if line.endswith(b"\n")]
        rows = [parse_json(decode(line, f"line {n} of {file}"), f"line {n} of {file}", True) for n, line in whole]
        if not all(isinstance(row, dict) for row in rows):
            raise UserError(f"{file} has lines that are no versions; remove it to begin a new record")
        return rows


def vllm_files(drafter: EagleModel) -> DrafterFiles:
    """A drafter as it is now, as vLLM starts with it."""
    files = files_of(drafter)
    # Its tensors hold the maps of a reduced vocabulary and the head already.
    known = ExportedDrafter(drafter.policy.config, "", 0, files.config, files.tensors, {}, torch.empty(0))
    return DrafterFiles(*make_files(known, "vllm"))
