"""Settings are checked when they are made; choosing follows them exactly."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.prompt.sampling import Sampler, Sampling

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5])


def drawn(sampling: Sampling, logits: Tensor = LOGITS, count: int = 400, ids: tuple[int, ...] = ()) -> list[int]:
    sampler = Sampler(sampling)
    return [sampler.choose(logits, list(ids)) for _ in range(count)]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"temperature": -0.1}, "temperature >= 0"),
        ({"temperature": float("nan")}, "temperature >= 0"),
        ({"top_p": 0.0}, "0 < top_p <= 1"),
        ({"top_p": 1.1}, "0 < top_p <= 1"),
        ({"top_k": -1}, "top_k >= 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty > 0"),
        ({"max_tokens": 0}, "max_tokens >= 1 or None"),
        ({"seed": 2**64}, "seed with at most 64 bits"),
        ({"stop": ("END", "")}, "stop strings that are not empty"),
        ({"stop": ""}, "stop strings that are not empty"),
        ({"stop": (7,)}, "stop strings that are not empty"),
    ],
)
def test_bad_values_are_refused_by_rule_and_value(options: dict, rule: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        Sampling(**options)
    assert rule in str(caught.value) and f"{next(iter(options))}=" in str(caught.value)


def test_every_broken_rule_is_named() -> None:
    with pytest.raises(InvalidSetting, match=r"temperature >= 0, .*top_k >= 0"):
        Sampling(temperature=-1, top_k=-1)


def test_stop_may_be_one_string_a_list_or_none() -> None:
    assert Sampling(stop="END").stop == ("END",)
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")
    assert Sampling(stop=None).stop == ()


def test_override_replaces_and_checks() -> None:
    base = Sampling(temperature=0.5, stop=("a",))
    assert base.override({"top_k": 3, "stop": "b"}) == Sampling(temperature=0.5, top_k=3, stop=("b",))
    assert base.override({}) == base == Sampling(temperature=0.5, stop=("a",))
    with pytest.raises(InvalidSetting, match="top_p"):
        base.override({"top_p": 2})


def test_unknown_options_are_a_type_error_that_names_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"unknown option n, temprature; the options are temperature, top_p, .*stop"):
        Sampling().override({"temprature": 1, "n": 2, "top_k": 1})


def test_temperature_zero_takes_the_most_probable() -> None:
    assert set(drawn(Sampling(), count=20)) == {0}
    assert set(drawn(Sampling(), LOGITS.flip(0), count=20)) == {5}


def test_the_same_seed_repeats_itself() -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    assert drawn(sampling) == drawn(sampling)
    assert drawn(sampling) != drawn(Sampling(temperature=1.0, seed=8))


def test_a_seed_does_not_touch_the_process_wide_generator() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    drawn(Sampling(temperature=1.0, seed=7), count=5)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**64 - 1])
def test_every_accepted_seed_works(seed: int) -> None:
    assert drawn(Sampling(temperature=1.0, seed=seed), count=1)


def test_without_a_seed_turns_differ() -> None:
    assert drawn(Sampling(temperature=1.0)) != drawn(Sampling(temperature=1.0))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature: float) -> None:
    counts = Counter(drawn(Sampling(temperature=temperature, seed=0), count=4000))
    expected = (LOGITS / temperature).softmax(-1)
    for token, probability in enumerate(expected.tolist()):
        assert abs(counts[token] / 4000 - probability) < 0.035


@pytest.mark.parametrize(("top_k", "support"), [(1, {0}), (3, {0, 1, 2}), (6, set(range(6))), (0, set(range(6)))])
def test_top_k_keeps_exactly_the_k_most_probable(top_k: int, support: set[int]) -> None:
    assert set(drawn(Sampling(temperature=1.5, top_k=top_k, seed=0))) == support
    assert set(drawn(Sampling(temperature=1.5, top_k=100, seed=0))) == set(range(6)), "k beyond the vocabulary is all"


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float) -> None:
    shuffled = torch.tensor([3, 0, 5, 1, 4, 2])
    logits = LOGITS[shuffled]
    support, total = set(), 0.0
    for token in logits.argsort(descending=True).tolist():
        if total >= top_p:
            break
        support.add(token)
        total += float(logits.softmax(-1)[token])
    assert set(drawn(Sampling(temperature=1.0, top_p=top_p, seed=0), logits, count=1500)) == support


def test_top_k_is_applied_before_top_p() -> None:
    # the two left have probabilities 0.62 and 0.38 among themselves
    assert set(drawn(Sampling(temperature=1.0, top_k=2, top_p=0.6, seed=0))) == {0}
    assert set(drawn(Sampling(temperature=1.0, top_k=2, top_p=0.7, seed=0))) == {0, 1}


def test_masked_tokens_are_never_chosen() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0])
    assert set(drawn(Sampling(temperature=5.0, seed=0), logits)) == {1, 3}
    assert drawn(Sampling(temperature=0.0, repetition_penalty=2.0), logits, 1, ids=(1, 3, 0))[0] in (1, 3)


def test_the_penalty_makes_what_was_said_less_probable_whatever_its_sign() -> None:
    penalised = Sampling(repetition_penalty=2.0)
    assert drawn(penalised, torch.tensor([2.0, 1.5]), 1, ids=(0,)) == [1]
    assert drawn(penalised, torch.tensor([-1.0, -1.5]), 1, ids=(0,)) == [1]
    assert drawn(penalised, torch.tensor([2.0, 1.5]), 1, ids=()) == [0]


def test_the_penalty_counts_a_token_once() -> None:
    assert drawn(Sampling(repetition_penalty=1.2), torch.tensor([2.0, 1.5]), 1, ids=(0,) * 50) == [0]


def test_choosing_leaves_the_logits_alone() -> None:
    logits = LOGITS.clone()
    drawn(Sampling(temperature=0.7, top_k=2, top_p=0.5, repetition_penalty=1.5, seed=0), logits, 3, ids=(0, 1))
    assert torch.equal(logits, LOGITS)
