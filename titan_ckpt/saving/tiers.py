"""Open the stores of a run and of its mirror, on all ranks or on none."""

from __future__ import annotations

from titan_ckpt.errors import UsageError
from titan_ckpt.location import StrPath, check_writable, is_inside, redact, url_text
from titan_ckpt.state.exchange import RankGroup, raise_on_all
from titan_ckpt.store.base import Store
from titan_ckpt.store.clients.options import Options, using
from titan_ckpt.store.open import open_store


def open_tiers(
    ranks: RankGroup,
    url: StrPath | Store,
    mirror: StrPath | Store | None,
    storage_options: Options = None,
) -> tuple[Store, Store | None]:
    """The stores of a run and of its mirror; an error on one rank is raised on all. A collective call."""
    error: BaseException | None = None
    first, second = url, mirror
    try:
        for target in (url, mirror):
            if target is not None:
                check_writable(target.url if isinstance(target, Store) else target)
        _check_apart(url, mirror)
        with using(storage_options, url, mirror):
            first = url if isinstance(url, Store) else open_store(url)
            second = mirror if isinstance(mirror, Store) or mirror is None else open_store(mirror)
    except BaseException as caught:  # noqa: BLE001  (raised below, once the other ranks know)
        error = caught
    raise_on_all(ranks, error, "opening the run's store")
    assert isinstance(first, Store)
    assert second is None or isinstance(second, Store)
    return first, second


def _check_apart(url: StrPath | Store, mirror: StrPath | Store | None) -> None:
    """UsageError if the two tiers are one folder, or one lies in the other: then there is no second copy."""
    if mirror is None:
        return
    first, second = (item.url if isinstance(item, Store) else url_text(item) for item in (url, mirror))
    if is_inside(first, second) or is_inside(second, first):
        raise UsageError(
            f"mirror {redact(second)} and the run {redact(first)} are one folder, or one lies in the other: that is no second "
            f"copy. Give a mirror on another disk or store"
        )
