"""What a run writes for people: logs, metrics, phases and traces, profiles, goodput, plots. Imports `model` only.

Terms: record (a line of metrics.jsonl), sink (a destination of records), phase (a named part of a step).
"""
