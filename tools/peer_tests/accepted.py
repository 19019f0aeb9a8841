"""Tests that pass with torch's storage and need not pass with ours, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping

ACCEPTED: Mapping[tuple[str, str], str] = {
    ("mixed", "test_compatibility.TestDCPCompatbility.test_storage_meta"): (
        "our .metadata has no checkpoint_id: it would be wrong in every copy of the folder"
    ),
}
"""Reasons by storage and test."""
