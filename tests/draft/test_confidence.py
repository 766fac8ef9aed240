from __future__ import annotations

import pytest
import torch

from paceline.draft.confidence import Calibration, share_rows

CPU = torch.device("cpu")


def test_the_budget_goes_to_the_draft_tokens_that_are_likeliest_to_be_reached_and_accepted():
    rates = torch.tensor([[0.9, 0.9, 0.9, 0.9], [0.5, 0.9, 0.9, 0.9], [0.99, 0.1, 0.9, 0.9]]).log()
    shared = share_rows(rates, torch.tensor([True, True, True]), 6)
    assert shared.chosen.sum(1).tolist() == [5, 2, 2], "0.9, 0.81, 0.73, 0.66; 0.5; 0.99"
    assert shared.request.tolist() == [0, 1, 2, 0, 0, 0, 0, 1, 2]
    assert shared.level.tolist() == [0, 0, 0, 1, 2, 3, 4, 1, 1]


@pytest.mark.parametrize("seed", range(5))
def test_of_each_chain_a_beginning_is_chosen_and_the_budget_is_spent(seed):
    generator = torch.Generator("cpu").manual_seed(seed)
    log_rates = torch.rand(7, 9, generator=generator).log() * (torch.rand(7, 9, generator=generator) > 0.5)
    present = torch.tensor([True] * 6 + [False])
    for count in (7, 20, 40):
        shared = share_rows(log_rates, present, count)
        chosen = shared.chosen[:, 1:]
        assert int(chosen.sum()) == count and len(shared.request) == 7 + count
        assert bool(shared.chosen[:, 0].all()), "the last token of each request is verified"
        assert not bool((chosen[:, 1:] & ~chosen[:, :-1]).any()), "sure draft tokens, with log rate 0, keep their order"
        assert not bool(chosen[6].any()), "rows that pad a graph get none"
        flat = torch.arange(70).view(7, 10)[shared.chosen]
        assert sorted(shared.flat.tolist()) == flat.tolist()


def test_at_first_a_draft_token_is_as_good_as_its_probability():
    calibration = Calibration(CPU)
    probabilities = torch.tensor([[0.999, 0.95, 0.7, 0.4, 0.05]])
    rates = calibration.log_rates(probabilities.log()).exp()
    torch.testing.assert_close(rates, probabilities, rtol=0.35, atol=0.02)
    assert rates[0].tolist() == sorted(rates[0].tolist(), reverse=True)


def test_then_as_it_was_accepted():
    """This drafter is too sure: what it gives 0.9 is accepted in six of ten cases, what it gives 0.5 in two."""
    calibration = Calibration(CPU)
    generator = torch.Generator("cpu").manual_seed(0)
    log_probs = torch.tensor([0.9, 0.5]).log().repeat(64, 1)
    chosen = torch.ones(64, 2, dtype=torch.bool)
    for _ in range(200):
        first = torch.rand(64, generator=generator) < 0.6
        second = torch.rand(64, generator=generator) < 0.2
        num_accepted = first.long() + (first & second).long()
        calibration.observe(log_probs, chosen, num_accepted, torch.ones(64, dtype=torch.bool))
    rates = calibration.log_rates(log_probs[0]).exp()
    torch.testing.assert_close(rates, torch.tensor([0.6, 0.2]), rtol=0.05, atol=0.02)


def test_what_was_not_verified_and_rows_without_a_request_say_nothing():
    calibration = Calibration(CPU)
    log_probs = torch.full((2, 3), 0.5).log()
    chosen = torch.tensor([[True, False, False], [True, True, True]])
    calibration.observe(log_probs, chosen, torch.tensor([1, 3]), torch.tensor([True, False]))
    assert float(calibration.reached.sum()) == 1 and float(calibration.accepted.sum()) == 1
