"""Tests of the example of weak peers, on scenes made here: no extra is needed."""
