"""The end of the page: runs that failed, how everything was measured, and where."""

from __future__ import annotations

from collections.abc import Sequence

from ampatch.sweeps.processes.warmup import said_of_warmup
from ampatch.sweeps.records.numbers import TYPESET
from ampatch.sweeps.records.record import LAST_LOSSES, Record
from ampatch.sweeps.records.sweep import Settings, Sweep
from ampatch.sweeps.web.figures import memory_kinds
from ampatch.sweeps.web.markup import Markup, breakable, element

LINES_SHOWN, LINE_LENGTH = 30, 400


def failures(records: Sequence[Record]) -> list[Markup]:
    """Returns what is known of the runs that failed; those of a row that failed alike are told once."""
    alike: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if record.failed:
            alike.setdefault((record.row, record.outcome.value, record.cause), []).append(record)
    return [failure(group) for group in alike.values()]


def failure(group: Sequence[Record]) -> Markup:
    """Returns how runs failed, why, and the last lines of the first one's log."""
    first = group[0]
    lines = [cut(line) for line in first.last_lines[-LINES_SHOWN:]]
    log = element("p", "Log: ", element("code", breakable(first.log)), class_="note") if first.log else None
    return element(
        "div",
        element("h3", element("span", breakable(first.row), class_="name"), f": {first.outcome.value}"),
        element(
            "p",
            f"{runs_text(group)}, after {TYPESET.number(first.seconds)} s. ",
            element("b", first.cause),
        ),
        element("pre", "\n".join(lines)) if lines else None,
        log,
        class_="failure",
    )


def runs_text(group: Sequence[Record]) -> str:
    """Returns which runs they are, by their seeds and, where there are several of a seed, repeats."""
    repeats = any(record.repeat for record in group)
    names = [f"{it.seed}" + (f" (repeat {it.repeat})" if repeats else "") for it in group]
    return f"{'Seed' if len(group) == 1 else 'Seeds'} {', '.join(names)}"


def cut(line: str) -> str:
    """Returns a line of a log, without the end of a very long one."""
    return line if len(line) <= LINE_LENGTH else line[:LINE_LENGTH] + " …"


def method(sweep: Sweep) -> Markup:
    """Returns how things were measured, and what the words mean."""
    paragraphs = [time_text(sweep), memory_text(sweep), verdict_text(sweep.settings)]
    return element("div", *(element("p", paragraph) for paragraph in paragraphs))


def time_text(sweep: Sweep) -> str:
    """Returns how times were measured."""
    # Runs of a function in one process have no logs.
    has_logs = any(record.log for record in sweep.records)
    kind = "a fresh process of the unchanged script" if has_logs else "a call of the function in one process"
    return (
        f"Every run is {kind}; runs of all rows take turns, so that a "
        "machine that slows down slows all of them. Times are medians "
        f"{said_of_warmup(sweep)}. Forward is the time in models alone, update that of the "
        "optimizers; the rest of a step is data, losses and what the script does besides."
    )


def memory_text(sweep: Sweep) -> str:
    """Returns which memory was measured, and what became of losses."""
    whose = (
        "what tensors took up on the device"
        if memory_kinds(sweep) == ["device"]
        else "resident memory of the process"
    )
    return (
        f"Peak memory is {whose}. The final loss is the mean of the last {LAST_LOSSES} losses, a metric the "
        "last value that the script reported; loss scales are the last ones. A skipped step is one whose "
        "gradients overflowed: the optimizer did nothing and the loss scale was lowered."
    )


def verdict_text(settings: Settings) -> str:
    """Returns what a verdict means."""
    most = f"{TYPESET.short(settings.tolerance)} spreads"
    return (
        "A spread is the standard deviation of O0 over the seeds, or with one seed the standard error of "
        "O0's last losses; where neither is known it is a small part of O0's value, and distances are given "
        f"in percent. “Same” means that neither the loss nor a metric is more than {most} worse than that of "
        "O0. “Diverged” means that the loss or a metric ended as no finite number, that the loss ended above "
        "where it began, or that the last steps were all skipped; “failed” that a run did not finish. The "
        "recommendation is the fastest level whose accuracy is the same."
    )


def environment_list(sweep: Sweep) -> Markup:
    """Returns settings and environment by name."""
    settings, it = sweep.settings, sweep.environment
    pairs = [
        ("Script", element("code", breakable(" ".join([settings.script, *settings.arguments])))),
        ("Rows", breakable(", ".join(settings.rows))),
        ("Seeds", f"{settings.seeds}"),
        ("Runs of each seed", f"{settings.repeat}"),
        ("Steps", f"{settings.steps:,}" if settings.steps is not None else "as many as the script makes"),
        ("Warm-up", TYPESET.plural(settings.warmup, "step")),
        (
            "Time limit",
            f"{TYPESET.short(settings.timeout)} s a run" if settings.timeout is not None else "none",
        ),
        ("Tolerance", f"{TYPESET.short(settings.tolerance)} spreads"),
        ("Device", it.device),
        (
            "CPU",
            f"{it.cpu}, {TYPESET.plural(it.cores, 'core')}, {TYPESET.plural(it.threads, 'thread')}",
        ),
        ("Software", f"torch {it.torch}, ampatch {it.ampatch}, Python {it.python}"),
        ("Platform", breakable(it.platform)),
        ("Commit", element("code", it.commit) if it.commit else None),
        ("Made", it.created),
    ]
    items = [
        element("tr", element("th", name, scope="row"), element("td", value))
        for name, value in pairs
        if value
    ]
    return element("table", element("tbody", *items), class_="pairs")
