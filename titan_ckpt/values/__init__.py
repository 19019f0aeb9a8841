"""Values that are not tensors, to and from the bytes that `torch.save` writes for them, without running code from a file.

A value is read in two phases. `inert` follows the pickle and makes a record of each call that it asks for; nothing is called.
`build` makes the value from the records by a list of known constructors, and classes that the caller allows. Imports format,
parsing and the base modules; torch when a value holds tensors.
"""
