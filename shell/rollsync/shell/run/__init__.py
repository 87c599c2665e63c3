"""Runs a configuration: starts its Ray actors, wires them to the controller, shows what happens.

`launch` makes the parts and runs them, `display` shows the journal's entries as they come.
"""
