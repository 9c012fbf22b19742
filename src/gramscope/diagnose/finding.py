"""What is said about a run: findings, and what could not be judged."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar, overload

from gramscope.base.json_values import Json, json_values
from gramscope.base.results import TableResult

NOTHING_WRONG = "nothing_wrong"
PAGE = "docs/diagnosis.md"


@dataclass(frozen=True)
class Evidence:
    """One number that speaks for a finding: ``value`` is ``relation`` ("above", "below", "equal to") ``threshold``."""

    name: str
    value: float
    relation: str
    threshold: float

    def __str__(self) -> str:
        if math.isnan(self.threshold):
            return f"{self.name}: not finite"
        return f"{self.name} {self.value:.3g} ({self.relation} {self.threshold:.3g})"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a run.

    ``kind``: its name in :data:`gramscope.diagnose.RULES`. ``what``: one sentence. ``where``: layers or classes.
    ``step``: from which on the record shows it. ``confidence``: the share of such findings that were right on held-out
    runs of known faults. ``follows_from``: the kind of another finding that explains this one. ``alternatives``: causes
    that the record cannot tell from this one.
    """

    kind: str
    what: str
    evidence: tuple[Evidence, ...]
    cause: str
    remedy: str
    where: tuple[str, ...] = ()
    step: float = 0.0
    confidence: float = math.nan
    follows_from: str = ""
    alternatives: tuple[str, ...] = ()

    @property
    def page(self) -> str:
        """Where the documentation argues it."""
        return f"{PAGE}#{self.kind.replace('_', '-')}"

    def __str__(self) -> str:
        lines = [f"{self.what} ({', '.join(map(str, self.evidence))})" if self.evidence else self.what]
        if self.follows_from:  # its own remedy would hide the cause, or contradict that of the cause
            return lines[0]
        lines += [f"Likely cause: {self.cause}"] if self.cause else []
        lines += [f"It may also be: {'; '.join(self.alternatives)}"] if self.alternatives else []
        lines += [f"Try first: {self.remedy}"] if self.remedy else []
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Diagnosis(Sequence[Finding], TableResult):
    """The findings of one run, the likeliest cause first; ``not_judged``: kinds that could not be judged, and why.

    ``[0]`` is always there: where no rule finds anything, it says so.
    """

    rows_from: ClassVar[str] = "findings"
    plotted: ClassVar[tuple[str, ...]] = ("confidence",)

    name: str
    findings: tuple[Finding, ...]
    not_judged: Mapping[str, str] = field(default_factory=dict)
    step: float = 0.0

    def __len__(self) -> int:
        return len(self.findings)

    @overload
    def __getitem__(self, place: int) -> Finding: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Finding]: ...

    def __getitem__(self, place: int | slice) -> Finding | Sequence[Finding]:
        return self.findings[place]

    @property
    def healthy(self) -> bool:
        """Whether nothing wrong was found."""
        return self.findings[0].kind == NOTHING_WRONG

    @property
    def reasons(self) -> list[str]:
        """Why kinds could not be judged: one entry for each reason, with all kinds that it concerns."""
        grouped: dict[str, list[str]] = {}
        for kind, reason in self.not_judged.items():
            grouped.setdefault(reason, []).append(kind)
        return [f"{', '.join(kinds)} ({reason})" for reason, kinds in grouped.items()]

    def __repr__(self) -> str:
        found = ", ".join(finding.kind for finding in self.findings)
        return f"Diagnosis({self.name!r}, up to step {self.step:,.0f}: {found})"

    def json(self) -> dict[str, Json]:
        """Plain numbers and text, without NaN."""
        return {
            "run": self.name,
            "step": self.step,
            "findings": [json_values(asdict(f) | {"page": f.page}, not_finite="null") for f in self.findings],
            "not_judged": dict(self.not_judged),
        }

    def __str__(self) -> str:
        lines = [f"{self.name}, up to step {self.step:,.0f}"]
        for place, finding in enumerate(self.findings, 1):
            sure = "" if math.isnan(finding.confidence) else f" [{100 * finding.confidence:.0f} % sure]"
            follows = f" (follows from {finding.follows_from})" if finding.follows_from else ""
            first, *rest = str(finding).splitlines()
            lines += [f"{place}. {finding.kind}{sure}{follows}: {first}", *(f"   {line}" for line in rest)]
            lines += [f"   More: {finding.page}"] if finding.kind != NOTHING_WRONG else []
        if self.not_judged:
            lines.append(f"Not judged: {'; '.join(self.reasons)}.")
        return "\n".join(lines)
