"""From a history to a diagnosis: every rule is asked, findings are ranked, consequences follow their causes."""

import math
from collections.abc import Mapping
from dataclasses import replace

from gramscope.diagnose import rules as rules  # registers them
from gramscope.diagnose.finding import NOTHING_WRONG, Diagnosis, Finding
from gramscope.diagnose.held_out_rates import confidence
from gramscope.diagnose.history import History
from gramscope.diagnose.loss_of_probe import by_the_loss_of_the_batches
from gramscope.diagnose.progress import removed
from gramscope.diagnose.rule_registry import NOT_NEEDED, RULES

FEW_RECORDS, EARLY = 3, 8
NOT_LEARNT = 0.1  # of the first loss is gone, at most


def diagnosis_of(history: History, name: str = "run") -> Diagnosis:
    """Findings of one run, the likeliest cause first; a pure function of what was recorded."""
    known, other = by_the_loss_of_the_batches(history)
    lacking = {kind: rule.lacks(history) or other for kind, rule in RULES.items() if rule.lacks(known)}
    history = known
    found = []
    for kind, rule in RULES.items():
        try:
            made = None if kind in lacking else rule.find(history)
        except (ArithmeticError, LookupError, ValueError) as error:  # one rule must not lose what the others found
            lacking[kind] = f"the rule failed on this run: {error!r}; please report it"
        else:
            found += [made] if made is not None else []
    ranked = rank({finding.kind: replace(finding, confidence=confidence(finding.kind)) for finding in found})
    return Diagnosis(name, tuple(ranked) or (_nothing(history, lacking),), lacking, history.end)


def rank(found: Mapping[str, Finding]) -> list[Finding]:
    """Causes first, in the order of their rules; a finding that another one explains follows it.

    Where two explain one another, the one that was to be seen earlier is the cause; of equals, that of the lower order.
    So it is where several explain one another in a circle.
    """
    causes = {kind: _cause(kind, found) for kind in found}
    for kind in found:
        chain = [kind]
        while (cause := causes[chain[-1]]) and cause not in chain:
            chain.append(cause)
        if cause:
            circle = chain[chain.index(cause) :]
            causes[min(circle, key=lambda k: (found[k].step, RULES[k].order, k))] = ""
    first = sorted((k for k, cause in causes.items() if not cause), key=lambda k: (RULES[k].order, found[k].step))
    rest = sorted((k for k, cause in causes.items() if cause), key=lambda k: (RULES[k].order, found[k].step))
    return [found[kind] for kind in first] + [replace(found[kind], follows_from=causes[kind]) for kind in rest]


def _cause(kind: str, found: Mapping[str, Finding]) -> str:
    candidates = [other for other in found if kind in RULES[other].explains]
    stronger = [other for other in candidates if other not in RULES[kind].explains or _before(other, kind, found)]
    return min(stronger, key=lambda other: (RULES[other].order, found[other].step), default="")


def _before(one: str, other: str, found: Mapping[str, Finding]) -> bool:
    return (found[one].step, RULES[one].order, one) < (found[other].step, RULES[other].order, other)


def _nothing(history: History, lacking: Mapping[str, str]) -> Finding:
    count, gone = len(history.steps), removed(history)
    if count < FEW_RECORDS:
        counted = "1 measurement" if count == 1 else f"{count} measurements"
        what = f"There is too little to judge: {counted}. Most rules need {FEW_RECORDS} to {EARLY} of them."
    else:
        what = f"Nothing wrong found, by {len(RULES) - len(lacking)} of {len(RULES)} rules."
        if count < EARLY:
            what += f" It is early: there are {count} measurements, and several rules wait for more."
        if gone < NOT_LEARNT:
            what += f" But the run has hardly learnt: {100 * gone:.0f} % of the first loss is gone."
    sure = all(reason.startswith(NOT_NEEDED) for reason in lacking.values()) and not (
        count < EARLY or gone < NOT_LEARNT
    )
    return Finding(NOTHING_WRONG, what, (), "", "", confidence=confidence(NOTHING_WRONG) if sure else math.nan)
