"""What a user has to fix is said in one sentence, by whichever process finds it."""

from __future__ import annotations

import socket

import pytest
import torch

from paceline.cluster import devices
from paceline.cluster.devices import choose_devices, choose_workers
from paceline.config import load_config
from paceline.errors import UserError

from ..test_cli import QUICK, here


@pytest.fixture
def taken():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield s.getsockname()[1]


def refused(capsys, tmp_path, *words) -> str:
    run = tmp_path / "run"
    assert here("train", *QUICK, f"run_dir={run}", "cluster.workers=2", *words) == 2
    assert not run.exists(), "nothing has happened in it"
    error = capsys.readouterr().err.strip()
    assert error.startswith("paceline: ") and "\n" not in error
    return error


def test_a_port_that_is_taken(capsys, tmp_path, taken):
    assert f"port {taken}" in refused(capsys, tmp_path, f"cluster.port={taken}")


def test_a_ray_cluster_that_is_not_there(capsys, tmp_path, taken):
    pytest.importorskip("ray")
    words = ["cluster.backend=ray", "cluster.address=127.0.0.1:1"]
    assert "no Ray cluster can be reached at 127.0.0.1:1" in refused(capsys, tmp_path, *words)


def test_something_that_a_worker_finds(capsys, tmp_path):
    assert "no drafter at nowhere" in refused(capsys, tmp_path, "speculation.drafter=nowhere")


def test_one_worker_has_no_tail_to_train_in(capsys, tmp_path):
    words = ["cluster.workers=1", "spot.when=tail", "model.device=cpu"]
    assert "there is only one" in refused(capsys, tmp_path, *words)


def test_fewer_gpus_than_workers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = load_config(None, ["cluster.workers=4", "model.device=cuda"])
    with pytest.raises(UserError, match=r"cluster\.workers=4, but this machine has 2 GPUs for 1 each"):
        choose_devices(config)
    shared = load_config(None, ["cluster.workers=4", "model.device=cuda", "cluster.workers_per_gpu=2"])
    assert choose_devices(shared) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


@pytest.mark.parametrize(
    ("gpus", "cores", "words", "workers"),
    [
        (0, 1, [], 1),
        (0, 2, [], 2),
        (0, 64, [], 2),
        (1, 16, [], 1),
        (8, 16, [], 8),
        (8, 16, ["model.device=cuda:3"], 1),
        (8, 16, ["model.device=cpu"], 2),
        (1, 16, ["cluster.workers_per_gpu=4"], 4),
        (8, 16, ["cluster.workers=2"], 2),
    ],
)
def test_the_default_suits_the_machine(monkeypatch, gpus, cores, words, workers):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(devices, "my_cores", lambda: list(range(cores)))
    assert choose_workers(load_config(None, words)).cluster.workers == workers
