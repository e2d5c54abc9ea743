"""The report in words: the lines of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from ampatch.doctor.finding import Finding, Report

MOST_SHOWN = 2  # findings after the first
MOST_SILENT = 5
# Numbers break because of these silent faults.
MISUSES = ("not_unscaled", "unscaled_twice", "never_stepped", "lost_state", "scaled_penalty")
MISUSES += ("not_zeroed", "stepped_twice", "renewed_scaler")
SURVIVES = {
    True: "the same run in float32 stays finite to its end",
    False: "the same run in float32 breaks as well: this is not a matter of precision",
    None: "whether float32 survives is not known",
}


def describe(report: Report) -> Iterator[str]:
    """Yields the lines of a report."""
    if report.untraced:
        yield report.untraced
    elif not report.findings:
        yield from describe_nothing(report)
    first = report.findings[0].step or 0 if report.findings else -1
    is_misused = any(fault.kind in MISUSES and (fault.step or 0) <= first for fault in report.silent)
    if is_misused:
        yield from describe_silent(report.silent, "What probably breaks the run")
    for finding in report.findings[:1]:
        yield from describe_finding(finding)
    yield from describe_others(report.findings)
    if not is_misused:
        yield from describe_silent(report.silent)
    named = {finding.where for finding in (*report.findings, *report.silent)}
    harmless = [str(finding.where) for finding in report.harmless if finding.where not in named]
    if lines := ", ".join(dict.fromkeys(harmless)):
        yield f"Harmless, as it reached no loss, gradient or weight: inf or NaN made at {lines}"
    for line in report.unknown:
        yield f"Not known: {line}"


def describe_others(findings: Sequence[Finding]) -> Iterator[str]:
    """Yields the lines of all findings but the first, of which most come of the same cause."""
    fixes = {remedy for finding in findings[:1] for remedy in finding.remedies}
    others = []
    for finding in findings[1:]:
        if not fixes.issuperset(finding.remedies[:1]):
            others.append(finding)
        fixes.update(finding.remedies[:1])
    for finding in others[:MOST_SHOWN]:
        yield f"Then {describe_place(finding)} ({finding.cause})"
        yield f"  -> {finding.remedies[0]}"
    if rest := max(0, len(findings) - 1) - len(others[:MOST_SHOWN]):
        yield f"... and {rest} more, probably with the same cause (--json OUT has them all)"


def describe_nothing(report: Report) -> Iterator[str]:
    if report.unknown:
        yield f"Nothing {'broke' if report.silent else 'was found'}, but not everything is known."
    elif skipped := report.scale.get("skipped"):
        scales = [scale for _, scale in report.scale["history"]]
        yield (
            f"Nothing broke. {len(skipped)} of {report.scale['steps']} steps were skipped "
            f"(scale {scales[0]:g} to {scales[-1]:g}): that is a dynamic loss scale finding its value; "
            "nothing to do."
        )
    elif not report.scale["steps"]:
        yield "No optimizer made a step."
    else:
        yield "Nothing broke: losses, gradients and weights stayed finite."


def describe_place(finding: Finding) -> str:
    """Says when and where an operation broke."""
    module = ".".join(filter(None, (finding.model, finding.module))) or "the script"
    micro = f" (micro-step {finding.micro_step})" if finding.micro_step else ""
    what = finding.op or ("the weight" if finding.parameter else "the data")
    where = finding.where or "line unknown"
    return f"Step {finding.step}{micro}, {finding.phase}: {what} in {module}, {where}"


def describe_finding(finding: Finding) -> Iterator[str]:
    """Yields the lines of one finding: the cause first, what to do, and then what was seen."""
    yield describe_place(finding)
    yield f"  {finding.why}"
    yield from describe_fixes(finding)
    if "flat" in finding.facts:
        return
    element = f" at {list(finding.element)}" if finding.element else ""
    sample = f", sample {finding.sample} of the batch" if finding.sample is not None else ""
    steps = "; again at step " if len(finding.steps) == 2 else "; again at steps "
    again = steps + ", ".join(map(str, finding.steps[1:])) if len(finding.steps) > 1 else ""
    if not {"error", "raised"} & finding.facts.keys():
        yield f"  first {finding.kind}{element}{sample}; {finding.count} in all{again}"
    survives = SURVIVES[finding.float32_survives]
    if "up_to" in finding.facts:
        survives = f"the same run in float32 stays finite up to step {finding.facts['up_to']}, and ends there"
    yield f"  {survives}"


def describe_fixes(finding: Finding) -> Iterator[str]:
    """Yields what to do, each with what came of trying it."""
    for fix, tried in zip_longest(finding.remedies, finding.tried):
        title, *lines = str(fix).split("\n")
        yield "\n".join([f"  -> {title}{' (not tried)' if tried and not tried.said else ''}", *lines])
        if tried and tried.said:
            yield f"     (tried: {tried})"


def describe_silent(
    faults: Sequence[Finding], title: str = "Silent faults, which skip no step"
) -> Iterator[str]:
    """Yields the lines of silent faults; parameters of one kind and line stand together."""
    groups: dict[tuple[str, str, str | None], list[Finding]] = {}
    for fault in faults:
        groups.setdefault((fault.phase, fault.kind, fault.where), []).append(fault)
    if groups:
        yield f"{title}: {len(groups)}"
    for first, *others in list(groups.values())[:MOST_SILENT]:
        module = f" in {first.model}.{first.module}".rstrip(".") if first.model else ""
        subject = first.parameter or first.op
        yield f"Step {first.step}, {first.kind}: {subject}{module}, {first.where or 'line unknown'}"
        yield f"  {first.why}"
        if less := first.facts.get("less"):
            yield f"  {less}"
        if others:
            names = [str(fault.parameter or fault.op) for fault in others]
            more = f" and {len(names) - MOST_SILENT} more" if len(names) > MOST_SILENT else ""
            yield f"  the same of {', '.join(names[:MOST_SILENT])}{more}"
        yield from describe_fixes(first)
    if len(groups) > MOST_SILENT:
        yield f"... and {len(groups) - MOST_SILENT} more (--json OUT has them all)"
