"""Will it fit, and how long will it take? Memory and time of a training step, predicted from shapes and a few rates.

    work      what a step needs: counts of parameters, bytes and operations       `Work`, `work_of`, `with_head`
    rates     what a machine reaches, measured once or an H200's                  `Machine`, `this_machine`
    cost      memory of a `Work` under a `Choice` of what lies where              `device_bytes`, `reserved_bytes`
    duration  and the time of a step                                              `step_ms`
    choose    the fastest `Choice` within a budget, for `t1lib.train.stream`      `choose_plan`
    predict   every mode with every head, and what would fit; `python -m t1lib plan`

Nothing is trained and no weights are created. `t1lib.train` asks this package; it never imports `t1lib.train`.
"""
