"""The steps to profile: `profile.steps=10:12`."""

import re


def profiled_steps(text: str) -> range:
    """Returns the steps that `text` names: "10:12" is 10, 11 and 12, and "10" is 10."""
    if not text:
        return range(0)
    first, _, last = text.partition(":")
    return range(int(first), int(last or first) + 1)


def profile_problem(text: str, steps: int) -> str:
    """Returns what is wrong with the steps to profile of a run; "" if nothing."""
    if text and not re.fullmatch(r"\d{1,9}(:\d{1,9})?", text, re.ASCII):
        return "must be FIRST:LAST, such as 10:12, or one step"
    traced = profiled_steps(text)
    if text and not traced:
        return "the last step comes before the first"
    if text and traced[0] < 1:
        return "steps are counted from 1"
    if text and traced[-1] > steps:
        return f"the run ends with step {steps}"
    return ""
