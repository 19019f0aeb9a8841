"""One line of `titan-ckpt doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about `subject`; unless all is well, `mend` is what to do about it."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    found: str
    mend: str = ""
