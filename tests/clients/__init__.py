"""Tests with the clients themselves; a package, so that its conftest.py has a name of its own."""
