"""Wrong command lines, generated from the parser, and the judge of what the program says to each."""
