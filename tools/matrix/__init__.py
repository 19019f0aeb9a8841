"""Install and try the project on every Python here, without torch and with each torch.

Needs the standard library alone, so that any Python >= 3.11 can start it.
"""
