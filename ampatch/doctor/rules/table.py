"""The table of rules: the first that explains a finding says why, and what to do."""

from __future__ import annotations

from dataclasses import replace

from ampatch.doctor.finding import Finding
from ampatch.doctor.fixes import Words
from ampatch.doctor.rules import loud, silent
from ampatch.doctor.rules import remedies as do
from ampatch.doctor.rules.remedies import words_for

RULES = (*silent.RULES, *loud.RULES)


def explain(finding: Finding) -> Finding:
    """Returns the finding with its reason and what to do."""
    rule = next(rule for rule in RULES if rule.explains(finding))
    words = words_for(finding)
    is_of_size = "{limit}" in rule.why and do.SLOWER not in rule.remedies
    first = do.slow_down(finding) if is_of_size else None
    rows = [row for row in rule.remedies if not (first and row is do.lower_rate)]
    advice = [first, *(Words(row.format(**words)) if isinstance(row, str) else row(finding) for row in rows)]
    advice += [] if finding.is_silent else [do.cast_functions(finding)]
    fixes = dict.fromkeys(fix for fix in advice if fix)
    remedies = tuple(sorted(fixes, key=lambda fix: not fix.is_exact)) or (Words(do.LOOK),)
    why = rule.why.format(**words)
    if lost := finding.facts.get("lost_buffer"):
        why += f" The buffer {lost} is not finite from then on: no step that is skipped mends it."
    return replace(finding, cause=rule.name, why=why, remedies=remedies)
