"""However many workers there are, wherever they run: the same answers, and the same policy after learning from them."""

from __future__ import annotations

from itertools import product

import pytest

from .runs import make, run, same_policy

STEPS = 3
SHORT = [
    (2, "local", "adaptive", "tail"),
    (4, "local", "plain", "off"),
]
LONG = [
    (3, "local", "adaptive", "both"),
    *(
        (workers, backend, mode, "update" if spot == "tail" and workers == 1 else spot)
        for workers, backend, mode, spot in product((1, 2, 4), ("local", "ray"), ("adaptive", "plain"), ("tail", "off"))
        if not (mode == "plain" and spot == "tail")
    ),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone") / "run", STEPS, "speculation.mode=plain")


def check(alone, folder, workers, backend, mode, spot):
    words = [f"cluster.workers={workers}", f"cluster.backend={backend}", f"speculation.mode={mode}"]
    answers, policy = run(folder / "run", STEPS, *words, f"spot.when={spot}")
    assert answers == alone[0]
    assert same_policy(policy, alone[1])


@pytest.mark.parametrize(("workers", "backend", "mode", "spot"), SHORT)
def test_the_same_with_more_workers(alone, tmp_path, workers, backend, mode, spot):
    check(alone, tmp_path, workers, backend, mode, spot)


def test_the_same_with_ray(alone, tmp_path):
    pytest.importorskip("ray")
    check(alone, tmp_path, 2, "ray", "adaptive", "tail")


@pytest.mark.soak
@pytest.mark.parametrize(("workers", "backend", "mode", "spot"), LONG)
def test_the_same_in_every_combination(alone, tmp_path, workers, backend, mode, spot):
    check(alone, tmp_path, workers, backend, mode, spot)


@pytest.mark.parametrize(
    "words",
    [
        ["learn.algorithm=reinforce_pp", "learn.kl_coef=0.05"],
        ["learn.algorithm=grpo", "learn.epochs=2", "learn.minibatches=2", "learn.kl_coef=0.05"],
    ],
)
def test_the_same_updates_by_other_algorithms(tmp_path, words):
    words = [*words, "speculation.mode=plain", "rollout.max_tokens=24"]
    one = run(tmp_path / "one", 2, *words)
    three = run(tmp_path / "three", 2, *words, "cluster.workers=3")
    assert one[0] == three[0] and same_policy(one[1], three[1])


def test_a_run_goes_on_with_another_number_of_workers(alone, tmp_path):
    from paceline.run import Run

    from .runs import Recorded, policy

    first = make(tmp_path / "run", f"steps={STEPS}", "cluster.workers=2", "speculation.mode=plain")
    try:
        first.step()
        first.saver.save()
    finally:
        first.close()
    resumed = Run.open(tmp_path / "run")
    config = resumed.config.model_copy(update={"cluster": resumed.config.cluster.model_copy(update={"workers": 1})})
    second = Recorded(config, resumed)
    try:
        for _ in range(STEPS - 1):
            second.step()
        assert [*first.answers, *second.answers] == alone[0]
        assert same_policy(policy(second), alone[1])
    finally:
        second.close()
