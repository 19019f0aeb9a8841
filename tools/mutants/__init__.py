"""Put small faults into the code and see whether a test notices each.

Terms: a mutation is one small change of a file, a mutant the program with it; a mutant is killed or survives.
Our own: mutmut and cosmic-ray take one source folder, and this package is five folders joined by links.
"""
