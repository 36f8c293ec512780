"""Will it fit, and how long will it take? Memory and time of a training step, predicted from shapes and a few rates.

`work` counts what a step needs, `rates` says what a machine reaches, `cost` gives the memory and time of a `Choice` of
what lies where, and `choose` finds the fastest within a budget. `t1lib.train` asks this package, never the reverse."""
