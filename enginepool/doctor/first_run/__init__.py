"""The first run on a TPU: `enginepool doctor --first-run`.

`run` starts one process after the other, since only one may hold the chips, and any may crash or
hang. `stages` is the program of these processes. The other files have one function per check.
"""
