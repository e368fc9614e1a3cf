"""What a check is, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

#: problem: something does not work. warning: something works badly, or will fail. note: nothing is wrong, and one should know it.
Severity = Literal["problem", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that the doctor looks at. `mend` are commands and steps; {names} in braces are filled in by the finding."""

    name: str
    severity: Severity
    means: str  #: what is the case when it is found
    why: str  #: why that matters
    mend: tuple[str, ...]

    def found(self, subject: str, what: str, **values: Any) -> Finding:
        return Finding(self.name, self.severity, subject, what, self.why, tuple(step.format(**values) for step in self.mend))


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found on this machine."""

    check: str
    severity: Severity
    subject: str  #: what it is about: a device, a file, a library
    what: str
    why: str
    mend: tuple[str, ...]
