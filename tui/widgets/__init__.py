"""Widgets that the screens are built of: a list of lines, a plot, the base class of a numbered screen."""
