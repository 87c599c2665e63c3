"""The main job on one machine: a tiny model learns arithmetic, is killed, and resumes.

Nothing here is special to the library: `task` and `model` make the input that a user would bring,
`config.yaml` is a configuration like any other, and `story` runs `rollsync run` on it as a child
process, kills that process group, and starts it again.
"""
