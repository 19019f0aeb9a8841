"""Read and reduce what the screens show: runs, incidents, logs, metrics. Knows nothing of Textual.

Terms: tier (a place that holds copies of a run's steps), lane (the operations of one process group), grid (a lane as a heatmap),
log index (byte offsets, times and levels of all log lines).
"""
