"""One rank's run: setup, loop, stop signals, resumption, background export. Imports every other room.

Terms: control group (small CPU exchanges between all ranks), start (the checkpoint a run begins with), progress (steps, samples).
"""
