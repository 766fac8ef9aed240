"""The docs: links lead somewhere, commands and settings that are named exist, every setting says what it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from paceline import cli
from paceline.config import Config, describe_settings, load_config, setting_names
from paceline.loop import train

from .conftest import load_file

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
CODE_COLUMNS = 100
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


settings_hook = load_file(DOCS / "hooks" / "settings.py")


def text_of(page: Path) -> str:
    """The page as a reader of the site has it, settings included."""
    return page.read_text(encoding="utf-8").replace(settings_hook.MARK, settings_hook.render())


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ +(.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands() -> list[tuple[str, str]]:
    """Every command line that a page shows, in a block or within a sentence."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for kind, block in FENCE.findall(text) if kind == "sh" for line in join(block).split("\n")]
        lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]
        found += [(page.name, line.strip()) for line in lines]
    return found


def join(block: str) -> str:
    return re.sub(r"\\\n\s*", " ", block)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_fits(page):
    """In the column of the site, without a bar to scroll it; only a single word may be longer."""
    lines = [line for _, block in FENCE.findall(page.read_text(encoding="utf-8")) for line in block.split("\n")]
    too_long = [line for line in lines if len(line.rstrip(" \\")) > CODE_COLUMNS]
    assert not [line for line in too_long if not re.fullmatch(r" *('[^']*'|[^' ]*)", line.rstrip(" \\"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(FENCE.sub("", text_of(page))):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}, which has no such heading"


def test_pages_that_messages_name_exist():
    named = {
        match
        for file in (ROOT / "src").rglob("*.py")
        for match in re.findall(r"docs/(\w[\w-]*\.md)#([\w-]+)", file.read_text())
    }
    assert len(named) >= 2
    assert not [(page, anchor) for page, anchor in named if anchor not in anchors(DOCS / page)]


def test_every_page_can_be_reached_from_the_first():
    first = LINK.findall((DOCS / "README.md").read_text(encoding="utf-8"))
    assert {p.name for p in DOCS.glob("*.md")} - {"README.md"} <= {t.partition("#")[0] for t in first}


def test_lists_are_indented_so_that_the_site_reads_them_too():
    for page in PAGES:
        assert not re.findall(r"^ {1,3}```", page.read_text(encoding="utf-8"), re.MULTILINE), page.name


def test_every_setting_has_a_description_of_its_own():
    schema = Config.model_json_schema()
    fields = {
        f"{where}.{name}": field.get("description", "").strip()
        for where, part in {"Config": schema, **schema["$defs"]}.items()
        for name, field in part["properties"].items()
    }
    assert not [name for name, text in fields.items() if len(text.split()) < 2]
    assert len(set(fields.values())) == len(fields), "two settings are described by the same words"
    assert len(fields) > len(describe_settings()), "sections and lists of sections count too"


def test_the_settings_page_has_every_setting():
    rows = [line for line in settings_hook.render().split("\n") if line.startswith("| `")]
    page = {re.match(r"\| `([\w.\[\]]+)`", row).group(1): row for row in rows}
    assert [name for name in page if "[]" not in name] == setting_names()
    lists = {f"reward.functions[].{name}" for name in ("function", "weight", "per")}
    assert {name for name in page if "[]" in name} == lists | {name.replace("reward", "eval") for name in lists}
    assert all(row.count(" | ") == 2 and row.endswith("* |") for row in rows), "a | in a description ends its cell"
    assert "| `512` | Most tokens of a completion.<br>*whole number from 1* |" in page["rollout.max_tokens"]
    assert "*number above 0 or `null`*" in page["rollout.kv_memory_gb"]
    assert "*one of `adaptive`, `plain`*" in page["speculation.mode"]
    assert "`[0.9, 0.999]`" in page["learn.betas"] and "*list of 2 numbers*" in page["learn.betas"]
    assert "| `null` |" in page["run_dir"] and "| `[]` |" in page["rollout.stop"]


def test_commands_exist_with_their_options():
    app = typer.main.get_command(cli.app)
    seen = set()
    for page, line in commands():
        words = line.split("#")[0].split()
        if words[:1] != ["paceline"] or len(words) < 2 or not words[1][0].isalpha():
            continue
        command = app
        for word in words[1:]:
            if word in getattr(command, "commands", {}):
                command = command.commands[word]
        assert command is not app, f"{page} names `{line}`, which is no command"
        options = {o for p in command.params for o in p.opts} | {"--help"}
        unknown = {w.partition("=")[0] for w in words if w.startswith("--")} - options
        assert not unknown, f"{page}: `{line}` has no {unknown}"
        seen.add(command.name)
    assert seen >= {"train", "compare", "plan", "report", "export", "generate", "doctor", "settings", "eval"}


def test_scripts_and_targets_exist_with_their_options():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    seen = set()
    for page, line in commands():
        if match := re.match(r"python (?:-m pytest )?((?:benchmarks|examples)/\S+\.py)(.*)", line.split("  #")[0]):
            path, rest = match.groups()
            assert (ROOT / path).is_file(), f"{page} names {path}"
            source = (ROOT / path).read_text(encoding="utf-8")
            for option in re.findall(r"--[\w-]+", rest):
                assert f'"{option}"' in source, f"{page}: {path} has no {option}"
            seen.add(path)
        if match := re.match(r"make ([a-z-]+)(?:\s|$)", line):
            assert match.group(1) in targets, f"{page} names `{line}`"
            seen.add(match.group(1))
    assert seen >= {"benchmarks/rl_step.py", "benchmarks/make_reasoner.py", "train", "test", "docs"}


def test_settings_that_are_named_exist():
    known = set(setting_names())
    sections = {name.partition(".")[0] for name in known if "." in name}
    seen = set()
    for page, line in commands():
        for key in re.findall(r"(?<![\w./-])([a-z]+\.[a-z_]+)(?==|$)", line):
            if key.partition(".")[0] in sections and not key.endswith((".py", ".jsonl")):
                assert key in known, f"{page} names the setting {key}"
                seen.add(key)
    assert len(seen) > 40


def test_recipes_on_the_pages_are_valid(tmp_path):
    blocks = [b for p in PAGES for kind, b in FENCE.findall(p.read_text(encoding="utf-8")) if kind == "yaml"]
    assert len(blocks) >= 3
    for block in blocks:
        (recipe := tmp_path / "recipe.yaml").write_text(block)
        load_config(str(recipe))


def test_every_metric_is_explained(tmp_path):
    known = set()
    for row in re.findall(r"^\| (`.+?) \|", (DOCS / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", row)
        known |= {first, *others, *(f"{first.rpartition('/')[0]}/{name}" for name in others)}
    known = {re.sub(r"/[A-Z]+$", "/", name) for name in known}  # of reward/FUNCTION any will do
    small = ["rollout.prompts=2", "rollout.samples=2", "rollout.max_tokens=40", "model.threads=1", "reward.workers=0"]
    quiet = ["log.tensorboard=false", "cluster.workers=1", "spot.when=update", "steps=2", f"run_dir={tmp_path / 'run'}"]
    evaluated = ["eval.task=countdown", "eval.prompts=2", "eval.samples=4", "eval.greedy=true", "eval.max_tokens=30"]
    _, rows = train(load_config(None, small + quiet + evaluated))
    names = {name for row in rows for name in row} - {"step"}
    assert "rollout/spec_accept_length" in names and "timing_s/train_drafter" in names
    kinds = tuple(name for name in known if name.endswith("/"))  # a strategy has a / of its own: neural:4x3/8
    forms = [re.sub(r"[A-Z]+", ".+", re.escape(name)) for name in known if name.startswith("val-")]
    assert "val-core/countdown/reward/best@4/mean" in names
    unknown = {n for n in names if n not in known and not n.startswith(kinds)}
    assert not {n for n in unknown if not any(re.fullmatch(form, n) for form in forms)}


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("", "`src/a.py`", "it\nwon (`benchmarks/b.txt`)"),
        ("https://h/blob/", "[`a.py`](https://h/blob/src/a.py)", "[it\nwon](https://h/blob/benchmarks/b.txt)"),
    ],
)
def test_links_out_of_the_docs_become_paths(source, code, words):
    rest = "[c](c.md#d), ![p](p.svg), [w](https://w.org), [e](#e)\n```\n[x](../src/x.py)\n```\n"
    links = load_file(DOCS / "hooks" / "links.py")
    made = links.rewrite(f"see [`a.py`](../src/a.py), [it\nwon](../benchmarks/b.txt), {rest}", "", source)
    assert made == f"see {code}, {words}, {rest}"


def test_the_site_builds_without_a_warning(tmp_path):
    for package in ("mkdocs", "material", "pymdownx"):
        pytest.importorskip(package)
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PACELINE_SOURCE": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in DOCS.glob("*.md"):
        name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        html = (site / name).read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img)\b[^>]*?(?:src|href)=\"?(https?://[^\s\">]+)", html)
        assert not loaded, f"{name} needs the network: {loaded}"
        assert "](" not in re.sub(r"<(pre|code|script).*?</\1>", "", html, flags=re.DOTALL), f"{name} shows a raw link"
    assert "rollout.max_tokens" in (site / "settings.html").read_text(encoding="utf-8")
    assert not (site / "hooks").exists()
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = {") and "rollout.max_tokens" in index, "search in pages opened as files"
