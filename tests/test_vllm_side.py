"""benchmarks/vllm_side.py without vLLM: our own sides, and what it makes of all of them. With vLLM it runs in
tests/engines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .conftest import benchmark

vllm_side = benchmark("vllm_side")
SMALL = (
    *("--model", "embedded", "--batch", "1,3", "--prompts", "2", "--samples", "2", "--max-tokens", "60"),
    *("--tokens", "24", "--temperature", "0", "--difficulty", "medium", "--repeat", "1", "--eager", "--depth", "5"),
)


def side(start: float, one: float, tail: float, accept: float | None = None) -> dict:
    part = {"first_s": 9.0, "tokens": 100, "accept_length": accept}
    return {"start_s": start, "parts": {"1": part | {"seconds": [one, 5.0, one]}, "tail": part | {"seconds": [tail]}}}


def test_ratios_are_of_medians_and_the_best_depth_is_each_parts_own(vllm_side):
    found = {
        "ours": side(1, 2.0, 8.0),
        "vllm": side(2, 2.4, 10.0),
        "vllm:3": side(3, 1.2, 6.0, 3.1),
        "vllm:7": side(4, 1.6, 5.0, 4.5),
        "tuned": side(5, 1.25, 4.0, 4.0),
    }
    rows = vllm_side.make_rows(found)
    assert rows[0] | {"range": None} == {
        "side": "ours", "part": "1", "seconds": 2.0, "range": None, "first_s": 9.0, "tok_s": 50.0, "accept_length": None
    }  # fmt: skip
    ratios = vllm_side.make_ratios(rows)
    assert ratios["tuner, times as fast as speculation off"] == {"1": 1.92, "tail": 2.5}
    assert ratios["tuner, times as fast as the best depth in hindsight, off included"] == {"1": 0.96, "tail": 1.25}
    assert ratios["tuner, times as fast as depth 7"] == {"1": 1.28, "tail": 1.25}
    assert ratios["tuner, times as fast as our engine without speculation"] == {"1": 1.6, "tail": 2.0}
    assert vllm_side.make_ratios(rows[:-2]) == {}, "the tuner has not run yet"


def test_an_accept_length_has_the_bonus_token(vllm_side):
    assert vllm_side.accept_length((10, 20), (20, 55)) == 4.5 and vllm_side.accept_length((3, 1), (3, 1)) is None


def test_our_sides_run_and_sides_that_are_there_do_not_run_again(vllm_side, tmp_path, capsys):
    assert vllm_side.main([*SMALL, "--out", str(tmp_path), "--sides", "adaptive"])["ratios"] == {}
    said = capsys.readouterr().out.splitlines()
    assert "a step takes at least" in said[0] and json.loads(said[-1])["starts"].keys() == {"adaptive"}
    rows = {row["part"]: row for row in json.loads(said[-1])["rows"]}
    assert rows.keys() == {"1", "3", "tail"} and rows["tail"]["accept_length"] > 2
    before = (tmp_path / "side-adaptive.json").stat().st_mtime_ns
    again = vllm_side.main([*SMALL, "--out", str(tmp_path), "--sides", "adaptive"])
    assert (tmp_path / "side-adaptive.json").stat().st_mtime_ns == before and len(again["rows"]) == 3
    assert "adaptive took" not in capsys.readouterr().out


def test_a_side_that_fails_is_named_with_its_log(vllm_side, tmp_path):
    (tmp_path / "card.json").write_text(
        json.dumps({"model": "m", "device": "d", "weight_bytes": 1, "kv_bytes_per_token": 1, "bytes_per_s": 1.0,
                    "requests": 1, "tokens": 1, "longest": 1})
    )  # fmt: skip
    broken = tmp_path / "python"
    broken.write_text(f"#!{sys.executable}\nraise SystemExit('no vLLM here')\n")
    broken.chmod(0o755)
    with pytest.raises(SystemExit, match=r"vllm:5 failed; .*side-vllm-5.log says why"):
        vllm_side.main([*SMALL, "--out", str(tmp_path), "--sides", "vllm:5", "--vllm-python", str(broken)])
    assert "no vLLM here" in (tmp_path / "side-vllm-5.log").read_text()


def test_vllm_finds_the_plug_in_of_a_source_tree(vllm_side, tmp_path):
    folder = vllm_side.plugin_folder(vllm_side.parse([*SMALL, "--out", str(tmp_path)]))
    script = (
        "from importlib.metadata import entry_points\n"
        "found = entry_points(group='vllm.general_plugins')\n"
        "print([point.load().__name__ for point in found if point.dist.name == 'paceline-source'])"
    )
    env = {"PYTHONPATH": f"{folder}:{vllm_side.SOURCE}"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=120)
    assert done.stdout.strip() == "['register']", done.stderr
