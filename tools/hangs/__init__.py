"""Jobs that really hang, crash or only look as if they did: `python -m tools.hangs`, with what `debug` must make of each.

What users do, in programs that know nothing of the analyzer but `Recorder.start`; the lines at fault are marked `# CULPRIT`.
"""
