"""Pure detectors: a Run in, ranked verdicts out. Imports incident.

Terms: lane (the collectives of one group as a matrix), edge (a rank that waits for another), root (a rank that is awaited and
does not wait), basis (what a confidence rests on), witness (a rank that waited).
"""
