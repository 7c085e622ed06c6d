"""Sampling and Speculation refuse what they cannot do, in words of their own, at construction."""

import numpy as np
import pytest

from eaglejax import EagleJaxEngine, Sampling, Speculation
from eaglejax.errors import ConfigError


@pytest.mark.parametrize(
    "values",
    [
        {"stop": 5}, {"stop": {"a": 1}}, {"stop": [""]}, {"stop_token_ids": 5}, {"stop_token_ids": "12"},
        {"stop_token_ids": [2**40]}, {"top_k": 2**40}, {"top_k": 1.5}, {"temperature": 10**400}, {"temperature": True},
        {"temperature": float("nan")}, {"top_p": 0}, {"min_p": 1.1}, {"ignore_eos": "no"}, {"seed": -1},
        {"max_new_tokens": -1},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_requests_are_refused_by_name(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        Sampling(**values)


def test_none_is_no_stop():
    assert Sampling(stop=None, stop_token_ids=None) == Sampling()


@pytest.mark.parametrize(
    "values",
    [
        {"score_temperature": None}, {"score_temperature": [1, None, 2]}, {"score_temperature": [1.0]},
        {"score_temperature": 10**400}, {"coupling": "x"}, {"coupling": 0}, {"coupled": "no"}, {"num_steps": None},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_trees_are_refused_by_name(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        Speculation(**values)


def test_numbers_may_be_text_or_numpy():
    assert Speculation(num_steps="3", topk=np.int64(1), score_temperature="1.0") == Speculation(3, 1, 4)


@pytest.mark.parametrize(
    "values, words",
    [
        ({"max_len": 0}, "max_len: out of range; found 0; expected at least 1"),
        ({"slots": -2}, "slots: out of range; found -2; expected at least 1"),
        ({"max_len": True}, "max_len: not a whole number; found True"),
    ],
    ids=str,
)
def test_impossible_engines_are_refused_before_anything_is_opened(values, words):
    with pytest.raises(ConfigError, match=words):
        EagleJaxEngine.from_pretrained("no/such/model", **values)
