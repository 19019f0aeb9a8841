"""The last line of a job, with its exit code, as shells and runners print it.

Shell scripts (`echo "exit code: $?"`), `kubectl exec`, GNU make, PyCharm's console, the runners of GitHub Actions and GitLab.
"""

from __future__ import annotations

import re

LAST_LINE = re.compile(
    r"\s*(?:(?:rc|exit(?:[ _-]?code| status)?)\s*[=:]\s*|exit status |command terminated with exit code "
    r"|make: \*\*\* .{1,200} Error |Process finished with exit code |##\[error\]Process completed with exit code "
    r"|ERROR: Job failed: exit code )(?P<code>-?\d{1,9})\.?(?: \([\w :]{1,60}\))?\s*$",
    re.IGNORECASE,
)
