"""The report in words: the lines of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampatch.doctor.against.compare import said_of_comparison
from ampatch.doctor.brakes import said_of_speed
from ampatch.doctor.finding import Finding, Report
from ampatch.doctor.growth.curves import said_of_growth
from ampatch.doctor.silent.words import describe_silent

MOST_SHOWN = 3
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
    for finding in report.findings[:MOST_SHOWN]:
        yield from describe_finding(finding)
    if len(report.findings) > MOST_SHOWN:
        yield f"... and {len(report.findings) - MOST_SHOWN} more (--json OUT has them all)"
    yield from describe_silent(report.silent)
    if report.keep_fp32:
        cost = report.keep_fp32_cost
        said = "too few steps to time it" if cost is None else f"a step takes about {cost:.2f} times as long"
        yield f"Proposed: keep_fp32={list(report.keep_fp32)} ({said})"
    named = {it.where for it in (*report.findings, *report.silent)}
    harmless = [str(it.where) for it in report.harmless if it.where not in named]
    if harmless:
        yield f"Harmless, since it reached nothing: inf or NaN made at {', '.join(dict.fromkeys(harmless))}"
    for line in report.unknown:
        yield f"Not known: {line}"
    if report.growth and not is_explained(report.growth, report.findings):
        yield from said_of_growth(report.growth)
    if report.against:
        yield from said_of_comparison(report.against)
    if report.speed and not report.findings and (said := said_of_speed(report.speed)):
        yield "Why mixed precision may not be faster here:"
        yield from (f"  - {line}" for line in said)


def is_explained(growth: dict, findings: Sequence[Finding]) -> bool:
    """Says whether growth began no earlier than something broke: it comes of that."""
    steps = [it.step for it in findings if it.step is not None]
    return bool(growth.get("began") and steps) and growth["began"]["attempt"] >= min(steps)


def describe_nothing(report: Report) -> Iterator[str]:
    """Yields the lines of a report without a finding."""
    if report.unknown:
        yield "Nothing was found, but not everything is known."
    elif skipped := report.scale.get("skipped"):
        scales = [scale for _, scale in report.scale["history"]]
        yield (
            f"Nothing broke. {len(skipped)} of {report.scale['steps']} steps were skipped (scale "
            f"{scales[0]:g} to {scales[-1]:g}): that is the search of a dynamic loss scale, and cured by it."
        )
    else:
        yield "Nothing broke: losses, gradients and weights stayed finite."


def describe_finding(finding: Finding) -> Iterator[str]:
    """Yields the lines of one finding."""
    module = ".".join(filter(None, (finding.model, finding.module))) or "the script"
    where = finding.where or "line unknown"
    micro = f" (micro-step {finding.micro_step})" if finding.micro_step else ""
    yield f"Step {finding.step}{micro}, {finding.phase}: {finding.op or 'the data'} in {module}, {where}"
    yield f"  {finding.why}"
    element = f" at {list(finding.element)}" if finding.element else ""
    sample = f", sample {finding.sample} of the batch" if finding.sample is not None else ""
    yield f"  first {finding.kind}{element}{sample}; {finding.count} in all"
    if len(finding.steps) > 1:
        steps = "step" if len(finding.steps) == 2 else "steps"
        yield f"  again at {steps} {', '.join(map(str, finding.steps[1:]))}"
    if "cast" in finding.facts and finding.float32_survives is False:
        yield "  the same run in float32 breaks as well: the script itself casts to half there"
    else:
        yield f"  {SURVIVES[finding.float32_survives]}"
    for remedy in finding.remedies:
        yield f"  -> {remedy}"
