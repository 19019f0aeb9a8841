"""Faults of a soak's requests to S3: how often they come, and of which kind."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

from tools.faults.proxy import HttpRequest, RequestFault, RequestFaultKind

# Percent of all faults. A hang outlasts the client's own read timeout of 30 s.
FREQUENCIES: dict[RequestFaultKind, int] = {
    RequestFaultKind.BUSY: 28, RequestFaultKind.CUT: 20, RequestFaultKind.LOST: 15, RequestFaultKind.TRUNCATED: 15,
    RequestFaultKind.SLOW: 20, RequestFaultKind.HANG: 2,
}  # fmt: skip
HANG_S = 45.0
SLOWEST_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Share of requests that get a fault; within `outage` (seconds from now) all are cut."""

    name: str
    fault_rate: float
    outage: tuple[float, float] = (0.0, 0.0)


CALM = Weather(name="calm", fault_rate=0.0)
BREEZE = Weather(name="breeze", fault_rate=0.03)
GALE = Weather(name="gale", fault_rate=0.12)
STORM = Weather(name="storm", fault_rate=0.4)


def draw_weather(rng: random.Random) -> Weather:
    """Draw the weather of one action."""
    name = rng.choices(("calm", "breeze", "gale", "storm", "outage"), (15, 35, 25, 10, 15))[0]
    if name == "outage":
        begin = rng.uniform(0.0, 15.0)
        return Weather(name=name, fault_rate=0.03, outage=(begin, begin + rng.uniform(2.0, 30.0)))
    return next(weather for weather in (CALM, BREEZE, GALE, STORM) if weather.name == name)


class Climate:
    """A proxy's rule that follows the current weather."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._weather, self._since = CALM, time.monotonic()

    def set(self, weather: Weather) -> None:
        """Change the weather."""
        with self._lock:
            self._weather, self._since = weather, time.monotonic()

    def __call__(self, request: HttpRequest) -> RequestFault | None:
        """Draw the fault of a request, None for most."""
        with self._lock:
            begin, end = self._weather.outage
            if begin <= time.monotonic() - self._since < end:
                return RequestFault(kind=RequestFaultKind.CUT)
            if self._rng.random() >= self._weather.fault_rate:
                return None
            kind = self._rng.choices(list(FREQUENCIES), list(FREQUENCIES.values()))[0]
            share = self._rng.random()
        return _fault(kind, share, request)


def _fault(kind: RequestFaultKind, share: float, request: HttpRequest) -> RequestFault:
    """A fault of this kind; `share` in [0, 1) places it in the request or sets its delay."""
    if kind == RequestFaultKind.CUT:
        return RequestFault(kind=kind, after_bytes=int(share * request.body_bytes))
    if kind == RequestFaultKind.TRUNCATED:
        return RequestFault(kind=kind, after_bytes=int(share * (1 << 18)))
    return RequestFault(kind=kind, seconds=HANG_S if kind == RequestFaultKind.HANG else share * SLOWEST_S)
