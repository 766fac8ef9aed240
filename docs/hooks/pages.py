"""Pages that the nav of mkdocs.yml does not name come last in its last section, so that none is out of reach."""

from __future__ import annotations

from typing import Any


def on_files(files: Any, config: Any) -> Any:
    named = set(_paths(config.nav))
    ((_, last),) = config.nav[-1].items()
    last += sorted(f.src_uri for f in files.documentation_pages() if f.src_uri not in named)
    return files


def _paths(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [path for part in parts for path in _paths(part)]
