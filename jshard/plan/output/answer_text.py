"""The answers to "which GPUs, how many, how long and how much" on the terminal."""

from collections.abc import Callable, Iterator, Sequence

from jshard.plan.output.plan_text import columns
from jshard.plan.search.answers import Answer, Question, front
from jshard.system.formatting import format_bytes, format_count

ESTIMATED = (
    "Estimated rows were not compiled, because other rows are estimated to take fewer "
    "days for less. Their days are arithmetic, scaled as the compiled steps turned out."
)
HEADING = ("GPUs", "{unit}/s", "MFU", "exposed", "memory", "days", "range", "cost")


def lines(
    question: Question,
    answers: Sequence[Answer],
    unit: str,
    command: Callable[[Answer], str],
) -> Iterator[str]:
    """Yields a table of all topologies, and the commands of those that none beats."""
    yield title(question, unit)
    yield ""
    best = front(question, answers)
    marks = {answer.topology for answer in best}
    heading = [cell.format(unit=unit) for cell in HEADING]
    rows = [tuple(heading)]
    rows += [row(question, answer) for answer in answers if answer.best]
    marked = [(f"{'* '[x[0] not in marks]} {x[0]}", *x[1:]) for x in rows]
    yield from columns(marked, "<>>>>><>")
    yield from (f"  {x.topology}: {x.why}" for x in answers if x.best is None)
    yield ""
    if not best:
        yield nothing(question, answers)
        return
    cost = "cost" if any(answer.cost for answer in best) else "GPU hours"
    yield f"* No other takes fewer days for as little {cost}:"
    for answer in best:
        yield f"  {answer.topology}: {command(answer)}"
    if any(answer.best and answer.best.estimated for answer in answers):
        yield f"{ESTIMATED} --topologies with one of them alone compiles it."
    for answer in best:
        if answer.best and answer.best.range is None:
            yield f"No published run confirms a step like that: {answer.best.kind}"
            break


def title(question: Question, unit: str) -> str:
    """Returns "15T tokens; prices in USD: our contract, 2026-11-01", for example."""
    found = f"{format_count(question.amount)} {unit}"
    if question.prices.per_gpu_hour:
        currency = question.prices.currency
        found += f"; prices{f' in {currency}' if currency else ''}, per GPU and hour: "
        found += question.prices.source
    if question.days is not None:
        found += f"; at most {question.days:g} days"
    if question.budget is not None:
        found += f"; at most {question.budget:,.0f} {question.prices.currency}".rstrip()
    return found


def row(question: Question, answer: Answer) -> tuple[str, ...]:
    """Returns the cells of an answer that has a step, as of ``HEADING``."""
    best = answer.best
    assert best is not None
    days, least, most = answer.days
    span = f"{least:,.1f} to {most:,.1f}" if best.range else "not confirmed"
    span = "estimated" if best.estimated else span
    cost = f"{answer.gpu_hours:,.0f} GPU hours"
    if answer.cost is not None:
        cost = f"{answer.cost[0]:,.0f} {question.prices.currency}".rstrip()
    return (
        answer.topology,
        format_count(best.rate),
        "" if best.mfu is None else f"{best.mfu:.1%}",
        "" if best.estimated else f"{best.exposed / best.seconds:.1%}",
        format_bytes(best.memory),
        f"{days:,.1f}",
        span,
        cost,
    )


def nothing(question: Question, answers: Sequence[Answer]) -> str:
    """Says why no topology is an answer, and what is closest."""
    fitting = [answer for answer in answers if answer.best]
    if not fitting:
        if not any(answer.why.startswith("does not fit") for answer in answers):
            return "Nothing is possible, for the reasons above."
        return "Nothing fits: more GPUs, or GPUs with more memory, would help."
    fastest = min(fitting, key=lambda answer: answer.days[0])
    said = f"the fastest, {fastest.topology}, takes {fastest.days[0]:,.1f} days"
    priced = [answer for answer in fitting if answer.cost is not None]
    if question.budget is not None and priced:
        least = min(priced, key=lambda answer: answer.cost or (0.0,))
        cost = least.cost[0] if least.cost else 0.0
        said += f", and the cheapest, {least.topology}, costs {cost:,.0f}"
    return f"Nothing is in time and within the budget: {said}."
