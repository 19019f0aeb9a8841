"""A zoo of states: every kind is saved and loaded by us and by torch's DCP, resharded, copied and converted, and compared."""
