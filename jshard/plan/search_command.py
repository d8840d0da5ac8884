"""`--search` and `--topologies`: what compiles many programs to compare them."""

import json
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from jshard.plan.output import answer_page, answer_text, search_text
from jshard.plan.output.plan_files import write_file
from jshard.plan.planning import plan_recipe
from jshard.plan.search import answers, candidates
from jshard.plan.search.answers import (
    Answer,
    Question,
    compiled_over_estimated,
    middle_of_each_kind,
    topologies,
    worth_compiling,
)
from jshard.plan.search.candidates import Candidate
from jshard.plan.search.estimated import Estimated
from jshard.plan.search.outcomes import Search
from jshard.plan.search.pareto_search import (
    Asked,
    compiled,
    estimated,
    search,
)
from jshard.plan.search.prices import read_prices
from jshard.plan.search.traces import Traces
from jshard.plan.topology import require_plugin
from jshard.recipe.config.overrides import read_words
from jshard.recipe.config.shared_keys import FITTED
from jshard.recipe.configured import Configured
from jshard.system.cli.terminal import show
from jshard.system.errors import UserError

DOES_NOT_FIT = 3
_LIMIT = 50  # candidates that are compiled of one topology
_FIRST, _THEN = 2, 1  # of each of many: of one of a kind, of the others
_SMALLER = 0.8  # of the memory of what did not fit, as estimated, to try next
# Where a search begins with what a recipe leaves to the memory.
_OPEN = {"policy.remat": "full", "policy.accumulate": 1}


def search_one(
    arguments: SimpleNamespace, configured: Configured, given: dict[str, Any]
) -> None:
    """Searches the ways to run a job on one topology; exits with 3 if none fits."""
    _refuse(arguments, ("html",), "shows one plan, and --search makes many")
    chosen = _chosen(configured, arguments.topology)
    allowed = _allowed(arguments, configured, given, arguments.search)
    found = _search(arguments, configured, chosen | given, arguments.topology, allowed)
    words = chosen | arguments.config_keys
    command = lambda candidate: candidate.command(str(arguments.config), words)
    show("\n".join(search_text.lines(found, command, allowed)))
    if arguments.json:
        write_file("json", arguments.json, json.dumps(found.as_dict(), indent=1) + "\n")
    if not found.best:
        sys.exit(DOES_NOT_FIT)


def check_question(arguments: SimpleNamespace) -> tuple[list[str], Question]:
    """Reads what is asked of many topologies, before anything is compiled.

    Raises:
      UserError: a topology, a price or an amount is missing or impossible.
    """
    specs = topologies(arguments.topologies)
    if arguments.tokens is None:
        raise UserError("--topologies: how much to train on is missing: --tokens=15e12")
    if arguments.budget is not None and arguments.prices is None:
        raise UserError(f"--budget={arguments.budget:g}: needs --prices=FILE")
    question = Question(arguments.tokens, days=arguments.days, budget=arguments.budget)
    if arguments.prices is not None:
        prices = read_prices(arguments.prices)
        known = {spec.rpartition(":")[0].lower() for spec in specs}
        if missing := sorted(known - {*prices.per_gpu_hour}):
            raise UserError(
                f"--prices={arguments.prices}: has no price of {', '.join(missing)}"
            )
        question = Question(arguments.tokens, prices, arguments.days, arguments.budget)
    require_plugin()
    return specs, question


def ask_all(
    arguments: SimpleNamespace, configured: Configured, given: dict[str, Any]
) -> None:
    """Finds the fastest way to train on each topology; exits with 3 without any."""
    _refuse(arguments, (), "shows one plan, and --topologies asks for many")
    specs, question = check_question(arguments)
    opened = configured.settings.policy.open_keys
    base = {key: value for key, value in _OPEN.items() if key in opened}
    allowed = _allowed(arguments, configured, given, arguments.search or ("",))
    found = _answers(arguments, configured, base | given, specs, allowed, question)
    unit = found.unit
    words = base | arguments.config_keys

    def command(answer: Answer) -> str:
        assert answer.best is not None
        return answer.best.candidate.command(str(arguments.config), words)

    show("\n".join(answer_text.lines(question, found.answers, unit, command)))
    if arguments.json:
        data = answers.as_dict(question, found.answers, unit)
        write_file("json", arguments.json, json.dumps(data, indent=1) + "\n")
    if arguments.html:
        heading = f"{configured.recipe.name}: which GPUs, how many, how long"
        page = answer_page.render(question, found.answers, unit, command, heading)
        write_file("html", arguments.html, page)
    if not answers.front(question, found.answers):
        sys.exit(DOES_NOT_FIT)


class _Found(NamedTuple):
    answers: list[Answer]  # of all topologies, as they were asked for
    unit: str


def _answers(
    arguments: SimpleNamespace,
    configured: Configured,
    overrides: dict[str, Any],
    specs: list[str],
    allowed: dict[str, Any],
    question: Question,
) -> _Found:
    """Estimates the steps of all topologies, and compiles those that may be best."""
    constants = str(arguments.constants)
    traces = Traces(configured.recipe, overrides)
    estimates: dict[str, Estimated] = {}
    for spec in specs:
        estimates[spec] = found = estimated(traces, spec, allowed, constants)
        answer = question.estimate(found)
        days = f"about {answer.days[0]:,.1f} days, of {found.considered:,} ways"
        show(f"{spec}: {days if answer.best else answer.why}", error=True)
    guesses = {spec: question.estimate(found) for spec, found in estimates.items()}
    best: dict[str, Answer] = {}

    def expected() -> list[Answer]:
        ratios = {x: compiled_over_estimated(x, best, guesses) for x in specs}
        return [
            best.get(x) or question.estimate(estimates[x], ratios[x]) for x in specs
        ]

    def compile_those(chosen: list[str], each: int) -> None:
        orders = {spec: estimates[spec].fastest() for spec in chosen}

        def limit(order: Sequence[Candidate]) -> int:
            # What further axes exchange is estimated worst.
            return arguments.limit or (each if order[0].is_plain else _FIRST)

        while orders:
            asked = [Asked(estimates[x], y, limit(y)) for x, y in orders.items()]
            found = compiled(
                configured.recipe.path, overrides, asked, constants, search_text.report
            )
            for searched in found:
                spec = searched.topology
                order = orders.pop(spec)
                order = _smaller(estimates[spec], order, limit(order))
                if order and not searched.best:
                    orders[spec] = order
                    continue
                for warning in searched.warnings:
                    show(f"jshard: warning: {warning}", error=True)
                best[spec] = answer = question.answer(searched)
                days = f"{answer.days[0]:,.1f} days" if answer.best else answer.why
                show(f"{spec}: {days}", error=True)

    # What kinds of GPUs make of their estimates differs; then those that may be best.
    compile_those(middle_of_each_kind(guesses.values()), _FIRST)
    while left := [x for x in worth_compiling(question, expected()) if x not in best]:
        compile_those(left, _THEN)
    unit = next(iter(estimates.values())).unit
    return _Found(expected(), unit)


def _smaller(found: Estimated, order: list[Candidate], limit: int) -> list[Candidate]:
    """Returns what is left of an order if all that was compiled of it does not fit.

    Estimates of memory were too low, so these are estimated smaller.
    """
    least = min(found.estimates[x].memory for x in order[:limit])
    return [x for x in order[limit:] if found.estimates[x].memory < _SMALLER * least]


def _refuse(arguments: SimpleNamespace, more: tuple[str, ...], why: str) -> None:
    for name in ("profile", "fit", "trace", "hlo", *more):
        if getattr(arguments, name) is not None:
            raise UserError(f"--{name}: {why}; plan the candidate that it finds")
    if arguments.imbalance != 1.0:
        raise UserError(f"--imbalance: {why}; plan the candidate that it finds")


def _allowed(
    arguments: SimpleNamespace,
    configured: Configured,
    given: Mapping[str, Any],
    searches: tuple[str, ...],
) -> dict[str, Any]:
    recipe = configured.recipe
    listed = {
        key: tuple(
            read_words(configured.config, {key: word}, recipe.name, "search")[key]
            for word in text.split(",")
            if word
        )
        for key, text in arguments.search_keys.items()
    }
    return candidates.parse_search(searches, listed, given)


def _search(
    arguments: SimpleNamespace,
    configured: Configured,
    overrides: dict[str, Any],
    spec: str,
    allowed: dict[str, Any],
) -> Search:
    found = search(
        configured.recipe.path,
        overrides,
        spec,
        allowed,
        limit=arguments.limit or _LIMIT,
        constants=str(arguments.constants),
        report=search_text.report,
    )
    for warning in found.warnings:
        show(f"jshard: warning: {warning}", error=True)
    return found


def _chosen(configured: Configured, where: str) -> dict[str, Any]:
    """Returns what training would choose of keys that are "fit"; a search begins there.

    Raises:
      DoesNotFit: no choice fits.
    """
    if not configured.settings.policy.open_keys:
        return {}
    chosen = plan_recipe(configured, where).program.job.configured.values
    return {key: chosen[key] for key in FITTED}
