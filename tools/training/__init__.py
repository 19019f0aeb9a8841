"""Models, meshes and short training runs that tests and benchmarks compare."""
