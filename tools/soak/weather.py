"""What the network and the S3 service do to the requests of a soak: how often something breaks, and in which way."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

from tools.faults.proxy import Fault, Kind, Request

# How often each kind comes, of 100. A hang outlives the client's own limit of 30 s for an answer.
KINDS: dict[Kind, int] = {"busy": 28, "cut": 20, "lost": 15, "truncated": 15, "slow": 20, "hang": 2}
HANG_S = 45.0
SLOWEST_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """`fault_rate` of all requests break; between `outage` (seconds from now) every one is reset."""

    name: str
    fault_rate: float
    outage: tuple[float, float] = (0.0, 0.0)


CALM = Weather(name="calm", fault_rate=0.0)
BREEZE = Weather(name="breeze", fault_rate=0.03)
GALE = Weather(name="gale", fault_rate=0.12)
STORM = Weather(name="storm", fault_rate=0.4)


def draw_weather(rng: random.Random) -> Weather:
    """The weather of one action."""
    name = rng.choices(("calm", "breeze", "gale", "storm", "outage"), (15, 35, 25, 10, 15))[0]
    if name == "outage":
        begin = rng.uniform(0.0, 15.0)
        return Weather(name=name, fault_rate=0.03, outage=(begin, begin + rng.uniform(2.0, 30.0)))
    return next(weather for weather in (CALM, BREEZE, GALE, STORM) if weather.name == name)


class Climate:
    """The rule of a proxy, under the weather of the moment."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._weather, self._since = CALM, time.monotonic()

    def set(self, weather: Weather) -> None:
        """From now on it is this."""
        with self._lock:
            self._weather, self._since = weather, time.monotonic()

    def __call__(self, request: Request) -> Fault | None:
        """What becomes of a request."""
        with self._lock:
            begin, end = self._weather.outage
            if begin <= time.monotonic() - self._since < end:
                return Fault(kind="cut")
            if self._rng.random() >= self._weather.fault_rate:
                return None
            kind = self._rng.choices(list(KINDS), list(KINDS.values()))[0]
            share = self._rng.random()
        return _fault(kind, share, request)


def _fault(kind: Kind, share: float, request: Request) -> Fault:
    """A fault of this kind; `share` in [0, 1) says where in the request or how late."""
    if kind == "cut":
        return Fault(kind=kind, after_bytes=int(share * request.body_bytes))
    if kind == "truncated":
        return Fault(kind=kind, after_bytes=int(share * (1 << 18)))
    return Fault(kind=kind, seconds=HANG_S if kind == "hang" else share * SLOWEST_S)
