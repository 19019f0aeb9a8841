"""Tests of the room `saving`."""
