"""What may stand in a state: containers, keys, values, objects with a state of their own."""
