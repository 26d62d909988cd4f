"""Settings of `DecodeConfig` that have no effect are named in a warning."""

import pytest

from mtpjax import DecodeConfig
from mtpjax.decoding.unused_settings import find_unused_settings
from mtpjax.inference.requests import check_settings, make_drafter

USED = [
    {},
    {"acceptance": "threshold", "threshold_single": 0.5, "threshold_acc": 0.5},
    {"acceptance": "typical", "typical_epsilon": 0.2, "typical_delta": 0.2},
    {"acceptance": "relaxed", "relaxed_topk": 4, "relaxed_delta": 0.5},
    {"depth_policy": "adaptive", "depth_costs": (1.0, 2.0), "depth_rates": (0.5,)},
    {"drafter": "lookup", "prompt_lookup_min": 1, "prompt_lookup_max": 5},
    {"draft_window": 8, "draft_sinks": 1},
    {"num_steps": 2, "topk": 2, "num_draft_tokens": 4},
]


@pytest.mark.parametrize("settings", USED)
def test_settings_that_count_are_not_named(settings):
    assert find_unused_settings(DecodeConfig(**settings)) == {}


@pytest.mark.parametrize("settings", USED[1:])
def test_the_same_settings_without_what_they_need_are_named(settings):
    condition, *names = settings
    if condition == "num_steps":
        settings, names = settings | {"num_steps": 0}, ["num_draft_tokens"]
    else:
        settings = {name: settings[name] for name in names}
    found = find_unused_settings(DecodeConfig(**settings))
    assert sorted(found) == sorted(names) and all(condition in need for need in found.values())


def test_plain_decoding_may_be_made_of_any_settings():
    assert find_unused_settings(DecodeConfig(num_steps=0, typical_delta=0.2, depth_rates=(0.5,))) == {}


def test_a_warning_names_each_setting_once(small, caplog):
    model, _ = small()
    config = DecodeConfig(typical_epsilon=0.123, draft_sinks=7)
    for _ in range(2):
        check_settings(model, config, make_drafter(config))
    assert sorted(caplog.messages) == [
        "draft_sinks 7 has no effect: it needs draft_window",
        "typical_epsilon 0.123 has no effect: it needs acceptance 'typical'",
    ]
