"""The first run on a TPU: `enginepool doctor --first-run`.

`run` calls one process after the other, since only one may hold the chips and any may crash or
hang there; `stages` is what runs in them, a function a check in the other files.
"""
