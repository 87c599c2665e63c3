"""Runs a configuration: starts its Ray actors, wires them to the controller, shows what happens.

`launch` makes the parts and runs them: `actors` starts processes, `fleet` watches the engines,
`fleet_sync` brings them weights, `connect` ties them to the controller. `display` shows the
journal's entries as they come, `saved` reads what a run directory holds.
"""
