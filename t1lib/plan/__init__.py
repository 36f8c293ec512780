"""Will it fit, and how long will it take? Memory and time of a training step, predicted from shapes and a few rates.

`work` counts what a step needs, `rates` says what a machine reaches; `cost` gives the memory and the time of a `Choice`
of what lies where, and `choose` the fastest one within a budget, and those of every mode and head. Nothing is trained
and no weights are created. `t1lib.train` asks this package; it never imports `t1lib.train`.
"""
