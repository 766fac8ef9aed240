"""Links from a page to files outside of docs/, which GitHub can follow and a site cannot.

With `extra.source` in mkdocs.yml they go there; without it they become the path of the file, as code.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

FENCE = re.compile(r"(^ *```.*?^ *```[^\n]*$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return rewrite(markdown, posixpath.dirname(page.file.src_uri), config.extra.get("source") or "")


def rewrite(markdown: str, folder: str, source: str) -> str:
    """The page with its outward links changed; what stands in fences is left alone."""

    def replace(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if ":" in target or target.startswith("#") or path == "docs" or path.startswith("docs/"):
            return match.group()
        if source:
            return f"[{text}]({source.rstrip('/')}/{path})"
        return f"`{path}`" if text.startswith("`") else f"{text} (`{path}`)"

    parts = FENCE.split(markdown)
    return "".join(part if i % 2 else LINK.sub(replace, part) for i, part in enumerate(parts))
