"""The campaign `secrets`: no four characters of a secret survive redaction, in any notation, and nothing around it goes."""

from __future__ import annotations

import random
import time

from titan_ckpt.redaction import redact_text
from tools.hostile.outcome import Outcome
from tools.hostile.secret_notations import cases, leaked


def run_secrets(seed: int, seconds: float) -> Outcome:
    """Draw names and secrets for every notation in every carrier until the time is over."""
    outcome, rng = Outcome(part="secrets"), random.Random(seed)
    end = time.monotonic() + seconds
    while not outcome.cases or time.monotonic() < end:
        for case in cases(rng):
            outcome.cases += 1
            shown = redact_text(case.text)
            if parts := leaked(case, shown):
                outcome.failures.append(f"{case.name}: {parts[:3]} in {shown[:300]!r}")
            if not (shown.startswith("before: rank 3\n") and shown.endswith("\nafter: step 7\n")):
                outcome.failures.append(f"{case.name}: too much hidden: {shown[:300]!r}")
            if shown.count("\n") != case.text.count("\n"):
                outcome.failures.append(f"{case.name}: lines were lost")
    return outcome
