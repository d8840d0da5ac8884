"""Runs with `deterministic=true`: the same bits again, and when they go on."""

from resumable import read_metrics, train

KEYS = {"deterministic": True, "eval_every": 4}


def test_a_deterministic_run_has_the_same_bits_again_and_when_it_goes_on(tmp_path):
    whole = train(tmp_path, "whole", steps=6, **KEYS)
    train(tmp_path, "again", steps=4, **KEYS)
    again = train(tmp_path, "again", steps=6, **KEYS)
    assert read_metrics(again) == read_metrics(whole)
    assert (
        "deterministic   the same bits each time" in (again / "notes.json").read_text()
    )
