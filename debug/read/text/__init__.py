"""Text that jobs, launchers, schedulers and kernels write, to records: lines, their prefixes, what they say, who wrote them."""
